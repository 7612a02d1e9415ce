"""What the last frames say together: sums over windows, never averages of ratios."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuidle.agent.model import PHASES, Frame, GpuFrame, Phase

HISTORY_FRAMES = 600
"""How many frames are kept: the widest strip of phases, and 60 s of frames ten times a second."""

TRAILING_NS = 60_000_000_000
"""How far back the ledger on screen reaches."""


class Ledger(msgspec.Struct, frozen=True):
    """Where the time of one device went over the trailing windows; `causes_ns` sums to `window_ns`."""

    window_ns: int
    causes_ns: dict[str, int]
    estimated: frozenset[str]
    phases_ns: dict[Phase, int]
    phases_estimated: bool
    reclaimable_ns: int | None
    """Over the same windows; None where it is not known over all of them."""


class Track(msgspec.Struct, frozen=True):
    """One device over the frames kept."""

    steps: tuple[GpuFrame | None, ...]
    """By frame, oldest first; None where there is no settled window."""
    ledger: Ledger | None
    """None before the first settled window."""
    split: bool = False
    """Whether other devices are instances of this one (MIG): the time is booked on them."""


def tracks(history: Sequence[Frame]) -> dict[str, Track]:
    """Return the devices of the newest frame by `hw_id`."""
    if not history:
        return {}
    found: dict[str, list[GpuFrame | None]] = {gpu.hw_id: [None] * len(history) for gpu in history[-1].gpus}
    for position, frame in enumerate(history):
        for gpu in frame.gpus:
            if gpu.window_ns > 0 and gpu.hw_id in found:
                found[gpu.hw_id][position] = gpu
    since = history[-1].monotonic_ns - TRAILING_NS
    start = next(position for position, frame in enumerate(history) if frame.monotonic_ns >= since)
    parents = {gpu.parent_hw_id for gpu in history[-1].gpus}
    return {
        hw_id: Track(tuple(steps), _ledger(steps[start:]), split=hw_id in parents)
        for hw_id, steps in found.items()
    }


def _ledger(steps: Sequence[GpuFrame | None]) -> Ledger | None:
    """Return the ledger of `steps`, from differences of the running totals.

    With one frame, or where totals went backwards (a replay that was wound back), it is the newest window
    alone.
    """
    newest = steps[-1]
    if newest is None:
        return None
    oldest, *later = [gpu for gpu in steps if gpu is not None]
    causes = _difference(newest.causes_total_ns, oldest.causes_total_ns)
    phases = _difference(newest.phases_total_ns, oldest.phases_total_ns)
    if not later or causes is None or phases is None or not any(causes.values()):
        alone = newest.reclaimable_total_ns
        first = alone is not None and sum(newest.causes_total_ns.values()) == newest.window_ns
        return Ledger(
            window_ns=newest.window_ns,
            causes_ns=newest.causes_ns,
            estimated=frozenset(newest.estimated_causes),
            phases_ns={phase: newest.phases.of(phase) for phase in PHASES},
            phases_estimated=newest.phases.evidence == "estimated",
            reclaimable_ns=alone if first else None,
        )
    reclaimable = None
    if newest.reclaimable_total_ns is not None and oldest.reclaimable_total_ns is not None:
        reclaimable = newest.reclaimable_total_ns - oldest.reclaimable_total_ns
    return Ledger(
        window_ns=sum(causes.values()),
        causes_ns=causes,
        estimated=frozenset().union(*{gpu.estimated_causes for gpu in later}),
        phases_ns={phase: phases.get(phase, 0) for phase in PHASES},
        phases_estimated=any(gpu.phases.evidence == "estimated" for gpu in later),
        reclaimable_ns=reclaimable,
    )


def _difference(newer: dict[str, int], older: dict[str, int]) -> dict[str, int] | None:
    """Return the growth of totals, or None where one of them shrank."""
    growth = {name: total - older.get(name, 0) for name, total in newer.items()}
    return growth if all(ns >= 0 for ns in growth.values()) else None


def main_phase(gpu: GpuFrame) -> Phase:
    """Return the phase that took most of the settled window."""
    return max(PHASES, key=gpu.phases.of)


def cells(parts_ns: Sequence[int], width: int) -> list[int]:
    """Return how many of `width` cells each part takes.

    Whole cells by largest remainder; a part that is there at all gets one cell while there are enough, so
    that a bar never hides what its legend names.
    """
    total = sum(parts_ns)
    if total <= 0 or width <= 0:
        return [0] * len(parts_ns)
    sizes = [ns * width // total for ns in parts_ns]
    by_remainder = sorted(range(len(parts_ns)), key=lambda i: (-(parts_ns[i] * width % total), i))
    for index in by_remainder[: width - sum(sizes)]:
        sizes[index] += 1
    if sum(1 for ns in parts_ns if ns > 0) <= width:
        for index, ns in enumerate(parts_ns):
            if ns > 0 and sizes[index] == 0:
                sizes[index] = 1
                sizes[sizes.index(max(sizes))] -= 1
    return sizes
