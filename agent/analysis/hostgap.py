"""The inactive time that the host takes between steps, from sums of windows alone.

Inactive time is the host's where a request was there all along, else a part of it was a rest. Gauges are read
too seldom to see a rest within a window, but two things tell that there was none: a request that runs at the
end and had its first token before the window, and that most windows are alike while several run at all edges.
Rests are as long as chance has it, gaps of steps are not.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from gpuidle.agent.analysis.rates import Sums

KEPT = 60
"""Windows that are remembered, of each kind."""
FEWEST_STEPS = 10
"""Fewer in a window tell nothing: its edges cut some."""
ALIKE = 1.15
"""Times the least: gaps within this are alike."""
ENOUGH_ALIKE, MOST = 5, 0.5
"""So many windows must be, and this share of all."""
SEVERAL = 2
"""Running at both edges: a single request that comes once a tick is at all edges, and rests between them."""
SYNCHRONOUS_RATIO = 0.25
"""Of the time of a decode-only step, from end to end, what an engine that schedules between its steps leaves
inactive: 0.24 of all time with 32 sequences of an 8B model on an H200 (Hugging Face's measurement for
asynchronous continuous batching, 2026), 0.23-0.27 of decode-only steps in five runs of vLLM 0.32 on CPUs."""
USUAL_RATIO = 0.1
"""Gap over the time of a step where nothing tells it: what engines take that overlap little."""


def request_throughout(sums: Sums, following: Sums | None) -> bool:
    """Return whether one request at least was there all the time.

    Who runs at the end and began within the window has its first token in it, or in the next one. More than
    these began before: had there been a rest, they would not be here.
    """
    running = sums.running[1]
    if sums.reset or following is None or following.reset or running is None or not sums.running[0]:
        return False
    if sums.first_tokens is None or following.first_tokens is None or following.start_ns > sums.end_ns:
        return False
    long = bool(following.chunk_steps or following.chunk_ns)  # a prompt that has no first token yet
    return not long and running > sums.first_tokens + following.first_tokens


class HostGap:
    """Inactive time a step while requests are there, of one engine."""

    def __init__(self) -> None:
        self._sure: deque[float] = deque(maxlen=KEPT)
        self._bounds: deque[tuple[float, bool]] = deque(maxlen=KEPT)
        self._step_ns = 0.0
        self._told: float | None = None
        """What the windows tell; found when it is asked for."""

    def learn(
        self, steps: int, inactive_ns: float, step_ns: float, *, running: int, throughout: bool
    ) -> None:
        """Take a window.

        Args:
            steps: That the engine counted in it.
            inactive_ns: Time without work on the GPU.
            step_ns: Time of a step, as far as it is known.
            running: Requests at that edge that had fewer.
            throughout: Whether a request was there all the time.
        """
        if steps < FEWEST_STEPS:
            return
        gap = inactive_ns / steps
        if throughout:
            self._sure.append(gap)
        else:
            self._bounds.append((gap, running >= SEVERAL))
        self._step_ns = step_ns
        self._told = None

    def told_ns(self) -> float | None:
        """Return the gap of a step; None before the first window that tells anything.

        An estimate: where no window is known to have held no rest, what is usual, or less if one shows less.
        """
        if self._told is None and (self._sure or self._bounds):
            self._told = self._find()
        return self._told

    def _find(self) -> float:
        if self._sure:
            return median(self._sure)
        least = min(gap for gap, _ in self._bounds)
        several = [gap for gap, many in self._bounds if many]
        alike = [gap for gap in several if gap <= ALIKE * min(several)]
        if len(alike) >= max(ENOUGH_ALIKE, MOST * len(self._bounds)):
            return sum(alike) / len(alike)
        return min(least, USUAL_RATIO * self._step_ns)
