"""What a window was: shares of prefill, decode, mixed and idle, with bounds.

Two kinds of evidence: steps with tokens give the phases by definition; token sums of a window give them
through the number of steps that had a prefill in them (design: "Phases: how they are decided"). What the
evidence does not carry is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from gpuidle.agent.analysis.integers import clip_to
from gpuidle.agent.analysis.prompts import prefill_steps
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.model import Evidence, Shares

UNSURE = 0.06
"""A window whose prefill-containing share is not known better than this (two standard errors) is unknown,"""
UNSURE_NS = 25e6
"""nor is one as short that this says nothing: to leave out those with prompts would show too few of them."""


class Clues(msgspec.Struct, frozen=True, kw_only=True):
    """What helps to read a window's token sums. None: not known."""

    window_ns: int
    busy_ns: float | None = None
    """Measured time with work on the GPU."""
    pace_ns: float | None = None
    """Time of a decode-only step at this batch."""
    pace_spread: float = 0.0
    """Its relative standard error."""
    max_batched_tokens: int | None = None
    prompt_token_ns: float | None = None
    """Time of a prompt token in chunks that ran alone."""
    following: Sums | None = None
    """The next window in which tokens moved: a step that ends there may have begun here."""

    def busy(self, sums: Sums) -> tuple[float, bool]:
        """Return the busy time (an upper bound where not known) and whether it is known.

        Without a counter it is the whole window while requests run at both edges.
        """
        if self.busy_ns is not None:
            return min(float(self.window_ns), max(0.0, self.busy_ns)), True
        return float(self.window_ns), sums.always_running


def shares_from_sums(sums: Sums | None, clues: Clues) -> Shares:
    """Return the phases of a window from token sums."""
    window_ns = clues.window_ns
    if sums is None:
        idle = 0 if clues.busy_ns is None else max(0, window_ns - round(clues.busy_ns))
        return Shares(
            window_ns=window_ns,
            idle_ns=idle,
            unknown_ns=window_ns - idle,
            prefill_high_ns=window_ns - idle,
            evidence="unknown" if clues.busy_ns is None else "measured",
        )
    if sums.at_rest and clues.busy_ns is None and not sums.chunk_ns:
        return Shares(window_ns=window_ns, idle_ns=window_ns, evidence="estimated")
    if not sums.moved or (sums.chunk_ns and not sums.counted_steps):
        return _silent(sums, clues)
    if sums.prefill_tokens and sums.first_tokens is None and sums.counted_steps:
        return _one_step(sums, clues, sums.counted_steps)
    if sums.prefill_tokens is None or sums.first_tokens is None:
        return _unknown(sums, clues)
    if not sums.prefill_tokens and not sums.first_tokens and not sums.chunk_steps:
        return _decodes(sums, clues)
    return _prompts(sums, clues)


def _unknown(sums: Sums, clues: Clues) -> Shares:
    busy, _ = clues.busy(sums)
    return _settle(
        clues.window_ns,
        {"idle": clues.window_ns - busy, "unknown": busy},
        (0, busy),
        "measured" if clues.busy_ns is not None else "unknown",
    )


def _one_step(sums: Sums, clues: Clues, steps: int) -> Shares:
    """Prompt tokens moved, but how many requests they were of is not told: one step had them for certain."""
    busy, _ = clues.busy(sums)
    least = busy / steps
    kind = "mixed" if sums.always_running and (sums.generated_tokens or 0) > steps / 2 else "prefill"
    return _settle(clues.window_ns, {kind: least, "idle": clues.window_ns - busy}, (least, busy), "estimated")


def _silent(sums: Sums, clues: Clues) -> Shares:
    """No token moved: chunks of a prompt that ended later, one long step, or work that no token tells of."""
    window_ns, following = clues.window_ns, clues.following
    busy, known = clues.busy(sums)
    if sums.chunk_ns or sums.chunk_steps:
        chunks = busy if known else min(busy, sums.chunk_ns)
        return _settle(window_ns, {"prefill": chunks, "idle": window_ns - busy}, (0, busy), "estimated")
    if following is None or not (known or sums.running[1]):
        return _unknown(sums, clues)
    # A step that ends there ran all through this window, or began in it.
    part = busy if known else busy / 2
    kind = "decode"
    if following.first_tokens or following.chunk_ns:
        kind = "mixed" if _decodes_beside(following) else "prefill"
    elif following.prefill_tokens or not sums.always_running:
        return _unknown(sums, clues)
    high = 0.0 if kind == "decode" else busy
    return _settle(window_ns, {kind: part, "idle": window_ns - part}, (0, high), "estimated")


def _decodes(sums: Sums, clues: Clues) -> Shares:
    """Only decode tokens moved; at the end a step with a prompt may have begun that ends later."""
    window_ns, pace_ns, following, steps = (
        clues.window_ns, clues.pace_ns, clues.following, sums.counted_steps
    )  # fmt: skip
    busy, known = clues.busy(sums)
    if not known:
        time = min(busy, (pace_ns or 0.0) * (steps or 0))
        idle = {"idle": busy - time} if pace_ns is not None else {}
        return _settle(window_ns, {"decode": time, **idle}, (0, 0), "estimated")
    begun = 0.0
    if following is not None and following.first_tokens and pace_ns is not None and steps is not None:
        # The edges cut a step each: half a step's time is no evidence.
        begun = max(0.0, busy - (steps + 0.5) * pace_ns)
    measured: Evidence = "measured" if clues.busy_ns is not None else "estimated"
    return _settle(
        window_ns,
        {
            "mixed" if sums.always_running else "prefill": begun,
            "decode": busy - begun,
            "idle": window_ns - busy,
        },
        (0, begun + (pace_ns or 0.0) if begun else 0.0),
        "estimated" if begun else measured,
    )


def _prompts(sums: Sums, clues: Clues) -> Shares:
    window_ns = clues.window_ns
    busy, known = clues.busy(sums)
    if known:
        low, estimate, high = _prefill_time(sums, clues, busy)
    else:
        low, estimate, high = 0.0, _prefill_unheard(sums, clues, busy), busy
    if estimate is None:
        return _settle(window_ns, {"idle": window_ns - busy, "unknown": busy}, (low, high), "unknown")
    wanted = {"mixed" if _decodes_beside(sums) else "prefill": estimate}
    if known:
        wanted |= {"decode": busy - estimate, "idle": window_ns - busy}
    else:
        # Nothing counts the busy time: what neither the prompts nor the decodes need was idle.
        steps = max(0, (sums.counted_steps or 0) - (sums.first_tokens or 0))
        wanted["decode"] = min(busy - estimate, (clues.pace_ns or 0.0) * steps)
        if clues.pace_ns is not None:
            wanted["idle"] = busy - estimate - wanted["decode"]
    return _settle(window_ns, wanted, (low, high), "estimated")


def _decodes_beside(sums: Sums) -> bool:
    """Whether decodes ran beside the prefills: enough decode tokens to be more than a prompt's own tail."""
    decodes, firsts = sums.decode_tokens, sums.first_tokens or 0
    beside = max((value for value in sums.running if value is not None), default=0) > firsts
    return sums.always_running and decodes is not None and (beside or decodes > 4 * max(1, firsts))


def _prefill_unheard(sums: Sums, clues: Clues, busy: float) -> float | None:
    """Return the prefill-containing time of a window that was busy for nobody knows how long.

    A prefill lasts no longer than its requests waited for it, and no less than a decode step.
    """
    heard = sums.time_to_first_token_s
    if heard is not None and not any(sums.waiting):
        return min(busy, heard * 1e9)
    steps = prefill_steps(sums, clues.max_batched_tokens, None, clues.pace_ns)
    if steps is not None and sums.moved and steps.counted_steps <= (sums.first_tokens or 0):
        return busy / 2  # it began or ended in this window, and nothing else ran
    if steps is None or (clues.pace_ns is None and clues.prompt_token_ns is None):
        return None
    by_tokens = (sums.prefill_tokens or 0) * (clues.prompt_token_ns or 0.0)
    return min(busy, max(steps.estimate * (clues.pace_ns or 0.0), by_tokens))


def _prefill_time(sums: Sums, clues: Clues, busy: float) -> tuple[float, float | None, float]:
    """Return low, estimate (None: unknown) and high of the prefill-containing time in ns."""
    budget, pace_ns = clues.max_batched_tokens, clues.pace_ns
    steps = prefill_steps(sums, budget, busy, pace_ns)
    if steps is None:
        return 0.0, None, busy
    if steps.counted_steps == 0:
        return busy, busy, busy  # no step with output: what ran were chunks of a prompt
    if sums.decode_tokens == 0:
        # Every step that gave a token ended a prompt. A decode may be cut by each of the window's edges.
        return max(0.0, busy * (1 - 2 / steps.counted_steps)), busy, busy
    if pace_ns is None:
        # A step with a prefill moves the same weights for more rows, so it lasts no less than another: the
        # prefills' part of all steps, chunks that were not counted included, is a lower bound of their time.
        chunks = 0 if budget is None else math.ceil((sums.prefill_tokens or 0) / budget)
        only = steps.counted_steps - steps.estimate
        every = max(float(steps.counted_steps), chunks + only)
        least = busy * (1 - min(1.0, max(0.0, steps.counted_steps - steps.high) / every))
        estimate = busy * (1 - min(1.0, only / every))
        return least, estimate if busy - estimate <= max(0.1 * busy, UNSURE_NS) else None, busy
    counts = (steps.high, steps.estimate, steps.low)
    decodes = max(0.0, steps.counted_steps - steps.estimate) * pace_ns
    error = 2 * clues.pace_spread * min(busy, decodes)
    high, estimate, low = (max(0.0, busy - max(0.0, steps.counted_steps - n) * pace_ns) for n in counts)
    if error > max(UNSURE * busy, UNSURE_NS):
        return max(0.0, low - error), None, min(busy, high + error)
    return max(0.0, low - error), estimate, min(busy, high + error)


def _settle(
    window_ns: int, wanted: Mapping[str, float], bounds: tuple[float, float], evidence: Evidence
) -> Shares:
    parts = clip_to(window_ns, wanted, "unknown")
    low, high = (min(window_ns, max(0, round(value))) for value in sorted(bounds))
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
