"""The steps of all engines as one collector: finds their sources, reads them each tick, fuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpuidle.agent.model import EngineReading, Problem, Reading, StepSeries, column
from gpuidle.collectors.steps import problems as say
from gpuidle.collectors.steps.finding import Found, FrontEnd, find_files
from gpuidle.collectors.steps.fpm import FpmEndpoint, Subscriber
from gpuidle.collectors.steps.fuse import TOKEN_COLUMNS, fuse
from gpuidle.collectors.steps.mappings import open_mapped
from gpuidle.collectors.steps.metric_files import MetricFile, MetricFileError
from gpuidle.collectors.steps.polling import POLL_HZ, Follower, Poller, series
from gpuidle.collectors.steps.ring import RingError, RingReader

_STARTING_NS = 5_000_000_000
_SERVING_NS = 60_000_000_000
"""How often the maps of an engine's processes are read: 2 ms a process; what is mapped comes at its start."""
_HOLD_NS = 1_000_000_000
"""How long steps wait where later ones change them: late prompt tokens, a second source."""


@dataclass
class _Sources:
    """What one engine is read through."""

    rings: dict[tuple[int, int, int], RingReader] = field(default_factory=dict)
    refused: dict[tuple[int, int, int], Problem] = field(default_factory=dict)
    """Files that are not what they should be: said at each tick, opened no more."""
    follower: Follower | None = None
    follower_key: tuple[int, int, int] | None = None
    several_front_ends: bool = False
    waiting: list[StepSeries] = field(default_factory=list)
    """Steps of an engine with several sources that are too young to be fused."""

    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
        self.rings = {}
        self.unfollow()

    def unfollow(self) -> Follower | None:
        """Let go of the metric files."""
        follower, self.follower, self.follower_key = self.follower, None, None
        return follower


class StepsCollector:
    """Implements `gpuidle.agent.ports.Collector` for the steps of all engines of the node."""

    name = "steps"

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineReading]],
        *,
        proc: Path = Path("/proc"),
        fpm: Sequence[FpmEndpoint] = (),
        poll_hz: int = POLL_HZ,
    ) -> None:
        """Make a collector; nothing is read before the first `read`.

        Args:
            engines: the engines as they were read last.
            proc: where the node's /proc is mounted.
            fpm: endpoints of ForwardPassMetrics.
            poll_hz: how often metric files are looked at, 2,000 at most.

        Raises:
            ValueError: the rate is out of range.
        """
        if not 1 <= poll_hz <= 2000:
            raise ValueError(f"metric files cannot be polled {poll_hz} times a second: 1 to 2000")
        self._engines = engines
        self._proc = proc
        self._fpm = tuple(fpm)
        self._subscribers: dict[str, Subscriber] = {}
        self._fpm_problems: dict[str, Problem] = {}
        self._poller = Poller(poll_hz)
        self._sources: dict[str, _Sources] = {}
        self._seen: dict[str, tuple[tuple[int, ...], bool]] = {}
        self._next_discovery_ns = 0
        self._first_ns: int | None = None

    def read(self, now_ns: int) -> Reading:
        """Return the steps since the last call; look for sources now and then, and when an engine changed."""
        if self._first_ns is None:
            self._first_ns = now_ns
        engines = {engine.engine_id: engine for engine in self._engines()}
        seen = {key: (engine.pids, engine.state == "serving") for key, engine in engines.items()}
        if seen != self._seen or now_ns >= self._next_discovery_ns:
            self._seen = seen
            waiting = any(not serving for _, serving in seen.values())
            self._next_discovery_ns = now_ns + (_STARTING_NS if waiting else _SERVING_NS)
            self._discover(engines, now_ns)
        streams, problems = self._read_streams(engines)
        out: list[StepSeries] = []
        for engine_id, sources in self._sources.items():
            read = [*_read_rings(engine_id, sources), *streams.get(engine_id, ())]
            read += _read_metric_files(engines[engine_id], sources, now_ns - _HOLD_NS)
            made, remarks = _put_together(sources, read, now_ns - _HOLD_NS)
            out += made
            problems += [*sources.refused.values(), *remarks]
            problems += [
                say.plugin_stopped(engine_id, ring.header.version)
                for ring in sources.rings.values()
                if ring.stopped
            ]
            problems += [say.several_front_ends(engine_id)] if sources.several_front_ends else []
        return Reading(steps=tuple(one for one in out if len(one) or one.lost), problems=tuple(problems))

    def close(self) -> None:
        """Let go of all files, sockets and threads."""
        self._poller.stop()
        for sources in self._sources.values():
            follower = sources.follower
            sources.close()
            if follower is not None:
                follower.close()
        for subscriber in self._subscribers.values():
            subscriber.close()

    # ------------------------------------------------------------------------------------------ discovery

    def _discover(self, engines: dict[str, EngineReading], now_ns: int) -> None:
        dropped: list[Follower | None] = []
        for engine_id in [key for key in self._sources if key not in engines]:
            gone = self._sources.pop(engine_id)
            dropped.append(gone.unfollow())
            gone.close()
        for engine_id, engine in engines.items():
            sources = self._sources.setdefault(engine_id, _Sources())
            if engine.engine == "vllm":
                found = find_files(self._proc, engine.pids)
                self._open_rings(engine_id, sources, found)
                dropped.append(self._follow_metric_files(engine_id, sources, found, now_ns))
        self._poller.follow(tuple(s.follower for s in self._sources.values() if s.follower is not None))
        for follower in dropped:
            if follower is not None:
                follower.close()

    def _open_rings(self, engine_id: str, sources: _Sources, found: Found) -> None:
        mapped = {file.key: file for file in found.rings}
        sources.refused = {key: value for key, value in sources.refused.items() if key in mapped}
        for key, file in mapped.items():
            if key in sources.rings or key in sources.refused:
                continue
            try:
                descriptor = open_mapped(self._proc, file)
                sources.rings[key] = RingReader(descriptor, since_ns=self._first_ns)
            except (RingError, OSError) as error:
                sources.refused[key] = say.bad_ring(engine_id, error)

    def _follow_metric_files(
        self, engine_id: str, sources: _Sources, found: Found, now_ns: int
    ) -> Follower | None:
        """Follow the metric files where nothing better is there; return a follower that is done with."""
        named = any(self._engine_of(one) == engine_id for one in self._fpm)
        fronts = () if sources.rings or named else found.front_ends
        sources.several_front_ends = len(fronts) > 1
        front = fronts[0] if len(fronts) == 1 else None
        key = front.histograms.key if front is not None else None
        failed = sources.follower is not None and sources.follower.failure is not None
        if key == sources.follower_key and not failed:
            return None
        done = sources.unfollow()
        if front is not None:
            try:
                sources.follower = self._open_metric_files(front, now_ns)
                sources.follower_key = key
            except (MetricFileError, OSError) as error:
                sources.refused[front.histograms.key] = say.bad_metric_files(engine_id, str(error))
        return done

    def _open_metric_files(self, front: FrontEnd, now_ns: int) -> Follower:
        opened: list[MetricFile] = []
        try:
            opened.append(MetricFile(open_mapped(self._proc, front.counters)))
            opened.append(MetricFile(open_mapped(self._proc, front.histograms)))
            return Follower(opened[0], opened[1], now_ns)
        except BaseException:
            for one in opened:
                one.close()
            raise

    # -------------------------------------------------------------------------------------------- streams

    def _engine_of(self, endpoint: FpmEndpoint) -> str | None:
        engines = self._engines()
        if endpoint.engine is None:
            return engines[0].engine_id if len(engines) == 1 else None
        for engine in engines:
            if endpoint.engine in (engine.engine_id, engine.model):
                return engine.engine_id
        return None

    def _read_streams(
        self, engines: dict[str, EngineReading]
    ) -> tuple[dict[str, list[StepSeries]], list[Problem]]:
        streams: dict[str, list[StepSeries]] = {}
        problems: list[Problem] = []
        for one in self._fpm:
            engine_id = self._engine_of(one)
            subscriber = self._subscriber(one.endpoint)
            if subscriber is None:
                problems.append(self._fpm_problems[one.endpoint])
            elif engine_id is None:
                problems += [say.no_engine(one)] if engines else []
            else:
                taken = subscriber.follower.take(engine_id)
                streams.setdefault(engine_id, []).extend(taken.series)
                if taken.refused:
                    problems.append(say.refused(engine_id, one.endpoint, taken.refused, taken.last_refusal))
        return streams, problems

    def _subscriber(self, endpoint: str) -> Subscriber | None:
        if endpoint in self._fpm_problems:
            return None
        if endpoint not in self._subscribers:
            try:
                self._subscribers[endpoint] = Subscriber(endpoint)
            except (ImportError, ValueError) as error:
                self._fpm_problems[endpoint] = say.no_subscriber(endpoint, error)
                return None
        return self._subscribers[endpoint]


# --------------------------------------------------------------------------------------------------------
# Reading


def _read_rings(engine_id: str, sources: _Sources) -> list[StepSeries]:
    out: list[StepSeries] = []
    for key, ring in list(sources.rings.items()):
        alive = ring.is_written()  # asked before the read: nothing is written after a death
        try:
            out.append(ring.series(engine_id, ring.records()))
        except (RingError, OSError) as error:
            sources.refused[key] = say.bad_ring(engine_id, error)
            alive = False
        if not alive:
            del sources.rings[key]
            ring.close()
    return out


def _read_metric_files(engine: EngineReading, sources: _Sources, until_ns: int) -> list[StepSeries]:
    follower = sources.follower
    if follower is None:
        return []
    if follower.failure is not None and sources.follower_key is not None:
        sources.refused[sources.follower_key] = say.bad_metric_files(engine.engine_id, follower.failure)
    budget = engine.limits.max_batched_tokens
    return [
        series(engine.engine_id, rank, rows, lost, budget)
        for rank, (rows, lost) in follower.take(until_ns).items()
    ]


def _put_together(
    sources: _Sources, read: list[StepSeries], until_ns: int
) -> tuple[list[StepSeries], list[Problem]]:
    """Return one series a core; where several sources see a core, the steps that all had time to tell."""
    by_rank: dict[str, list[StepSeries]] = {}
    for one in [*sources.waiting, *read]:
        by_rank.setdefault(one.rank, []).append(one)
    sources.waiting = []
    out: list[StepSeries] = []
    problems: list[Problem] = []
    for group in by_rank.values():
        if len({one.source for one in group}) == 1:
            out += group
        else:
            ready: list[StepSeries] = []
            for source in sorted({one.source for one in group}):
                now, later = _cut(_joined([one for one in group if one.source == source]), until_ns)
                ready.append(now)
                sources.waiting.append(later)
            fused, agreement = fuse(ready)
            out.append(fused)
            problems += [] if agreement is None else say.remarks(fused.engine_id, agreement)
    for one in out:
        problems += [say.lost(one)] if one.lost else []
    return out, problems


_COLUMNS = ("start_ns", "end_ns", *TOKEN_COLUMNS)


def _joined(parts: list[StepSeries]) -> StepSeries:
    """Return parts of one source as one series."""
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        values = [getattr(one, name) for one in parts]
        known = all(value is not None for value in values)
        columns[name] = column(np.concatenate(values), "i8") if known else None
    return replace(parts[0], lost=sum(one.lost for one in parts), **columns)


def _cut(one: StepSeries, until_ns: int) -> tuple[StepSeries, StepSeries]:
    """Return the steps that ended by `until_ns`, and the others."""
    at = int(np.searchsorted(one.end_ns, until_ns, side="right"))

    def part(rows: slice) -> dict[str, Any]:
        return {
            name: None if (values := getattr(one, name)) is None else column(values[rows], "i8")
            for name in _COLUMNS
        }

    return (
        replace(one, **part(slice(None, at))),
        replace(one, lost=0, **part(slice(at, None))),
    )
