"""Phases of a GPU that several engines share, from the steps of all of them.

Contexts of different processes take turns on a GPU, in slices far shorter than a step and of equal length,
so steps that overlap share the time in which they do evenly. That is how the device does it, not a
measurement: where steps of different phases overlap the shares are estimates, with bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuidle.agent.analysis.integers import split
from gpuidle.agent.model import Shares, StepSeries

_CLASSES = ("prefill", "decode", "mixed", "unknown")


def shares_of_several(engines: Sequence[Sequence[StepSeries]], start_ns: int, end_ns: int) -> Shares:
    """Return the phases of [start_ns, end_ns); each of `engines` has the steps of one of them."""
    window_ns = end_ns - start_ns
    edges, kinds = [np.array([start_ns, end_ns], dtype=np.int64)], []
    for series in engines:
        for steps in series:
            begin = np.clip(steps.start_ns, start_ns, end_ns)
            end = np.clip(steps.end_ns, start_ns, end_ns)
            keep = end > begin
            kinds.append((begin[keep], end[keep], _kinds(steps)[keep]))
            edges += kinds[-1][:2]
    knots = np.unique(np.concatenate(edges))
    lengths = np.diff(knots)
    counts = np.zeros((len(_CLASSES), len(knots)), dtype=np.int64)
    for begin, end, kind in kinds:
        np.add.at(counts, (kind, np.searchsorted(knots, begin)), 1)
        np.add.at(counts, (kind, np.searchsorted(knots, end)), -1)
    running = np.cumsum(counts, axis=1)[:, :-1]
    together = running.sum(axis=0)
    parts = running * (lengths / np.maximum(1, together))
    idle_ns = int(lengths[together == 0].sum())
    times = dict(zip(_CLASSES, split(window_ns - idle_ns, parts.sum(axis=1).tolist()), strict=True))
    containing = running[_CLASSES.index("prefill")] + running[_CLASSES.index("mixed")]
    doubtful = running[_CLASSES.index("unknown")]
    low = int(lengths[(containing > 0) & (containing == together)].sum())
    high = int(lengths[containing + doubtful > 0].sum())
    alike = int(((running > 0).sum(axis=0) <= 1).all())
    exact = all(steps.exact for series in engines for steps in series)
    share = times["prefill"] + times["mixed"]
    return Shares(
        window_ns=window_ns,
        prefill_ns=times["prefill"],
        decode_ns=times["decode"],
        mixed_ns=times["mixed"],
        idle_ns=idle_ns,
        unknown_ns=times["unknown"],
        prefill_low_ns=min(low, share),
        prefill_high_ns=max(high, share),
        evidence="measured" if alike and exact else "estimated",
    )


def _kinds(steps: StepSeries) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the index into _CLASSES of each step."""
    if steps.prefill_tokens is None or steps.decode_tokens is None:
        return np.full(len(steps), _CLASSES.index("unknown"), dtype=np.int64)
    prefill, decode = steps.prefill_tokens > 0, steps.decode_tokens > 0
    places = [_CLASSES.index(name) for name in ("mixed", "prefill", "decode", "unknown")]
    kinds: np.ndarray[tuple[int], np.dtype[np.int64]] = np.select(
        [prefill & decode, prefill, decode], places[:3], places[3]
    ).astype(np.int64)
    return kinds
