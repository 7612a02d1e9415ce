"""Whatever the scenario, the books balance."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.collectors.simulator.nodes import SMALL, asked, counters_of, node, ran, steps_of

from gpuidle.agent.model import RATIO_STEP
from gpuidle.collectors.simulator.scenario import SECOND_NS, EngineSpec, Request


@st.composite
def engines(draw: st.DrawFn) -> EngineSpec:
    """Engines with tight and wide limits, asked for a few dozen requests that all fit."""
    blocks = draw(st.sampled_from([16, 40, 400]))
    block_tokens = draw(st.sampled_from([1, 16, 32]))
    room = blocks * block_tokens
    requests = []
    at_ns = 0
    for _ in range(draw(st.integers(1, 15))):
        at_ns += draw(st.integers(0, SECOND_NS // 5))
        output = draw(st.integers(1, min(40, room)))
        prompt = draw(st.integers(1, min(900, room - output + 1)))
        requests.append(Request(at_ns, prompt, output, draw(st.integers(0, prompt - 1))))
    return replace(
        asked(*requests, engine=SMALL),
        kv_blocks=blocks,
        kv_block_tokens=block_tokens,
        max_batched_tokens=draw(st.sampled_from([1, 7, 64, 512])),
        max_sequences=draw(st.sampled_from([1, 3, 64])),
        host_gap_ns=draw(st.sampled_from([0, 300_000])),
        jitter=draw(st.sampled_from([0.0, 0.1])),
    )


@given(engines())
@settings(max_examples=40, deadline=None)
def test_all_that_is_asked_for_is_computed_and_delivered(spec: EngineSpec) -> None:
    steps, engine = steps_of(spec, seconds=100_000)
    requests = [request for kind in spec.arrivals for request in getattr(kind, "requests", ())]
    told = engine.counters
    assert told.generated_tokens == sum(r.output_tokens for r in requests)
    assert told.first_tokens == len(requests) == sum(step.first_tokens for step in steps)
    assert told.computed_prompt_tokens == sum(r.prompt_tokens - r.prefix_hit_tokens for r in requests)
    assert sum(step.fresh_prompt_tokens for step in steps) == told.computed_prompt_tokens
    assert sum(step.delivered_tokens for step in steps) == told.generated_tokens
    resumed = sum(step.prefill_tokens - step.fresh_prompt_tokens - step.recomputed_tokens for step in steps)
    assert 0 <= resumed <= told.preemptions
    assert sum(step.decode_tokens for step in steps) + resumed == told.generated_tokens - told.first_tokens
    assert told.kv_usage_ratio == 0.0
    assert told.counted_steps <= len(steps)
    for before, after in pairwise(steps):
        assert before.end_ns <= after.start_ns < after.end_ns
    for step in steps:
        assert step.end_ns - step.start_ns >= step.cost.bound_ns
        assert 1 <= step.prefill_tokens + step.decode_tokens <= spec.max_batched_tokens
        assert 1 <= step.sequences <= spec.max_sequences


@given(engines(), st.sampled_from([1_000_003, 40_000_000, SECOND_NS]))
@settings(max_examples=12, deadline=None)
def test_snapshots_and_truth_balance_on_any_tick(spec: EngineSpec, tick_ns: int) -> None:
    snapshots, truths = ran(node(spec, seconds=0.2 if tick_ns < SECOND_NS // 100 else 3.0), tick_ns=tick_ns)
    for snapshot, truth in zip(snapshots, truths, strict=True):
        window = truth.gpus[0].window
        assert sum(window.phases_ns.values()) == sum(window.causes_ns.values()) == truth.window_ns
        assert all(ns > 0 for ns in window.causes_ns.values())
        for series in snapshot.counters:
            assert series.gr_active is not None
            assert series.gr_active.max() * RATIO_STEP <= 1.0 + RATIO_STEP
    for before, after in pairwise(snapshots):
        then, now = counters_of(before), counters_of(after)
        for name in (
            "prompt_tokens",
            "generated_tokens",
            "counted_steps",
            "prefix_hit_tokens",
            "preemptions",
        ):
            assert getattr(then, name) <= getattr(now, name)
        assert before.gpus is not None
        assert after.gpus is not None
        assert (before.gpus[0].energy_joules or 0) < (after.gpus[0].energy_joules or 0)
