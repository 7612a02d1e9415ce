"""`gpuidle run`: the service. Metrics by Prometheus and OTLP, problems in the log, a recording if asked."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuidle.agent.commands.notify import service_manager
from gpuidle.agent.commands.session import (
    Status,
    live_source,
    price_options,
    run_until_signalled,
    source_options,
)
from gpuidle.agent.model import Frame, Problem

if TYPE_CHECKING:
    from gpuidle.agent.ports import Exporter, Source

log = logging.getLogger("gpuidle")

REPEAT_PROBLEM_S = 600
"""A problem that lasts is logged again after this time."""


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
    "--record", "record_to", type=click.Path(path_type=Path), metavar="FILE", help="Record as well."
)
@click.option("--demo", is_flag=True, help="Export the simulated node of `watch --demo`.")
def command(
    prices: dict[str, float],
    currency: str,
    prometheus: str,
    otlp: str | None,
    otlp_interval: float | None,
    record_to: Path | None,
    demo: bool,
    **live: Any,
) -> None:
    """Run as a service that exports metrics. SIGTERM or Ctrl-C ends it, with a last export."""
    from gpuidle.agent.analysis.analyzer import Analyzer, Settings
    from gpuidle.agent.pipeline import Pipeline

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    status = Status()
    exporters = [*_exporters(status, prometheus, otlp, otlp_interval), *_reporters(live["interval"])]
    recorder = None
    if record_to is not None:
        from gpuidle.exporters.recording.writer import RecordingError, SessionWriter

        try:
            recorder = SessionWriter(record_to)
        except RecordingError as error:
            raise click.ClickException(str(error)) from error
    source: Source
    if demo:
        from gpuidle.agent.clock import SystemClock
        from gpuidle.collectors.simulator.scenario import demo as demo_scenario
        from gpuidle.collectors.simulator.source import SimulatorSource

        source = SimulatorSource(demo_scenario(), SystemClock(), tick_ns=round(live["interval"] * 1e9))
    else:
        source = live_source(**live)
    analyzer = Analyzer(Settings(price_per_hour=prices, currency=currency))
    pipeline = status.pipeline = Pipeline(
        source, analyzer.feed, [*exporters, ProblemLog()], recorder=recorder
    )
    asyncio.run(run_until_signalled(pipeline, source))


def _exporters(
    status: Status, prometheus: str, otlp: str | None, otlp_interval: float | None
) -> list[Exporter]:
    from gpuidle.exporters.otlp import OtlpConfigError, OtlpExporter
    from gpuidle.exporters.prometheus import ListenError, PrometheusExporter
    from gpuidle.exporters.table import EXPORTERS, ExporterOptions

    options = ExporterOptions(None if prometheus == "none" else prometheus, otlp, otlp_interval)
    exporters: list[Exporter] = []
    try:
        exporters += [made for row in EXPORTERS if (made := row.make(options, status)) is not None]
    except ListenError as error:
        raise click.UsageError(f"--prometheus: {error}") from error
    except OtlpConfigError as error:
        raise click.UsageError(f"--otlp: {error}") from error
    for exporter in exporters:
        if isinstance(exporter, PrometheusExporter):
            log.info("Prometheus endpoint at http://%s/metrics", exporter.address)
    if otlp is not None and not any(isinstance(exporter, OtlpExporter) for exporter in exporters):
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


class ProblemLog:
    """An exporter that logs problems as they come and go, and no more than that."""

    name = "log"

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, str], float] = {}

    def publish(self, frame: Frame) -> None:
        """Log what is new, what lasts, and what has gone."""
        now = time.monotonic()
        present: dict[tuple[str, str, str], Problem] = {
            (problem.source, problem.kind, problem.subject): problem for problem in frame.problems
        }
        for key, problem in present.items():
            if now - self._since.get(key, -REPEAT_PROBLEM_S) >= REPEAT_PROBLEM_S:
                self._since[key] = now
                remedy = f" ({problem.remedy})" if problem.remedy else ""
                log.warning("%s: %s%s", problem.source, problem.message, remedy)
        for key in [key for key in self._since if key not in present]:
            del self._since[key]
            log.info("%s: %s is over%s", key[0], key[1], f" for {key[2]}" if key[2] else "")

    def close(self) -> None:
        """Nothing is held."""
