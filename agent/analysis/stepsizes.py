"""How many steps of a window ended a prompt, and how large they were, from the engine's histogram of them.

vLLM sorts each counted step by its tokens: those that it handed out and the whole prompts that it ended. A
step of decodes has a row for each running sequence, so steps that are larger than any such step ended a
prompt. Chunks before the last one are not told: a prompt that is larger than the room of a step had as many
steps before.
"""

from __future__ import annotations

import math

import msgspec

from gpuidle.agent.analysis.rates import Sums

Sizes = tuple[tuple[float, float], ...]
"""Steps by their mean tokens: (tokens, steps)."""
BEYOND = 1.5
"""A step beyond the last bucket is taken for so many times its limit."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a window that ended a prompt."""

    sizes: Sizes
    """With the tokens that they computed themselves."""
    perhaps: float
    """Steps that are as large as decodes of sequences that began in the window, and may be either."""
    chunks: float
    """Steps before them that only computed chunks of their prompts."""
    first: float
    """Of them, those of one prompt: no more than these may lie before the window."""


def most_rows(sums: Sums) -> float | None:
    """Return the most tokens that a step of decodes had in this window; None where it is not known."""
    if sums.running[0] is None or sums.first_tokens is None:
        return None
    rows = sums.running[0] + sums.first_tokens
    if sums.drafts and sums.draft_tokens:
        rows *= 1 + math.ceil(sums.draft_tokens / sums.drafts)
    if (sums.decode_tokens or 0) > rows * (sums.counted_steps or 0):
        return None  # accepted drafts of which the engine does not tell
    return float(rows)


def _buckets(sums: Sums) -> list[tuple[int, int, int]]:
    """Return the steps by their tokens: those of more than, of at most, and their number."""
    told = sums.steps_by_tokens
    if not told or sums.counted_steps is None:
        return []
    limits = [0, *(tokens for tokens, _ in told), math.ceil(BEYOND * told[-1][0])]
    counts = [0, *(count for _, count in told), sums.counted_steps]
    return [
        (lo, hi, count - before)
        for lo, hi, before, count in zip(limits, limits[1:], counts, counts[1:], strict=False)
        if count > before
    ]


def ended_prompts(sums: Sums, room: float | None) -> Ended | None:
    """Return the steps that ended a prompt; None where the histogram does not tell.

    `room` are the prompt tokens that fit a step (None: any prompt does).
    """
    steps, firsts, prompts = sums.counted_steps, sums.first_tokens, sums.prefill_tokens
    told, most = sums.steps_by_tokens, most_rows(sums)
    if steps is None or firsts is None or prompts is None or not told or most is None:
        return None
    if not firsts:
        return Ended(sizes=(), perhaps=0.0, chunks=0.0, first=0.0)
    buckets = _buckets(sums)
    sure = [bucket for bucket in buckets if bucket[0] >= most]
    count = sum(n for _, _, n in sure)
    least = max((value for value in sums.running if value is not None), default=0)
    perhaps = sum(n for lo, _, n in buckets if least <= lo < most)
    if count > firsts or not count:
        return None
    room = room if sums.always_running else None  # chunks that ran alone are not among the counted steps
    rows = sum(value or 0 for value in sums.running) / 2
    tokens = prompts + firsts + rows * count
    wide = sum((hi - lo) * n for lo, hi, n in sure)
    place = min(1.0, max(0.0, (tokens - sum(lo * n for lo, _, n in sure)) / wide))
    whole = [(lo + place * (hi - lo), lo, float(n)) for lo, hi, n in sure]
    alone = [0.0 if room is None else _chunks_before(size - rows, lo - rows, room) for size, lo, _ in whole]
    apart = sum(before * n for before, (_, _, n) in zip(alone, whole, strict=True))
    chunks = 0.0 if room is None or not apart else _packed(apart, prompts / room - count, count, steps)
    part = chunks / apart if apart else 0.0
    long = sum(n for before, (_, _, n) in zip(alone, whole, strict=True) if before)
    return Ended(
        sizes=tuple(
            (max(rows, size - part * before * (room or 0.0)), n)
            for before, (size, _, n) in zip(alone, whole, strict=True)
        ),
        perhaps=float(min(perhaps, firsts - count)),
        chunks=chunks,
        first=chunks / long if long else 0.0,
    )


def _chunks_before(tokens: float, least: float, room: float) -> float:
    """Return the chunks before the last one of a prompt of so many tokens (or `least`) that is alone."""
    if tokens <= room:
        return 0.0
    return max(math.ceil((least + 1) / room) - 1.0, tokens / room - 0.5, 0.0)


def _packed(apart: float, back_to_back: float, ended: int, steps: int) -> float:
    """Return the steps that ended no prompt: `apart` if each prompt began a step of its own.

    Prompts that queue fill each step to its end, and the chunks stand beside the ends of others. That is the
    more likely the more of the steps have prompts.
    """
    least, chunks = max(0.0, back_to_back), apart
    for _ in range(4):
        crowded = min(1.0, (ended + chunks) / max(1, steps)) ** 1.75
        chunks = max(least, (1 - crowded) * apart + crowded * back_to_back)
    return chunks


def prompt_sizes(sums: Sums) -> Sizes:
    """Return the steps with prompts by their tokens; one a request where the engine tells no sizes."""
    if sums.prompt_steps is not None:
        return sums.prompt_steps
    tokens, steps = sums.prefill_tokens or 0, max(float(sums.first_tokens or 0), sums.chunk_steps)
    return ((tokens / steps, steps),) if tokens and steps else ((float(tokens), 1.0),) if tokens else ()


def decode_rows(sums: Sums, *, by_tokens: bool = False) -> float:
    """Return the mean sequences of a step of decodes, by its tokens where no drafts were accepted.

    Steps with prompts have about as many (`by_tokens`). Without, those of the gauges are taken, as far as the
    tokens allow: enough for a pace that is fitted to rows.
    """
    known = [value for value in sums.running if value is not None]
    running = sum(known) / len(known) if known else 1.0
    steps, tokens = sums.counted_steps, sums.decode_tokens
    if not steps or not tokens or sums.accepted_tokens:
        return max(1.0, running)
    if by_tokens:
        return max(1.0, tokens / steps)
    only = steps - sum(count for _, count in sums.prompt_steps or ())
    return max(1.0, min(max(running, tokens / steps), tokens / max(1.0, only)))


def decode_sizes(sums: Sums, rows: float) -> Sizes:
    """Return the shares of the steps of decodes by their rows, of which the mean is `rows`.

    Within a bucket of the engine's histogram they are taken to be spread as evenly as its mean allows.
    Without a histogram all are alike.
    """
    most = most_rows(sums)
    buckets = [] if most is None else [each for each in _buckets(sums) if each[0] < max(1.0, most)]
    count = sum(n for _, _, n in buckets)
    if not count:
        return ((rows, 1.0),)
    wide = sum((hi - lo - 1) * n for lo, hi, n in buckets)
    place = (rows * count - sum((lo + 1) * n for lo, _, n in buckets)) / wide if wide else 0.0
    place = min(1.0, max(0.0, place))
    found: list[tuple[float, float]] = []
    for lo, hi, n in buckets:
        middle, half = lo + 1 + place * (hi - lo - 1), min(place, 1 - place) * (hi - lo - 1)
        found += (
            [(middle - half, n / 6), (middle, 2 * n / 3), (middle + half, n / 6)] if half else [(middle, n)]
        )
    return tuple((size, n / count) for size, n in found)


def beyond(sizes: Sizes, free_tokens: float) -> float:
    """Return the tokens of these steps beyond those that a step takes along for nothing."""
    return sum(max(0.0, tokens - free_tokens) * steps for tokens, steps in sizes)


def edge_tokens(sums: Sums) -> float:
    """Return the mean square of the tokens that an edge may have cut off a step with a prompt."""
    sizes = prompt_sizes(sums)
    count = sum(steps for _, steps in sizes)
    return sum(tokens**2 * steps for tokens, steps in sizes) / count / 3 if count else 0.0
