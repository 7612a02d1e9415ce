"""From cumulative engine counters to sums of one window, with resets, restarts and late tokens.

An engine's counters are exact sums but tell nothing about when inside the window they moved, and a prompt
that is computed in chunks is booked whole at its last chunk (vLLM): see `prompts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gpuidle.agent.model import EngineCounters, EngineReading, Problem

MEMORY_PROMPTS = 300.0
"""After this many prompts a window's weight has fallen to 1/e."""
ENOUGH_WINDOWS = 8.0
"""Windows with prompts before their spread is believed."""
USUAL_SPREAD, LARGEST_SPREAD = 0.6, 3.0
"""Variance of prompt sizes over their squared mean: 0.9 in Azure's traces, up to 0.3 where sizes are even."""
TOKENS_PER_S_LIMIT = 1e8
"""More than a whole rack can do: a counter that moves faster is no counter."""


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did in one window, all its cores together. None: the engine does not tell."""

    start_ns: int
    end_ns: int
    prefill_tokens: int | None
    """Prompt tokens computed."""
    prefill_exact: bool
    """False: the engine does not tell cached prompt tokens apart, this is an upper bound."""
    generated_tokens: int | None
    first_tokens: int | None
    whole_prompt_tokens: float | None = None
    """Mean size of the prompts that ended here, with their chunks in other windows; None: none did."""
    time_to_first_token_s: float | None
    counted_steps: int | None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    preemptions: int | None = None
    prefix_query_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    running: tuple[int | None, int | None] = (None, None)
    """At the two edges."""
    waiting: tuple[int | None, int | None] = (None, None)
    kv_usage_ratio: tuple[float | None, float | None] = (None, None)
    reset: bool = False
    """The engine restarted inside the window: the sums cover the part after it only."""
    chunk_steps: float = 0.0
    """Of the counted steps, those that computed chunks of prompts which ended in later windows."""
    chunk_ns: float = 0.0
    """Time of steps that the engine did not count, as no token came of them: chunks of such prompts."""

    @property
    def window_ns(self) -> int:
        """Length of the window."""
        return self.end_ns - self.start_ns

    @property
    def decode_tokens(self) -> int | None:
        """Tokens that a decode made: a request's first token comes from its prefill."""
        if self.generated_tokens is None or self.first_tokens is None:
            return None
        return max(0, self.generated_tokens - self.first_tokens)

    @property
    def moved(self) -> bool:
        """Whether any token moved."""
        return bool(self.prefill_tokens or self.generated_tokens or self.first_tokens)

    @property
    def at_rest(self) -> bool:
        """Nothing running, nothing waiting at both edges, and no token moved: all of it known."""
        gauges = (*self.running, *self.waiting)
        known = self.prefill_tokens is not None and self.generated_tokens is not None
        return known and not self.moved and not self.reset and all(value == 0 for value in gauges)

    @property
    def always_running(self) -> bool:
        """Requests were running at both edges."""
        return all(value is not None and value > 0 for value in self.running)


class PromptSizes:
    """Mean and variance of the prompts of one engine, learned from windows that hold several each.

    With n prompts of P tokens in a window, of a mean L and a variance V, P^2/n is V + n L^2 on average: so V
    follows from sums alone.
    """

    def __init__(self) -> None:
        self._windows = self._prompts = self._tokens = self._squares = 0.0

    def learn(self, sums: Sums) -> None:
        """Take a window as the engine booked it, before chunks are given back."""
        firsts, tokens = sums.first_tokens, sums.prefill_tokens
        if not firsts or not tokens or sums.reset:
            return
        fade = math.exp(-firsts / MEMORY_PROMPTS)
        self._windows = self._windows * fade + 1
        self._prompts = self._prompts * fade + firsts
        self._tokens = self._tokens * fade + tokens
        self._squares = self._squares * fade + tokens * tokens / firsts

    def mean(self) -> float | None:
        """Return the mean size; None before the first prompt."""
        return self._tokens / self._prompts if self._prompts else None

    def spread(self) -> float:
        """Return the variance over the square of the mean."""
        if self._windows < ENOUGH_WINDOWS:
            return USUAL_SPREAD
        mean = self._tokens / self._prompts
        variance = (self._squares - self._tokens * mean) / self._windows
        return min(LARGEST_SPREAD, max(0.0, variance / (mean * mean)))


_SUMMED = (
    "prompt_tokens",
    "computed_prompt_tokens",
    "generated_tokens",
    "first_tokens",
    "time_to_first_token_s",
    "counted_steps",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "prefix_query_tokens",
    "prefix_hit_tokens",
)


def total(rows: Sequence[EngineCounters], field: str) -> float | None:
    """Return the sum of `field` over the cores; None if any of them does not tell."""
    values = [getattr(row, field) for row in rows]
    return None if not values or any(value is None for value in values) else sum(values)


def mean(rows: Sequence[EngineCounters], field: str) -> float | None:
    """Return the mean of `field` over the cores; None if any of them does not tell."""
    whole = total(rows, field)
    return None if whole is None else whole / len(rows)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def restarted(before: EngineReading, after: EngineReading) -> bool:
    """Whether the engine is another process than before, or one of its counters fell."""
    if before.root_pid != after.root_pid or before.root_start_ns != after.root_start_ns:
        return True
    old = {row.rank: row for row in before.counters or ()}
    for row in after.counters or ():
        past = old.get(row.rank)
        for field in _SUMMED if past else ():
            was, now = getattr(past, field), getattr(row, field)
            if was is not None and now is not None and now < was:
                return True
    return False


def sums_between(before: EngineReading, after: EngineReading) -> tuple[Sums | None, tuple[Problem, ...]]:
    """Return what the engine did between two readings of it.

    A restart (another root process, or any counter below its last value) makes the window count from 0: the
    engine's counters began anew inside it. Implausible jumps give no sums and a Problem.
    """
    old, new = before.counters, after.counters
    if not old or not new:
        return None, ()
    start_ns = max(row.read_ns for row in old)
    end_ns = max(row.read_ns for row in new)
    if end_ns <= start_ns:
        return None, ()
    reset = restarted(before, after) or {r.rank for r in old} != {r.rank for r in new}
    delta: dict[str, float | None] = {}
    for field in _SUMMED:
        was, now = total(old, field), total(new, field)
        delta[field] = None if now is None else now if reset else None if was is None else now - was
    window_s = (end_ns - start_ns) / 1e9
    for field in ("prompt_tokens", "computed_prompt_tokens", "generated_tokens", "counted_steps"):
        moved = delta[field]
        if moved is not None and moved > TOKENS_PER_S_LIMIT * window_s:
            problem = Problem(
                source=after.engine,
                kind="bad_reading",
                message=f"{field} moved by {moved:.3g} in {window_s:.1f} s: not believed",
                remedy="check that the endpoint is the engine it says it is",
                subject=after.engine_id,
            )
            return None, (problem,)
    computed = delta["computed_prompt_tokens"]
    exact = computed is not None
    if delta["first_tokens"] is None and computed == 0:
        delta["first_tokens"] = 0  # each first token needs a prompt token computed for it
    if computed is None:
        prompts, hits = delta["prompt_tokens"], delta["prefix_hit_tokens"]
        computed = None if prompts is None else max(0, prompts - (hits or 0))
        # Hits count when a request is scheduled and prompts when it is through: only without a hit exact.
        exact = prompts == 0 or hits == 0
    rest: tuple[Sequence[EngineCounters], ...] = ((), new) if reset else (old, new)
    return (
        Sums(
            start_ns=start_ns,
            end_ns=end_ns,
            prefill_tokens=_whole(computed),
            prefill_exact=exact,
            generated_tokens=_whole(delta["generated_tokens"]),
            first_tokens=_whole(delta["first_tokens"]),
            whole_prompt_tokens=computed / firsts if computed and (firsts := delta["first_tokens"]) else None,
            time_to_first_token_s=delta["time_to_first_token_s"],
            counted_steps=_whole(delta["counted_steps"]) if after.steps_reliable else None,
            draft_tokens=_whole(delta["draft_tokens"]),
            accepted_tokens=_whole(delta["accepted_tokens"]),
            preemptions=_whole(delta["preemptions"]),
            prefix_query_tokens=_whole(delta["prefix_query_tokens"]),
            prefix_hit_tokens=_whole(delta["prefix_hit_tokens"]),
            running=(_whole(total(rest[0], "requests_running")), _whole(total(new, "requests_running"))),
            waiting=(_whole(total(rest[0], "requests_waiting")), _whole(total(new, "requests_waiting"))),
            kv_usage_ratio=(mean(rest[0], "kv_usage_ratio"), mean(new, "kv_usage_ratio")),
            reset=reset,
        ),
        (),
    )
