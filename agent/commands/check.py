"""`gpuidle check`: a plug-in for Nagios, Icinga and the like. Exits with 0, 1, 2 or 3, and one line."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuidle.agent.commands.check_logic import (
    CheckError,
    Limit,
    Limits,
    Sample,
    State,
    Totals,
    totals_of_frame,
    totals_of_page,
    verdict,
    waste,
)
from gpuidle.agent.commands.session import (
    all_settled,
    live_source,
    price_options,
    run_until_signalled,
    source_options,
)

if TYPE_CHECKING:
    from gpuidle.agent.model import Frame
    from gpuidle.agent.ports import Source

TIMEOUT_S = 10.0
PAGE_LIMIT = 64 << 20
DEFAULTS = Limits(unused=Limit(1, None), host_gap=Limit(0.2, 0.5), reclaimable=None, cost=None)
"""Where no limit is given."""


class _Plugin(click.Command):
    """A command whose faults are UNKNOWN: codes 1 and 2 would say something of the state of the node."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            error.show()
            raise click.exceptions.Exit(State.UNKNOWN) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            click.echo(f"GPUIDLE UNKNOWN - {type(error).__name__}: {error}")
            raise click.exceptions.Exit(State.UNKNOWN) from error


def _limit(_context: click.Context, parameter: click.Parameter, value: str | None) -> Limit | None:
    """Read WARNING[,CRITICAL]; either may be empty; shares may be written in per cent."""
    if value is None:
        return None
    warning, _, critical = value.partition(",")
    ends = [_number(text) for text in (warning, critical)]
    if not value.strip(", ") or any(end is not None and not 0 <= end < math.inf for end in ends):
        raise click.BadParameter(f"{value!r} is not WARNING[,CRITICAL], such as 0.2,0.5 or 20%,50%")
    if None not in ends and ends[0] > ends[1]:  # type: ignore[operator]
        raise click.BadParameter(f"{value!r}: the warning comes first, and is the lower one")
    limit = Limit(*ends)
    shares = parameter.name in ("host_gap", "reclaimable")
    if shares and any(end is not None and end > 1 for end in ends):
        raise click.BadParameter(f"{value!r}: a share is at most 1, or 100%")
    return limit


def _number(text: str) -> float | None:
    text = text.strip()
    if not text:
        return None
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan


@click.command(cls=_Plugin)
@source_options
@price_options
@click.option(
    "--url",
    default="http://127.0.0.1:9405/metrics",
    show_default=True,
    help="Metrics of the agent that is asked.",
)
@click.option(
    "--ca", type=click.Path(path_type=Path, exists=True), help="Authority of its certificate (PEM)."
)
@click.option(
    "--user-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File whose first line is NAME:PASSWORD.",
)
@click.option("--measure", is_flag=True, help="Measure here instead of asking an agent.")
@click.option(
    "--window",
    type=click.FloatRange(2, 3600),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="Over which it judges, and for which it runs.",
)
@click.option("--unused", callback=_limit, metavar="W,C", help="GPUs without a request or a process.")
@click.option("--host-gap", callback=_limit, metavar="W,C", help="Share of GPU time between steps.")
@click.option("--reclaimable", callback=_limit, metavar="W,C", help="Share of GPU time more rows could use.")
@click.option("--cost", callback=_limit, metavar="W,C", help="Money an hour for all of this.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    prices: dict[str, float],
    currency: str,
    url: str,
    ca: Path | None,
    user_file: Path | None,
    measure: bool,
    window: float,
    unused: Limit | None,
    host_gap: Limit | None,
    reclaimable: Limit | None,
    cost: Limit | None,
    **live: Any,
) -> None:
    """Judge wasted compute for a monitoring system: exit 0, 1, 2 or 3 and performance data.

    W,C are the values from which it warns and is critical: --host-gap 20%,50%. Without any limit it warns
    of one unused GPU and of 20 % host gaps (critical at 50 %).
    """
    limits = Limits(unused, host_gap, reclaimable, cost)
    if limits == Limits():
        limits = DEFAULTS
    try:
        if measure:
            before, after = _measured(live_source(**live), window, prices, currency)
        else:
            before, after = _asked(url, ca, user_file, window)
        state, line = verdict(waste(before, after), limits)
    except CheckError as error:
        state, line = State.UNKNOWN, f"GPUIDLE UNKNOWN - {error}"
    click.echo(line)
    ctx.exit(state)


def _asked(url: str, ca: Path | None, user_file: Path | None, window_s: float) -> tuple[Totals, Totals]:
    """Read an agent's counters now and after the window."""
    before = totals_of_page(_samples(url, ca, user_file))
    time.sleep(window_s)
    return before, totals_of_page(_samples(url, ca, user_file))


def _samples(url: str, ca: Path | None, user_file: Path | None) -> Iterator[Sample]:
    import base64
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    if not url.startswith(("http://", "https://")):
        raise CheckError(f"{url!r} is no URL of an agent, such as http://127.0.0.1:9405/metrics")
    request = urllib.request.Request(url)  # noqa: S310 - the scheme is checked above
    try:
        if user_file is not None:
            user = user_file.read_bytes().splitlines()[0].strip()
            request.add_header("Authorization", f"Basic {base64.b64encode(user).decode()}")
        # An agent is asked directly: a proxy for the web would be asked for its own loopback.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if url.startswith("https:"):
            context = ssl.create_default_context(cafile=ca)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as answer:
            page = answer.read(PAGE_LIMIT).decode()
        families = list(text_string_to_metric_families(page))
    except (OSError, ValueError, IndexError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise CheckError(f"no metrics from {url}: {reason}. Is gpuidle running? Or give --measure") from error
    return ((sample.name, sample.labels, sample.value) for family in families for sample in family.samples)


def _measured(
    source: Source, window_s: float, prices: dict[str, float], currency: str
) -> tuple[Totals, Totals]:
    """Run the pipe here until the settled windows span the time asked for."""
    from gpuidle.agent.analysis.analyzer import Analyzer, Settings
    from gpuidle.agent.pipeline import Pipeline

    stops: list[Callable[[], None]] = []
    span = _Span(window_s, lambda: [stop() for stop in stops])
    analyzer = Analyzer(Settings(price_per_hour=prices, currency=currency))
    pipeline = Pipeline(source, analyzer.feed, [span])
    asyncio.run(run_until_signalled(pipeline, source, give_stop=stops.append))
    if span.first is None or span.last is None:
        raise CheckError("no GPU was measured: gpuidle doctor says why")
    return totals_of_frame(span.first), totals_of_frame(span.last)


class _Span:
    """An exporter that keeps the first and the last Frame of a window."""

    name = "check"

    def __init__(self, window_s: float, stop: Callable[[], object]) -> None:
        self.first: Frame | None = None
        self.last: Frame | None = None
        self._window_ns = round(window_s * 1e9)
        self._stop = stop
        self._begin_ns: int | None = None

    def publish(self, frame: Frame) -> None:
        """Take a Frame; end the run after the window."""
        if self._begin_ns is None:
            self._begin_ns = frame.monotonic_ns
        settled = bool(frame.gpus) and all_settled(frame)
        if self.first is None and settled:
            self.first = frame
            self._begin_ns = frame.monotonic_ns
        elif self.first is not None:
            self.last = frame
        if frame.monotonic_ns - self._begin_ns >= self._window_ns:
            self._stop()

    def close(self) -> None:
        """Nothing is held."""
