"""`gpuidle run`: the service. Metrics by Prometheus and OTLP, problems in the log, a recording if asked."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuidle.agent.commands.logs import OutletLog, ProblemLog, set_up
from gpuidle.agent.commands.notify import service_manager
from gpuidle.agent.commands.session import (
    Status,
    live_source,
    price_options,
    run_until_signalled,
    source_options,
)
from gpuidle.agent.commands.simulated import check_demo, demo_options, demo_source

if TYPE_CHECKING:
    from gpuidle.agent.ports import Exporter, Source
    from gpuidle.exporters.table import ExporterOptions

log = logging.getLogger("gpuidle")

READABLE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command()
@source_options
@price_options
@click.option(
    "--prometheus",
    default="127.0.0.1:9405",
    show_default=True,
    metavar="HOST:PORT",
    help="Where Prometheus scrapes; 'none' for no endpoint.",
)
@click.option(
    "--prometheus-cert",
    type=READABLE,
    metavar="FILE",
    help="Speak TLS there, with this certificate (PEM, with its chain).",
)
@click.option(
    "--prometheus-key",
    type=READABLE,
    metavar="FILE",
    help="Key of the certificate (PEM) [default: in its file].",
)
@click.option(
    "--prometheus-client-ca",
    type=READABLE,
    metavar="FILE",
    help="Serve only clients with a certificate of this authority.",
)
@click.option(
    "--prometheus-users",
    type=READABLE,
    metavar="FILE",
    help="Serve only these users: lines of NAME:PASSWORD.",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="OTLP/HTTP collector, such as http://127.0.0.1:4318 [default: where OTEL_EXPORTER_OTLP_* points].",
)
@click.option(
    "--otlp-interval",
    type=click.FloatRange(0.1),
    metavar="SECONDS",
    help="Between two exports [default: OTEL_METRIC_EXPORT_INTERVAL, or 10].",
)
@click.option(
    "--record",
    "record_to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Record as well, to a file or into a folder; beside a file that is there a new one begins.",
)
@demo_options("Export the simulated node of `watch --demo`.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Export a recording as it happened, and end with it.",
)
@click.option(
    "--speed", type=click.FloatRange(0, 10_000), default=1.0, show_default=True, help="Of the replay."
)
@click.option(
    "--log-format",
    type=click.Choice(("text", "json")),
    default="text",
    show_default=True,
    help="Of the log on standard error.",
)
def command(
    prices: dict[str, float],
    currency: str,
    prometheus: str,
    prometheus_cert: Path | None,
    prometheus_key: Path | None,
    prometheus_client_ca: Path | None,
    prometheus_users: Path | None,
    otlp: str | None,
    otlp_interval: float | None,
    record_to: Path | None,
    demo: bool,
    demo_node: str,
    demo_faults: tuple[str, ...],
    replay: Path | None,
    speed: float,
    log_format: str,
    **live: Any,
) -> None:
    """Run as a service that exports metrics. SIGTERM or Ctrl-C ends it, with a last export."""
    from gpuidle.agent.analysis.analyzer import Analyzer, Settings
    from gpuidle.agent.pipeline import Pipeline
    from gpuidle.exporters.table import ExporterOptions
    from gpuidle.exporters.web_security import WebSecurity

    check_demo(demo, demo_node, demo_faults)
    if demo and replay is not None:
        raise click.UsageError("--demo and --replay exclude each other")
    set_up(log_format)
    status = Status()
    options = ExporterOptions(
        prometheus_address=None if prometheus == "none" else prometheus,
        prometheus_security=WebSecurity(
            prometheus_cert, prometheus_key, prometheus_client_ca, prometheus_users
        ),
        otlp_endpoint=otlp,
        otlp_interval_s=otlp_interval,
    )
    exporters = [*_exporters(status, options), *_reporters(live["interval"])]
    recorder = None
    if record_to is not None:
        from gpuidle.exporters.recording.writer import RecordingError, SessionWriter

        try:
            recorder = SessionWriter(free_name(record_to, time.time_ns()))
        except RecordingError as error:
            raise click.ClickException(str(error)) from error
        log.info("recording to %s", recorder.paths[0])
    source: Source
    if demo:
        source = demo_source(demo_node, demo_faults, tick_ns=round(live["interval"] * 1e9))
    else:
        source = _source(replay=replay, speed=speed, live=live)
    analyzer = Analyzer(Settings(price_per_hour=prices, currency=currency))
    pipeline = status.pipeline = Pipeline(
        source,
        analyzer.feed,
        [*exporters, ProblemLog(), OutletLog(status)],
        recorder=recorder,
        lossless=replay is not None,
    )
    asyncio.run(run_until_signalled(pipeline, source))


def free_name(path: Path, wall_ns: int) -> Path:
    """Return where a recording begins: a new file in a folder, or beside a file that is there.

    A service is started again by itself: what it recorded before stays, and does not keep it from starting.
    """
    from gpuidle.exporters.recording.writer import SUFFIX, session_name

    name = session_name(wall_ns)
    if path.is_dir():
        return path / name
    return path.with_name(f"{path.name.removesuffix(SUFFIX)}-{name}") if os.path.lexists(path) else path


def _source(*, replay: Path | None, speed: float, live: dict[str, Any]) -> Source:
    from gpuidle.agent.clock import SystemClock

    if replay is not None:
        from gpuidle.collectors.recording.reader import SessionError
        from gpuidle.collectors.recording.source import ReplaySource

        try:
            return ReplaySource(replay, SystemClock(), speed=speed)
        except SessionError as error:
            raise click.BadParameter(str(error), param_hint="--replay") from error
    return live_source(**live)


def _exporters(status: Status, options: ExporterOptions) -> list[Exporter]:
    from gpuidle.exporters.otlp import OtlpConfigError, OtlpExporter
    from gpuidle.exporters.prometheus import ListenError, PrometheusExporter
    from gpuidle.exporters.table import EXPORTERS
    from gpuidle.exporters.web_security import WebSecurityError

    exporters: list[Exporter] = []
    try:
        exporters += [made for row in EXPORTERS if (made := row.make(options, status)) is not None]
    except (ListenError, WebSecurityError) as error:
        raise click.UsageError(f"--prometheus: {error}") from error
    except OtlpConfigError as error:
        raise click.UsageError(f"--otlp: {error}") from error
    for exporter in exporters:
        if isinstance(exporter, PrometheusExporter):
            log.info("Prometheus endpoint at %s", exporter.url)
    if options.otlp_endpoint is not None and not any(
        isinstance(exporter, OtlpExporter) for exporter in exporters
    ):
        log.warning("OTLP is switched off by OTEL_SDK_DISABLED or OTEL_METRICS_EXPORTER")
    if not exporters:
        raise click.UsageError("nothing to export to: give --otlp, or leave --prometheus on")
    return exporters


def _reporters(interval_s: float) -> list[Exporter]:
    try:
        manager = service_manager(os.environ, interval_s)
    except ValueError as error:
        log.warning("systemd is not told that the service is alive: %s", error)
        return []
    return [] if manager is None else [manager]
