"""Snapshots in, Frames out. Pure: time comes with the snapshots, and nothing else is asked.

Tokens and gauges are told at once. Phases and ledgers are told of *settled* windows, `settle_ns` behind:
the last chunk of a prompt brings the tokens of the chunks before it, and the step after a gap tells what
the gap was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from gpuidle.agent.analysis.activity import activity, without_lone_rest, without_stale_rest
from gpuidle.agent.analysis.cores import prune_steps, settle_cores, told_of_engines
from gpuidle.agent.analysis.counting import count_engine
from gpuidle.agent.analysis.deadcounter import without_dead_tensor
from gpuidle.agent.analysis.enginewindow import EngineWindow, holders
from gpuidle.agent.analysis.frames import engine_frame, gpu_frame
from gpuidle.agent.analysis.settle import settle_gpu
from gpuidle.agent.analysis.shapes import Shapes
from gpuidle.agent.analysis.tracks import EngineTrack, GpuTrack, Pending
from gpuidle.agent.model import EngineReading, Frame, GpuReading, Problem, Snapshot
from gpuidle.agent.physics.prices import price_of

FORGET_NS = 600 * 10**9
"""A device or engine that has not been seen for ten minutes is gone; its totals begin anew if it returns."""

MISSING_NS = 30 * 10**9
"""How long an engine that gives no reading is still taken to hold its devices."""

SELDOM_NS = 30 * 10**9
"""A window waits no longer than this, however seldom its engine tells."""

LONGEST_SAMPLE_NS = 90 * 10**9
"""The longest that a window waits for a slow counter's sample (an exporter of DCGM gives one in 30 s)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the analysis is told by configuration."""

    settle_ns: int = 2 * 10**9
    """How long a window waits for late tokens."""
    trailing_ns: int = 60 * 10**9
    """Window of the gauges."""
    price_per_hour: dict[str, float] = {}
    """Price of a GPU-hour by device name or words of it (`price_of`); "" is any device."""
    currency: str = "USD"


class Analyzer:
    """Turns a session's Snapshots, in order, into Frames. One instance a session."""

    def __init__(self, settings: Settings = Settings()) -> None:  # noqa: B008  # frozen
        self._settings = settings
        self._before: Snapshot | None = None
        self._missed = 0
        self._pending: deque[Pending] = deque()
        self._gpus: dict[str, GpuTrack] = {}
        self._engines: dict[str, EngineTrack] = {}
        self._shapes = Shapes()
        self._prices: dict[tuple[str, int | None], float | None] = {}

    def feed(self, snapshot: Snapshot) -> Frame:
        """Take the next Snapshot and return its Frame."""
        before, now_ns = self._before, snapshot.monotonic_ns
        problems = list(snapshot.problems)
        if before is not None and now_ns <= before.monotonic_ns:
            # A monotonic clock cannot do this: a file was spliced, or two sessions were mixed.
            problems.append(_backwards(before, snapshot))
            before = None
            self._pending.clear()
        problems += _suspend(before, snapshot)
        for reading in snapshot.gpus or ():
            track = self._gpus.get(reading.hw_id)
            if track is None:
                self._gpus[reading.hw_id] = GpuTrack(reading=reading, last_seen_ns=now_ns)
            else:
                track.reading, track.last_seen_ns = reading, now_ns
        for series in snapshot.counters:
            if series.hw_id in self._gpus and len(series):
                track = self._gpus[series.hw_id]
                track.counters.append(series)
                track.zeros.add(series)
                track.counted_ns = max(track.counted_ns or 0, int(series.end_ns[-1]))
                track.sample_ns = int(series.width_ns[-1])
        for engine in snapshot.engines:
            problems += self._read_engine(engine, snapshot)
        for steps in snapshot.steps:
            if steps.engine_id in self._engines and len(steps):
                self._engines[steps.engine_id].steps.append(steps)
        self._forget(now_ns)
        if before is not None:
            self._pending.append(_pending(before, snapshot))
        while self._pending and self._ready(self._pending[0], now_ns):
            problems += self._settle(self._pending.popleft())
        self._before = snapshot
        self._missed += snapshot.missed_ticks
        return self._frame(snapshot, before, problems)

    def _read_engine(self, reading: EngineReading, snapshot: Snapshot) -> list[Problem]:
        problems: list[Problem] = []
        track = self._engines.get(reading.engine_id)
        if track is None:
            track = self._engines[reading.engine_id] = EngineTrack(reading=reading, last_seen_ns=0)
        track.reading, track.last_seen_ns = reading, snapshot.monotonic_ns
        if reading.counters:
            problems += count_engine(track, reading, self._before, self._settings.trailing_ns)
        unknown = self._shapes.read(reading, snapshot.texts)
        return problems if unknown is None else [*problems, unknown]

    def _ready(self, window: Pending, now_ns: int) -> bool:
        """Whether a window has waited long enough: longer for an engine that is slow, or told seldom."""
        age_ns = now_ns - window.end_ns
        if age_ns < self._settings.settle_ns:
            return False
        seldom_ns = max(
            (self._engines[k].cadence_ns for k in window.engines if k in self._engines), default=0
        )
        patience_ns = max(3 * self._settings.settle_ns, min(2 * seldom_ns, SELDOM_NS))
        if any(self._awaits_counter(track, window, now_ns) for track in self._gpus.values()):
            return False
        covered_ns = window.end_ns - (window.end_ns - window.start_ns) // 3
        return age_ns >= patience_ns or all(
            track.counted is None or max(r.read_ns for r in track.counted.counters or ()) >= covered_ns
            for key in window.engines
            if (track := self._engines.get(key)) is not None
        )

    def _awaits_counter(self, track: GpuTrack, window: Pending, now_ns: int) -> bool:
        """Whether a sample that covers the window is still to come from a counter that lives."""
        if track.counted_ns is None or track.counted_ns >= window.end_ns:
            return False
        alive = now_ns - track.counted_ns <= min(LONGEST_SAMPLE_NS, 3 * track.sample_ns)
        return alive and window.end_ns - track.counted_ns <= 2 * track.sample_ns

    def _settle(self, window: Pending) -> list[Problem]:
        problems: list[Problem] = []
        span = (window.start_ns, window.end_ns)
        gpus = window.gpus or {}
        # Engines that were found only after the window, or that gave no reading in it, held their devices
        # all the same: a device is not foreign because its engine was slow to answer.
        engines = {
            key: window.engines.get(key) or msgspec.structs.replace(track.reading, counters=None)
            for key, track in self._engines.items()
            if key in window.engines or abs(window.end_ns - track.last_seen_ns) < MISSING_NS
        }
        held = holders(list(gpus.values()), list(engines.values()))
        problems += self._dead(window, {key: held[key] for key in engines})
        seen = {
            hw_id: activity(list(track.counters), gpus.get(hw_id), *span, window.observed_ns)
            for hw_id, track in self._gpus.items()
        }
        made = told_of_engines(self._engines, engines, window, self._shapes.of)
        told: set[str] = set()
        for key, (engine, *_) in made.items():
            if engine.sums is not None:
                told.update(held[key])
            if engine.sums is not None and engine.sums.generated_tokens:
                for hw_id in held[key]:
                    seen[hw_id] = without_stale_rest(seen[hw_id])
        for hw_id in seen.keys() - told:
            seen[hw_id] = without_lone_rest(seen[hw_id], window.busy_before.get(hw_id))
        done: dict[str, dict[str, EngineWindow]] = {}
        for key, (engine, *cores) in made.items():
            mine = {hw_id: seen[hw_id] for hw_id in held[key] if hw_id in seen}
            done[key] = settle_cores(engine, cores, window, mine, gpus, self._gpus)
        # A GPU that is split into instances has no time of its own to account for.
        split = {gpu.reading.parent_hw_id for gpu in self._gpus.values()}
        for hw_id, gpu in self._gpus.items():
            if hw_id in split:
                continue
            here = [views[hw_id] for views in done.values() if hw_id in views]
            problems += settle_gpu(gpu, window, seen[hw_id], here, self._settings.trailing_ns)
        for track in self._engines.values():
            # One settled window is kept: a prompt may reach back into it only while it is pending.
            for each in (track, *track.cores.values()):
                while each.sums and each.sums[0].end_ns <= window.end_ns:
                    each.sums.popleft()
            prune_steps(track, window.end_ns)
        return problems

    def _dead(self, window: Pending, held: Mapping[str, Sequence[str]]) -> list[Problem]:
        """Take the samples of dead counters out of what the window settles by."""
        found = []
        for hw_id, gpu in self._gpus.items():
            here = [self._engines[key] for key, devices in held.items() if hw_id in devices]
            found.append(without_dead_tensor(gpu, window, here, self._shapes.of))
        return [each for each in found if each is not None]

    def _price(self, device: GpuReading) -> float | None:
        key = (device.name, device.memory_total_bytes)
        if key not in self._prices:
            self._prices[key] = price_of(*key, self._settings.price_per_hour)
        return self._prices[key]

    def _forget(self, now_ns: int) -> None:
        limit_ns = now_ns - FORGET_NS
        self._gpus = {key: track for key, track in self._gpus.items() if track.last_seen_ns > limit_ns}
        self._engines = {key: t for key, t in self._engines.items() if t.last_seen_ns > limit_ns}
        self._shapes.keep(track.reading for track in self._engines.values())

    def _frame(self, snapshot: Snapshot, before: Snapshot | None, problems: list[Problem]) -> Frame:
        now = {engine.engine_id for engine in snapshot.engines}
        held = holders(snapshot.gpus or (), snapshot.engines)
        here = {gpu.hw_id: gpu for gpu in snapshot.gpus or ()}
        engines_of: dict[str, tuple[str, ...]] = {}
        for key, devices in held.items():
            for hw_id in devices:
                engines_of[hw_id] = (*engines_of.get(hw_id, ()), key)
        unique = {(p.source, p.kind, p.subject, p.message): p for p in problems}
        return Frame(
            sequence=snapshot.sequence,
            monotonic_ns=snapshot.monotonic_ns,
            wall_ns=snapshot.wall_ns,
            node=snapshot.node,
            interval_ns=snapshot.monotonic_ns - before.monotonic_ns if before else 0,
            lateness_ns=snapshot.lateness_ns,
            missed_ticks_total=self._missed,
            gpus=tuple(
                gpu_frame(
                    track,
                    here.get(hw_id),
                    engines_of.get(hw_id, ()),
                    self._engines,
                    self._shapes.of,
                    self._price(track.reading),
                    self._settings.currency,
                )
                for hw_id, track in sorted(self._gpus.items(), key=lambda item: item[1].reading.index)
            ),
            gpu_source=snapshot.gpus is not None,
            engines=tuple(
                engine_frame(track, held.get(key, ()), snapshot.monotonic_ns)
                for key, track in sorted(self._engines.items())
                if key in now
            ),
            problems=tuple(unique.values()),
            runs=snapshot.runs,
        )


def _pending(before: Snapshot, snapshot: Snapshot) -> Pending:
    window_ns = snapshot.monotonic_ns - before.monotonic_ns
    return Pending(
        start_ns=before.monotonic_ns,
        end_ns=snapshot.monotonic_ns,
        # Gauges describe the last tick; of the ticks that were missed nobody saw anything.
        observed_ns=window_ns // (1 + snapshot.missed_ticks),
        gpus=None if snapshot.gpus is None else {gpu.hw_id: gpu for gpu in snapshot.gpus},
        busy_before={gpu.hw_id: gpu.busy_ratio for gpu in before.gpus or () if gpu.busy_ratio is not None},
        engines={engine.engine_id: engine for engine in snapshot.engines},
    )


def _backwards(before: Snapshot, snapshot: Snapshot) -> Problem:
    return Problem(
        source="session",
        kind="time_went_back",
        message=f"snapshot {snapshot.sequence} is older than snapshot {before.sequence}: window dropped",
        remedy="sessions of different boots cannot be joined; replay them one by one",
    )


def _suspend(before: Snapshot | None, snapshot: Snapshot) -> list[Problem]:
    if before is None:
        return []
    slept_ns = (snapshot.boottime_ns - before.boottime_ns) - (snapshot.monotonic_ns - before.monotonic_ns)
    if slept_ns < 10**9:
        return []
    return [
        Problem(
            source="clock",
            kind="suspended",
            message=f"the machine was suspended for {slept_ns / 1e9:.0f} s: that time is in no figure",
        )
    ]
