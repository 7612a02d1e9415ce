"""What a window was: shares of prefill, decode, mixed and idle, with bounds.

Two kinds of evidence: steps with tokens give the phases by definition; token sums of a window give them
through the number of steps that had a prefill in them (design: "Phases: how they are decided"). What the
evidence does not carry is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from gpuidle.agent.analysis.integers import clip_to, split
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.model import Evidence, Shares, StepSeries


class PrefillSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a window's steps had a prefill in them; `counted` is of the steps with output."""

    low: float
    estimate: float
    high: float
    counted_steps: int

    def decode_only(self) -> tuple[float, float, float]:
        """Return low, estimate and high of the steps that were decode only."""
        steps = self.counted_steps
        return (max(0.0, steps - self.high), max(0.0, steps - self.estimate), max(0.0, steps - self.low))


def prefill_steps(sums: Sums, max_batched_tokens: int | None) -> PrefillSteps | None:
    """Bound the steps with a prefill among the counted steps of a window; None where they are not known.

    With S counted steps, n first tokens, P computed prompt tokens, budget b and R running decodes:
    at least ceil(P/b), at most min(S, n + floor(P/(b-R)) + 1), estimate max(S(1-e^(-n/S)), ceil(P/b)).
    Steps without output are not counted by the engine. There are such steps only while no decode runs; where
    the gauges do not exclude that, the lower bound falls to the steps that made the first tokens.
    """
    steps, firsts, prompts = sums.counted_steps, sums.first_tokens, sums.prefill_tokens
    if steps is None or firsts is None or prompts is None:
        return None
    if firsts == 0 and prompts == 0:
        return PrefillSteps(low=0, estimate=0, high=0, counted_steps=steps)
    running = max((value for value in sums.running if value is not None), default=0)
    chunks = 0 if max_batched_tokens is None else math.ceil(prompts / max_batched_tokens)
    high: float = steps
    if max_batched_tokens is not None:
        room = max(1, max_batched_tokens - running)
        high = min(steps, firsts + prompts // room + 1)
    by_chance = steps * (1 - math.exp(-firsts / steps)) if steps else 0.0
    all_counted = sums.always_running
    low = min(steps, max(chunks if all_counted else 0, 1 if firsts else 0))
    # Decodes take their rows out of the budget first, so that a prompt needs some more chunks than P/b.
    shared = 0 if max_batched_tokens is None else prompts / max(1, max_batched_tokens - running)
    estimate = by_chance if not all_counted else max(by_chance, shared)
    return PrefillSteps(
        low=low, estimate=min(max(estimate, low), max(high, low)), high=max(high, low), counted_steps=steps
    )


class DecodePace:
    """Time of one decode-only step, learned from windows without a prompt token, by batch size.

    Batches within a factor of two share a figure: a decode step moves all weights whatever its batch.
    """

    def __init__(self) -> None:
        self._ns: dict[int, float] = {}

    @staticmethod
    def _bucket(running: float) -> int:
        return max(0, round(math.log2(max(1.0, running))))

    def learn(self, sums: Sums, busy_ns: float) -> None:
        """Take a settled window; it is used only if it was decode all through."""
        steps = sums.counted_steps
        if not steps or sums.prefill_tokens or sums.first_tokens or not sums.always_running:
            return
        bucket = self._bucket(_mean_running(sums))
        pace = busy_ns / steps
        past = self._ns.get(bucket)
        self._ns[bucket] = pace if past is None else past + 0.3 * (pace - past)

    def step_ns(self, sums: Sums) -> float | None:
        """Return the time of a decode-only step at this window's batch; None before any was seen."""
        if not self._ns:
            return None
        bucket = self._bucket(_mean_running(sums))
        return self._ns[min(self._ns, key=lambda known: abs(known - bucket))]


def _mean_running(sums: Sums) -> float:
    known = [value for value in sums.running if value is not None]
    return sum(known) / len(known) if known else 1.0


def shares_from_sums(
    sums: Sums | None,
    window_ns: int,
    busy_ns: float | None,
    pace_ns: float | None,
    max_batched_tokens: int | None,
) -> Shares:
    """Return the phases of a window from token sums.

    `busy_ns` is the measured time with work on the GPU, None without a counter; then it is the whole window
    while requests run at both edges, 0 at rest, and otherwise only bounded.
    """
    if sums is None:
        idle = 0 if busy_ns is None else max(0, window_ns - round(busy_ns))
        return Shares(
            window_ns=window_ns,
            idle_ns=idle,
            unknown_ns=window_ns - idle,
            prefill_high_ns=window_ns - idle,
            evidence="unknown" if busy_ns is None else "measured",
        )
    measured: Evidence = "measured" if busy_ns is not None else "estimated"
    if sums.at_rest and busy_ns is None:
        return Shares(window_ns=window_ns, idle_ns=window_ns, evidence="estimated")
    busy, busy_known = _busy(sums, window_ns, busy_ns)
    if not sums.moved:
        # Work on the GPU that no token tells of yet: a prefill under way, a warm-up, another process.
        return _settle(window_ns, {"idle": window_ns - busy, "unknown": busy}, (0, busy), measured)
    if not sums.prefill_tokens and not sums.first_tokens:
        if sums.prefill_tokens is None or sums.first_tokens is None:
            return _settle(window_ns, {"idle": window_ns - busy, "unknown": busy}, (0, busy), measured)
        known = busy if busy_known else min(busy, (pace_ns or 0.0) * (sums.counted_steps or 0))
        return _settle(
            window_ns, {"decode": known, "idle": window_ns - busy, "unknown": busy - known}, (0, 0), measured
        )
    low, estimate, high = _prefill_time(sums, busy, pace_ns, max_batched_tokens)
    if not busy_known and estimate is not None:
        # Nothing counts the busy time: a prefill lasts no longer than its requests waited for it.
        heard = sums.time_to_first_token_s
        estimate = None if heard is None or any(sums.waiting) else min(estimate, heard * 1e9)
    if estimate is None:
        return _settle(window_ns, {"idle": window_ns - busy, "unknown": busy}, (low, high), measured)
    decodes = min(busy - estimate, (pace_ns or 0.0) * (sums.counted_steps or 0)) if not busy_known else None
    return _settle(
        window_ns,
        {
            "mixed" if _decodes_beside(sums) else "prefill": estimate,
            "decode": busy - estimate if decodes is None else decodes,
            "idle": window_ns - busy,
        },
        (low, high),
        "estimated",
    )


def _busy(sums: Sums, window_ns: int, busy_ns: float | None) -> tuple[float, bool]:
    """Return the busy time (an upper bound where not known) and whether it is known."""
    if busy_ns is not None:
        return min(float(window_ns), max(0.0, busy_ns)), True
    return float(window_ns), sums.always_running


def _decodes_beside(sums: Sums) -> bool:
    """Whether decodes ran beside the prefills: enough decode tokens to be more than a prompt's own tail."""
    decodes, firsts = sums.decode_tokens, sums.first_tokens or 0
    beside = max((value for value in sums.running if value is not None), default=0) > firsts
    return sums.always_running and decodes is not None and (beside or decodes > 4 * max(1, firsts))


def _prefill_time(
    sums: Sums, busy_ns: float, pace_ns: float | None, max_batched_tokens: int | None
) -> tuple[float, float | None, float]:
    """Return low, estimate (None: unknown) and high of the prefill-containing time in ns."""
    steps = prefill_steps(sums, max_batched_tokens)
    if steps is None:
        return 0.0, None, busy_ns
    if steps.counted_steps == 0:
        return busy_ns, busy_ns, busy_ns  # no step with output: what ran were chunks of a prompt
    low, middle, high = steps.decode_only()
    if pace_ns is None:
        # No pace yet. A step with a prefill moves the same weights for more rows, so it lasts no less than a
        # decode-only one: the prefills' part of all steps, chunks included, is a lower bound of their time.
        chunks = (
            0 if max_batched_tokens is None else math.ceil((sums.prefill_tokens or 0) / max_batched_tokens)
        )
        every = max(steps.counted_steps, chunks + middle)
        return busy_ns * (1 - min(1.0, high / every)), busy_ns * (1 - middle / every), busy_ns
    least, estimate, most = (max(0.0, busy_ns - count * pace_ns) for count in (high, middle, low))
    return least, estimate, most


def _settle(
    window_ns: int, wanted: Mapping[str, float], bounds: tuple[float, float], evidence: Evidence
) -> Shares:
    parts = clip_to(window_ns, wanted, "unknown")
    low, high = (min(window_ns, max(0, round(value))) for value in bounds)
    containing = parts.get("prefill", 0) + parts.get("mixed", 0)
    return Shares(
        window_ns=window_ns,
        prefill_ns=parts.get("prefill", 0),
        decode_ns=parts.get("decode", 0),
        mixed_ns=parts.get("mixed", 0),
        idle_ns=parts.get("idle", 0),
        unknown_ns=parts.get("unknown", 0),
        prefill_low_ns=min(low, containing),
        prefill_high_ns=max(high, containing),
        evidence=evidence,
    )


class StepWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one engine clipped to one window."""

    shares: Shares
    steps: dict[str, int]
    """Steps that ended in the window, by phase."""
    gap_with_requests_ns: int
    """Between steps while a sequence was alive: the host's fault."""
    gap_without_requests_ns: int


def shares_from_steps(series: Sequence[StepSeries], start_ns: int, end_ns: int) -> StepWindow | None:
    """Return the phases of [start_ns, end_ns) from steps that name their tokens; None without such steps.

    `series` may reach beyond the window on both sides: the step after a gap tells whether requests were
    alive in it (a decode row in it was), so windows are settled with some steps of the future in hand.
    """
    usable = [s for s in series if s.prefill_tokens is not None and s.decode_tokens is not None and len(s)]
    if not usable:
        return None
    start = np.concatenate([s.start_ns for s in usable])
    end = np.concatenate([s.end_ns for s in usable])
    prefill = np.concatenate([s.prefill_tokens for s in usable if s.prefill_tokens is not None]) > 0
    decode = np.concatenate([s.decode_tokens for s in usable if s.decode_tokens is not None]) > 0
    order = np.argsort(end, kind="stable")
    start, end, prefill, decode = start[order], end[order], prefill[order], decode[order]
    clipped = np.maximum(0, np.minimum(end, end_ns) - np.maximum(start, start_ns))
    inside = (end > start_ns) & (end <= end_ns)
    names = ("mixed", "prefill", "decode", "unknown")
    masks = (prefill & decode, prefill & ~decode, decode & ~prefill, ~prefill & ~decode)
    times = {name: int(clipped[mask].sum()) for name, mask in zip(names, masks, strict=True)}
    counts = {name: int((inside & mask).sum()) for name, mask in zip(names, masks, strict=True)}
    window_ns = end_ns - start_ns
    busy_ns = sum(times.values())
    if busy_ns > window_ns:  # steps of two overlapping sources: their shares still hold
        times = dict(zip(times, split(window_ns, list(times.values())), strict=True))
        busy_ns = window_ns
    with_requests = _gaps_with_requests(start, end, prefill, decode, start_ns, end_ns)
    with_requests = min(with_requests, window_ns - busy_ns)
    exact = all(s.exact for s in usable)
    containing = times["prefill"] + times["mixed"]
    return StepWindow(
        shares=Shares(
            window_ns=window_ns,
            prefill_ns=times["prefill"],
            decode_ns=times["decode"],
            mixed_ns=times["mixed"],
            unknown_ns=times["unknown"],
            idle_ns=window_ns - busy_ns,
            prefill_low_ns=containing,
            prefill_high_ns=containing + times["unknown"],
            evidence="measured" if exact else "estimated",
        ),
        steps={name: counts[name] for name in ("prefill", "decode", "mixed", "unknown") if counts[name]},
        gap_with_requests_ns=with_requests,
        gap_without_requests_ns=window_ns - busy_ns - with_requests,
    )


def _gaps_with_requests(
    start: np.ndarray[tuple[int], np.dtype[np.int64]],
    end: np.ndarray[tuple[int], np.dtype[np.int64]],
    prefill: np.ndarray[tuple[int], np.dtype[np.bool_]],
    decode: np.ndarray[tuple[int], np.dtype[np.bool_]],
    start_ns: int,
    end_ns: int,
) -> int:
    """Return the gap time in the window in which a sequence was alive.

    A decode row after a gap belongs to a sequence that lived through it. A prefill-only step after a gap may
    be the next chunk of a prompt: it is taken for one when the gap is as short as the gaps before decodes.
    """
    if len(end) < 2:
        return 0
    gap_start, gap_end = end[:-1], start[1:]
    lengths = np.maximum(0, gap_end - gap_start)
    alive = decode[1:]
    usual_ns = float(np.median(lengths[alive])) if alive.any() else 0.0
    chunk = ~alive & prefill[1:] & prefill[:-1] & (lengths <= max(3 * usual_ns, 2e6))
    clipped = np.maximum(0, np.minimum(gap_end, end_ns) - np.maximum(gap_start, start_ns))
    return int(clipped[alive | chunk].sum())
