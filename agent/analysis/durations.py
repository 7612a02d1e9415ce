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


def _total(lengths_ns: NDArray[np.int64]) -> int:
    # An int64 sum is ten times as fast, where it cannot overflow.
    if int(lengths_ns.max()) <= (1 << 62) // len(lengths_ns):
        return int(lengths_ns.sum())
    return sum(lengths_ns.tolist())


def together(one: Durations, other: Durations) -> Durations:
    """Return both in one; the first and the last count stay above 0."""
    offset = min(one.offset, other.offset)
    counts = [0] * (max(d.offset + len(d.counts) for d in (one, other)) - offset)
    for durations in (one, other):
        for index, count in enumerate(durations.counts, durations.offset - offset):
            counts[index] += count
    return Durations(offset=offset, counts=tuple(counts), sum_ns=one.sum_ns + other.sum_ns)
