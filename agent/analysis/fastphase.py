"""Phases from fast counters alone: decode against steps that contain a prefill.

A step that moves weights for few rows keeps DRAM busy and the tensor pipe idle; one with a prompt does the
reverse. Where the two stand on this GPU, with this model and batch, is learned: a level for each class in the
plane of (tensor, DRAM), begun at what the ridge says and moved with what was seen. A sample that lies between
the levels holds both, and is labelled only where one of them clearly fills it; the next samples keep a label
until the other is as clear (hysteresis). Prefill and mixed cannot be told apart this way.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import RATIO_STEP, CounterSeries

Floats = NDArray[np.float64]

MEMORY_S = 30.0
"""After this much busy time what a level was learned from has fallen to 1/e."""
ACTIVE_RATIO = 0.2
"""Less of a sample with work on the GPU says nothing about the work."""
DECODE_BELOW, PREFILL_ABOVE = 0.35, 0.60
"""Share of tensor in tensor + DRAM activity: below the one the roofline leaves no doubt, above the other
neither."""
START: dict[str, tuple[float, float]] = {"decode": (0.15, 0.60), "prefill": (0.50, 0.15)}
"""Levels before any was seen: published decode and prefill efficiencies of H100 and A100."""


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
        self._level = {name: np.array(start) for name, start in START.items()}
        self._weight = dict.fromkeys(START, 0.0)
        self._last = 0

    def classify(
        self, tensor: Floats, dram: Floats, active: Floats, width_ns: NDArray[np.int64]
    ) -> NDArray[np.int8]:
        """Return 1 (contains a prefill), -1 (decode) or 0 (unknown) for each sample, and learn from them.

        `tensor` is the pipe's active share, `dram` the bandwidth's, `active` that with work on the GPU; all
        of the sample.
        """
        point = np.stack([tensor, dram]) / np.maximum(active, ACTIVE_RATIO)
        usable = active >= ACTIVE_RATIO
        # Short samples lie inside one step: the middle between the classes is that of their intensities, and
        # what lies near it is an edge. Long ones hold several steps and mix in proportion.
        short = width_ns.size and float(np.median(width_ns)) < 50e6
        part = self._by_intensity(point) if short else self._part(point)
        margin = 0.10 if short else 0.35
        sure = np.where(part < 0.5 - margin, -1, np.where(part > 0.5 + margin, 1, 0)).astype(np.int8)
        sure[~usable] = 0
        if not self._weight["decode"] or not self._weight["prefill"]:
            # Only one class was seen so far: nothing but the roofline tells which.
            share = tensor / np.maximum(tensor + dram, 1e-9)
            by_ridge = np.where(share < DECODE_BELOW, -1, np.where(share > PREFILL_ABOVE, 1, 0))
            sure = np.where(usable, by_ridge, 0).astype(np.int8)
        self._learn(point, sure, active * width_ns / 1e9)
        return self._hold(sure, part, usable)

    def _part(self, point: Floats) -> Floats:
        """Return how far from the decode level to the prefill level each sample lies, 0 to 1."""
        axis = self._level["prefill"] - self._level["decode"]
        start = self._level["decode"]
        along: Floats = (axis[0] * (point[0] - start[0]) + axis[1] * (point[1] - start[1])) / (axis @ axis)
        return along

    def _by_intensity(self, point: Floats) -> Floats:
        """The same on the scale of log(tensor/DRAM): a step with a small prompt stands near decode."""
        low, high = (_log_intensity(self._level[name]) for name in ("decode", "prefill"))
        return (_log_intensity(point) - low) / np.maximum(high - low, 0.1)

    def _learn(self, point: Floats, sure: NDArray[np.int8], seconds: Floats) -> None:
        for name, sign in (("decode", -1), ("prefill", 1)):
            mask = sure == sign
            seen = float(seconds[mask].sum())
            if seen <= 0:
                continue
            mean = (point[:, mask] * seconds[mask]).sum(axis=1) / seen
            past = self._weight[name]
            share = seen / (past + seen)
            self._level[name] = (1 - share) * self._level[name] + share * mean
            self._weight[name] = min(MEMORY_S, past + seen)

    def _hold(self, sure: NDArray[np.int8], part: Floats, usable: NDArray[np.bool_]) -> NDArray[np.int8]:
        """Let a sample in the middle keep the label before it, unless it leans the other way."""
        index = np.arange(len(sure))
        last = np.maximum.accumulate(np.where(sure != 0, index, -1))
        held = np.where(last >= 0, sure[np.maximum(last, 0)], self._last)
        near = (index - last <= 2) & usable & (np.sign(part - 0.5) == held)
        labels: NDArray[np.int8] = np.where((sure == 0) & near, held, sure).astype(np.int8)
        if len(sure):
            self._last = int(held[-1])
        return labels


def _log_intensity(point: Floats) -> Floats:
    found: Floats = np.log((point[0] + 0.01) / (point[1] + 0.01))
    return found


def label_window(
    levels: Levels, series: Sequence[CounterSeries], start_ns: int, end_ns: int, peak_bytes_per_s: float
) -> Labels | None:
    """Label the samples that lie in [start_ns, end_ns); None where a column is missing.

    A sample across the edge counts in the window in which it ends, in proportion.
    """
    rows = [s for s in series if len(s) and s.end_ns[-1] > start_ns and s.end_ns[0] <= end_ns]
    if not rows or any(
        s.tensor_active is None
        or s.gr_active is None
        or s.dram_read_bytes_per_s is None
        or s.dram_write_bytes_per_s is None
        for s in rows
    ):
        return None
    end = np.concatenate([s.end_ns for s in rows])
    inside = (end > start_ns) & (end <= end_ns)
    if not inside.any():
        return None

    def column(name: str) -> Floats:
        found: Floats = np.concatenate([getattr(s, name) for s in rows])[inside].astype(np.float64)
        return found

    width = np.concatenate([s.width_ns for s in rows])[inside]
    active = column("gr_active") * RATIO_STEP
    dram = (column("dram_read_bytes_per_s") + column("dram_write_bytes_per_s")) / peak_bytes_per_s
    labels = levels.classify(column("tensor_active") * RATIO_STEP, dram, active, width)
    clipped = np.minimum(width, end[inside] - start_ns)
    busy = active * clipped
    return Labels(
        decode_ns=float(busy[labels == -1].sum()),
        containing_ns=float(busy[labels == 1].sum()),
        unknown_ns=float(busy[labels == 0].sum()),
        idle_ns=float((clipped - busy).sum()),
    )
