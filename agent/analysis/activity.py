"""What the counters of one device say of one window: integrals, never means of unequal windows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from gpuidle.agent.analysis.columns import known, whole
from gpuidle.agent.model import RATIO_STEP, RUNGS, CounterSeries, GpuReading, Rung

REST_RATIO = 0.05
"""A busy share of no more is a rest: the driver's own work, and rounding."""


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Integrals over the observed part of a window; None where no counter tells."""

    rung: Rung
    observed_ns: int
    active_ns: float | None = None
    active_measured: bool = False
    tensor_ns: float | None = None
    """Tensor-active time at the clock of the moment."""
    sm_ns: float | None = None
    dram_bytes: float | None = None
    sm_clock_hz: float | None = None


def activity(
    series: Sequence[CounterSeries],
    reading: GpuReading | None,
    start_ns: int,
    end_ns: int,
    observed_ns: int,
) -> Activity:
    """Return the integrals of [start_ns, end_ns) by the best rung that saw any of it.

    Samples that straddle an edge count in proportion. Where samples cover a part of the window only, the rest
    is unobserved. Without samples NVML's busy share stands for the tick (an estimate: it is the driver's own
    sampling of its last period).
    """
    touching = [s for s in series if _overlaps(s, start_ns, end_ns)]
    rungs = {s.rung for s in touching}
    for rung in RUNGS:
        if rung in rungs:
            rows = [s for s in touching if s.rung == rung]
            seen = _integrate(rows, rung, start_ns, end_ns)
            if seen.observed_ns > 0 and seen.sm_clock_hz is None and reading is not None:
                # GPM and DCGM tell no clock: the driver's own at the end of the tick stands for the window.
                return msgspec.structs.replace(seen, sm_clock_hz=reading.sm_clock_hz)
            if seen.observed_ns > 0:
                return seen
    if reading is None:
        return Activity(rung="nvml", observed_ns=0)
    busy = reading.busy_ratio
    return Activity(
        rung="nvml",
        observed_ns=observed_ns,
        active_ns=None if busy is None else busy * observed_ns,
        sm_clock_hz=reading.sm_clock_hz,
    )


def without_stale_rest(seen: Activity) -> Activity:
    """Return the activity without a busy share of 0 that tokens contradict.

    The driver's share is of its own last sample period, up to a second ago: at the edge of a load it still
    shows the rest before it, or already the one after it.
    """
    if seen.active_measured or seen.active_ns != 0:
        return seen
    return msgspec.structs.replace(seen, active_ns=None)


def without_lone_rest(seen: Activity, busy_before: float | None) -> Activity:
    """Return the activity without a rest that the reading at the window's start does not confirm.

    The driver's share is of its own last sample period, which ends with the window and may be shorter: a rest
    there says nothing of the window's beginning, unless the period before it was one too.
    """
    if seen.active_measured or seen.active_ns is None or seen.active_ns > REST_RATIO * seen.observed_ns:
        return seen
    if busy_before is not None and busy_before <= REST_RATIO:
        return seen
    return msgspec.structs.replace(seen, active_ns=None)


def _overlaps(series: CounterSeries, start_ns: int, end_ns: int) -> bool:
    return bool(series.end_ns[-1] > start_ns and series.end_ns[0] - series.width_ns[0] < end_ns)


def _integrate(rows: Sequence[CounterSeries], rung: Rung, start_ns: int, end_ns: int) -> Activity:
    end, width = whole(rows, "end_ns"), whole(rows, "width_ns")
    inside = np.maximum(0, np.minimum(end, end_ns) - np.maximum(end - width, start_ns))
    covered_ns = int(np.add.reduce(inside))
    weights = inside.astype(np.float64)

    def total(name: str) -> float | None:
        return float(np.dot(whole(rows, name), weights)) if known(rows, name) else None

    def ratio(name: str) -> float | None:
        found = total(name)
        return None if found is None else found * RATIO_STEP

    clock, moved = total("sm_clock_hz"), total("dram_bytes_per_s")
    read, written = total("dram_read_bytes_per_s"), total("dram_write_bytes_per_s")
    if read is not None and written is not None:
        moved = read + written
    return Activity(
        rung=rung,
        observed_ns=min(covered_ns, end_ns - start_ns),
        active_ns=ratio("gr_active"),
        active_measured=True,
        tensor_ns=ratio("tensor_active"),
        sm_ns=ratio("sm_active"),
        dram_bytes=None if moved is None else moved / 1e9,
        sm_clock_hz=None if clock is None or not covered_ns else clock / covered_ns,
    )
