"""From polls of a dcgm-exporter to samples: each measured interval once, as long as it was, never repeated.

The tracker has no clock and does no I/O: it is told of polls. A sample ends when the page was renewed. Where
the renewal changed no counter (an idle GPU reads 0.000000 for hours), something else on the page (power,
energy) shows that the exporter goes on: then half an interval is waited for the counters to follow, and they
are taken as measured anew. Where nothing on the page changes any more, there are no samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuidle.collectors.counters.dcgm_cadence import DEFAULT_NS, MILLISECOND_NS, SECOND_NS, Cadence
from gpuidle.collectors.counters.dcgm_page import DcgmPage

_FIRST_POLL_NS = 250 * MILLISECOND_NS
_FIRST_POLLS = 12
_BURST_POLL_NS = 40 * MILLISECOND_NS
_SHORTEST_POLL_NS = 100 * MILLISECOND_NS
_LONGEST_POLL_NS = 2 * SECOND_NS
_STALE_INTERVALS = 3
_LATEST_STALE_NS = 3 * SECOND_NS


@dataclass(frozen=True)
class Sample:
    """One measured interval of all devices of the page."""

    seen_ns: int
    """When the page was renewed with it, CLOCK_MONOTONIC: the interval ended then, or a lag before."""
    interval_ns: int
    page: DcgmPage
    ended_ns: int | None = None
    """The end itself, where the exporter gives time stamps."""
    energy_new: bool = True
    """Whether the page's energy counters are of this renewal."""


class Tracker:
    """Follows one exporter."""

    def __init__(self) -> None:
        self._counters = Cadence()
        self._whole = Cadence()
        self._page: DcgmPage | None = None
        self._sent_ns = 0
        self._polls = 0
        self._alive_ns: int | None = None
        """When the page last changed at all."""
        self._seen_ns: int | None = None
        """When the last sample's page came."""
        self._silent: Sample | None = None
        """A renewal that changed no counter, while they may still follow."""
        self._stamps: frozenset[float] = frozenset()

    @property
    def interval_ns(self) -> int | None:
        """The exporter's interval; None while it is not known."""
        return self._counters.interval_ns or self._whole.interval_ns

    def stale(self, now_ns: int) -> float | None:
        """Return for how many seconds the page has stood still, if that is too long to be an interval."""
        if self._alive_ns is None:
            return None
        limit_ns = max(_STALE_INTERVALS * (self.interval_ns or DEFAULT_NS), _LATEST_STALE_NS)
        still_ns = now_ns - self._alive_ns
        return still_ns / 1e9 if still_ns > limit_ns else None

    def pause_ns(self) -> int:
        """Return how long to wait before the next poll: a quarter of the interval, once that is known."""
        if self.interval_ns is not None:
            return min(max(self.interval_ns // 4, _SHORTEST_POLL_NS), _LONGEST_POLL_NS)
        if self._counters.too_slow or self._whole.too_slow:
            return _BURST_POLL_NS
        return _FIRST_POLL_NS if self._polls < _FIRST_POLLS else SECOND_NS

    def poll(
        self, page: DcgmPage, sent_ns: int, read_ns: int, wall_less_monotonic_ns: int = 0
    ) -> Sample | None:
        """Take in a page that was asked for and read then; return the sample that it completes, if it does.

        `wall_less_monotonic_ns` is the wall clock less CLOCK_MONOTONIC, for time stamps on the page.
        """
        before, before_ns = self._page, self._sent_ns
        self._page, self._sent_ns = page, sent_ns
        self._polls += 1
        if before is None:
            self._alive_ns = read_ns
        changed = before is not None and page.values != before.values
        counted = before is not None and page.counted != before.counted
        self._counters.poll(sent_ns, read_ns, changed=counted)
        self._whole.poll(sent_ns, read_ns, changed=changed)
        if changed:
            self._alive_ns = read_ns
        stamps = frozenset(row.stamp_ms for row in page.devices.values() if row.stamp_ms is not None)
        fresh = stamps != self._stamps
        self._stamps = stamps
        interval_ns = self.interval_ns
        if before is None or interval_ns is None or not page.devices:
            return None
        energy_new = _energies(page) != _energies(before)
        if stamps:
            if not fresh:
                return None
            ended_ns = round(max(stamps) * MILLISECOND_NS) - wall_less_monotonic_ns
            # A stamp of another clock, or of long ago, says nothing about now.
            if not read_ns - 10 * interval_ns <= ended_ns <= read_ns + SECOND_NS:
                return None
            return self._sample(read_ns, interval_ns, page, ended_ns, energy_new=energy_new)
        if counted:
            seen_ns = self._within(before_ns, read_ns, interval_ns)
            return self._sample(seen_ns, interval_ns, page, None, energy_new=energy_new)
        if changed and (self._seen_ns is None or read_ns - self._seen_ns > 0.6 * interval_ns):
            seen_ns = self._within(before_ns, read_ns, interval_ns)
            self._silent = Sample(seen_ns, interval_ns, page, None, energy_new)
        silent = self._silent
        if silent is None or read_ns - silent.seen_ns < interval_ns // 2:
            return None
        return self._sample(silent.seen_ns, interval_ns, silent.page, None, energy_new=silent.energy_new)

    def _within(self, after_ns: int, by_ns: int, interval_ns: int) -> int:
        """Return when the page was renewed: between two polls, an interval after the last if it can be."""
        if self._seen_ns is None:
            return (after_ns + by_ns) // 2
        steps = max(1, round((by_ns - self._seen_ns) / interval_ns))
        return min(max(self._seen_ns + steps * interval_ns, after_ns), by_ns)

    def _sample(
        self, seen_ns: int, interval_ns: int, page: DcgmPage, ended_ns: int | None, *, energy_new: bool
    ) -> Sample:
        self._seen_ns = seen_ns
        self._silent = None
        return Sample(seen_ns, interval_ns, page, ended_ns, energy_new)


def _energies(page: DcgmPage) -> tuple[float | None, ...]:
    return tuple(row.energy_joules for row in page.devices.values())
