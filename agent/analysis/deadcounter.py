"""A tensor counter that stands at exactly 0 beside tokens is dead: no model computes without that pipe.

Its samples are taken out, as if the source had none, until it shows something again: a pipe that nobody saw
is not an idle one. The referee judges over a minute what is doubtful; this is certain within seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gpuidle.agent.analysis.enginewindow import device_peaks
from gpuidle.agent.analysis.tracks import EngineTrack, GpuTrack, Pending
from gpuidle.agent.analysis.zeros import ZeroRun
from gpuidle.agent.model import RATIO_STEP, CounterSeries, EngineReading, Problem
from gpuidle.agent.physics.peaks import NoPeak
from gpuidle.agent.physics.shapes import ModelShape

LEAST_NS = 2_500_000_000
"""The pipe must stand still for so long."""
CLEAR_NS = 200_000_000
"""What is read this close to the edges of that may belong to the time before or after."""
FEWEST_ROWS, MANY_ROWS = 16, 64
"""Tokens a step: with fewer kernels may do without the tensor pipe, with as many they never do."""
LEAST_ACTIVE_RATIO = 0.05
"""The device must have worked for this share of the time: an engine's process may be there and do nothing."""


def without_dead_tensor(
    track: GpuTrack,
    window: Pending,
    engines: Sequence[EngineTrack],
    shape_of: Callable[[EngineReading], ModelShape | None],
) -> Problem | None:
    """Take a dead counter's samples out of the track before a window settles; return what to say of it.

    `engines` are those with a process on the device.
    """
    for run in track.zeros.runs:
        if not run.dead and run.end_ns - run.start_ns >= LEAST_NS:
            run.dead = _worked(run, _usable(track, run, engines, shape_of)) and _was_active(track, run)
        if run.dead:
            _take_out(track, run)
    track.zeros.prune(window.start_ns)
    here = [run for run in track.zeros.runs if run.start_ns < window.end_ns and run.end_ns > window.start_ns]
    if not any(run.dead for run in here):
        return None
    return Problem(
        source="referee",
        kind="dead_counter",
        message=f"{track.reading.name}: the tensor counter is dead: it stands at 0 while tokens are computed;"
        " it is taken for absent until it shows something",
        remedy="another profiler may hold the counters (DCGM, Nsight, a second agent): stop it, restart the"
        " exporter, or choose another source of counters",
        subject=track.reading.hw_id,
    )


def _within(run: ZeroRun, s: CounterSeries) -> bool:
    first_ns = int(s.end_ns[0] - s.width_ns[0])
    return s.rung == run.rung and first_ns >= run.start_ns and int(s.end_ns[-1]) <= run.end_ns


def _take_out(track: GpuTrack, run: ZeroRun) -> None:
    if any(s.tensor_active is not None and _within(run, s) for s in track.counters):
        track.counters = deque(
            replace(s, tensor_active=None) if _within(run, s) else s for s in track.counters
        )


def _was_active(track: GpuTrack, run: ZeroRun) -> bool:
    """Whether the device worked, by the samples in hand; where they do not tell, tokens are believed."""
    rows = [s for s in track.counters if _within(run, s)]
    told = [(s.gr_active, s.width_ns) for s in rows if s.gr_active is not None]
    if not told:
        return True
    active = sum(float(np.dot(ratio.astype(np.float64), width)) for ratio, width in told) * RATIO_STEP
    return active >= LEAST_ACTIVE_RATIO * sum(int(width.sum()) for _, width in told)


def _usable(
    track: GpuTrack,
    run: ZeroRun,
    engines: Sequence[EngineTrack],
    shape_of: Callable[[EngineReading], ModelShape | None],
) -> list[EngineTrack]:
    """Return the engines whose tokens need this device's pipe. Which of several cores is on it is open."""
    return [
        each
        for each in engines
        if each.reading.parallelism.data == 1 and (run.lived or _takes_pipe(track, shape_of(each.reading)))
    ]


def _takes_pipe(track: GpuTrack, shape: ModelShape | None) -> bool:
    """Whether a counter that never showed anything should have: products in 32 bits do without the pipe."""
    peaks = device_peaks(track.reading)
    if shape is None or peaks is None:
        return False
    try:
        return peaks.rate(shape.compute_dtype) > 0
    except NoPeak:
        return False


def _worked(run: ZeroRun, engines: Sequence[EngineTrack]) -> bool:
    """Whether one of them computed within the run what takes the pipe."""
    span = run.start_ns + CLEAR_NS, run.end_ns - CLEAR_NS
    return any(_stepped(each, *span) or _counted(each, *span) for each in engines)


def _stepped(engine: EngineTrack, start_ns: int, end_ns: int) -> bool:
    """Whether exact steps within tell so."""
    tokens = steps = most = 0
    for s in engine.steps:
        if not s.exact or s.prefill_tokens is None or s.decode_tokens is None:
            continue
        first = int(np.searchsorted(s.start_ns, start_ns))
        last = int(np.searchsorted(s.end_ns, end_ns, side="right"))
        if last > first:
            rows = s.prefill_tokens[first:last] + s.decode_tokens[first:last]
            tokens, steps, most = tokens + int(rows.sum()), steps + last - first, max(most, int(rows.max()))
    return most >= MANY_ROWS or (steps > 0 and tokens >= FEWEST_ROWS * steps)


def _counted(engine: EngineTrack, start_ns: int, end_ns: int) -> bool:
    """Whether readings within tell so. A prompt is booked when it ends: its last chunk was here."""
    tokens = steps = 0
    for sums in engine.sums:
        if sums.start_ns < start_ns or sums.end_ns > end_ns or sums.reset:
            continue
        firsts = sums.first_tokens or 0
        if sums.prefill_exact and firsts and (sums.prefill_tokens or 0) >= MANY_ROWS * firsts:
            return True
        if sums.counted_steps:
            tokens, steps = tokens + (sums.generated_tokens or 0), steps + sums.counted_steps
    return steps > 0 and tokens >= FEWEST_ROWS * steps
