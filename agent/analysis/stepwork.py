"""Exact steps, priced and held against counters: the ledger of each step, summed over a window.

Where every step is known the terms need no means: a decode step beside a prefill is memory-bound though the
window as a whole is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.collectives import collectives_ns
from gpuidle.agent.analysis.windowwork import WindowWork
from gpuidle.agent.model import RATIO_STEP, CounterSeries
from gpuidle.agent.physics.peaks import DevicePeaks, NoPeak
from gpuidle.agent.physics.roofline import compute_time_s
from gpuidle.agent.physics.work import Column, Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_DRAM = ("dram_read_bytes_per_s", "dram_write_bytes_per_s")


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of the steps that touch a window, and how much of each lies in it."""

    start: Any
    end: Any
    length: Any
    share: Any
    """Part of the step inside the window, 0 to 1."""
    tokens: Any
    padded: Any
    """Rows with those that fill up the tiles over those without."""
    work: Work
    moved: Any
    """Bytes of weights and KV cache."""


def table_ns(steps: Steps, tensor_parallel: int) -> Column:
    """Return what the messages of each step take by the table of collectives; one number if all are alike."""
    return collectives_ns(steps.work.collectives, steps.work.collective_bytes, tensor_parallel)


def summed(steps: Steps, tensor_parallel: int) -> WindowWork:
    """Return the window's work: each step by its part inside the window."""
    flops = {dtype: float(np.dot(value, steps.share)) for dtype, value in steps.work.flops.items()}
    whole = sum(flops.values())
    talking = table_ns(steps, tensor_parallel)
    return WindowWork(
        flops_by_dtype=flops,
        flops_low=0.95 * whole,
        flops_high=1.05 * whole,
        bytes_moved=float(np.dot(steps.moved, steps.share)),
        collectives_ns=float(np.sum(talking * steps.share)) if isinstance(talking, np.ndarray) else talking,
    )


def _integrals(
    steps: Steps, counters: Sequence[CounterSeries], lag_ns: float, columns: Sequence[tuple[str, ...]]
) -> list[Floats] | None:
    """Return the integral of each sum of columns over each step; None without samples that are short enough.

    Columns stay in their own unit, times ns. `lag_ns` is by how much the counters' clock is ahead of the
    steps'.
    """
    first, last = int(steps.start[0]) + round(lag_ns), int(steps.end[-1]) + round(lag_ns)
    rows = [s for s in counters if len(s) and s.end_ns[-1] > first and s.end_ns[0] - s.width_ns[0] < last]
    if not rows or 2 * int(rows[0].width_ns[0]) * len(steps.end) > int(steps.length.sum()):
        return None
    if any(getattr(s, name) is None for s in rows for names in columns for name in names):
        return None

    edges = np.stack([steps.start, steps.end]) + round(lag_ns)
    # Of the first series, what lies before the steps was another window's.
    skip = int(np.searchsorted(rows[0].end_ns, first))

    def column(name: str) -> Any:
        return np.concatenate([getattr(s, name) for s in rows])[skip:]

    width, end = column("width_ns"), column("end_ns")
    knots = np.append(end[0] - width[0], end)
    weight = width.astype(np.float64)
    sample, part = _places(knots, edges)

    def over_steps(names: tuple[str, ...]) -> Floats:
        rate = column(names[0])
        for name in names[1:]:
            rate = rate + column(name)
        amounts = rate * weight
        reached = np.append(0.0, np.cumsum(amounts))[sample] + amounts[sample] * part
        inside: Floats = reached[1] - reached[0]
        return inside

    return [over_steps(names) for names in columns]


def _places(knots: Ints, edges: Ints) -> tuple[Ints, Floats]:
    """Return for each edge of a step the sample that it lies in, and the part of the sample's work before it.

    A GPU works in steps and rests between them: what a sample holds is spread over what the steps cover of
    it. Spread over all of it, each step would lose up to a quarter of a sample to the gap after it. Before
    the first of the steps and after the last, others may have worked.

    Args:
        knots: Ends of the samples, after the beginning of the first.
        edges: Rows of starts and of ends of the steps, which are disjoint and in order, of the same clock.
    """
    sample = np.minimum(np.maximum(np.searchsorted(knots, edges, side="right") - 1, 0), len(knots) - 2)
    worked = edges.copy()
    worked[:, 1:] -= np.cumsum(edges[0, 1:] - edges[1, :-1])
    around = knots[np.stack([sample, sample + 1])]
    at = np.interp(around, edges.T.ravel(), worked.T.ravel())
    at += np.minimum(0, around - edges[0, 0]) + np.maximum(0, around - edges[1, -1])
    part = (worked - at[0]) / np.maximum(at[1] - at[0], 1.0)
    return sample, np.minimum(np.maximum(part, 0.0), 1.0)


def unheld_ns(steps: Steps, counters: Sequence[CounterSeries], lag_ns: float = 0.0) -> Floats | None:
    """Return of each step how long it was active without a warp on the SMs, ns.

    NaN for steps that began before the counters did; None without samples that are short enough.
    """
    found = _integrals(steps, counters, lag_ns, (("gr_active",), ("sm_active",)))
    if found is None:
        return None
    begin = min(int(s.end_ns[0] - s.width_ns[0]) for s in counters if len(s))
    unheld = np.maximum(0.0, found[0] - found[1]) * RATIO_STEP
    return np.where(steps.start + round(lag_ns) >= begin, unheld, np.nan)


class StepTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the steps of a window, ns."""

    memory_ns: float
    """Of each step what DRAM needs beyond the tensor pipe's time."""
    communication_ns: float


def step_terms(
    steps: Steps,
    counters: Sequence[CounterSeries],
    peaks: DevicePeaks,
    reachable_bytes_per_s: float,
    tensor_parallel: int,
    lag_ns: float = 0.0,
    clock_ratio: float = 1.0,
    messages_ns: Floats | None = None,
) -> StepTerms:
    """Return the memory-bound and communication terms step by step.

    Samples are integrated over each step. Where they are not shorter than the steps a step's edge would
    smear into its neighbour: then the work model stands for the counters, with rows that fill up tiles and
    at the window's SM clock over the sheet's. `messages_ns` is the time of each step's messages, the
    table's where it is not known.
    """
    length = steps.length
    try:
        useful = np.asarray(compute_time_s(steps.work, peaks)) * 1e9
    except NoPeak:
        useful = np.zeros(len(length))
    seen = _integrals(steps, counters, lag_ns, (("tensor_active",), _DRAM))
    if seen is None:
        busy = useful * steps.padded / clock_ratio
        memory = steps.moved / reachable_bytes_per_s * 1e9
    else:
        busy, moved = seen[0] * RATIO_STEP, seen[1] / 1e9
        memory = moved / reachable_bytes_per_s * 1e9
    executed = np.minimum(length, np.maximum(busy, np.minimum(useful, 1.05 * busy)))
    rest = length - executed
    bound = np.minimum(rest, np.maximum(0.0, memory - executed))
    talking = table_ns(steps, tensor_parallel) if messages_ns is None else messages_ns
    talked_ns = 0.0
    if tensor_parallel > 1:
        talked_ns = float(np.dot(np.minimum(talking, rest - bound), steps.share))
    return StepTerms(memory_ns=float(np.dot(bound, steps.share)), communication_ns=talked_ns)


def tiles_ns(steps: Steps, peaks: DevicePeaks) -> float | None:
    """Estimate the pipe's time for rows that fill up tiles, ns; None where the device's peak is not known."""
    try:
        useful = np.asarray(compute_time_s(steps.work, peaks)) * 1e9
    except NoPeak:
        return None
    return float(np.dot(useful * np.maximum(0.0, np.asarray(steps.padded) - 1.0), steps.share))
