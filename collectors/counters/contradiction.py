"""A dead counter is not an idle GPU: counters that read 0 while the driver sees a busy GPU are not believed.

After an Xid, or when another tool has left them in a bad state, profiling counters can read 0 for ever and
with success. Only another counter shows that. A GPU with a kernel resident has an active SM (one of 132 is
0.8 %), so SM activity of 0 contradicts NVML's busy share near 1 before, in and after the window, and graphics
activity near 1 in the same window.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

import numpy as np

from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuReading

Verdict = Literal["alive", "contradicted", "unclear"]

BUSY_RATIO = 0.9
POWER_RATIO = 0.2
"""Of the limit: an idle GPU with a loaded model draws less; a busy one more."""
ZERO_RATIO = 0.0005
"""A warp on one SM of the largest GPU is ten times this."""

AROUND_NS = 1_500_000_000
"""The driver's busy share is of up to a second before its reading: readings this near belong to a window."""
KEPT_NS = 120 * 10**9

DEAD_AFTER_NS = 3 * 10**9
"""So long must a counter be contradicted, without a sign of life, to be declared dead."""
ALIVE_TICKS = 2
"""So many ticks with signs of life make it trusted again."""


class History:
    """Whether the driver showed one device busy, over the last two minutes."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, bool]] = deque()

    def add(self, reading: GpuReading) -> None:
        """Take the device's reading; one without a busy share tells nothing."""
        if reading.busy_ratio is None or (self._rows and self._rows[-1][0] >= reading.read_ns):
            return
        draws = (
            reading.power_watts is None
            or reading.power_limit_watts is None
            or reading.power_watts >= POWER_RATIO * reading.power_limit_watts
        )
        self._rows.append((reading.read_ns, reading.busy_ratio >= BUSY_RATIO and draws))
        while self._rows[0][0] < reading.read_ns - KEPT_NS:
            self._rows.popleft()

    def busy_throughout(self, start_ns: int, end_ns: int) -> bool:
        """Whether every reading around the window showed it busy, and there were two at least."""
        around = [busy for at_ns, busy in self._rows if start_ns - AROUND_NS <= at_ns <= end_ns + AROUND_NS]
        return len(around) >= 2 and all(around)


def verdict(series: CounterSeries, history: History) -> Verdict:
    """Say whether the samples of one tick fit each other, and what the driver said of the GPU around them.

    SM activity tells; where the rung has none, graphics activity, else tensor activity, of which 0 is
    possible on a busy GPU, but says nothing about idle compute then.
    """
    sm, graphics, tensor = (_mean(series, name) for name in ("sm_active", "gr_active", "tensor_active"))
    mean = next((value for value in (sm, graphics, tensor) if value is not None), None)
    if mean is None:
        return "unclear"
    if mean >= ZERO_RATIO:
        return "alive"
    if graphics is not None and graphics >= BUSY_RATIO:
        return "contradicted"
    start_ns = int(series.end_ns[0] - series.width_ns[0])
    return "contradicted" if history.busy_throughout(start_ns, int(series.end_ns[-1])) else "unclear"


def _mean(series: CounterSeries, name: str) -> float | None:
    column = getattr(series, name)
    if column is None or not len(series):
        return None
    return float(np.average(column.astype(np.float64), weights=series.width_ns)) * RATIO_STEP


class Trust:
    """Whether one rung is believed on one device."""

    def __init__(self) -> None:
        self.dead = False
        self.contradicted_ns = 0
        """How long it has been contradicted without a sign of life."""
        self._alive = 0

    def judge(self, series: CounterSeries, history: History) -> bool:
        """Return whether the series may be handed on."""
        found = verdict(series, history)
        if found == "contradicted":
            self.contradicted_ns += int(series.width_ns.sum())
            self.dead = self.dead or self.contradicted_ns >= DEAD_AFTER_NS
            self._alive = 0
            return False
        if found == "alive":
            self._alive += 1
            if not self.dead or self._alive >= ALIVE_TICKS:
                self.dead, self.contradicted_ns = False, 0
        return not self.dead
