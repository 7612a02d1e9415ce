"""From CUPTI's clock to CLOCK_MONOTONIC: an offset and a rate, fitted anew as anchors come."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

SPAN = 10
"""Anchors kept; the child sends one a second."""
STEP_NS = 1_000_000
"""An anchor further than this off the fit means that the clock was set, not that it runs fast."""


class Anchor(msgspec.Struct, frozen=True, array_like=True):
    """One moment in both clocks; the true one lies within `doubt_ns` to each side."""

    theirs_ns: int
    ours_ns: int
    doubt_ns: int


class ClockFit:
    """A straight line through the first and last of the recent anchors."""

    def __init__(self) -> None:
        self._anchors: deque[Anchor] = deque(maxlen=SPAN)

    @property
    def known(self) -> bool:
        """Whether there is an anchor."""
        return bool(self._anchors)

    @property
    def doubt_ns(self) -> int:
        """Half the width of the worst anchor in use."""
        return max((anchor.doubt_ns for anchor in self._anchors), default=0)

    def add(self, anchor: Anchor) -> bool:
        """Take an anchor; return whether the clock was set since the last one."""
        stepped = False
        if self._anchors:
            if anchor.ours_ns == self._anchors[-1].ours_ns:
                return False
            expected = int(self.to_monotonic(np.array([anchor.theirs_ns], dtype=np.uint64))[0])
            stepped = abs(expected - anchor.ours_ns) > STEP_NS + anchor.doubt_ns
            if stepped:
                self._anchors.clear()
        self._anchors.append(anchor)
        return stepped

    def to_monotonic(self, theirs_ns: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return times of CUPTI's clock in CLOCK_MONOTONIC nanoseconds; exact to the anchors' doubt."""
        first, last = self._anchors[0], self._anchors[-1]
        theirs = last.theirs_ns - first.theirs_ns
        rate = (last.ours_ns - first.ours_ns) / theirs if theirs > 0 else 1.0
        # Whole nanoseconds since the last anchor: the clock's own figures are beyond a float's precision.
        since = (theirs_ns - np.uint64(last.theirs_ns)).view(np.int64)
        out: NDArray[np.int64] = last.ours_ns + np.rint(since * rate).astype(np.int64)
        return out
