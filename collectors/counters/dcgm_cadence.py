"""How often a page is renewed, found by polling it: the exporter does not say.

A poll that finds the page changed since the poll before brackets one renewal in time. The shortest distance
between two brackets is one interval, as long as some poll in between found nothing new: without that the
page may be renewed faster than it is polled, and the interval is not known.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000 * MILLISECOND_NS
SHORTEST_NS = 100 * MILLISECOND_NS
"""DCGM measures no faster."""
DEFAULT_NS = 30 * SECOND_NS
"""What dcgm-exporter does unless it is told otherwise."""

_CHANGES = 10
_NEEDED = 3
"""Renewals seen before an interval is believed: two distances that agree."""
_JITTER = 1.05
"""How far bounds may cross before they are not those of one interval."""
_ROUND_NS = tuple(value * MILLISECOND_NS for value in (30_000, 10_000, 5_000, 1_000, 500, 100))


@dataclass(frozen=True)
class _Renewal:
    after_ns: int
    by_ns: int
    quiet: int
    """Polls between the renewal before and this one that found nothing new."""

    @property
    def middle_ns(self) -> int:
        return (self.after_ns + self.by_ns) // 2


class Cadence:
    """Follows one page; `poll` is told of every poll in order of time."""

    def __init__(self) -> None:
        self._renewals: deque[_Renewal] = deque(maxlen=_CHANGES)
        self._last_ns: int | None = None
        self._quiet = 0
        self.interval_ns: int | None = None
        """None: not known yet."""
        self.too_slow = False
        """Whether the page changes at every poll: only faster polls can tell the interval."""

    def poll(self, sent_ns: int, read_ns: int, *, changed: bool) -> None:
        """Take in when the page was asked for and read, and whether it had changed since the poll before."""
        before, self._last_ns = self._last_ns, sent_ns
        if before is None:
            return
        if not changed:
            self._quiet += 1
            return
        self._renewals.append(_Renewal(before, read_ns, self._quiet))
        self._quiet = 0
        self._settle()

    def _settle(self) -> None:
        rows = list(self._renewals)
        self.too_slow = len(rows) >= _NEEDED and all(row.quiet == 0 for row in rows[-_NEEDED + 1 :])
        if len(rows) < _NEEDED or self.too_slow:
            return
        gaps = [b.middle_ns - a.middle_ns for a, b in pairwise(rows)]
        # A renewal that changed nothing is not seen: then a distance is several of the longest interval that
        # the shortest distance allows.
        longest = min(b.by_ns - a.after_ns for a, b in pairwise(rows))
        steps = [max(1, round(gap / longest)) for gap in gaps]
        at = [0, *accumulate(steps)]
        low, high = 0.0, math.inf
        for i, j in combinations(range(len(rows)), 2):
            low = max(low, (rows[j].after_ns - rows[i].by_ns) / (at[j] - at[i]))
            high = min(high, (rows[j].by_ns - rows[i].after_ns) / (at[j] - at[i]))
        if low <= high * _JITTER:
            self.interval_ns = _plainest(low, max(low, high))
        else:
            # It was restarted with another interval, or a poll was late: the newest renewal begins again.
            self._renewals = deque(rows[-1:], maxlen=_CHANGES)


def _plainest(low: float, high: float) -> int:
    """Return the roundest interval between two bounds: people write 30 s or 100 ms, not 29.7 s."""
    middle = (low + high) / 2
    for unit in _ROUND_NS:
        near = round(middle / unit) * unit
        if near and low <= near <= high:
            return near
    return max(SHORTEST_NS, round(middle))
