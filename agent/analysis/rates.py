"""From cumulative engine counters to sums of one window, with resets, restarts and late tokens.

An engine's counters are exact sums but tell nothing about when inside the window they moved, and a prompt
that is computed in chunks is booked whole at its last chunk (vLLM): see `prompts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from gpuidle.agent.model import EngineCounters, EngineReading, Problem

MEMORY_PROMPTS = 300.0
"""After this many prompts a window's weight has fallen to 1/e."""
ENOUGH_WINDOWS = 8.0
"""Windows with prompts before their spread is believed."""
USUAL_SPREAD, LARGEST_SPREAD = 0.6, 3.0
"""Variance of prompt sizes over their squared mean: 0.9 in Azure's traces, up to 0.3 where sizes are even."""
SHORT_NS = 500_000_000
"""In a longer window another request may have come for one that went, with the same number running."""
TOKENS_PER_S_LIMIT = 1e8
"""More than a whole rack can do: a counter that moves faster is no counter."""


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did in one window, all its cores together. None: the engine does not tell."""

    start_ns: int
    end_ns: int
    cores: int = 1
    """Data-parallel cores that the sums are of: behind an outer balancer it may be one of many."""
    whole_batch: bool = True
    """Whether each step is of all running requests; in a pipeline it is of a part of them."""
    prefill_tokens: int | None
    """Prompt tokens computed."""
    prefill_exact: bool
    """False: the engine does not tell cached prompt tokens apart; this is by its cache's hit ratio, or an
    upper bound where that is not told either."""
    generated_tokens: int | None
    first_tokens: int | None
    whole_prompt_tokens: float | None = None
    """Mean size of the prompts that ended here, with their chunks in other windows; None: none did."""
    time_to_first_token_s: float | None
    inter_token_s: float | None = None
    """Sum of the times from one decode of a request to the next that ended here."""
    counted_steps: int | None
    steps_by_tokens: tuple[tuple[int, int], ...] | None = None
    """Counted steps of at most so many tokens, cumulative; a step's tokens are those handed out and the whole
    prompts that it ended."""
    drafts: int | None = None
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
    prompt_steps: tuple[tuple[float, float], ...] | None = None
    """Of the counted steps, those that computed prompts: (tokens, steps); None: the engine does not tell."""
    chunk_spread: float = 0.0
    """Standard deviation of how many of `prompt_steps` computed only chunks."""
    perhaps_steps: float = 0.0
    """Steps beside `prompt_steps` that may have been such."""
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
    def decode_rows(self) -> int | None:
        """Rows of its steps that gave tokens to requests which had their first; one whatever it drafted.

        None with drafts of which not all is told.
        """
        tokens, accepted = self.decode_tokens, self.accepted_tokens if self.drafts else 0
        return None if tokens is None or accepted is None else max(0, tokens - accepted)

    @property
    def decode_row_ns(self) -> float | None:
        """Mean time of a step that decodes, from end to end, by the engine's own clock; None: not told.

        Steps with a prompt beside their decodes are among them. A request that was preempted waited longer.
        """
        rows = self.decode_rows
        if not self.inter_token_s or not rows or self.reset or self.preemptions or not self.whole_batch:
            return None
        return self.inter_token_s * 1e9 / rows

    @property
    def moved(self) -> bool:
        """Whether any token moved."""
        return bool(self.prefill_tokens or self.generated_tokens or self.first_tokens)

    @property
    def at_rest(self) -> bool:
        """Nothing running, nothing waiting at both edges, and no token moved: all of it known."""
        if self.moved or self.reset or self.prefill_tokens is None or self.generated_tokens is None:
            return False
        return all(value == 0 for value in (*self.running, *self.waiting))

    @property
    def silent_rows(self) -> int | None:
        """Rows of its steps that gave no token: those of requests whose prompts are not through.

        Told of short windows at both edges of which as many run, and where no prompt ended: each of their
        decodes gives a token a step. None where requests came or went, or drafts are not told in full.
        """
        rows, end = self.running
        if rows is None or rows != end or self.cores > 1 or self.reset or self.counted_steps is None:
            return None
        if self.window_ns > SHORT_NS or self.preemptions or not self.whole_batch:
            return None
        if self.generated_tokens is None or self.first_tokens != 0 or self.prefill_tokens != 0:
            return None
        given = self.decode_rows
        return None if given is None else max(0, rows * self.counted_steps - given)

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
    "inter_token_latency_s",
    "counted_steps",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "prefix_query_tokens",
    "prefix_hit_tokens",
)


_told = attrgetter(*_SUMMED)


def _totals(rows: Sequence[EngineCounters]) -> Sequence[float | None]:
    """Return the sums over the cores of what is summed, each None if any of them does not tell."""
    if len(rows) == 1:
        told: Sequence[float | None] = _told(rows[0])
        return told
    return [total(rows, field) for field in _SUMMED]


def total(rows: Sequence[EngineCounters], field: str) -> float | None:
    """Return the sum of `field` over the cores; None if any of them does not tell."""
    if len(rows) == 1:
        only: float | None = getattr(rows[0], field)
        return only
    values = [getattr(row, field) for row in rows]
    return None if not values or any(value is None for value in values) else sum(values)


def mean(rows: Sequence[EngineCounters], field: str) -> float | None:
    """Return the mean of `field` over the cores; None if any of them does not tell."""
    whole = total(rows, field)
    return None if whole is None else whole / len(rows)


def _by_tokens(rows: Sequence[EngineCounters]) -> dict[int, int] | None:
    """Return the histogram of all cores together; None where one has none, or other buckets."""
    whole: dict[int, int] | None = None
    for row in rows:
        one = None if row.steps_by_tokens is None else dict(row.steps_by_tokens)
        if one is None or (whole is not None and one.keys() != whole.keys()):
            return None
        whole = one if whole is None else {tokens: steps + one[tokens] for tokens, steps in whole.items()}
    return whole


def _steps_by_tokens(
    old: Sequence[EngineCounters], new: Sequence[EngineCounters]
) -> tuple[tuple[int, int], ...] | None:
    was, now = _by_tokens(old), _by_tokens(new)
    if now is None or was is None or was.keys() != now.keys():
        return None
    if any(now[tokens] < was[tokens] for tokens in now):
        return None
    return tuple((tokens, steps - was[tokens]) for tokens, steps in now.items())


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _baselines(
    before: EngineReading, after: EngineReading
) -> tuple[list[EngineCounters], list[EngineCounters], bool]:
    """Return the rows to count from, the rows to count to, and whether any of them began anew.

    A core of another process than before, or one of whose counters fell, counts from 0. A core that was not
    seen before has no baseline and is left out, as is one that is gone (elastic data parallelism).
    """
    anew = before.root_pid != after.root_pid or before.root_start_ns != after.root_start_ns
    old = {row.rank: row for row in before.counters or ()}
    froms, tos, reset = [], [], anew
    for row in after.counters or ():
        past = old.get(row.rank)
        if anew or (past is not None and _fell(past, row)):
            past, reset = _zero(row), True
        if past is not None:
            froms.append(past)
            tos.append(row)
    return froms, tos, reset


def _fell(past: EngineCounters, row: EngineCounters) -> bool:
    pairs = zip(_told(past), _told(row), strict=True)
    return any(was is not None and now is not None and now < was for was, now in pairs)


def _zero(row: EngineCounters) -> EngineCounters:
    """Return the counters of a core that has done nothing yet."""
    told = {field: 0 for field in _SUMMED if getattr(row, field) is not None}
    buckets = row.steps_by_tokens
    none_yet = None if buckets is None else tuple((tokens, 0) for tokens, _ in buckets)
    return EngineCounters(rank=row.rank, read_ns=row.read_ns, steps_by_tokens=none_yet, **told)  # type: ignore[arg-type]


def sums_between(
    before: EngineReading, after: EngineReading, cached_ratio: float | None = None
) -> tuple[Sums | None, tuple[Problem, ...]]:
    """Return what the engine did between two readings of it.

    After a restart (another root process, or any counter below its last value) a core counts from 0: its
    counters began anew inside the window. Implausible jumps give no sums and a Problem. `cached_ratio` is the
    share of prompt tokens that the prefix cache has had of late, for engines that do not tell the computed
    ones in each reading; None: not known.
    """
    if not before.counters or not after.counters:
        return None, ()
    start_ns = max(row.read_ns for row in before.counters)
    end_ns = max(row.read_ns for row in after.counters)
    old, new, reset = _baselines(before, after)
    if end_ns <= start_ns or not new:
        return None, ()
    delta = {
        field: None if now is None or was is None else now - was
        for field, was, now in zip(_SUMMED, _totals(old), _totals(new), strict=True)
    }
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
        # Hits count when a request is scheduled, once more if it has to wait, and prompts when it is through:
        # their ratio is right on average, and only without a hit exact.
        prompts, hits, queries = (
            delta[field] for field in ("prompt_tokens", "prefix_hit_tokens", "prefix_query_tokens")
        )
        ratio = hits / queries if hits is not None and queries else cached_ratio
        computed = None if prompts is None else prompts * (1 - min(1.0, ratio or 0.0))
        exact = prompts == 0 or (hits == 0 and queries is not None)
    # The gauges are those of all cores that stand at an edge.
    first, last = () if reset else before.counters, after.counters
    return (
        Sums(
            start_ns=start_ns,
            end_ns=end_ns,
            cores=len(new),
            whole_batch=after.parallelism.pipeline == 1,
            prefill_tokens=_whole(computed),
            prefill_exact=exact,
            generated_tokens=_whole(delta["generated_tokens"]),
            first_tokens=_whole(delta["first_tokens"]),
            whole_prompt_tokens=computed / firsts if computed and (firsts := delta["first_tokens"]) else None,
            time_to_first_token_s=delta["time_to_first_token_s"],
            inter_token_s=delta["inter_token_latency_s"],
            counted_steps=_whole(delta["counted_steps"]) if after.steps_reliable else None,
            steps_by_tokens=_steps_by_tokens(old, new) if after.steps_reliable else None,
            drafts=_whole(delta["drafts"]),
            draft_tokens=_whole(delta["draft_tokens"]),
            accepted_tokens=_whole(delta["accepted_tokens"]),
            preemptions=_whole(delta["preemptions"]),
            prefix_query_tokens=_whole(delta["prefix_query_tokens"]),
            prefix_hit_tokens=_whole(delta["prefix_hit_tokens"]),
            running=(_whole(total(first, "requests_running")), _whole(total(last, "requests_running"))),
            waiting=(_whole(total(first, "requests_waiting")), _whole(total(last, "requests_waiting"))),
            kv_usage_ratio=(mean(first, "kv_usage_ratio"), mean(last, "kv_usage_ratio")),
            reset=reset,
        ),
        (),
    )
