"""What a window was: shares of prefill, decode, mixed and idle, with bounds.

Two kinds of evidence: steps with tokens give the phases by definition; token sums of a window give them
through the number of steps that had a prefill in them (design: "Phases: how they are decided"). What the
evidence does not carry is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from gpuidle.agent.analysis.integers import clip_to, split
from gpuidle.agent.analysis.prompts import PrefillSteps, heard_ns, prefill_steps
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
    prompt_token_steps: float | None = None
    """Time of a prompt token beside decodes, in decode-only steps."""
    prompt_token_spread: float = 0.0
    """Its relative standard error."""
    prompt_ratio: float = 1.0
    """Time of a step with a small prompt to that of a decode-only step: it reads more experts."""
    more_decodes_ns: float = 0.0
    """Of decodes, beyond what counted steps say: what a counter tells (negative: they were shorter)."""
    gap_ratio: float = 0.0
    """Of a decode-only step's time, what the host takes between steps: where `busy_ns` is not known, that is
    in `pace_ns` and `prompt_token_ns` as well."""
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
    shares = _end_to_end(sums, clues)
    if sums is None or clues.busy_ns is not None or not clues.gap_ratio:
        return shares
    return _without_gaps(shares, sums, clues)


def _without_gaps(shares: Shares, sums: Sums, clues: Clues) -> Shares:
    """Take what the host needs between steps out of their time: for a step with a prompt as for another."""
    containing = shares.prefill_ns + shares.mixed_ns
    decode_gap = round(clues.gap_ratio * shares.decode_ns)
    pace_ns = clues.pace_ns
    if not sums.always_running:
        pace_ns = _pace_here(sums, pace_ns, alone=not sums.running[0] and (sums.first_tokens or 0) <= 1)
    prompts, each_gap = 0.0, clues.gap_ratio * (pace_ns or 0.0)
    if containing and each_gap:
        decodes = shares.decode_ns / (pace_ns or 1.0)
        chunks = (sums.prefill_tokens or 0) / clues.max_batched_tokens if clues.max_batched_tokens else 0.0
        prompts = max(1.0, (sums.counted_steps or 0) - decodes, chunks)
    gap = min(round(clues.gap_ratio * containing), round(prompts * each_gap))
    prefill_gap, mixed_gap = split(gap, (shares.prefill_ns, shares.mixed_ns)) if gap else (0, 0)
    return msgspec.structs.replace(
        shares,
        prefill_ns=shares.prefill_ns - prefill_gap,
        mixed_ns=shares.mixed_ns - mixed_gap,
        decode_ns=shares.decode_ns - decode_gap,
        idle_ns=shares.idle_ns + decode_gap + gap,
        prefill_low_ns=max(0, shares.prefill_low_ns - gap),
    )


def _end_to_end(sums: Sums | None, clues: Clues) -> Shares:
    """Return the same; where no counter tells when steps end, they last until the next one begins."""
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
        if not known and sums.running[0] == 0:
            busy = max(chunks, 1.0)  # nothing ran before them
        high = busy if known else window_ns
        return _settle(window_ns, {"prefill": chunks, "idle": window_ns - busy}, (0, high), "estimated")
    if following is None or not (known or sums.running[1]):
        return _unknown(sums, clues)
    # A step that ends there ran all through this window, or began in it.
    part = busy if known else busy / 2
    kind = "decode"
    if following.first_tokens or following.chunk_ns or following.chunk_steps:
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
        cut = 0.5 if sums.running[0] and steps else 0.0
        pace_ns = sums.decode_row_ns or pace_ns
        time = min(busy, (pace_ns or 0.0) * ((steps or 0) - cut))
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
    kind = "mixed" if _decodes_beside(sums) else "prefill"
    if not known:
        times = _unheard(sums, clues)
        return _settle(window_ns, {"unknown": busy} if times is None else times, (0.0, busy), "estimated")
    low, estimate, high = _prefill_time(sums, clues, busy)
    if estimate is None:
        return _settle(window_ns, {"idle": window_ns - busy, "unknown": busy}, (low, high), "unknown")
    estimate = min(busy, max(0.0, estimate - clues.more_decodes_ns))
    low, high = min(low, estimate), max(high, estimate)
    wanted = {kind: estimate, "decode": busy - estimate, "idle": window_ns - busy}
    return _settle(window_ns, wanted, (low, high), "estimated")


def _decodes_beside(sums: Sums) -> bool:
    """Whether decodes ran beside the prefills: enough decode tokens to be more than a prompt's own tail."""
    decodes, firsts = sums.decode_tokens, sums.first_tokens or 0
    beside = max((value for value in sums.running if value is not None), default=0) > firsts
    return sums.always_running and decodes is not None and (beside or decodes > 4 * max(1, firsts))


def _unheard(sums: Sums, clues: Clues) -> dict[str, float] | None:
    """Return the times of a window at whose start or end nothing ran: no gauge tells how long it was busy.

    None: not known. Requests that still run at its end kept it busy from their first token on; the step under
    way at an edge is cut anywhere.
    """
    window_ns, pace_ns, steps = float(clues.window_ns), clues.pace_ns, sums.counted_steps or 0
    found = prefill_steps(sums, clues.max_batched_tokens, None, pace_ns)
    prompts = min(1.0 * steps, found.estimate) if found is not None else 1.0
    began, goes_on = not sums.running[0], bool(sums.running[1])
    pace_ns = _pace_here(sums, pace_ns, alone=began and prompts <= 1)
    each_ns = _prompt_step_ns(sums, clues, prompts)
    if sums.chunk_ns:
        spent = min(window_ns, sums.chunk_ns)
    elif steps <= prompts and clues.prompt_token_ns is None and heard_ns(sums, prompts) is None:
        spent = window_ns / 2  # it began or ended in this window, and nothing else ran
    elif each_ns is None:
        return None
    elif began:
        spent = min(window_ns, each_ns * prompts)
    else:
        spent = _cut(each_ns, window_ns) + min(window_ns, each_ns * (prompts - 1))
    decodes = max(0.0, steps - prompts)
    if pace_ns is None and (decodes or goes_on):
        return None if goes_on and not spent else {"prefill": spent}
    times = {"prefill": spent, "decode": min(window_ns - spent, decodes * (pace_ns or 0.0))}
    left = window_ns - sum(times.values())
    if goes_on:
        again, under_way_ns = _under_way(clues, each_ns, pace_ns)
        under_way_ns = min(left, under_way_ns)
        times["mixed" if again else "decode"] = times.get("mixed" if again else "decode", 0.0) + under_way_ns
        left -= under_way_ns
    return {**times, "idle": left}


def _pace_here(sums: Sums, pace_ns: float | None, *, alone: bool) -> float | None:
    """Return the time of a step of decodes by its rows' own clock; no prompt was beside any if `alone`."""
    told_ns = sums.decode_row_ns
    if told_ns is None or pace_ns is None:
        return told_ns or pace_ns
    return told_ns if alone else min(told_ns, pace_ns)


def _under_way(clues: Clues, each_ns: float | None, decode_ns: float | None) -> tuple[bool, float]:
    """Return whether the step that the window's end cuts has a prompt, and the part of it before the end.

    That is half of it, or what the next window leaves of the time that its steps take.
    """
    following, pace_ns = clues.following, decode_ns or 0.0
    if following is None or not (following.first_tokens or following.chunk_steps):
        return False, pace_ns / 2
    tokens_ns = _mean_tokens(following) * (clues.prompt_token_ns or 0.0)
    step_ns = max(each_ns or 0.0, pace_ns, tokens_ns)
    found = prefill_steps(following, clues.max_batched_tokens, None, decode_ns)
    if found is None or not following.always_running or decode_ns is None:
        return True, step_ns / 2
    decodes = max(0.0, found.counted_steps - found.estimate)
    before_ns = found.estimate * step_ns + decodes * pace_ns - following.window_ns
    return True, (step_ns / 2 + min(step_ns, max(0.0, before_ns))) / 2


def _mean_tokens(sums: Sums) -> float:
    """Return the mean tokens of a step with a prompt; 0 where the engine does not tell."""
    steps = sums.prompt_steps or ()
    count = sum(number for _, number in steps)
    return sum(tokens * number for tokens, number in steps) / count if count else 0.0


def _cut(step_ns: float, window_ns: float) -> float:
    """Return the part in a window of a step that ends anywhere in it, and began before it if it is long."""
    return window_ns / 2 if step_ns >= window_ns else step_ns * (1 - step_ns / (2 * window_ns))


def _prompt_step_ns(sums: Sums, clues: Clues, prompts: float) -> float | None:
    """Return the time of a step with a prompt in a window that nothing ran through; None: not known."""
    heard = heard_ns(sums, prompts)
    if heard is not None:
        return heard / max(1.0, prompts)
    if clues.pace_ns is None and clues.prompt_token_ns is None:
        return None
    by_tokens = (sums.prefill_tokens or 0) * (clues.prompt_token_ns or 0.0) / max(1.0, prompts)
    return max(clues.pace_ns or 0.0, by_tokens)


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
    # Nor do decodes take longer than the mean step beside prompts; the edges cut half a step together.
    if steps.low > 0:
        pace_ns = min(pace_ns, busy / max(0.5, steps.counted_steps - 0.5))
    counts = (steps.high, steps.estimate, steps.low)
    decodes = max(0.0, steps.counted_steps - steps.estimate) * pace_ns
    spread = clues.pace_spread
    told = _by_tokens(sums, clues, steps, busy)
    if told is not None and decodes:
        weight = told[1]
        pace_ns *= 1 - weight + weight * (busy - told[0]) / decodes
        decodes = max(0.0, steps.counted_steps - steps.estimate) * pace_ns
        spread *= math.sqrt(1 - weight)
    error = 2 * spread * min(busy, decodes)
    high, estimate, low = (max(0.0, busy - max(0.0, steps.counted_steps - n) * pace_ns) for n in counts)
    if error > max(UNSURE * busy, UNSURE_NS):
        return max(0.0, low - error), None, min(busy, high + error)
    return max(0.0, low - error), estimate, min(busy, high + error)


def _by_tokens(sums: Sums, clues: Clues, steps: PrefillSteps, busy: float) -> tuple[float, float] | None:
    """Return the prefill-containing time by what its prompt tokens take in decode-only steps, and its weight.

    That is right at whatever pace the machine has just now. It weighs as much as the pace is unsure.
    """
    per_token, decodes = clues.prompt_token_steps, steps.counted_steps - steps.estimate
    if per_token is None or clues.pace_ns is None or not sums.prefill_tokens or decodes <= 0:
        return None
    more = per_token * sums.prefill_tokens
    every = steps.counted_steps + more
    by_pace = decodes * clues.pace_ns * clues.pace_spread
    by_tokens = busy * decodes * more * clues.prompt_token_spread / every**2
    return busy * (steps.estimate + more) / every, by_pace**2 / (by_pace**2 + by_tokens**2 + 1e-9)


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
