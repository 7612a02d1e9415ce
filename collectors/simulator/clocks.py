"""The SM clocks of a simulated node's GPUs over time, as its scenario lays them down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuidle.collectors.simulator.costs import SHEET, Clock
from gpuidle.collectors.simulator.options import ClockSpell


class Clocks:
    """What `spells` say of each GPU; what no spell tells of is the sheet's clock."""

    def __init__(self, spells: Sequence[ClockSpell]) -> None:
        self._spells = spells

    def at(self, gpu: int, at_ns: int) -> Clock:
        """Return the clock of a GPU at a moment: that of the first spell that holds."""
        for spell in self._spells:
            if spell.gpu == gpu and spell.holds(at_ns):
                return Clock(spell.clock_ratio, spell.event)
        return SHEET

    def differ(self, gpus: Sequence[int]) -> bool:
        """Whether the clocks of these GPUs are not the sheet's at some time."""
        return any(spell.gpu in gpus for spell in self._spells)

    def mean(self, gpu: int, edges: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the mean ratio of each stretch between two edges."""
        mine = [spell for spell in self._spells if spell.gpu == gpu]
        if not mine:
            return np.ones(len(edges) - 1)
        turns = {t for spell in mine for t in (spell.start_ns, spell.stop_ns) if t is not None}
        inside = sorted(t for t in turns if edges[0] < t < edges[-1])
        knots = np.array([int(edges[0]), *inside, int(edges[-1])], dtype=np.int64)
        ratios = np.array([self.at(gpu, int(t)).ratio for t in knots[:-1]])
        passed = np.concatenate(([0.0], np.cumsum(ratios * np.diff(knots))))
        mean: NDArray[np.float64] = np.diff(np.interp(edges, knots, passed)) / np.diff(edges)
        return mean
