"""Time that a GPU waits for another one of its group, from the counters of all of them side by side.

A stage of a pipeline is inactive while another stage is at work: a bubble. A rank of a tensor-parallel group
that has come to a collective before its peers spins there, and that shows in two ways. Its tensor pipe and
its DRAM stand still while a peer's move: where the wait is longer than a sample. And as all ranks do the same
work between two collectives, a peer whose pipe or whose SMs are busy for longer with it (its clock is lower,
its kernels are slower, it has more tokens of an expert) keeps the others waiting for the difference, however
short each wait is: one that spins holds a few SMs only. An ordinary collective is no such wait: there all
ranks are slow at once. All of these are lower bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import RATIO_STEP, CounterSeries, Parallelism

Floats = NDArray[np.float64]

FAST_NS = 5_000_000
"""Samples up to this width can lie inside one wait in a collective; ordinary ones take microseconds."""
ACTIVE_RATIO = 0.5
SPINS_BELOW, WORKS_ABOVE = 0.35, 0.60
"""Of a rank's own level while it works: less than the one is no work, more than the other is."""
SHORTEST_RUN = 2
"""Samples in a row: one alone may be an edge that the two GPUs' samples cut differently."""
FEWEST_SAMPLES = 20
LEAST_LEVEL = 0.02
COVERED_RATIO = 0.98
UNEQUAL = 0.03
"""Less of a difference between two GPUs may be their counters'."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU waited for the others of its group in a window, ns."""

    idle_low_ns: float = 0.0
    """Inactive while another stage was at work, at least: where slow samples overlap as much as they can."""
    idle_high_ns: float = 0.0
    """The same at most: where the stages took turns."""
    spinning_ns: float = 0.0
    """Active without work while a peer worked."""


class _Group(msgspec.Struct, frozen=True):
    """Counters of the devices on one grid of time: a row a device, a column a sample."""

    width: Floats
    active: Floats
    busy: tuple[Floats, ...]
    """Tensor activity and SM activity, as far as they are known."""
    work: Floats | None
    """The larger of tensor activity and the share of DRAM's bandwidth."""


def group_of(place: Parallelism, index_of: Mapping[str, int]) -> tuple[str, ...]:
    """Return the devices of one core by rank, stage by stage; empty where their number does not match.

    Engines deal out devices in order of index: all of a stage's tensor-parallel ranks, then the next stage's.
    """
    ranks = place.tensor * place.pipeline
    if ranks < 2 or len(index_of) != ranks:
        return ()
    return tuple(sorted(index_of, key=lambda hw_id: index_of[hw_id]))


def waits(
    series: Sequence[Sequence[CounterSeries]],
    start_ns: int,
    end_ns: int,
    *,
    tensor_parallel: int,
    peak_bytes_per_s: float | None,
) -> tuple[Waits, ...] | None:
    """Return the waits of each device; None unless counters of one rung saw all of them through the window.

    `series` has the counters of each device, by rank, stage by stage.
    """
    group = _together(series, start_ns, end_ns, peak_bytes_per_s)
    if group is None:
        return None
    ranks = len(series)
    stage = np.arange(ranks) // tensor_parallel
    stages = int(stage[-1]) + 1
    by_stage = np.stack([group.active[stage == s].max(axis=0) for s in range(stages)])
    spinning = np.zeros(ranks)
    for s in range(stages if tensor_parallel > 1 else 0):
        mine = stage == s
        for busy in group.busy:
            less = _behind(group.active[mine], busy[mine], group.width)
            spinning[mine] = np.maximum(spinning[mine], less)
        if group.work is not None and float(np.median(group.width)) <= FAST_NS:
            spun = _spinning(group.active[mine], group.work[mine], group.width)
            spinning[mine] = np.maximum(spinning[mine], spun)
    out = []
    for rank in range(ranks):
        low = high = 0.0
        if stages > 1:
            others = np.delete(by_stage, stage[rank], axis=0)
            own = group.active[rank]
            low = float(np.dot(np.maximum(0.0, others.max(axis=0) - own), group.width))
            high = float(np.dot(np.minimum(1.0 - own, others.sum(axis=0)), group.width))
        out.append(Waits(idle_low_ns=low, idle_high_ns=high, spinning_ns=float(spinning[rank])))
    return tuple(out)


def _behind(active: Floats, busy: Floats, width: Floats) -> Floats:
    """Return by how much less each rank's pipe (or its SMs) was busy than that of the busiest, ns.

    Equal work on equal devices takes equal time; small differences are the counters' own.
    """
    whole, present = busy @ width, active @ width
    less = whole.max() - whole
    less[less < UNEQUAL * whole.max()] = 0.0
    # A rank that was active for longer or shorter did something else as well.
    less[np.abs(present - present[int(whole.argmax())]) > UNEQUAL * present.max()] = 0.0
    spun: Floats = np.minimum(less, present)
    return spun


def _spinning(active: Floats, work: Floats, width: Floats) -> Floats:
    """Return the time that each rank of a tensor-parallel group spun, ns.

    A rank spins where it does less than SPINS_BELOW of its own level and a peer works, or where one peer is
    not even active while at least two ranks wait for it. A single active rank may have work of its own.
    """
    ranks = len(active)
    spun = np.zeros(ranks)
    level = np.zeros(ranks)
    for rank in range(ranks):
        at_work = work[rank][active[rank] > ACTIVE_RATIO]
        if len(at_work) < FEWEST_SAMPLES:
            return spun
        level[rank] = float(np.quantile(at_work, 0.75))
    if level.min() < LEAST_LEVEL:
        return spun
    share = work / level[:, None]
    low = (active > ACTIVE_RATIO) & (share < SPINS_BELOW)
    works = share > WORKS_ABOVE
    late = (active < ACTIVE_RATIO).any(axis=0) & (low.sum(axis=0) >= 2)
    for rank in range(ranks):
        waiting = _runs(low[rank] & (np.delete(works, rank, axis=0).any(axis=0) | late))
        lost = active[rank] * np.clip(1.0 - share[rank], 0.0, 1.0) * width
        spun[rank] = float(lost[waiting].sum())
    return spun


def _runs(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return `mask` without the runs that are shorter than SHORTEST_RUN."""
    edges = np.diff(np.concatenate(([0], mask.astype(np.int8), [0])))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    keep = ends - begins >= SHORTEST_RUN
    marks = np.zeros(len(mask) + 1, dtype=np.int64)
    np.add.at(marks, begins[keep], 1)
    np.add.at(marks, ends[keep], -1)
    runs: NDArray[np.bool_] = np.cumsum(marks[:-1]) > 0
    return runs


def _together(
    series: Sequence[Sequence[CounterSeries]], start_ns: int, end_ns: int, peak_bytes_per_s: float | None
) -> _Group | None:
    """Put the counters of all devices on the first one's samples; None where one misses parts."""
    taken: list[list[CounterSeries]] = []
    for each in series:
        rows = [
            s for s in each if len(s) and s.end_ns[-1] > start_ns and s.end_ns[0] - s.width_ns[0] < end_ns
        ]
        if not rows or len({s.rung for s in (*rows, *(taken[0] if taken else ()))}) > 1:
            return None
        if any(s.gr_active is None for s in rows) or not _covers(rows, start_ns, end_ns):
            return None
        taken.append(rows)
    first = np.concatenate([s.end_ns for s in taken[0]])
    inside = first[(first > start_ns) & (first < end_ns)]
    edges = np.concatenate(([start_ns], inside, [end_ns]))
    active = np.stack([_mean(rows, ("gr_active",), edges) * RATIO_STEP for rows in taken])
    tensor, sm = (_ratio(taken, name, edges) for name in ("tensor_active", "sm_active"))
    moved = _moved(taken, edges)
    work = None
    if tensor is not None and moved is not None and peak_bytes_per_s is not None:
        work = np.maximum(tensor, moved / peak_bytes_per_s)
    busy = tuple(each for each in (tensor, sm) if each is not None)
    return _Group(width=np.diff(edges).astype(np.float64), active=active, busy=busy, work=work)


def _ratio(taken: Sequence[Sequence[CounterSeries]], name: str, edges: NDArray[np.int64]) -> Floats | None:
    if any(getattr(s, name) is None for rows in taken for s in rows):
        return None
    return np.stack([_mean(rows, (name,), edges) * RATIO_STEP for rows in taken])


def _moved(taken: Sequence[Sequence[CounterSeries]], edges: NDArray[np.int64]) -> Floats | None:
    """Return DRAM's bytes a second; None where reads and writes are not told apart (slow counters)."""
    if any(
        s.dram_read_bytes_per_s is None or s.dram_write_bytes_per_s is None for rows in taken for s in rows
    ):
        return None
    names = ("dram_read_bytes_per_s", "dram_write_bytes_per_s")
    return np.stack([_mean(rows, names, edges) for rows in taken])


def _covers(rows: Sequence[CounterSeries], start_ns: int, end_ns: int) -> bool:
    end = np.concatenate([s.end_ns for s in rows])
    width = np.concatenate([s.width_ns for s in rows])
    inside = np.maximum(0, np.minimum(end, end_ns) - np.maximum(end - width, start_ns))
    return int(inside.sum()) >= COVERED_RATIO * (end_ns - start_ns)


def _mean(rows: Sequence[CounterSeries], names: Sequence[str], edges: NDArray[np.int64]) -> Floats:
    """Return the means of the summed columns between the edges."""
    end = np.concatenate([s.end_ns for s in rows])
    width = np.concatenate([s.width_ns for s in rows])
    values = sum(np.concatenate([getattr(s, name) for s in rows]).astype(np.float64) for name in names)
    knots = np.append(end[0] - width[0], end)
    sums = np.append(0.0, np.cumsum(values * width))
    means: Floats = np.diff(np.interp(edges, knots, sums)) / np.diff(edges)
    return means


def idle_wait(
    found: Waits | None, active_ns: float, stepping_ns: float | None, window_ns: int
) -> tuple[float, bool]:
    """Return the inactive time that a device waited for another stage, and whether it is measured.

    Steps of the group (`stepping_ns`: time with one under way) tell what slow counters leave open: in a step
    some stage is always at work, or the host is late.
    """
    if found is None:
        return 0.0, False
    low, high = found.idle_low_ns, found.idle_high_ns
    certain = high - low <= 0.02 * window_ns
    if stepping_ns is None or certain:
        return low, certain
    return min(high, max(low, stepping_ns - active_ns)), False
