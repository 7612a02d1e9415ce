"""An engine's readings in, what moved between them out: token sums, totals, the prefix cache."""

from __future__ import annotations

from collections import deque

import msgspec

from gpuidle.agent.analysis.cores import core_reading, cores_of
from gpuidle.agent.analysis.enginewindow import cached_ratio
from gpuidle.agent.analysis.frames import mean_known
from gpuidle.agent.analysis.prompts import give_back
from gpuidle.agent.analysis.rates import Sums, sums_between
from gpuidle.agent.analysis.tracks import EngineTrack
from gpuidle.agent.model import EngineReading, Problem, Snapshot


def count_engine(
    track: EngineTrack, reading: EngineReading, before: Snapshot | None, trailing_ns: int
) -> tuple[Problem, ...]:
    """Take a reading with counters, of the engine and of each of its cores; `before` is the last snapshot."""
    cached = cached_ratio(track)
    problems = _count(track, reading, before, cached)
    _count_prefix(track, reading, trailing_ns)
    for rank, core in cores_of(track).items():
        core.reading = core_reading(reading, rank)
        if core.reading.counters:
            _count(core, core.reading, before, cached)
    return problems


def _count(
    track: EngineTrack, reading: EngineReading, before: Snapshot | None, cached: float | None
) -> tuple[Problem, ...]:
    """Take a reading with counters: what moved since the one before it."""
    sums: Sums | None = None
    problems: tuple[Problem, ...] = ()
    if track.counted is not None:
        sums, problems = sums_between(track.counted, reading, cached)
    elif before is not None and _started_after(reading, before):
        sums, problems = sums_between(_unborn(reading, before), reading, cached)
    track.counted, track.last_sums = reading, sums
    _take_estimate(track, reading)
    if sums is None:
        for name in ("prefill_total", "decode_total"):
            setattr(track, name, getattr(track, name) or 0)
        return problems
    track.cadence_ns = sums.window_ns
    _add_tokens(track, sums)
    given, prompt_ns = give_back(
        [*track.sums, sums],
        reading.limits.max_batched_tokens,
        track.pace_ns,
        track.prompt_token_ns,
        measured=before is not None and bool(before.gpus),
    )
    track.sums = deque(given)
    if prompt_ns is not None:
        past = track.prompt_token_ns
        track.prompt_token_ns = prompt_ns if past is None else (past + prompt_ns) / 2
    return problems


def _started_after(reading: EngineReading, before: Snapshot) -> bool:
    return reading.root_start_ns is not None and reading.root_start_ns > before.boottime_ns


def _unborn(reading: EngineReading, before: Snapshot) -> EngineReading:
    """Return the reading that would have been made before the engine began to count."""
    rows = tuple(msgspec.structs.replace(row, read_ns=before.monotonic_ns) for row in reading.counters or ())
    return msgspec.structs.replace(reading, counters=rows, root_pid=-1)


def _add_tokens(track: EngineTrack, sums: Sums) -> None:
    track.sizes.learn(sums)
    for name, value in (
        ("prefill_total", sums.prefill_tokens),
        ("decode_total", sums.decode_tokens),
        ("draft_total", sums.draft_tokens),
        ("accepted_total", sums.accepted_tokens),
        ("preemptions_total", sums.preemptions),
    ):
        if value is not None:
            setattr(track, name, (getattr(track, name) or 0) + value)


def _take_estimate(track: EngineTrack, reading: EngineReading) -> None:
    """Keep the engine's own estimate of its FLOPs, the mean over its cores' GPUs."""
    told = [row.estimated_flops_per_gpu for row in reading.counters or ()]
    mean = mean_known(told)
    if mean is None:
        return
    if track.estimates and mean < track.estimates[-1][1]:
        track.estimates.clear()  # the engine began anew
    track.estimates.append((reading.read_ns, mean))


def _count_prefix(track: EngineTrack, reading: EngineReading, trailing_ns: int) -> None:
    """Follow the prefix cache's own counters: they may come more seldom than the others."""
    rows = reading.counters or ()
    queries = [row.prefix_query_tokens for row in rows]
    hits = [row.prefix_hit_tokens for row in rows]
    if any(value is None for value in (*queries, *hits)):
        return
    now = (sum(value or 0 for value in queries), sum(value or 0 for value in hits))
    past, track.prefix_last = track.prefix_last, now
    if past is not None and now >= past:
        track.prefix.append((reading.read_ns, now[0] - past[0], now[1] - past[1]))
    while track.prefix and track.prefix[0][0] <= reading.read_ns - trailing_ns:
        track.prefix.popleft()
