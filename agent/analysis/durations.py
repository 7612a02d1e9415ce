"""Durations of steps into buckets that never lose a count: integers, and exact at every edge."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import DURATION_SCALE, Durations

_FIRST = -30 << DURATION_SCALE
"""The bucket of 1 ns: 2**-30 s is less."""
_LAST = 33 << DURATION_SCALE
"""2**33 s is the largest power of two whose nanoseconds are an int64."""
_UPPER_NS = np.array(
    [math.floor(2.0 ** (index / (1 << DURATION_SCALE)) * 1e9) for index in range(_FIRST + 1, _LAST + 1)],
    dtype=np.int64,
)
"""Upper edges, inclusive: an integer is below an edge exactly if it is below the edge's floor."""
_EXACT_NS = 1 << 53
"""Sums of whole numbers below it are exact in floats as well."""


def durations_of(lengths_ns: NDArray[np.int64]) -> Durations | None:
    """Return the durations that are above 0; None if there is none."""
    lengths_ns = lengths_ns[lengths_ns > 0]
    if not len(lengths_ns):
        return None
    found = _UPPER_NS.searchsorted(lengths_ns)
    first = int(found.min())
    return Durations(
        offset=_FIRST + first,
        counts=tuple(np.bincount(found)[first:].tolist()),
        sum_ns=_total(lengths_ns),
    )


def durations_by_kind(
    lengths_ns: NDArray[np.int64], kinds: NDArray[np.int64], count: int
) -> list[Durations | None]:
    """Return the same of each kind: `kinds` says which of 0 to `count` - 1 each length is of."""
    sums = np.bincount(kinds, weights=lengths_ns, minlength=count).tolist()
    if not len(lengths_ns) or lengths_ns.min() <= 0 or max(sums) >= _EXACT_NS:
        return [durations_of(lengths_ns[kinds == kind]) for kind in range(count)]
    buckets = _UPPER_NS.searchsorted(lengths_ns)
    first = int(buckets.min())
    width = int(buckets.max()) - first + 1
    table = np.bincount(kinds * width + (buckets - first), minlength=count * width)
    filled = np.flatnonzero(table)
    counts: list[dict[int, int]] = [{} for _ in range(count)]
    for place, many in zip(filled.tolist(), table[filled].tolist(), strict=True):
        counts[place // width][place % width] = many
    return [
        Durations(
            offset=_FIRST + first + min(each),
            counts=tuple([each.get(bucket, 0) for bucket in range(min(each), max(each) + 1)]),
            sum_ns=int(sum_ns),
        )
        if each
        else None
        for each, sum_ns in zip(counts, sums, strict=True)
    ]


def _total(lengths_ns: NDArray[np.int64]) -> int:
    # An int64 sum is ten times as fast, where it cannot overflow.
    if int(lengths_ns.max()) <= (1 << 62) // len(lengths_ns):
        return int(lengths_ns.sum())
    return sum(lengths_ns.tolist())


def together(one: Durations, other: Durations) -> Durations:
    """Return both in one; the first and the last count stay above 0."""
    offset = min(one.offset, other.offset)
    before, after = one.offset - offset, other.offset + len(other.counts) - one.offset - len(one.counts)
    counts = [0] * before + list(one.counts) + [0] * after
    for index, count in enumerate(other.counts, other.offset - offset):
        counts[index] += count
    return Durations(offset=offset, counts=tuple(counts), sum_ns=one.sum_ns + other.sum_ns)
