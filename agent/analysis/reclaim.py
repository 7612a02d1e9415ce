"""What of the idle compute could be had back: by more rows a step, before something stops it.

A decode step moves the weights whatever its batch. With k times the rows it does k times the work in a time
that grows only by the contexts it reads. What stops it first is the ridge (compute binds) or the KV cache (no
room for more contexts). A node whose cache is full has nothing to reclaim, however idle its tensor cores are.
The engine's limit of sequences stops nothing: it is a setting, and whoever reads the figure can raise it.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.windowwork import mean_of
from gpuidle.agent.model import EngineReading
from gpuidle.agent.physics.capacity import Parallel, compute_bound_rows, decode_work
from gpuidle.agent.physics.peaks import DevicePeaks, NoPeak
from gpuidle.agent.physics.roofline import compute_time_s
from gpuidle.agent.physics.shapes import ModelShape

Known: TypeAlias = "dict[tuple[str, int, int, int], tuple[float, float]]"
"""By model, rows, context and target (each rounded): gain factor, seconds of a row's useful work."""

_REMEMBERED = 256


def reclaimable_ns(
    known: Known,
    shape: ModelShape,
    peaks: DevicePeaks,
    reading: EngineReading,
    sums: Sums,
    decode_ns: int,
    busy_ns: float,
    stalled_ns: int,
) -> int | None:
    """Return the reclaimable time of a window on one GPU; None where the batch or the cache is not known.

    Args:
        known: What was computed before; filled here.
        shape: The model.
        peaks: The device's.
        reading: The engine's cache and its parallelism.
        sums: The window's tokens and gauges.
        decode_ns: Time in decode steps.
        busy_ns: Time with work on the GPU.
        stalled_ns: Memory-bound time and padding: no more than this can be had back.
    """
    # Of one core: a data-parallel core has its own batch and its own cache.
    rows, usage = mean_of(sums.running) / sums.cores, mean_of(sums.kv_usage_ratio)
    capacity, tokens = reading.limits.kv_capacity_tokens, sums.decode_tokens
    if capacity is None or tokens is None or not sums.always_running or usage <= 0 or rows < 1:
        return None
    if decode_ns <= 0 or busy_ns <= 0:
        return 0
    seats = rows / min(1.0, usage)
    if seats <= rows:
        return 0
    context = capacity * usage / rows
    key = (reading.model_text or "", _rounded(rows), _rounded(context), _rounded(seats))
    if key not in known:
        if len(known) >= _REMEMBERED:
            known.clear()
        known[key] = _gain(shape, peaks, reading, *(2.0 ** (x / 8) for x in key[1:]))
    gain, row_s = known[key]
    useful_ns = tokens / sums.cores * row_s * 1e9 * min(1.0, decode_ns / busy_ns)
    return max(0, min(stalled_ns, round(useful_ns * (gain - 1))))


def _rounded(value: float) -> int:
    """Round to eighths of a power of two: what is alike is computed once."""
    return round(8 * math.log2(max(1.0, value)))


def _gain(
    shape: ModelShape, peaks: DevicePeaks, reading: EngineReading, rows: float, context: float, seats: float
) -> tuple[float, float]:
    """Return by how much the useful work of a second grows at the best batch, and a row's useful seconds."""
    place = reading.parallelism
    spread = Parallel(tensor=place.tensor, pipeline=place.pipeline, data=place.data, expert=place.expert)
    try:
        ridge = compute_bound_rows(shape, peaks, context, parallel=spread)
        best = max(rows, min(seats, math.inf if ridge is None else float(ridge)))
        now = decode_work(shape, rows, context, parallel=spread)
        then = decode_work(shape, best, context, parallel=spread)
        row_s = float(compute_time_s(now, peaks)) / rows
    except NoPeak:
        return 1.0, 0.0
    slower = float(then.total_bytes) / float(now.total_bytes)
    return max(1.0, best / rows / slower), row_s
