"""Prompts in chunks: given back to the windows in which they were computed, and how many steps they touched.

vLLM books a prompt whole on its last chunk, and does not count steps that give no token. So a window in which
nothing seems to move may be full of chunks, and the window in which the prompt ends shows too many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gpuidle.agent.analysis.integers import split
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.stepsizes import Ended, beyond, ended_prompts

CHUNK_SPREAD = 0.6
"""Standard deviation of the steps that ended no prompt, over their root (simulated traces)."""


def room_tokens(sums: Sums, max_batched_tokens: int | None) -> float | None:
    """Return the prompt tokens that fit a step beside the running decodes; None: no budget is known."""
    if max_batched_tokens is None:
        return None
    running = max((value for value in sums.running if value is not None), default=0)
    return float(max(1, max_batched_tokens - max(0, running - (sums.first_tokens or 0))))


def give_back(
    windows: Sequence[Sums],
    max_batched_tokens: int | None,
    pace_ns: float | None = None,
    prompt_token_ns: float | None = None,
    *,
    measured: bool = False,
) -> tuple[list[Sums], float | None]:
    """Give the chunks of the prompts that ended in the last window back to the windows before it.

    With decodes beside it each chunk is a counted step, so the chunks are as many steps back. Without, the
    windows in which no token moved while a request was running were chunks; then the time of a prompt token
    follows, and is the second value (ns). Sums over all windows stay as they are. `pace_ns` and
    `prompt_token_ns` are what is known so far of a decode-only step's time and of a prompt token's. Where a
    counter is `measured`, chunks beside decodes go no further back than to a window without a counted step.
    """
    moved = [*windows[:-1], *(_with_seen_chunks(window) for window in windows[-1:])]
    last = moved[-1] if moved else None
    ended = None if last is None else ended_prompts(last, room_tokens(last, max_batched_tokens))
    if last is not None and ended is not None:
        last = moved[-1] = msgspec.structs.replace(
            last, prompt_steps=ended.sizes, perhaps_steps=ended.perhaps
        )
    if last is None or not last.prefill_tokens or not last.first_tokens or last.reset or len(moved) < 2:
        return moved, None
    room = room_tokens(last, max_batched_tokens)
    if room is None:
        return _by_first_token_time(moved, pace_ns), None
    chunks = math.ceil(last.prefill_tokens / room - 1e-9)
    silent = _silent(moved)
    before = moved[silent[-1] - 1] if silent and silent[-1] else None
    beside = before is not None and bool(before.counted_steps) and before.always_running
    if silent and chunks > 1 and not beside:
        span_ns = heard_ns(last, 1.0) if last.first_tokens == 1 else None
        if span_ns is not None:
            first = None if moved[silent[-1]].running[0] else moved[silent[-1]]
            return _by_first_token_time(moved, pace_ns, first, chunks), span_ns / last.prefill_tokens
        return _give_to_silent(moved, silent, chunks)
    if not moved[-2].counted_steps and not beside:
        return _by_first_token_time(moved, pace_ns), None
    if ended is not None:
        return _give_to_steps(moved, ended, room, pace_ns, prompt_token_ns, measured=measured), None
    if chunks < 2:
        return moved, None
    left = chunks - min(float(chunks), _chunks_here(last, room, pace_ns, prompt_token_ns))
    parts = [0.0] * len(moved)
    for i in range(len(moved) - 2, -1, -1):
        window = moved[i]
        if i in silent or (left > 0 and not window.counted_steps and window.always_running):
            moved[i] = _through(window)
            continue
        if left <= 0 or window.reset or not window.counted_steps:
            break
        parts[i] = max(0.0, min(left, window.counted_steps - window.chunk_steps))
        moved[i] = msgspec.structs.replace(window, chunk_steps=window.chunk_steps + parts[i])
        left -= parts[i]
    parts[-1] = chunks - sum(parts[:-1])
    return _move_tokens(moved, parts), None


def _with_seen_chunks(sums: Sums) -> Sums:
    """Return a window with the steps that its own rows tell to have had a chunk, before the prompt ends."""
    rows = sums.silent_rows
    return (
        msgspec.structs.replace(sums, chunk_steps=float(min(sums.counted_steps or 0, rows))) if rows else sums
    )


def _through(window: Sums) -> Sums:
    """Return a window with nothing counted, all through which a step with a chunk ran that ended later."""
    return msgspec.structs.replace(window, chunk_ns=float(window.window_ns))


def _give_to_steps(
    windows: list[Sums],
    ended: Ended,
    room: float,
    pace_ns: float | None,
    prompt_token_ns: float | None,
    *,
    measured: bool,
) -> list[Sums]:
    """Place the chunks of prompts that were larger than a step: they are the steps just before its last one.

    So only those of the first such prompt may lie before the window in which it ended. A window that is long
    beside them has nearly all; a short one has as many as fill its time.
    """
    last = windows[-1]
    if not ended.chunks or not last.always_running:
        return windows
    full = room + max((value for value in last.running if value is not None), default=0)
    window_ns, steps = float(last.window_ns), float(last.counted_steps or 1)
    pace = window_ns / steps if pace_ns is None else pace_ns
    chunk_ns = window_ns / steps if prompt_token_ns is None else max(pace, prompt_token_ns * full)
    long = ended.chunks / ended.first
    if chunk_ns * ended.first * long < window_ns / 2 or prompt_token_ns is None or chunk_ns < 1.5 * pace:
        before = sum(min(1.0, long * j * chunk_ns / window_ns) for j in range(1, math.ceil(ended.first) + 1))
        before = min(before, ended.first)
    else:
        own_ns = steps * pace + prompt_token_ns * beyond(ended.sizes, pace / prompt_token_ns)
        here = (window_ns - own_ns) / (chunk_ns - pace)
        before = min(ended.first, max(0.0, ended.chunks - here))
    # That no chunk was there is no sign of how many are here: which prompts had some is a guess by sizes.
    before = _told_before(windows) or before
    # No more of them are here than steps that ended no prompt.
    before = max(before, ended.chunks - max(0.0, steps - sum(count for _, count in ended.sizes)))
    left = before
    given = 0
    for i in range(len(windows) - 2, -1, -1):
        window = windows[i]
        if left <= 0 or window.reset or window.prefill_tokens is None:
            break
        if not window.counted_steps:
            if measured or not window.always_running:
                break
            windows[i] = _through(window)
            continue
        seen = window.chunk_steps if window.silent_rows is not None else 0.0
        free = window.counted_steps - sum(n for _, n in window.prompt_steps or ()) - window.chunk_steps
        part = max(0.0, min(left, seen or free))
        tokens = min(round(part * room), (last.prefill_tokens or 0) - given)
        known = window.prompt_steps
        windows[i] = msgspec.structs.replace(
            window,
            chunk_spread=math.hypot(window.chunk_spread, min(part, 1.0) ** 0.5 / 2),
            chunk_steps=seen or window.chunk_steps + part,
            prompt_steps=None if known is None else (*known, (full, part)),
            prefill_tokens=window.prefill_tokens + tokens,
        )
        given += tokens
        left -= part
    here = ended.chunks - before + left
    windows[-1] = msgspec.structs.replace(
        last,
        prefill_tokens=(last.prefill_tokens or 0) - given,
        prompt_steps=(*ended.sizes, (full, here)) if here > 0 else ended.sizes,
        chunk_spread=CHUNK_SPREAD * math.sqrt(ended.chunks),
    )
    return windows


def _told_before(windows: Sequence[Sums]) -> float:
    """Return the steps before the last window that computed chunks of the prompt that ended there first.

    0 also where the windows do not tell that, back to the one in which it began.
    """
    found = 0.0
    for window in reversed(windows[:-1]):
        rows, steps = window.silent_rows, window.counted_steps or 0
        if rows is None or not window.always_running:
            break
        found += min(rows, steps)
        if rows < steps:
            return found
    return 0.0


def _chunks_here(last: Sums, room: float, pace_ns: float | None, prompt_token_ns: float | None) -> float:
    """Return the chunks among the steps of the window in which a prompt ended.

    Where the times of both kinds of steps are known, as many as fill the window; else the last chunk stands
    anywhere among the steps, and half of them lie before it.
    """
    steps = float(last.counted_steps or 1)
    longer = None if prompt_token_ns is None or pace_ns is None else prompt_token_ns * room - pace_ns
    if longer is None or pace_ns is None or longer < 2 * pace_ns or not last.always_running:
        return max(1.0, steps / 2)
    return max(1.0, min(steps, (last.window_ns - steps * pace_ns) / longer))


def _silent(windows: Sequence[Sums]) -> list[int]:
    """Return the windows just before the last in which nothing moved though a request was there."""
    found: list[int] = []
    for i in range(len(windows) - 2, -1, -1):
        window = windows[i]
        there = any(window.running) or any(window.waiting)
        if window.reset or window.counted_steps or window.moved or not there:
            break
        found.append(i)
    return found


def _give_to_silent(
    windows: list[Sums], silent: Sequence[int], chunks: int
) -> tuple[list[Sums], float | None]:
    """Spread a prompt over silent windows. The gauges move when its first chunk is through.

    That was somewhere in the first of them if it began with nothing running, and the last chunk ended
    somewhere in the window that booked it: half a window each, with one chunk less between them.
    """
    last, first = windows[-1], windows[silent[-1]]
    began = not first.running[0]
    whole = silent[:-1] if began else silent
    span_ns = sum(windows[i].window_ns for i in whole) + last.window_ns / 2
    span_ns += first.window_ns / 2 if began else 0.0
    chunk_ns = span_ns / (chunks - 1 if began else chunks)
    times = {i: float(windows[i].window_ns) for i in whole}
    if began:
        before_ns = chunk_ns - first.window_ns / 2
        times[silent[-1]] = first.window_ns / 2 + min(chunk_ns, first.window_ns / 2)
        for i in range(silent[-1] - 1, -1, -1):
            if before_ns <= 0 or not windows[i].at_rest:
                break
            times[i] = min(before_ns, float(windows[i].window_ns))
            before_ns -= times[i]
    parts = [times.get(i, 0.0) for i in range(len(windows))]
    parts[-1] = last.window_ns / 2
    for i, ns in times.items():
        windows[i] = msgspec.structs.replace(windows[i], chunk_ns=ns)
    pace_ns = chunk_ns * chunks / (last.prefill_tokens or 1)
    return _move_tokens(windows, parts), pace_ns


def _move_tokens(windows: list[Sums], parts: Sequence[float]) -> list[Sums]:
    for i, tokens in enumerate(split(windows[-1].prefill_tokens or 0, parts)):
        if not tokens and i < len(windows) - 1:
            continue
        own = windows[i].prefill_tokens
        base = 0 if i == len(windows) - 1 else own
        windows[i] = msgspec.structs.replace(
            windows[i], prefill_tokens=None if base is None else base + tokens
        )
    return windows


def heard_ns(sums: Sums, prompts: float) -> float | None:
    """Return how long the steps with the prompts that ended here took, by the time to their first token.

    None where requests queue, or it is not told. Those that came together waited for each other: the mean of
    N steps is that of (N + 1) / 2.
    """
    heard, firsts = sums.time_to_first_token_s, sums.first_tokens
    if not heard or not firsts or any(sums.waiting):
        return None
    if (sums.running[1] or 0) < firsts:
        return heard * 1e9
    return heard * 1e9 / firsts * 2 * prompts / (prompts + 1)


def _by_first_token_time(
    windows: list[Sums], pace_ns: float | None, first: Sums | None = None, chunks: int = 1
) -> list[Sums]:
    """A prefill that no gauge shows fills the time to its first token, unless requests queue.

    Its end lies before the decodes of the window that booked it. `first` is the window in which the gauges
    showed that the first of its chunks was through.
    """
    last = windows[-1]
    prompts = float(min(last.first_tokens or 1, last.counted_steps or 1))
    span_ns = heard_ns(last, prompts)
    if span_ns is None:
        return windows
    if last.decode_row_ns is not None:
        pace_ns = min(last.decode_row_ns, pace_ns or last.decode_row_ns)
    decodes = max(0.0, (last.counted_steps or 0) - prompts) + (0.5 if last.running[1] else 0.0)
    earliest, latest = float(last.start_ns), last.end_ns - decodes * (pace_ns or 0.0)
    if first is not None:
        rest_ns = span_ns - span_ns / chunks
        earliest, latest = max(earliest, first.start_ns + rest_ns), min(latest, first.end_ns + rest_ns)
    elif pace_ns is not None and last.running[1]:
        earliest = latest
    end_ns = min(float(last.end_ns), max(float(last.start_ns), (earliest + latest) / 2))
    begun_ns = end_ns - span_ns
    overlaps = [
        0.0 if w.reset or w.counted_steps else max(0.0, min(end_ns, w.end_ns) - max(begun_ns, w.start_ns))
        for w in windows[:-1]
    ]
    here = max(0.0, min(span_ns, end_ns - last.start_ns))
    if not last.always_running:
        # None of it here is told as such, and not as unknown.
        last = windows[-1] = msgspec.structs.replace(last, chunk_ns=max(1.0, here))
    if sum(overlaps) <= 0:
        return windows
    for i, ns in enumerate(overlaps):
        windows[i] = msgspec.structs.replace(windows[i], chunk_ns=max(ns, windows[i].chunk_ns))
    return _move_tokens(windows, [*overlaps, max(1.0, here)])


class PrefillSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a window's counted steps had a prefill in them."""

    low: float
    estimate: float
    high: float
    counted_steps: int


def prefill_steps(
    sums: Sums,
    max_batched_tokens: int | None,
    busy_ns: float | None,
    pace_ns: float | None,
) -> PrefillSteps | None:
    """Bound the steps with a prefill among the counted steps of a window; None where they are not known.

    With S counted steps, n first tokens, P computed prompt tokens, budget b and R running decodes: at least
    ceil(P/b) (where all steps are counted), at most min(S, n + floor(P/(b-R)) + 1). Requests arrive by
    chance, and more of them in longer steps: with t the time of a decode-only step and m of one with a
    prefill, a step has a prefill with the probability a = 1 - e^(-rt) after the former and
    c = 1 - (1-q) e^(-rm) after the latter (q: a prompt does not fit one step), so that a share
    a / (a + 1 - c) of the steps has one, m following from the busy time. Requests that find the engine idle
    each begin a step.
    """
    steps, firsts, prompts = sums.counted_steps, sums.first_tokens, sums.prefill_tokens
    if steps is None or firsts is None or prompts is None:
        return None
    if sums.prompt_steps is not None and (firsts or sums.prompt_steps):
        return _told_steps(sums, steps, firsts, busy_ns, pace_ns)
    given = min(float(steps), sums.chunk_steps)
    if not firsts:
        return PrefillSteps(low=0.0, estimate=given, high=float(steps) if given else 0.0, counted_steps=steps)
    room = room_tokens(sums, max_batched_tokens)
    whole = sums.always_running
    chunks = 0.0 if room is None or max_batched_tokens is None else prompts / room
    high = float(steps) if room is None else min(float(steps), firsts + chunks // 1 + 1 + given)
    least = math.ceil(prompts / max_batched_tokens) if whole and max_batched_tokens else 1
    low = float(min(steps, max(1, least)))
    window_ns = float(max(1, sums.window_ns))
    busy = min(window_ns, window_ns if busy_ns is None else max(0.0, busy_ns))
    fresh = firsts * (1 - busy / window_ns)
    others = max(0.0, steps - fresh)
    mean = busy / steps if steps else busy
    pace = min(mean, pace_ns) if pace_ns else mean
    over = 0.0 if room is None or not prompts else math.exp(-room * firsts / prompts)
    by_chance = min(others, fresh + _by_chance(others, firsts, window_ns, busy, pace, over))
    estimate = max(by_chance, chunks if whole else 0.0) + given
    estimate = min(max(estimate, low), max(high, low))
    return PrefillSteps(low=low, estimate=estimate, high=max(high, low), counted_steps=steps)


def _told_steps(
    sums: Sums,
    steps: int,
    firsts: int,
    busy_ns: float | None,
    pace_ns: float | None,
) -> PrefillSteps:
    """Return the steps with a prefill where the engine tells its steps' sizes.

    Those that may have been either are taken for as many as chance would make.
    """
    told = min(float(steps), sum(count for _, count in sums.prompt_steps or ()))
    high = min(float(steps), told + sums.perhaps_steps)
    estimate = told
    window_ns = float(max(1, sums.window_ns))
    busy = window_ns if busy_ns is None else min(window_ns, busy_ns)
    if sums.perhaps_steps:
        pace = min(busy / steps, pace_ns) if pace_ns else busy / steps
        estimate = min(high, max(told, _by_chance(float(steps), firsts, window_ns, busy, pace, 0.0)))
    low, high = max(0.0, told - 2 * sums.chunk_spread), min(float(steps), high + 2 * sums.chunk_spread)
    return PrefillSteps(
        low=min(low, estimate), estimate=estimate, high=max(high, estimate), counted_steps=steps
    )


def _by_chance(
    steps: float, firsts: int, window_ns: float, busy_ns: float, pace_ns: float, over: float
) -> float:
    share = min(1.0, firsts / steps) if steps else 0.0
    if not steps:
        return 0.0
    starts = 1 - math.exp(-firsts / window_ns * pace_ns)
    for _ in range(12):
        longer = max(pace_ns, (busy_ns - (1 - share) * steps * pace_ns) / max(1e-9, share * steps))
        goes_on = 1 - (1 - over) * math.exp(-(firsts - 1) / window_ns * longer)
        was, share = share, starts / (starts + 1 - goes_on) if starts + 1 - goes_on > 0 else 1.0
        share = 0.5 * (was + share)
    return share * steps
