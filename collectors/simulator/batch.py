"""What an engine's scheduler deals with: sequences, steps that compute parts of them, counters they move."""

from __future__ import annotations

import msgspec

from gpuidle.collectors.simulator.costs import Cost
from gpuidle.collectors.simulator.scenario import Request


class Sequence:
    """A request on its way through the engine."""

    __slots__ = (
        "blocks",
        "computed",
        "drafts",
        "furthest",
        "gained",
        "grown",
        "last_ns",
        "outputs",
        "preempted",
        "prompt",
        "request",
        "room",
        "tag",
        "target",
        "wanted",
    )

    def __init__(self, request: Request, tag: int, wanted: int) -> None:
        self.request = request
        self.tag = tag
        self.prompt = request.prompt_tokens
        self.wanted = wanted
        """Tokens that this engine hands out."""
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
        self.last_ns = 0
        """When its last token was handed out."""
        self.drafts = 0
        """Rows that the next step verifies beside the last token."""
        self.grown = self.gained = 0
        """What the step that is under way adds: to `computed`, and to `outputs`."""


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
    drafts: int = 0
    """Sequences with drafts to verify."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """With those beyond a request's last token, which are not handed out."""
    ranks: tuple[Cost, ...] = ()
    """By GPU of the engine, where they differ; `cost` is that of the first."""
    died: bool = False
    """Whether the engine died in it: nothing was handed out."""
    pieces: list[tuple[int, int, int]] = []
    """On a GPU that is shared: (start, end, ns of the step's own work in it), as far as it got."""

    def on(self, rank: int) -> Cost:
        """Return what the step costs on one GPU of its engine."""
        return self.ranks[rank] if self.ranks else self.cost

    def segments(self, rank: int) -> list[tuple[int, int, float]]:
        """Return when one GPU works on it, and what part of the step's work it does then."""
        cost = self.on(rank)
        if self.pieces:
            return [(start, end, work / cost.active_ns) for start, end, work in self.pieces]
        start_ns = self.start_ns + cost.lead_ns
        return [(start_ns, start_ns + cost.active_ns, 1.0)]


STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
"""Upper ends of vLLM's buckets of a step's tokens, 1 and 8 to 16384."""


class VllmCounters(msgspec.Struct):
    """What the engine tells on its metrics page: moved at the end of a step, gauges as they stood then."""

    prompt_tokens: int = 0
    """Whole prompts, on the step that ends them."""
    computed_prompt_tokens: int = 0
    """The same less prefix hits. Recomputation after a preemption is not in it."""
    generated_tokens: int = 0
    first_tokens: int = 0
    time_to_first_token_ns: int = 0
    inter_token_ns: int = 0
    """From one step that gave a sequence tokens to the next, over all sequences."""
    counted_steps: int = 0
    """Steps that gave a token: one that only computes a chunk is not counted."""
    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * len(STEP_TOKENS))
    """Counted steps by their tokens: prompts that they ended, less prefix hits, and tokens given."""
    requests_running: int = 0
    """As set at the last step's end: 0 all through the first long prefill."""
    requests_waiting: int = 0
    kv_usage_ratio: float = 0.0
    prefix_query_tokens: int = 0
    """On scheduling, of requests that were not preempted."""
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


def apportion(parts: list[int], amount: int) -> list[int]:
    """Take `amount` out of `parts` in proportion: whole numbers, none above its part, exact sum."""
    whole = sum(parts)
    taken = []
    before = reached = 0
    for part in parts:
        reached += part
        upto = reached * amount // whole
        taken.append(upto - before)
        before = upto
    return taken


def cut(step: Step, at_ns: int) -> Step:
    """Return the part of a step before `at_ns`, in which its engine died: its work was for nothing."""
    part = (at_ns - step.start_ns) / step.cost.duration_ns

    def of(cost: Cost) -> Cost:
        duration_ns = at_ns - step.start_ns
        useful, padding, *others = apportion(list(cost.causes_ns), duration_ns)
        lead_ns = min(cost.lead_ns, duration_ns)
        return cost._replace(
            duration_ns=duration_ns,
            bound_ns=0.0,
            useful_flops=0.0,
            executed_flops=cost.executed_flops * part,
            pipe_ns=cost.pipe_ns * part,
            resident_ns=cost.resident_ns * part,
            read_bytes=cost.read_bytes * part,
            write_bytes=cost.write_bytes * part,
            causes_ns=(0, useful + padding, *others),
            lead_ns=lead_ns,
            active_ns=min(cost.active_ns, duration_ns - lead_ns),
        )

    return msgspec.structs.replace(
        step, end_ns=at_ns, cost=of(step.cost), ranks=tuple(map(of, step.ranks)), died=True
    )
