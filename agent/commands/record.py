"""`gpuidle record`: what is read, to a session file."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuidle.agent.commands.session import Status, live_source, run_until_signalled, source_options
from gpuidle.agent.commands.simulated import check_demo, demo_options, demo_source
from gpuidle.agent.model import Frame

if TYPE_CHECKING:
    from gpuidle.agent.ports import Source


@click.command()
@source_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Session file, or a folder to put one into [default: session-TIME.gpuidle.mcap here].",
)
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="End after.")
@click.option("--max-megabytes", type=click.IntRange(1), help="Begin a new file at this size.")
@click.option("--max-minutes", type=click.FloatRange(0.1), help="Begin a new file at this age.")
@click.option("--keep", type=click.IntRange(1), help="Keep this many of the rotated files.")
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@demo_options("Record the simulated node of `watch --demo`.")
def command(
    output: Path | None,
    duration: float | None,
    max_megabytes: int | None,
    max_minutes: float | None,
    keep: int | None,
    overwrite: bool,
    demo: bool,
    demo_node: str,
    demo_faults: tuple[str, ...],
    **live: Any,
) -> None:
    """Write what is read to a session file, for `gpuidle watch --replay`.

    The file is readable at any moment, also when this program is killed. Ctrl-C ends it.
    """
    from gpuidle.agent.analysis.analyzer import Analyzer
    from gpuidle.agent.pipeline import Pipeline
    from gpuidle.exporters.recording.writer import RecordingError, Rotation, SessionWriter, session_name

    check_demo(demo, demo_node, demo_faults)
    path = output or Path()
    if path.is_dir():
        path /= session_name(time.time_ns())
    rotates = max_megabytes is not None or max_minutes is not None
    if keep is not None and not rotates:
        raise click.UsageError("--keep needs --max-megabytes or --max-minutes")
    rotation = Rotation(
        max_bytes=None if max_megabytes is None else max_megabytes * 1_000_000,
        max_age_ns=None if max_minutes is None else round(max_minutes * 60e9),
        keep=keep,
    )
    source: Source
    if demo:
        source = demo_source(demo_node, demo_faults, tick_ns=round(live["interval"] * 1e9))
    else:
        source = live_source(**live)
    try:
        writer = SessionWriter(path, rotation=rotation if rotates else None, overwrite=overwrite)
    except RecordingError as error:
        raise click.ClickException(str(error)) from error
    stops: list[Callable[[], None]] = []
    status = Status()
    progress = _Progress(
        duration,
        lambda: [stop() for stop in stops],
        has_failed=lambda: any(outlet.failed for outlet in status.outlets() if outlet.outlet == "recorder"),
    )
    pipeline = status.pipeline = Pipeline(source, Analyzer().feed, [progress], recorder=writer)
    click.echo(f"recording to {writer.paths[0]} (Ctrl-C ends)", err=True)
    asyncio.run(run_until_signalled(pipeline, source, give_stop=stops.append))
    if sys.stderr.isatty():
        click.echo("", err=True)
    recorder = pipeline.outlets()[0]
    click.echo(
        f"{recorder.delivered} snapshots, {writer.bytes_written / 1e6:.1f} MB in "
        f"{', '.join(str(each) for each in writer.paths)}"
        + (f"; {recorder.dropped} dropped" if recorder.dropped else ""),
        err=True,
    )
    if recorder.failed:
        raise click.ClickException(recorder.last_error)


class _Progress:
    """A line on the terminal, and the end: after the duration, or when the file takes no more."""

    name = "progress"

    def __init__(
        self, duration_s: float | None, stop: Callable[[], object], has_failed: Callable[[], bool]
    ) -> None:
        self._duration_s = duration_s
        self._stop = stop
        self._has_failed = has_failed
        self._first_ns: int | None = None

    def publish(self, frame: Frame) -> None:
        if self._first_ns is None:
            self._first_ns = frame.monotonic_ns
        elapsed_s = (frame.monotonic_ns - self._first_ns) / 1e9
        if sys.stderr.isatty():
            found = f"{len(frame.gpus)} GPUs, {len(frame.engines)} engines, {len(frame.problems)} problems"
            click.echo(f"\r{elapsed_s:8.0f} s  {found} ", nl=False, err=True)
        over = self._duration_s is not None and elapsed_s >= self._duration_s
        if over or self._has_failed():
            self._stop()

    def close(self) -> None:
        """Nothing is held."""
