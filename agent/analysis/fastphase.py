"""Phases from fast counters alone: decode against steps that contain a prefill.

A step that moves weights for few rows keeps DRAM busy and the tensor pipe idle; one with a prompt does the
reverse. Where the two stand on this GPU, with this model and batch, is learned (`levels`); what lies between
is unknown. Prefill and mixed cannot be told apart this way.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.levels import LONG_NS, Floats, LongSamples, ShortSamples
from gpuidle.agent.model import RATIO_STEP, CounterSeries

BEFORE_NS, AHEAD_NS = 500_000_000, 1_000_000_000
"""What is looked at around a window: what repeats after it is decode in it as well."""


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds of a window by label; the rest of the window was not seen."""

    decode_ns: float
    containing_ns: float
    """Steps that contain a prefill."""
    unknown_ns: float
    idle_ns: float


class Levels:
    """What this GPU's counters show in decode and in prefill, learned as samples pass."""

    def __init__(self) -> None:
        self._short, self._long = ShortSamples(), LongSamples()

    def classify(
        self,
        tensor: Floats,
        dram: Floats,
        active: Floats,
        width_ns: NDArray[np.int64],
        inside: NDArray[np.bool_],
    ) -> NDArray[np.int8]:
        """Return 1 (contains a prefill), -1 (decode) or 0 (unknown) for each sample inside.

        `tensor` is the pipe's active share, `dram` the bandwidth's, `active` that with work on the GPU; all
        of the sample. Samples inside are learned from: each should be so once. The others are around them.
        """
        if not inside.any():
            return np.zeros(0, dtype=np.int8)
        if float(np.median(width_ns)) < LONG_NS:
            return self._short.classify(tensor, dram, active, width_ns, inside)[inside]
        return self._long.classify(tensor[inside], dram[inside], active[inside], width_ns[inside])


def label_window(
    levels: Levels, series: Sequence[CounterSeries], start_ns: int, end_ns: int, peak_bytes_per_s: float
) -> Labels | None:
    """Label the samples that lie in [start_ns, end_ns); None where a column is missing.

    A sample across the edge counts in the window in which it ends, in proportion.
    """
    rows = _between(series, start_ns, end_ns)
    if not rows or not all(map(_complete, rows)):
        return None
    first_ns, last_ns = start_ns - BEFORE_NS, end_ns + AHEAD_NS
    rows = [s for s in _between(series, first_ns, last_ns) if _complete(s)]
    end = np.concatenate([s.end_ns for s in rows])
    near = (end > first_ns) & (end <= last_ns)
    end = end[near]
    inside = (end > start_ns) & (end <= end_ns)
    if not inside.any():
        return None

    def column(name: str) -> Floats:
        found: Floats = np.concatenate([getattr(s, name) for s in rows])[near].astype(np.float64)
        return found

    width = np.concatenate([s.width_ns for s in rows])[near]
    active = column("gr_active") * RATIO_STEP
    dram = (column("dram_read_bytes_per_s") + column("dram_write_bytes_per_s")) / peak_bytes_per_s
    labels = levels.classify(column("tensor_active") * RATIO_STEP, dram, active, width, inside)
    clipped = np.minimum(width, end - start_ns)[inside]
    busy = active[inside] * clipped
    return Labels(
        decode_ns=float(busy[labels == -1].sum()),
        containing_ns=float(busy[labels == 1].sum()),
        unknown_ns=float(busy[labels == 0].sum()),
        idle_ns=float((clipped - busy).sum()),
    )


def _between(series: Sequence[CounterSeries], start_ns: int, end_ns: int) -> list[CounterSeries]:
    return [s for s in series if len(s) and s.end_ns[-1] > start_ns and s.end_ns[0] <= end_ns]


def _complete(series: CounterSeries) -> bool:
    needed = (
        series.tensor_active,
        series.gr_active,
        series.dram_read_bytes_per_s,
        series.dram_write_bytes_per_s,
    )
    return all(column is not None for column in needed)
