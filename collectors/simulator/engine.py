"""Continuous batching with chunked prefill, as vLLM V1 schedules, and vLLM's counters with their traps.

Each step has a budget of tokens. Running sequences are served first, in order; what is left of the budget
goes to waiting ones, first come first served, so that a long prompt is computed in chunks beside the
decodes. KV is held in blocks; when none is free the youngest running sequence is preempted and its context
computed again later. A cached prefix costs neither time nor tokens, but each sequence holds its own blocks.

With speculation a decoding sequence brings its drafts: the step verifies 1 + k rows of it and hands out those
that hold. Whether they do is drawn when the step is planned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from random import Random

import msgspec

from gpuidle.agent.model import Cause
from gpuidle.collectors.simulator.arrivals import Feed
from gpuidle.collectors.simulator.batch import STEP_TOKENS, Sequence, Step, VllmCounters, cut
from gpuidle.collectors.simulator.costs import SHEET, Clock, Costs, Load
from gpuidle.collectors.simulator.options import Restart
from gpuidle.collectors.simulator.scenario import EngineSpec, Request, ScenarioError


def _sheet_clocks(_at_ns: int) -> tuple[Clock, ...]:
    return (SHEET,)


class Engine:
    """One engine from the start of the simulation on. `advance` drives it, unless it shares its GPUs.

    Args:
        spec: The engine.
        costs: Of its steps.
        seed: All that is drawn comes from it.
        clocks: What the clocks are at a moment: one for all its GPUs, or one for each.
        restarts: When it dies and comes back, in order.
        late_ns: By how much its counters are late.
    """

    def __init__(
        self,
        spec: EngineSpec,
        costs: Costs,
        seed: str,
        *,
        clocks: Callable[[int], Several[Clock]] = _sheet_clocks,
        restarts: Several[Restart] = (),
        late_ns: int = 0,
    ) -> None:
        self.spec = spec
        self.counters = VllmCounters()
        self.pending: Step | None = None
        """The step that is on the GPU, or about to be; its end lies beyond the last `advance`."""
        self.spans: list[tuple[int, int, Cause]] = []
        """Times in which the GPU is idle for another reason than a lack of requests."""
        self.handed: list[tuple[int, Request]] = []
        """Requests that go on elsewhere, with the moment; the node takes them from here."""
        self.lives: list[Restart] = []
        """The restarts that came to pass."""
        self._costs = costs
        self._clocks = clocks
        self._feed = Feed(spec.arrivals, seed)
        self._rng = Random(f"{seed}/jitter")  # noqa: S311 - a simulation
        self._luck = Random(f"{seed}/accept")  # noqa: S311
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._free_blocks = spec.kv_blocks
        self._free_ns = 0
        self._scheduled_ns = 0
        """When the host began with the next step."""
        self._restarts = deque(restarts)
        self._late_ns = late_ns
        self._past: deque[tuple[int, VllmCounters]] = deque()

    def advance(self, until_ns: int) -> list[Step]:
        """Run until `until_ns` and return the steps that ended by then, in order."""
        done: list[Step] = []
        while self._restarts and self._restarts[0].at_ns <= until_ns:
            restart = self._restarts.popleft()
            done += self._run(restart.at_ns)
            done += self._die(restart)
        return done + self._run(until_ns)

    def receive(self, request: Request, sent_ns: int) -> None:
        """Take over a request whose KV is under way since `sent_ns`; it can run once it has arrived."""
        self._feed.give(request)
        self.spans.append((sent_ns, request.arrival_ns, "waiting_peer"))

    def transferring(self, at_ns: int) -> int:
        """Return how many requests wait for their KV."""
        return sum(cause == "waiting_peer" and begin <= at_ns < end for begin, end, cause in self.spans)

    def told(self, at_ns: int) -> VllmCounters:
        """Return the counters as they are told at `at_ns`, the moment of the last `advance`."""
        if not self._late_ns:
            return self.counters
        while len(self._past) > 1 and self._past[1][0] <= at_ns - self._late_ns:
            self._past.popleft()
        reached = bool(self._past) and self._past[0][0] <= at_ns - self._late_ns
        return self._past[0][1] if reached else VllmCounters()

    def peek(self, until_ns: int) -> Step | None:
        """Return the step that runs, or the next one if it is ready by `until_ns`; then plan it."""
        if self.pending is not None:
            return self.pending
        ready_ns = self._free_ns
        hidden = self.spec.async_scheduling and self._scheduled_ns > 0
        self._admit(self._scheduled_ns if hidden else ready_ns)
        if not self._running and not self._waiting:
            arrival_ns = self._feed.next_ns()
            if arrival_ns is None or arrival_ns > until_ns:
                return None
            hidden = False
            ready_ns = max(ready_ns, arrival_ns)
            self._admit(ready_ns)
        gap_from_ns = self._scheduled_ns if hidden else ready_ns
        start_ns = max(ready_ns, gap_from_ns + self.spec.host_gap_ns)
        self.pending = self._plan(ready_ns, start_ns)
        self._scheduled_ns = start_ns
        return self.pending

    def complete(self, step: Step) -> None:
        """End the step that runs, at its `end_ns`."""
        self._finish(step)
        self._free_ns = step.end_ns
        self.pending = None
        if self._late_ns:
            told = msgspec.structs.replace(self.counters, steps_by_tokens=list(self.counters.steps_by_tokens))
            self._past.append((step.end_ns, told))

    def _run(self, until_ns: int) -> list[Step]:
        done: list[Step] = []
        while True:
            step = self.peek(until_ns)
            if step is None or step.end_ns > until_ns:
                return done
            self.complete(step)
            done.append(step)

    def _die(self, restart: Restart) -> list[Step]:
        """Lose everything; return the step that was under way, cut off."""
        at_ns, step = restart.at_ns, self.pending
        died = []
        if step is not None and step.start_ns < at_ns:
            died.append(cut(step, at_ns))
        self.pending = None
        for sequence in (*self._running, *self._waiting):
            self._feed.finished(sequence.tag, restart.back_ns)
        for _, tag in self._feed.take(restart.back_ns - 1):
            self._feed.finished(tag, restart.back_ns)
        self._running, self._waiting = [], deque()
        self._free_blocks = self.spec.kv_blocks
        self._free_ns, self._scheduled_ns = restart.back_ns, 0
        self.counters = VllmCounters()
        self._past.clear()
        loading_ns = at_ns + restart.gone_ns
        self.spans += [(at_ns, loading_ns, "unallocated"), (loading_ns, restart.back_ns, "starting")]
        self.lives.append(restart)
        return died

    def _admit(self, at_ns: int) -> None:
        drafts = 0 if self.spec.speculation is None else len(self.spec.speculation.acceptance)
        for request, tag in self._feed.take(at_ns):
            wanted = 1 if self.spec.hands_to is not None else request.output_tokens
            # The last token is handed out and never cached.
            longest = request.prompt_tokens + wanted - 1 + drafts
            if longest > self.spec.kv_capacity_tokens:
                raise ScenarioError(
                    f"{self.spec.name}: a request of {longest} tokens of context never fits"
                    f" {self.spec.kv_capacity_tokens}"
                )
            self._waiting.append(Sequence(request, tag, wanted))

    def _plan(self, ready_ns: int, start_ns: int) -> Step:
        """Schedule the next step: who computes how many tokens, and how long it takes."""
        batch: list[tuple[Sequence, int]] = []
        budget = self.spec.max_batched_tokens
        preemptions = 0
        running = self._running
        index = 0
        while index < len(running) and budget:
            sequence = running[index]
            tokens = sequence.target - sequence.computed + sequence.drafts
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
            if not sequence.preempted:
                hit += sequence.request.transferred_tokens
            tokens = min(sequence.target - hit, budget)
            if not self._allocate(sequence, hit + tokens):
                break
            sequence.computed = hit
            if not sequence.preempted:
                sequence.furthest = hit
                queries += sequence.prompt
                hits += sequence.request.prefix_hit_tokens
            self._waiting.popleft()
            running.append(sequence)
            batch.append((sequence, tokens))
            budget -= tokens
        return self._step(ready_ns, start_ns, batch, preemptions, queries, hits)

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
        sequence.computed = sequence.drafts = 0
        sequence.preempted = True
        self._waiting.appendleft(sequence)

    def _step(
        self,
        ready_ns: int,
        start_ns: int,
        batch: list[tuple[Sequence, int]],
        preemptions: int,
        queries: int,
        hits: int,
    ) -> Step:
        prefill = fresh = again = decode = delivered = first = kv = pairs = again_pairs = 0
        drafts = draft_tokens = accepted_tokens = drafting = drafting_kv = ends = rejected_pairs = 0
        for sequence, tokens in batch:
            begin = sequence.computed
            end = begin + tokens
            kv += begin
            pairs += tokens * (begin + end + 1) // 2  # each query sees itself and all before it
            if begin == sequence.furthest and begin >= sequence.prompt:
                accepted = self._accepted(tokens - 1)
                gained = min(1 + accepted, sequence.wanted - sequence.outputs)
                sequence.grown = sequence.gained = gained
                decode += tokens
                delivered += gained
                drafts += tokens > 1
                draft_tokens += tokens - 1
                accepted_tokens += accepted
                rejected_pairs += (tokens - gained) * (begin + gained + end + 1) // 2
            else:
                prefill += tokens
                repeated = min(end, sequence.furthest) - begin
                again += repeated
                again_pairs += repeated * (2 * begin + repeated + 1) // 2
                fresh += max(0, min(end, sequence.prompt) - begin - repeated)
                sequence.grown = tokens
                sequence.gained = int(end == sequence.target)
                ends += sequence.gained
                delivered += sequence.gained
                first += bool(sequence.gained) and not sequence.outputs
            if sequence.gained and sequence.outputs + sequence.gained < sequence.wanted:
                drafting += 1
                drafting_kv += begin + sequence.grown
        load = Load(
            tokens=prefill + decode,
            logit_rows=decode + ends,
            attention_pairs=pairs,
            kv_tokens=kv,
            recomputed_tokens=again,
            recomputed_pairs=again_pairs,
            rejected_rows=decode + ends - delivered,
            rejected_pairs=rejected_pairs,
            drafting=drafting,
            drafting_kv_tokens=drafting_kv,
        )
        slower = 1.0 + abs(self._rng.gauss(0.0, self.spec.jitter)) if self.spec.jitter else 1.0
        ranks = self._costs.by_rank(load, slower, self._clocks(start_ns))
        return Step(
            ready_ns=ready_ns,
            start_ns=start_ns,
            end_ns=start_ns + ranks[0].duration_ns,
            prefill_tokens=prefill,
            fresh_prompt_tokens=fresh,
            recomputed_tokens=again,
            decode_tokens=decode,
            delivered_tokens=delivered,
            first_tokens=first,
            sequences=len(batch),
            kv_tokens=kv,
            preemptions=preemptions,
            cost=ranks[0],
            batch=batch,
            prefix_query_tokens=queries,
            prefix_hit_tokens=hits,
            drafts=drafts,
            draft_tokens=draft_tokens,
            accepted_tokens=accepted_tokens,
            ranks=ranks if len(ranks) > 1 else (),
        )

    def _accepted(self, drafts: int) -> int:
        """Draw how many of a sequence's drafts hold: all before the first that does not."""
        if drafts and self.spec.speculation is not None:
            for place, chance in enumerate(self.spec.speculation.acceptance[:drafts]):
                if self._luck.random() >= chance:
                    return place
        return drafts

    def _finish(self, step: Step) -> None:
        """Hand out the step's tokens, let finished requests go, and move the counters."""
        counters = self.counters
        told = step.delivered_tokens
        drafts = 0 if self.spec.speculation is None else len(self.spec.speculation.acceptance)
        ended = False
        for sequence, _ in step.batch:
            sequence.computed += sequence.grown
            sequence.furthest = max(sequence.furthest, sequence.computed)
            if not sequence.gained:
                continue
            if not sequence.outputs:
                request = sequence.request
                computed = sequence.prompt - request.prefix_hit_tokens - request.transferred_tokens
                counters.prompt_tokens += sequence.prompt
                counters.computed_prompt_tokens += computed
                told += computed
                counters.time_to_first_token_ns += step.end_ns - request.arrival_ns
            else:
                counters.inter_token_ns += step.end_ns - sequence.last_ns
            sequence.last_ns = step.end_ns
            sequence.outputs += sequence.gained
            sequence.target += sequence.gained
            sequence.drafts = drafts
            if sequence.outputs == sequence.wanted:
                ended = True
                self._release(sequence)
                self._feed.finished(sequence.tag, step.end_ns)
                if self.spec.hands_to is not None and sequence.request.output_tokens > 1:
                    self.handed.append((step.end_ns, sequence.request))
        if ended:
            self._running = [s for s in self._running if s.outputs < s.wanted]
        counters.generated_tokens += step.delivered_tokens
        counters.first_tokens += step.first_tokens
        counters.counted_steps += step.delivered_tokens > 0
        if 0 < told <= STEP_TOKENS[-1]:
            counters.steps_by_tokens[bisect_left(STEP_TOKENS, told)] += 1
        counters.requests_running = len(self._running)
        counters.requests_waiting = len(self._waiting)
        counters.kv_usage_ratio = 1.0 - self._free_blocks / self.spec.kv_blocks
        counters.prefix_query_tokens += step.prefix_query_tokens
        counters.prefix_hit_tokens += step.prefix_hit_tokens
        counters.preemptions += step.preemptions
        counters.drafts += step.drafts
        counters.draft_tokens += step.draft_tokens
        counters.accepted_tokens += step.accepted_tokens
