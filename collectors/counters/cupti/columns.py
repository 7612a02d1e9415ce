"""From raw samples to a CounterSeries: what cannot be is left out and counted, ratios are quantised once."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import RATIO_STEP, CounterSeries, column, rate_column
from gpuidle.collectors.counters.cupti.clockfit import ClockFit
from gpuidle.collectors.counters.cupti.ring import Layout

RATIOS = ("gr_active", "sm_active", "tensor_active")
RATES = ("dram_read_bytes_per_s", "dram_write_bytes_per_s", "sm_clock_hz")
LONGEST_PERIODS = 50
"""A sample that lasts longer is garbage. Where a clock is the trigger, an idle GPU stretches them."""
EARLY_NS = 5_000_000
"""How far a sample may seem to end after it was decoded: the doubt of the clock fit is far smaller."""
RATIO_MOST = 1.31
RATE_MOST = 1e15


class Raw(NamedTuple):
    """Samples as they stand in shared memory."""

    start: NDArray[np.uint64]
    end: NDArray[np.uint64]
    values: dict[str, NDArray[np.float64]]


class RingReader:
    """The parent's end of the ring."""

    def __init__(self, descriptor: int, of: Layout) -> None:
        self._layout = of
        self._tail = 0
        memory = mmap.mmap(descriptor, of.size, prot=mmap.PROT_READ)
        words = np.frombuffer(memory, dtype=np.uint64)
        self._words = words.reshape(2 + of.values, of.capacity)
        self._numbers = np.frombuffer(memory, dtype=np.float64).reshape(2 + of.values, of.capacity)

    def take(self, head: int, names: tuple[str, ...]) -> tuple[Raw, int]:
        """Return the samples up to number `head` and how many were overwritten before they were read."""
        # An eighth of the ring is left to the writer, who goes on meanwhile.
        oldest = head - self._layout.capacity * 7 // 8
        lost = max(0, oldest - self._tail)
        places = np.arange(self._tail + lost, head) % self._layout.capacity
        self._tail = max(self._tail, head)
        return (
            Raw(
                start=self._words[0, places],
                end=self._words[1, places],
                values={name: self._numbers[2 + row, places] for row, name in enumerate(names)},
            ),
            lost,
        )


class Converted(NamedTuple):
    """Samples that can be, and how many could not."""

    series: CounterSeries | None
    bad_times: int
    bad_values: int


def convert(
    raw: Raw, fit: ClockFit, *, hw_id: str, period_ns: int, not_before_ns: int, not_after_ns: int
) -> Converted:
    """Return `raw` as a series in CLOCK_MONOTONIC, ordered and without overlaps.

    A sample is left out if it ends before it starts, has no start, lasts absurdly long, ends before
    `not_before_ns` (the end of the last one handed over) or after `not_after_ns` (when it was decoded), or
    has a value that cannot be.
    """
    if not len(raw.end):
        return Converted(None, 0, 0)
    width = (raw.end - raw.start).view(np.int64)
    end = fit.to_monotonic(raw.end)
    fits = (raw.start > 0) & (width > 0) & (width <= LONGEST_PERIODS * period_ns)
    fits &= (end > not_before_ns) & (end <= not_after_ns + EARLY_NS)
    # Of what is left, a sample that ends before one ahead of it is out of order.
    ahead = np.maximum.accumulate(np.where(fits, end, not_before_ns))
    fits[1:] &= end[1:] > ahead[:-1]
    sound = np.ones(len(end), dtype=bool)
    for names, most in ((RATIOS, RATIO_MOST * 100), (RATES, RATE_MOST)):
        for name in names:
            values = raw.values[name]
            sound &= (values >= 0) & (values <= most)  # NaN is neither
    keep = fits & sound
    bad_times, bad_values = int(np.count_nonzero(~fits)), int(np.count_nonzero(fits & ~sound))
    if not keep.any():
        return Converted(None, bad_times, bad_values)
    end = end[keep]
    start = np.maximum(end - width[keep], np.concatenate(([not_before_ns], end[:-1])))
    columns: dict[str, NDArray[Any]] = {
        name: column(np.rint(raw.values[name][keep] / (100 * RATIO_STEP)), "<u2") for name in RATIOS
    }
    columns |= {name: rate_column(raw.values[name][keep]) for name in RATES}
    series = CounterSeries(
        hw_id=hw_id,
        rung="cupti_pm",
        end_ns=column(end, "<i8"),
        width_ns=column(end - start, "<i8"),
        **columns,
    )
    return Converted(series, bad_times, bad_values)


def join(parts: list[CounterSeries]) -> CounterSeries:
    """Return the samples of several series of one device as one."""
    if len(parts) == 1:
        return parts[0]

    def whole(name: str, dtype: str) -> NDArray[Any]:
        return column(np.concatenate([getattr(part, name) for part in parts]), dtype)

    return CounterSeries(
        hw_id=parts[0].hw_id,
        rung="cupti_pm",
        end_ns=whole("end_ns", "<i8"),
        width_ns=whole("width_ns", "<i8"),
        **{name: whole(name, "<u2") for name in RATIOS},
        **{name: whole(name, "<f8") for name in RATES},
    )
