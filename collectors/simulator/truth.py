"""What really happened on a simulated node, to hold conclusions against.

Phases and causes are exact to the nanosecond. Causes follow the design's ledger, evaluated on each step by
itself with the exact efficiencies of the scenario; a conclusion drawn from a window's integrals clips at
zero less often and may differ a little where steps of different kinds share the window.

A step's phase is that of its whole interval on every GPU of its engine, pipeline bubbles included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from gpuidle.agent.model import Cause, Phase
from gpuidle.collectors.simulator.batch import Step, apportion
from gpuidle.collectors.simulator.costs import STEP_CAUSES, Cost


class Split(msgspec.Struct, frozen=True):
    """GPU time by phase and by cause, in nanoseconds; each of the two sums to the window."""

    phases_ns: dict[Phase, int]
    causes_ns: dict[Cause, int]


class EngineWork(msgspec.Struct, frozen=True):
    """What the steps that ended in a window did. FLOPs are of all GPUs of the engine together."""

    prompt_tokens: int = 0
    """Computed for the first time: no prefix hits, no recompute."""
    recomputed_tokens: int = 0
    """Computed again after a preemption: executed, not useful."""
    first_tokens: int = 0
    decode_tokens: int = 0
    """Tokens handed out, less first tokens."""
    useful_flops: float = 0.0
    executed_flops: float = 0.0
    steps_prefill: int = 0
    steps_decode: int = 0
    steps_mixed: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    """Verified: executed, useful as far as they were handed out."""
    accepted_tokens: int = 0


class GpuTruth(msgspec.Struct, frozen=True):
    """One GPU: the tick, and all since the start of the simulation."""

    hw_id: str
    window: Split
    total: Split


class EngineTruth(msgspec.Struct, frozen=True):
    """One engine: the tick, and all since the start of the simulation."""

    engine_id: str
    window: EngineWork
    total: EngineWork


class Truth(msgspec.Struct, frozen=True):
    """The truth of one tick, beside the Snapshot of the same `monotonic_ns`."""

    monotonic_ns: int
    window_ns: int
    gpus: tuple[GpuTruth, ...]
    engines: tuple[EngineTruth, ...]


def phase_of(step: Step) -> Phase:
    """Return the phase of a step by the definition: which tokens it computed."""
    if not step.decode_tokens:
        return "prefill"
    return "mixed" if step.prefill_tokens else "decode"


Span = tuple[int, int, Cause]
"""From, until, and why a GPU was idle then."""


class Account:
    """Splits what one GPU of an engine did, tick by tick; a step may lie across several ticks."""

    def __init__(self, rank: int = 0) -> None:
        self.cursor_ns = 0
        self._rank = rank
        self._left: list[int] | None = None
        """What is left of the causes of the step that the cursor stands in, bubbles left out."""

    def advance(
        self, steps: Iterable[Step], pending: Step | None, until_ns: int, spans: Sequence[Span] = ()
    ) -> Split:
        """Return the split of the time from the last call to `until_ns`.

        `steps` ended in it, `pending` did not yet. GPU time before a step is ready has no request or what
        `spans` say, time from then to its start is a host gap.
        """
        phases: dict[Phase, int] = {}
        causes: dict[Cause, int] = {}

        def add(phase: Phase, cause: Cause, ns: int) -> None:
            if ns:
                phases[phase] = phases.get(phase, 0) + ns
                causes[cause] = causes.get(cause, 0) + ns

        def rest(end_ns: int) -> None:
            if end_ns > self.cursor_ns:
                for cause, ns in _reasons(self.cursor_ns, end_ns, spans):
                    add("idle", cause, ns)
                self.cursor_ns = end_ns

        def wait(phase: Phase, cause: Cause, end_ns: int) -> None:
            end_ns = min(end_ns, until_ns)
            if end_ns > self.cursor_ns:
                add(phase, cause, end_ns - self.cursor_ns)
                self.cursor_ns = end_ns

        for step in (*steps, *(() if pending is None else (pending,))):
            rest(min(step.ready_ns, until_ns))
            wait("idle", "host_gap", step.start_ns)
            phase, cost = phase_of(step), step.on(self._rank)
            first_ns = step.start_ns + cost.lead_ns
            last_ns = first_ns + cost.active_ns
            wait(phase, "waiting_peer", first_ns)
            end_ns = min(last_ns, until_ns)
            if end_ns > self.cursor_ns:
                for cause, ns in zip(STEP_CAUSES, self._take(step, end_ns, last_ns), strict=True):
                    add(phase, cause, ns)
                self.cursor_ns = end_ns
            wait(phase, "waiting_peer", step.end_ns)
        rest(until_ns)
        return Split(phases, causes)

    def _take(self, step: Step, end_ns: int, last_ns: int) -> list[int]:
        """Return the causes of the step from the cursor to `end_ns`, even over what is left of it."""
        left = work_causes(step.on(self._rank)) if self._left is None else self._left
        if end_ns == last_ns:
            self._left = None
            return left
        taken = apportion(left, end_ns - self.cursor_ns)
        self._left = [whole - part for whole, part in zip(left, taken, strict=True)]
        return taken


def work_causes(cost: Cost) -> list[int]:
    """Return the causes of the time in which a GPU is active for a step, in the order of STEP_CAUSES."""
    causes = list(cost.causes_ns)
    causes[STEP_CAUSES.index("waiting_peer")] -= cost.duration_ns - cost.active_ns
    return causes


def _reasons(begin_ns: int, end_ns: int, spans: Sequence[Span]) -> Iterable[tuple[Cause, int]]:
    """Cut an idle time by what it was idle for; of spans that overlap the first counts."""
    inside = [span for span in spans if span[0] < end_ns and span[1] > begin_ns]
    edges = sorted({begin_ns, end_ns, *(e for span in inside for e in span[:2] if begin_ns < e < end_ns)})
    for start_ns, stop_ns in pairwise(edges):
        why: list[Cause] = [cause for first, last, cause in inside if first <= start_ns < last]
        yield why[0] if why else "no_request", stop_ns - start_ns


def work_of(steps: Iterable[Step], gpus: int) -> EngineWork:
    """Sum up steps of an engine on `gpus` GPUs."""
    prompt = again = first = delivered = preemptions = drafts = accepted = 0
    useful = executed = 0.0
    kinds = {"prefill": 0, "decode": 0, "mixed": 0}
    for step in steps:
        executed += step.cost.executed_flops
        if step.died:
            continue
        prompt += step.fresh_prompt_tokens
        again += step.recomputed_tokens
        first += step.first_tokens
        delivered += step.delivered_tokens
        preemptions += step.preemptions
        useful += step.cost.useful_flops
        drafts += step.draft_tokens
        accepted += step.accepted_tokens
        kinds[phase_of(step)] += 1
    return EngineWork(
        prompt_tokens=prompt,
        recomputed_tokens=again,
        first_tokens=first,
        decode_tokens=delivered - first,
        useful_flops=useful * gpus,
        executed_flops=executed * gpus,
        steps_prefill=kinds["prefill"],
        steps_decode=kinds["decode"],
        steps_mixed=kinds["mixed"],
        preemptions=preemptions,
        draft_tokens=drafts,
        accepted_tokens=accepted,
    )


def add_work(one: EngineWork, other: EngineWork) -> EngineWork:
    """Return the sum of two windows."""
    return EngineWork(
        *(getattr(one, f.name) + getattr(other, f.name) for f in msgspec.structs.fields(EngineWork))
    )


def add_split(one: Split, other: Split) -> Split:
    """Return the sum of two windows."""
    phases = dict(one.phases_ns)
    for phase, ns in other.phases_ns.items():
        phases[phase] = phases.get(phase, 0) + ns
    causes = dict(one.causes_ns)
    for cause, ns in other.causes_ns.items():
        causes[cause] = causes.get(cause, 0) + ns
    return Split(phases, causes)
