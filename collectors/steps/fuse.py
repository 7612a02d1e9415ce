"""Several sources that saw the same steps become one series: by overlap in time, never by averaging.

Boundaries come from the source with the best clock, tokens from the one with the best count. What one has
and the other lacks, and where they disagree, is counted and told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import StepSeries, column

CLOCK_ORDER = ("uprobe", "plugin", "fpm", "simulator", "mmap", "counters")
"""Best first. Uprobes see the driver's calls; the plugin the scheduler's; the others a message of it."""
COUNT_ORDER = ("plugin", "simulator", "fpm", "mmap", "counters", "uprobe")
"""Best first. A stream of steps is exact; counters lump chunks; uprobes know no tokens."""
TOKEN_COLUMNS = (
    "prefill_tokens",
    "decode_tokens",
    "delivered_tokens",
    "sequences",
    "kv_tokens",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "recomputed_tokens",
)
_Int = NDArray[np.int64]


@dataclass(frozen=True)
class Agreement:
    """How well two sources told the same story."""

    clock_source: str
    count_source: str
    steps: int
    """In the result."""
    matched: int
    """Of those, steps that both saw."""
    without_tokens: int
    """Boundaries to which no counted step belongs: they have no tokens (0 rows, phase unknown)."""
    without_boundary: int
    """Counted steps that no boundary was found for: they keep their own times."""
    shared: int
    """Boundaries beyond the first that fell into one counted step: it was really several."""
    disagreeing: int
    """Matched steps whose token counts differ where both count the same thing."""


def fuse(series: Sequence[StepSeries]) -> tuple[StepSeries, Agreement | None]:
    """Return one series of the same engine core's steps; the agreement is None for a single source.

    Of each source there may be one series. With more than two, the best clock and the best count are used.

    Raises:
        ValueError: there is none, or they are of different cores, or two are of one source.
    """
    if not series:
        raise ValueError("there are no steps to fuse")
    if len({(one.engine_id, one.rank) for one in series}) > 1:
        raise ValueError("steps of different engine cores cannot be fused")
    if len({one.source for one in series}) < len(series):
        raise ValueError("a source may be given once")
    counts = [one for one in series if one.prefill_tokens is not None or one.decode_tokens is not None]
    clock = min(series, key=lambda one: _rank(CLOCK_ORDER, one.source))
    count = min(counts or series, key=lambda one: _rank(COUNT_ORDER, one.source))
    if clock is count:
        others = [one for one in counts if one is not count]
        second = min(others, key=lambda one: _rank(COUNT_ORDER, one.source), default=None)
        return clock, None if second is None else _compare(clock, second)
    return _join(clock, count)


def _rank(order: tuple[str, ...], source: str) -> int:
    return order.index(source) if source in order else len(order)


def match(clock: StepSeries, count: StepSeries) -> _Int:
    """Return for each step of `clock` the step of `count` that it overlaps longest, or -1."""
    owner = np.full(len(clock), -1, dtype=np.int64)
    best = np.zeros(len(clock), dtype=np.int64)
    begin = np.searchsorted(count.end_ns, clock.start_ns, side="right")
    end = np.searchsorted(count.start_ns, clock.end_ns, side="left")
    for offset in range(int((end - begin).max(initial=0))):
        candidate = begin + offset
        valid = candidate < end
        place = np.where(valid, candidate, 0)
        overlap = np.minimum(clock.end_ns, count.end_ns[place]) - np.maximum(
            clock.start_ns, count.start_ns[place]
        )
        better = valid & (overlap > best)
        best = np.where(better, overlap, best)
        owner = np.where(better, candidate, owner)
    return owner


def _join(clock: StepSeries, count: StepSeries) -> tuple[StepSeries, Agreement]:
    """Give each boundary the tokens of the counted step it belongs to.

    Where several boundaries fell into one counted step, the tokens go to the last: they were handed out
    there. A counted step without a boundary keeps its own times, cut to what is free; where nothing is, its
    tokens go to the boundary it lies in, so that no token is lost.
    """
    owner = match(clock, count)
    known = owner >= 0
    last = np.zeros(len(clock), dtype=bool)
    if len(clock):
        last[np.flatnonzero(known)] = True
        following = np.append(owner[1:], -2)
        last &= owner != following
    matched_counts = np.unique(owner[known])
    alone = np.setdiff1d(np.arange(len(count)), matched_counts)
    start_ns, end_ns = _free(clock, count, alone)
    kept = end_ns > start_ns
    crowded = alone[~kept]
    host = match(count, clock)[crowded]
    alone, start_ns, end_ns = alone[kept], start_ns[kept], end_ns[kept]
    order = np.argsort(np.concatenate((clock.end_ns, end_ns)), kind="stable")

    def tokens(name: str) -> _Int | None:
        values: _Int | None = getattr(count, name)
        if values is None:
            return None
        given = np.zeros(len(clock), dtype=np.int64)
        given[last] = values[owner[last]]
        np.add.at(given, host, values[crowded])
        return column(np.concatenate((given, values[alone]))[order], "i8")

    columns = {name: tokens(name) for name in TOKEN_COLUMNS}
    fused = StepSeries(
        engine_id=clock.engine_id,
        source=f"{clock.source}+{count.source}",
        exact=False,
        lost=max(clock.lost, count.lost),
        start_ns=column(np.concatenate((clock.start_ns, start_ns))[order], "i8"),
        end_ns=column(np.concatenate((clock.end_ns, end_ns))[order], "i8"),
        rank=clock.rank,
        **columns,
    )
    agreement = Agreement(
        clock_source=clock.source,
        count_source=count.source,
        steps=len(fused),
        matched=len(matched_counts),
        without_tokens=int((~known).sum()),
        without_boundary=len(count) - len(matched_counts),
        shared=int(known.sum()) - len(matched_counts),
        disagreeing=_disagreeing(clock, count, owner, last),
    )
    return fused, agreement


def _free(clock: StepSeries, count: StepSeries, alone: _Int) -> tuple[_Int, _Int]:
    """Return the times of counted steps without a boundary, cut so that steps stay disjoint."""
    start_ns, end_ns = count.start_ns[alone], count.end_ns[alone]
    if not len(clock):
        return start_ns, end_ns
    after = np.searchsorted(clock.end_ns, end_ns, side="left")
    before_end = np.where(after > 0, clock.end_ns[np.maximum(after - 1, 0)], 0)
    next_start = np.where(
        after < len(clock), clock.start_ns[np.minimum(after, len(clock) - 1)], np.iinfo(np.int64).max
    )
    return np.maximum(start_ns, before_end), np.minimum(end_ns, next_start)


def _compare(clock: StepSeries, other: StepSeries) -> Agreement:
    """Say how a second source agrees with the one that serves as clock and count both."""
    owner = match(clock, other)
    known = owner >= 0
    matched = len(np.unique(owner[known]))
    last = known & (owner != np.append(owner[1:], -2)) if len(clock) else known
    return Agreement(
        clock_source=clock.source,
        count_source=other.source,
        steps=len(clock),
        matched=matched,
        without_tokens=int((~known).sum()),
        without_boundary=len(other) - matched,
        shared=int(known.sum()) - matched,
        disagreeing=_disagreeing(clock, other, owner, last),
    )


def _disagreeing(one: StepSeries, other: StepSeries, owner: _Int, last: NDArray[np.bool_]) -> int:
    """Count steps that one boundary and one counted step share alone and whose tokens differ."""
    sizes = np.bincount(owner[owner >= 0], minlength=len(other)) if len(other) else np.zeros(0, "i8")
    alone = last & (owner >= 0)
    if len(other):
        alone &= sizes[np.maximum(owner, 0)] == 1
    differs = np.zeros(len(one), dtype=bool)
    for name in ("prefill_tokens", "decode_tokens", "delivered_tokens"):
        mine: _Int | None = getattr(one, name)
        theirs: _Int | None = getattr(other, name)
        if mine is not None and theirs is not None and len(other):
            differs |= mine != theirs[np.maximum(owner, 0)]
    return int((differs & alone).sum())
