"""From polls of a dcgm-exporter to samples: each measured interval once, as long as it was, never repeated.

The tracker has no clock and does no I/O: it is told of polls. A sample ends when the page was renewed. DCGM
renews one GPU after another, and an idle GPU reads 0.000000 for hours: a device whose counters did not change
with the renewal is waited for, half an interval at most, and then taken as measured anew with the same
result. That something else on the page (power, energy) was renewed shows as well that the exporter goes on.
Where nothing on the page changes any more, there are no samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gpuidle.collectors.counters.dcgm_cadence import DEFAULT_NS, MILLISECOND_NS, SECOND_NS, Cadence
from gpuidle.collectors.counters.dcgm_page import DcgmPage, DeviceKey, DeviceRow

_FIRST_POLL_NS = 250 * MILLISECOND_NS
_FIRST_POLLS = 12
_BURST_POLL_NS = 40 * MILLISECOND_NS
_SHORTEST_POLL_NS = 100 * MILLISECOND_NS
_LONGEST_POLL_NS = 2 * SECOND_NS
_STALE_INTERVALS = 3
_ENERGIES = 16
_LATEST_STALE_NS = 3 * SECOND_NS


@dataclass(frozen=True)
class Sample:
    """One measured interval of some devices."""

    seen_ns: int
    """When the page was renewed with it, CLOCK_MONOTONIC: the interval ended then, or a lag before."""
    interval_ns: int
    devices: Mapping[DeviceKey, DeviceRow]
    ended_ns: int | None = None
    """The end itself, where the exporter gives time stamps."""


@dataclass(frozen=True)
class EnergyRenewal:
    """That energy counters came out new: what they stand at belongs to a moment a lag before."""

    seen_ns: int
    joules: Mapping[str, float]
    """By the GPU's UUID."""


class Tracker:
    """Follows one exporter."""

    def __init__(self) -> None:
        self._devices: dict[DeviceKey, Cadence] = {}
        """Of the counters of each device: two devices together may change more often than each."""
        self._whole = Cadence()
        """For nodes on which every counter stands still."""
        self._page: DcgmPage | None = None
        self._sent_ns = 0
        self._polls = 0
        self._alive_ns: int | None = None
        """When the page last changed at all."""
        self._seen_ns: int | None = None
        """When the page was last renewed."""
        self._energies: deque[EnergyRenewal] = deque(maxlen=_ENERGIES)
        self._waiting: dict[DeviceKey, DeviceRow] = {}
        """Devices of the last renewal whose counters have not changed yet."""

    @property
    def interval_ns(self) -> int | None:
        """The exporter's interval; None while it is not known."""
        # A renewal that came out the same makes an interval look longer, nothing makes it look shorter.
        known = [found for each in self._devices.values() if (found := each.interval_ns) is not None]
        return min(known, default=self._whole.interval_ns)

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
        if self._whole.too_slow or any(each.too_slow for each in self._devices.values()):
            return _BURST_POLL_NS
        return _FIRST_POLL_NS if self._polls < _FIRST_POLLS else SECOND_NS

    def poll(
        self, page: DcgmPage, sent_ns: int, read_ns: int, wall_less_monotonic_ns: int = 0
    ) -> tuple[Sample, ...]:
        """Take in a page that was asked for and read then; return the samples that it completes.

        `wall_less_monotonic_ns` is the wall clock less CLOCK_MONOTONIC, for time stamps on the page.
        """
        before, before_ns = self._page, self._sent_ns
        self._page, self._sent_ns = page, sent_ns
        self._polls += 1
        if before is None:
            self._alive_ns = read_ns
        changed = before is not None and page.values != before.values
        counted = before is not None and page.counted != before.counted
        # DCGM renews one GPU after another: what follows at once belongs to the same renewal.
        follows = counted and self._is_near(read_ns)
        moved = {key for key, row in page.devices.items() if before and _ratios(before, key) != row.ratios}
        self._devices = {key: self._devices.get(key) or Cadence() for key in page.devices}
        for key, cadence in self._devices.items():
            cadence.poll(sent_ns, read_ns, changed=key in moved)
        self._whole.poll(sent_ns, read_ns, changed=before is not None and _beat(page) != _beat(before))
        if changed:
            self._alive_ns = read_ns
        if before is not None:
            self._note_energies(before, (before_ns + read_ns) // 2)
        interval_ns = self.interval_ns
        if before is None or interval_ns is None:
            return ()
        if any(row.stamp_ms is not None for row in page.devices.values()):
            return self._stamped(before, read_ns, interval_ns, wall_less_monotonic_ns)
        done: list[Sample] = []
        if follows and self._seen_ns is not None:
            done.append(self._take(self._seen_ns, interval_ns, moved & self._waiting.keys()))
        elif counted:
            done += self._flush(interval_ns)
            self._renew(self._within(before_ns, read_ns, interval_ns))
            done.append(self._take(self._seen_ns or 0, interval_ns, moved))
        elif changed and (self._seen_ns is None or read_ns - self._seen_ns > 0.6 * interval_ns):
            done += self._flush(interval_ns)
            self._renew(self._within(before_ns, read_ns, interval_ns))
        if self._seen_ns is not None and read_ns - self._seen_ns >= interval_ns // 2:
            done += self._flush(interval_ns)
        return tuple(sample for sample in done if sample.devices)

    def take_energies(self) -> list[EnergyRenewal]:
        """Return the renewals of energy counters since the last call."""
        energies = list(self._energies)
        self._energies.clear()
        return energies

    def _note_energies(self, before: DcgmPage, seen_ns: int) -> None:
        assert self._page is not None
        renewed = {
            key.uuid: row.energy_joules
            for key, row in self._page.devices.items()
            if row.energy_joules is not None
            and key in before.devices
            and before.devices[key].energy_joules not in (None, row.energy_joules)
        }
        if renewed:
            self._energies.append(EnergyRenewal(seen_ns, renewed))

    def _is_near(self, read_ns: int) -> bool:
        """Return whether the last renewal is less than half an interval ago."""
        interval_ns = self.interval_ns
        return (
            interval_ns is not None
            and self._seen_ns is not None
            and read_ns - self._seen_ns < interval_ns // 2
        )

    def _renew(self, seen_ns: int) -> None:
        assert self._page is not None
        self._seen_ns = seen_ns
        self._waiting = dict(self._page.devices)

    def _take(self, seen_ns: int, interval_ns: int, keys: AbstractSet[DeviceKey]) -> Sample:
        """Return the sample of devices whose counters have changed."""
        assert self._page is not None
        for key in keys:
            self._waiting.pop(key, None)
        return Sample(seen_ns, interval_ns, {key: self._page.devices[key] for key in keys})

    def _flush(self, interval_ns: int) -> list[Sample]:
        """Return the sample of devices whose counters were renewed and came out the same."""
        waiting, self._waiting = self._waiting, {}
        return [] if self._seen_ns is None else [Sample(self._seen_ns, interval_ns, waiting)]

    def _stamped(
        self, before: DcgmPage, read_ns: int, interval_ns: int, wall_less_monotonic_ns: int
    ) -> tuple[Sample, ...]:
        assert self._page is not None
        ends: dict[int, dict[DeviceKey, DeviceRow]] = {}
        for key, row in self._page.devices.items():
            earlier = before.devices.get(key)
            if row.stamp_ms is None or earlier is None or earlier.stamp_ms == row.stamp_ms:
                continue
            ended_ns = round(row.stamp_ms * MILLISECOND_NS) - wall_less_monotonic_ns
            # A stamp of another clock, or of long ago, says nothing about now.
            if read_ns - 10 * interval_ns <= ended_ns <= read_ns + SECOND_NS:
                ends.setdefault(ended_ns, {})[key] = row
        self._seen_ns = read_ns if ends else self._seen_ns
        return tuple(Sample(read_ns, interval_ns, ends[end_ns], end_ns) for end_ns in sorted(ends))

    def _within(self, after_ns: int, by_ns: int, interval_ns: int) -> int:
        """Return when the page was renewed: between two polls, an interval after the last if it can be."""
        if self._seen_ns is None:
            return (after_ns + by_ns) // 2
        steps = max(1, round((by_ns - self._seen_ns) / interval_ns))
        return min(max(self._seen_ns + steps * interval_ns, after_ns), by_ns)


def _ratios(page: DcgmPage, key: DeviceKey) -> Mapping[str, float] | None:
    row = page.devices.get(key)
    return None if row is None else row.ratios


def _beat(page: DcgmPage) -> object:
    """Return what changes with every renewal: one GPU's energy (two GPUs are not renewed at once)."""
    energies = (row.energy_joules for row in page.devices.values() if row.energy_joules is not None)
    return next(energies, page.values)
