"""What the last frames say together: sums over windows, never averages of ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuidle.agent.model import PHASES, Frame, GpuFrame, Phase

HISTORY_FRAMES = 600
"""How many frames are kept: the widest strip of phases, and 60 s of frames ten times a second."""

TRAILING_NS = 60_000_000_000
"""How far back the ledger on screen reaches."""


@dataclass(frozen=True)
class Ledger:
    """Where the time of one device went over the trailing windows; `causes_ns` sums to `window_ns`."""

    window_ns: int
    causes_ns: dict[str, int]
    estimated: frozenset[str]
    phases_ns: dict[Phase, int]
    phases_estimated: bool
    reclaimable_ns: int | None
    """Over the same windows; None where it is not known over all of them."""


def gpu_of(frame: Frame, hw_id: str) -> GpuFrame | None:
    """Return the device of a frame, or None where the frame does not have it."""
    return next((gpu for gpu in frame.gpus if gpu.hw_id == hw_id), None)


def trail(history: Sequence[Frame], hw_id: str, limit: int) -> list[GpuFrame | None]:
    """Return the device in at most `limit` of the last frames; None where there is no settled window."""
    found = [gpu_of(frame, hw_id) for frame in history[-limit:]] if limit > 0 else []
    return [gpu if gpu and gpu.window_ns > 0 else None for gpu in found]


def ledger(history: Sequence[Frame], hw_id: str) -> Ledger | None:
    """Return the ledger of the last 60 s of `history`, from differences of the running totals.

    None before the first settled window. With one frame, or where totals went backwards (a replay that
    was wound back), it is the newest window alone.
    """
    newest = gpu_of(history[-1], hw_id) if history else None
    if newest is None or newest.window_ns <= 0:
        return None
    since = history[-1].monotonic_ns - TRAILING_NS
    recent = [gpu_of(frame, hw_id) for frame in history if frame.monotonic_ns >= since]
    spanned = [gpu for gpu in recent if gpu is not None]
    oldest, later = spanned[0], spanned[1:]
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
        estimated=frozenset(cause for gpu in later for cause in gpu.estimated_causes),
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
