"""`gpuidle watch`: the live terminal, a recording, the simulated demo; one report; lines of JSON."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuidle.agent.commands.session import (
    all_settled,
    live_source,
    price_options,
    run_until_signalled,
    source_options,
)
from gpuidle.agent.commands.simulated import check_demo, demo_options, demo_source
from gpuidle.agent.model import Frame

if TYPE_CHECKING:
    from gpuidle.agent.ports import Exporter, Source
    from gpuidle.exporters.terminal.options import ScreenOptions

WARM_UP_NS = 55 * 10**9
"""Simulated time before the demo's first screen: it has a history, and is in the middle of a decode."""

ONCE_FRAMES = 5
"""Frames that `--once` looks at: enough for one window to settle at the default interval."""

ONCE_LONGEST = 8


@click.command()
@source_options
@price_options
@demo_options("Watch a simulated node: two H100s that serve a 70B model.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Watch a recording (a session file, or a folder with one).",
)
@click.option(
    "--speed",
    type=click.FloatRange(0, 10_000),
    default=1.0,
    show_default=True,
    help="Of the replay; 0 is as fast as possible.",
)
@click.option("--once", is_flag=True, help="Print one report of a few seconds and end.")
@click.option("--json", "as_json", is_flag=True, help="One frame a line as JSON; the default in a pipe.")
@click.option("--ascii", is_flag=True, help="Draw with ASCII characters only.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    prices: dict[str, float],
    currency: str,
    demo: bool,
    demo_node: str,
    demo_faults: tuple[str, ...],
    replay: Path | None,
    speed: float,
    once: bool,
    as_json: bool,
    ascii: bool,  # noqa: A002  # the option's name
    **live: Any,
) -> None:
    """Show live what the GPUs of this node do and why compute stands idle.

    Attaches to what is running; nothing needs a restart. In a pipe it writes one frame a line as JSON.
    """
    check_demo(demo, demo_node, demo_faults)
    if demo and replay is not None:
        raise click.UsageError("--demo and --replay exclude each other")
    if replay is not None and not replay.exists() and not list(replay.parent.glob(f"{replay.name}*")):
        raise click.BadParameter(f"{replay}: no such file", param_hint="--replay")
    from gpuidle.exporters.terminal.consoles import can_draw

    pipe_out = not sys.stdout.isatty()
    once = once or not (pipe_out or as_json or can_draw(sys.stdout))  # a dumb terminal gets one report
    source: Source
    if demo:
        source = demo_source(demo_node, demo_faults, warm_up_ns=WARM_UP_NS)
    else:
        source = _source(replay=replay, speed=0.0 if once else speed, live=live)
    options = _screen_options(ascii, replay)
    from gpuidle.agent.analysis.analyzer import Analyzer, Settings
    from gpuidle.agent.pipeline import Pipeline

    analyzer = Analyzer(Settings(price_per_hour=prices, currency=currency))
    lossless = replay is not None
    quit_pressed: list[Callable[[], None]] = []

    def on_quit() -> None:
        for stop in quit_pressed:
            stop()

    exporter: Exporter
    report: _Once | None = None
    if once:
        exporter = report = _Once(on_quit, endless=replay is not None, demo=demo)
    elif as_json or pipe_out:
        from gpuidle.exporters.terminal.ndjson import NdjsonExporter

        exporter = _StopsWhenRefused(NdjsonExporter(sys.stdout.buffer), on_quit)
    else:
        from gpuidle.exporters.terminal.live import TerminalExporter

        terminal = TerminalExporter(
            options, on_quit, keyboard=sys.stdin.fileno() if sys.stdin.isatty() else None
        )
        terminal.start()
        exporter = terminal
    pipeline = Pipeline(source, analyzer.feed, [exporter], lossless=lossless)
    asyncio.run(run_until_signalled(pipeline, source, give_stop=quit_pressed.append))
    if report is not None:
        _print(report.frames, options, as_json=as_json)
        if not report.frames or _nothing(report.frames[-1]):
            ctx.exit(1)
    for status in pipeline.outlets():
        if status.failed and status.last_error and not status.last_error.startswith("OutputClosedError"):
            raise click.ClickException(f"{status.outlet}: {status.last_error}")


def _source(*, replay: Path | None, speed: float, live: dict[str, Any]) -> Source:
    from gpuidle.agent.clock import SystemClock

    if replay is not None:
        from gpuidle.collectors.recording.reader import SessionError
        from gpuidle.collectors.recording.source import ReplaySource

        try:
            return ReplaySource(replay, SystemClock(), speed=speed)
        except SessionError as error:
            raise click.ClickException(str(error)) from error
    return live_source(**live)


def _screen_options(ascii_only: bool, replay: Path | None) -> ScreenOptions:
    from gpuidle.exporters.terminal.options import Replay, ScreenOptions

    return ScreenOptions(
        colour="NO_COLOR" not in os.environ,
        ascii=ascii_only,
        replay=None if replay is None else Replay(name=replay.name),
    )


def _nothing(frame: Frame) -> bool:
    return not frame.gpus and not frame.engines


class _Once:
    """Keeps frames until everything that was found has a settled window, then ends the run."""

    name = "once"

    def __init__(self, stop: Callable[[], None], *, endless: bool, demo: bool) -> None:
        self.frames: list[Frame] = []
        self._stop = stop
        self._endless = endless
        self._least = WARM_UP_NS // 10**9 - 1 if demo else ONCE_FRAMES
        self._done = False

    def publish(self, frame: Frame) -> None:
        if self._done:
            return
        self.frames.append(frame)
        seen = len(self.frames)
        settled = all_settled(frame) and all(e.phases.window_ns for e in frame.engines)
        whole = settled and all(run.ok for run in frame.runs)  # a tick that a collector missed is no report
        enough = seen >= self._least and (whole or seen >= self._least + ONCE_LONGEST)
        if enough and not self._endless:
            self._done = True
            self._stop()

    def close(self) -> None:
        """Nothing is held."""


class _StopsWhenRefused:
    """Ends the run when the reader of the pipe has gone."""

    def __init__(self, exporter: Exporter, stop: Callable[[], None]) -> None:
        self._exporter = exporter
        self._stop = stop

    @property
    def name(self) -> str:
        return self._exporter.name

    def publish(self, frame: Frame) -> None:
        try:
            self._exporter.publish(frame)
        except Exception:
            self._stop()
            raise

    def close(self) -> None:
        self._exporter.close()


def _print(frames: list[Frame], options: ScreenOptions, *, as_json: bool) -> None:
    if not frames:
        click.echo("nothing was read: the recording holds no snapshot", err=True)
    elif as_json:
        from gpuidle.agent.codec import encode_frame

        click.echo(encode_frame(frames[-1]))
    else:
        from gpuidle.exporters.terminal.once import print_once

        print_once(frames, options, sys.stdout)
