"""The thread that takes the GPM samples of a node's GPUs and of their instances.

One thread wakes for all of them, which costs a third of the CPU time of a thread each. It says which GPU it
is asking, and since when, so that the others can be given to another thread when that one hangs.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from gpuidle.collectors.counters.gpm_calls import GpmDevice, Means, state_of
from gpuidle.collectors.counters.nvml_binding import error_text, nvml
from gpuidle.collectors.counters.rung import RungState

PERIOD_NS = 200_000_000
JITTER_RATIO = 0.25
"""Of the period, to both sides."""
SHORTEST_NS = 110_000_000
"""Below, the two samples may be of one refresh of the driver (100 ms)."""
LONGEST_NS = 1_000_000_000
"""Above, the thread was held up: by a slow driver, or a machine that was asleep."""
SLOW_CALL_NS = 50_000_000
"""A sample that took longer has no moment that could be told."""
RETRY_NS = (1_000_000_000, 2_000_000_000, 5_000_000_000)
UNSUPPORTED_RETRY_NS = 60_000_000_000
MOST_ROWS = 1_000
"""Kept for a reader that does not come."""


class Target(NamedTuple):
    """What to sample: a GPU, or the GPU instance of that id."""

    hw_id: str
    gpu_uuid: str
    instance_id: int | None
    peak_bytes_per_s: float | None
    """DRAM bandwidth that GPM's share refers to; None: not known."""


class Row(NamedTuple):
    """One window."""

    end_ns: int
    width_ns: int
    means: Means
    peak_bytes_per_s: float | None


@dataclass
class Taken:
    """What was gathered of one device since the last call, and how it stands."""

    rows: list[Row] = field(default_factory=list)
    thrown: Counter[str] = field(default_factory=Counter)
    state: RungState = "serving"
    message: str = ""
    remedy: str = ""


@dataclass
class _Track:
    """One target of the thread; only the thread touches the device and what was sampled."""

    target: Target
    taken: Taken = field(default_factory=Taken)
    device: GpmDevice | None = None
    sampled_ns: int | None = None
    """When the old sample of a pair was taken; None: there is none that could be used."""
    identity: object = None
    identified: bool = False
    failures: int = 0
    retry_ns: int = 0

    def seed_anew(self) -> None:
        """Use no sample taken so far."""
        self.sampled_ns, self.identity, self.identified = None, None, False


class GpmThread:
    """Samples the targets it is aimed at. It starts with the first target and waits while there is none."""

    def __init__(self, period_ns: int, clock: Callable[[], int]) -> None:
        self._period_ns = period_ns
        self._clock = clock
        self._tracks: dict[str, _Track] = {}
        self._closing: list[tuple[_Track, GpmDevice]] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._call: tuple[str, int] | None = None
        self._random = random.Random()  # noqa: S311  # jitter, not a secret
        self._thread: threading.Thread | None = None

    def aim(self, targets: tuple[Target, ...]) -> None:
        """Sample these from now on."""
        with self._changed:
            wanted = {target.hw_id: target for target in targets}
            for hw_id, track in list(self._tracks.items()):
                if wanted.get(hw_id) != track.target:
                    del self._tracks[hw_id]
                    if track.device is not None:
                        self._closing.append((track, track.device))
            for hw_id, target in wanted.items():
                self._tracks.setdefault(hw_id, _Track(target))
            if self._tracks and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="gpm", daemon=True)
                self._thread.start()
            self._changed.notify()

    def take(self) -> dict[str, Taken]:
        """Return what was gathered since the last call."""
        with self._changed:
            taken = {}
            for hw_id, track in self._tracks.items():
                taken[hw_id] = track.taken
                track.taken = Taken(
                    state=track.taken.state, message=track.taken.message, remedy=track.taken.remedy
                )
            return taken

    def hangs_at(self, limit_s: float) -> tuple[str, float] | None:
        """Return the GPU that is being asked and for how many seconds, if that is longer than `limit_s`."""
        call = self._call
        if call is None:
            return None
        seconds = (self._clock() - call[1]) / 1e9
        return (call[0], seconds) if seconds > limit_s else None

    def stop(self) -> None:
        """Let the thread end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        due_ns = self._clock()
        while self._wait_until(due_ns):
            for track, device in self._let_go():
                self._call = (track.target.gpu_uuid, self._clock())
                device.close()
            for track in list(self._tracks.values()):
                if not self._mine(track):  # given to another thread meanwhile
                    continue
                self._call = (track.target.gpu_uuid, self._clock())
                _sample(track, self._clock, self._changed)
                if track.device is not None and not self._mine(track):
                    track.device.close()
            self._call = None
            now_ns = self._clock()
            jitter = self._random.uniform(-JITTER_RATIO, JITTER_RATIO)
            due_ns = max(due_ns + round(self._period_ns * (1 + jitter)), now_ns + self._period_ns // 2)
        for track in self._tracks.values():
            if track.device is not None:
                track.device.close()

    def _mine(self, track: _Track) -> bool:
        return self._tracks.get(track.target.hw_id) is track

    def _wait_until(self, due_ns: int) -> bool:
        """Wait, and for a target if there is none; return False once stopped."""
        with self._changed:
            while not self._stopped:
                left_ns = due_ns - self._clock()
                if left_ns <= 0 and (self._tracks or self._closing):
                    return True
                self._changed.wait(left_ns / 1e9 if left_ns > 0 else None)
        return False

    def _let_go(self) -> list[tuple[_Track, GpmDevice]]:
        with self._changed:
            closing, self._closing = self._closing, []
        return closing


def _sample(track: _Track, clock: Callable[[], int], lock: threading.Condition) -> None:
    """Take one sample of a target; what comes of it goes to `track.taken` under the lock."""
    if clock() < track.retry_ns:
        return
    try:
        row, thrown = _window(track, clock)
    except nvml.NVMLError as error:
        state, message, remedy = state_of(error.value)
        steps = RETRY_NS[min(track.failures, len(RETRY_NS) - 1)]
        track.retry_ns = clock() + (UNSUPPORTED_RETRY_NS if state == "unsupported" else steps)
        track.failures += 1
        device, track.device = track.device, None
        track.seed_anew()
        if device is not None:
            device.close()
        with lock:
            track.taken.state = cast("RungState", state)
            track.taken.message = f"{message}: {error_text(error.value)} (error {error.value})"
            track.taken.remedy = remedy
        return
    track.failures = 0
    with lock:
        track.taken.state, track.taken.message, track.taken.remedy = "serving", "", ""
        if thrown is not None:
            track.taken.thrown[thrown] += 1
        if row is not None:
            track.taken.rows.append(row)
            del track.taken.rows[:-MOST_ROWS]


def _window(track: _Track, clock: Callable[[], int]) -> tuple[Row | None, str | None]:
    """Sample, and return the window that ends with it, or why one was thrown away.

    An instance must be the same before the old sample and after the new one, so each sample is followed by
    the question who it is, and a sample can be the old one of a pair only if the answer was the same before
    it. Raises pynvml.NVMLError.
    """
    if track.device is None:
        target = track.target
        instance = None if target.instance_id is None else (target.hw_id, target.instance_id)
        track.device = GpmDevice(target.gpu_uuid, instance)
    device = track.device
    if not track.identified:
        track.identity, track.identified = device.identity(), True
    before_ns = clock()
    device.sample()
    after_ns = clock()
    identity = device.identity()
    old_ns, track.sampled_ns = track.sampled_ns, (before_ns + after_ns) // 2
    if identity != track.identity:
        track.identity, track.sampled_ns = identity, None
        return None, None if old_ns is None else "across a re-created instance"
    if after_ns - before_ns > SLOW_CALL_NS:
        track.sampled_ns = None
        return None, None if old_ns is None else "of a slow call"
    if old_ns is None:
        return None, None
    width_ns = track.sampled_ns - old_ns
    if not SHORTEST_NS <= width_ns <= LONGEST_NS:
        return None, "of the wrong length"
    return Row(track.sampled_ns, width_ns, device.means(), track.target.peak_bytes_per_s), None
