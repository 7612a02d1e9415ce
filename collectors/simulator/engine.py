"""Continuous batching with chunked prefill, as vLLM V1 schedules, and vLLM's counters with their traps.

Each step has a budget of tokens. Running sequences are served first, in order; what is left of the budget
goes to waiting ones, first come first served, so that a long prompt is computed in chunks beside the
decodes. KV is held in blocks; when none is free the youngest running sequence is preempted and its context
computed again later. A cached prefix costs neither time nor tokens, but each sequence holds its own blocks.
"""

from __future__ import annotations

from collections import deque
from random import Random

import msgspec

from gpuidle.collectors.simulator.arrivals import Feed
from gpuidle.collectors.simulator.costs import Cost, Costs, Load
from gpuidle.collectors.simulator.scenario import EngineSpec, Request, ScenarioError


class Sequence:
    """A request on its way through the engine."""

    __slots__ = (
        "blocks",
        "computed",
        "furthest",
        "outputs",
        "preempted",
        "prompt",
        "request",
        "room",
        "tag",
        "target",
    )

    def __init__(self, request: Request, tag: int) -> None:
        self.request = request
        self.tag = tag
        self.prompt = request.prompt_tokens
        self.outputs = 0
        self.target = request.prompt_tokens
        """Prompt and outputs so far: with their KV computed, the next token is handed out."""
        self.computed = 0
        """Leading tokens whose KV is in the cache."""
        self.furthest = 0
        """The most that `computed` has been: what lies before it is computed again after a preemption."""
        self.blocks = 0
        self.room = 0
        """Tokens that fit the blocks."""
        self.preempted = False


class Step(msgspec.Struct):
    """One forward pass. `ready_ns` is when the engine had work, `start_ns` when the GPU had it."""

    ready_ns: int
    start_ns: int
    end_ns: int
    prefill_tokens: int
    """Computed in chunks: prompts, and contexts again after a preemption."""
    fresh_prompt_tokens: int
    """Prompt tokens among them that had not been computed before."""
    recomputed_tokens: int
    decode_tokens: int
    delivered_tokens: int
    first_tokens: int
    sequences: int
    kv_tokens: int
    """Context found in the cache, summed over the sequences; the step's own tokens are not in it."""
    preemptions: int
    cost: Cost
    batch: list[tuple[Sequence, int]]
    prefix_query_tokens: int
    prefix_hit_tokens: int


class VllmCounters(msgspec.Struct):
    """What the engine tells on its metrics page: moved at the end of a step, gauges as they stood then."""

    prompt_tokens: int = 0
    """Whole prompts, on the step that ends them."""
    computed_prompt_tokens: int = 0
    """The same less prefix hits. Recomputation after a preemption is not in it."""
    generated_tokens: int = 0
    first_tokens: int = 0
    time_to_first_token_ns: int = 0
    counted_steps: int = 0
    """Steps that gave a token: one that only computes a chunk is not counted."""
    requests_running: int = 0
    """As set at the last step's end: 0 all through the first long prefill."""
    requests_waiting: int = 0
    kv_usage_ratio: float = 0.0
    prefix_query_tokens: int = 0
    """On scheduling, of requests that were not preempted."""
    prefix_hit_tokens: int = 0
    preemptions: int = 0


class Engine:
    """One engine from the start of the simulation on. `advance` is all there is to drive it."""

    def __init__(self, spec: EngineSpec, costs: Costs, seed: str) -> None:
        self.spec = spec
        self.counters = VllmCounters()
        self.pending: Step | None = None
        """The step that is on the GPU, or about to be; its end lies beyond the last `advance`."""
        self._costs = costs
        self._feed = Feed(spec.arrivals, seed)
        self._rng = Random(f"{seed}/jitter")  # noqa: S311 - a simulation
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._free_blocks = spec.kv_blocks
        self._free_ns = 0

    def advance(self, until_ns: int) -> list[Step]:
        """Run until `until_ns` and return the steps that ended by then, in order."""
        done: list[Step] = []
        while True:
            if self.pending is None:
                ready_ns = self._free_ns
                self._admit(ready_ns)
                if not self._running and not self._waiting:
                    arrival_ns = self._feed.next_ns()
                    if arrival_ns is None or arrival_ns > until_ns:
                        return done
                    ready_ns = arrival_ns
                    self._admit(ready_ns)
                self.pending = self._plan(ready_ns)
            step = self.pending
            if step.end_ns > until_ns:
                return done
            self._finish(step)
            self._free_ns = step.end_ns
            self.pending = None
            done.append(step)

    def _admit(self, at_ns: int) -> None:
        for request, tag in self._feed.take(at_ns):
            # The last token is handed out and never cached.
            longest = request.prompt_tokens + request.output_tokens - 1
            if longest > self.spec.kv_capacity_tokens:
                raise ScenarioError(
                    f"{self.spec.name}: a request of {longest} tokens of context never fits"
                    f" {self.spec.kv_capacity_tokens}"
                )
            self._waiting.append(Sequence(request, tag))

    def _plan(self, ready_ns: int) -> Step:
        """Schedule the next step: who computes how many tokens, and how long it takes."""
        batch: list[tuple[Sequence, int]] = []
        budget = self.spec.max_batched_tokens
        preemptions = 0
        running = self._running
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            tokens = sequence.target - sequence.computed
            tokens = min(tokens, budget)
            reach = sequence.computed + tokens
            while reach > sequence.room and not self._allocate(sequence, reach):
                victim = running.pop()
                self._preempt(victim)
                preemptions += 1
                if victim is sequence:
                    break
            else:
                batch.append((sequence, tokens))
                budget -= tokens
            index += 1
        queries = hits = 0
        while self._waiting and budget and not preemptions and len(running) < self.spec.max_sequences:
            sequence = self._waiting[0]
            hit = sequence.request.prefix_hit_tokens
            tokens = min(sequence.target - hit, budget)
            if not self._allocate(sequence, hit + tokens):
                break
            sequence.computed = hit
            if not sequence.preempted:
                sequence.furthest = hit
                queries += sequence.prompt
                hits += hit
            self._waiting.popleft()
            running.append(sequence)
            batch.append((sequence, tokens))
            budget -= tokens
        return self._step(ready_ns, batch, preemptions, queries, hits)

    def _allocate(self, sequence: Sequence, reach: int) -> bool:
        """Hold blocks for the first `reach` tokens of the sequence; False: they are not there."""
        blocks = -(-reach // self.spec.kv_block_tokens)
        if blocks - sequence.blocks > self._free_blocks:
            return False
        self._free_blocks -= blocks - sequence.blocks
        sequence.blocks = blocks
        sequence.room = blocks * self.spec.kv_block_tokens
        return True

    def _release(self, sequence: Sequence) -> None:
        self._free_blocks += sequence.blocks
        sequence.blocks = sequence.room = 0

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        sequence.preempted = True
        self._waiting.appendleft(sequence)

    def _step(
        self,
        ready_ns: int,
        batch: list[tuple[Sequence, int]],
        preemptions: int,
        queries: int,
        hits: int,
    ) -> Step:
        prefill = fresh = again = decode = delivered = first = kv = pairs = again_pairs = 0
        for sequence, tokens in batch:
            begin = sequence.computed
            kv += begin
            if tokens == 1 and begin == sequence.furthest and begin >= sequence.prompt:
                decode += 1
                delivered += 1
                pairs += begin + 1
                continue
            end = begin + tokens
            pairs += tokens * (begin + end + 1) // 2  # each query sees itself and all before it
            prefill += tokens
            repeated = min(end, sequence.furthest) - begin
            again += repeated
            again_pairs += repeated * (2 * begin + repeated + 1) // 2
            fresh += max(0, min(end, sequence.prompt) - begin - repeated)
            if end == sequence.target:
                delivered += 1
                first += not sequence.outputs
        load = Load(
            tokens=prefill + decode,
            logit_rows=delivered,
            attention_pairs=pairs,
            kv_tokens=kv,
            recomputed_tokens=again,
            recomputed_pairs=again_pairs,
        )
        slower = 1.0 + abs(self._rng.gauss(0.0, self.spec.jitter)) if self.spec.jitter else 1.0
        cost = self._costs.of(load, slower)
        start_ns = ready_ns + self.spec.host_gap_ns
        return Step(
            ready_ns=ready_ns,
            start_ns=start_ns,
            end_ns=start_ns + cost.duration_ns,
            prefill_tokens=prefill,
            fresh_prompt_tokens=fresh,
            recomputed_tokens=again,
            decode_tokens=decode,
            delivered_tokens=delivered,
            first_tokens=first,
            sequences=len(batch),
            kv_tokens=kv,
            preemptions=preemptions,
            cost=cost,
            batch=batch,
            prefix_query_tokens=queries,
            prefix_hit_tokens=hits,
        )

    def _finish(self, step: Step) -> None:
        """Hand out the step's tokens, let finished requests go, and move the counters."""
        counters = self.counters
        ended = False
        for sequence, tokens in step.batch:
            computed = sequence.computed = sequence.computed + tokens
            sequence.furthest = max(sequence.furthest, computed)
            if computed < sequence.target:
                continue
            sequence.outputs += 1
            sequence.target += 1
            if sequence.outputs == 1:
                counters.prompt_tokens += sequence.prompt
                counters.computed_prompt_tokens += sequence.prompt - sequence.request.prefix_hit_tokens
                counters.time_to_first_token_ns += step.end_ns - sequence.request.arrival_ns
            if sequence.outputs == sequence.request.output_tokens:
                ended = True
                self._release(sequence)
                self._feed.finished(sequence.tag, step.end_ns)
        if ended:
            self._running = [s for s in self._running if s.outputs < s.request.output_tokens]
        counters.generated_tokens += step.delivered_tokens
        counters.first_tokens += step.first_tokens
        counters.counted_steps += step.delivered_tokens > 0
        counters.requests_running = len(self._running)
        counters.requests_waiting = len(self._waiting)
        counters.kv_usage_ratio = 1.0 - self._free_blocks / self.spec.kv_blocks
        counters.prefix_query_tokens += step.prefix_query_tokens
        counters.prefix_hit_tokens += step.prefix_hit_tokens
        counters.preemptions += step.preemptions
