"""The scheduler and vLLM's counters: nothing is lost, and each trap is there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.collectors.simulator.nodes import SMALL, asked, counters_of, node, ran, steps_of

from gpuidle.collectors.simulator.scenario import (
    SECOND_NS,
    ClosedLoop,
    Request,
    ScenarioError,
    Sizes,
)


def test_every_token_asked_for_is_delivered_once() -> None:
    requests = [Request(i * SECOND_NS // 10, 100 + 37 * i, 5 + i, 16 * (i % 3)) for i in range(20)]
    steps, engine = steps_of(asked(*requests))
    told = engine.counters
    assert sum(step.delivered_tokens for step in steps) == sum(r.output_tokens for r in requests)
    assert told.generated_tokens == sum(r.output_tokens for r in requests)
    assert told.first_tokens == len(requests)
    assert told.prompt_tokens == sum(r.prompt_tokens for r in requests)
    computed = sum(r.prompt_tokens - r.prefix_hit_tokens for r in requests)
    assert told.computed_prompt_tokens == sum(step.prefill_tokens for step in steps) == computed
    assert sum(step.decode_tokens for step in steps) == told.generated_tokens - told.first_tokens
    assert told.prefix_query_tokens == told.prompt_tokens
    assert told.prefix_hit_tokens == sum(r.prefix_hit_tokens for r in requests)
    assert (told.requests_running, told.requests_waiting, told.kv_usage_ratio) == (0, 0, 0.0)


def test_steps_are_disjoint_ordered_and_within_their_budget() -> None:
    steps, _ = steps_of(asked(*(Request(0, 300, 20) for _ in range(30))))
    for before, after in pairwise(steps):
        assert before.end_ns <= after.ready_ns < after.start_ns < after.end_ns
    assert all(0 < step.prefill_tokens + step.decode_tokens <= SMALL.max_batched_tokens for step in steps)


def test_running_decodes_come_before_waiting_prompts() -> None:
    requests = (Request(0, 10, 50), Request(1, 2000, 1))
    steps, _ = steps_of(asked(*requests))
    chunks = [step for step in steps if step.prefill_tokens > 10]
    assert len(chunks) == 8  # 2,000 tokens in chunks of 255 beside one decode
    assert [step.prefill_tokens for step in chunks] == [255] * 7 + [215]
    assert all(step.decode_tokens == 1 for step in chunks)


def test_sequences_beyond_the_limit_wait() -> None:
    engine = replace(asked(*(Request(0, 8, 20) for _ in range(10))), max_sequences=4)
    steps, _ = steps_of(engine)
    assert max(step.sequences for step in steps) == 4


def test_decode_reads_the_context_that_is_cached() -> None:
    steps, _ = steps_of(asked(Request(0, 100, 4)))
    assert [step.kv_tokens for step in steps] == [0, 100, 101, 102]


def test_a_cached_prefix_costs_no_tokens_and_is_read_as_context() -> None:
    steps, _ = steps_of(asked(Request(0, 100, 2, prefix_hit_tokens=64)))
    assert [step.prefill_tokens for step in steps] == [36, 0]
    assert [step.kv_tokens for step in steps] == [64, 100]


def test_trap_steps_that_only_compute_a_chunk_are_not_counted() -> None:
    """As measured on a vLLM: four prompts of 1,900 at a budget of 256 are 32 + 4 steps, of which 8 count."""
    steps, engine = steps_of(asked(*(Request(i * 5 * SECOND_NS, 1900, 2) for i in range(4))))
    assert sum(not step.decode_tokens for step in steps) == 32
    assert sum(not step.prefill_tokens for step in steps) == 4
    assert engine.counters.counted_steps == 8


def test_trap_a_prompt_is_lumped_on_the_step_that_ends_it() -> None:
    snapshots, truths = ran(node(asked(Request(0, 1900, 2)), seconds=0.5), tick_ns=5_000_000)
    seen = [counters_of(snapshot).computed_prompt_tokens for snapshot in snapshots]
    assert set(seen) == {0, 1900}
    midway = [
        truth.engines[0].total.prompt_tokens
        for truth, tokens in zip(truths, seen, strict=True)
        if tokens == 0
    ]
    assert max(midway) >= 1024


def test_trap_the_running_gauge_reads_zero_in_the_first_long_prefill() -> None:
    engine = replace(asked(Request(0, 2000, 5)), max_batched_tokens=2048)
    snapshots, truths = ran(node(engine, seconds=1.0), tick_ns=10_000_000)
    during = [
        counters_of(snapshot).requests_running
        for snapshot, truth in zip(snapshots, truths, strict=True)
        if truth.gpus[0].window.phases_ns.get("prefill", 0) == truth.window_ns > 0
    ]
    assert len(during) >= 3
    assert set(during) == {0}


def test_trap_the_first_token_is_a_generated_token() -> None:
    _, engine = steps_of(asked(Request(0, 100, 1), Request(0, 100, 3)))
    assert engine.counters.generated_tokens == 4
    assert engine.counters.first_tokens == 2


def test_trap_a_request_that_arrives_during_a_step_is_not_waiting_at_its_end() -> None:
    engine = replace(asked(Request(0, 2000, 5), Request(1_000_000, 64, 5)), max_batched_tokens=2048)
    spec = replace(engine, max_sequences=1)
    steps, _ = steps_of(spec)
    _, once = steps_of(spec, seconds=steps[0].end_ns / SECOND_NS)
    assert once.counters.requests_waiting == 0
    _, twice = steps_of(spec, seconds=steps[1].end_ns / SECOND_NS)
    assert twice.counters.requests_waiting == 1


def crowded(requests: int = 6) -> list[Request]:
    return [Request(i, 60, 60) for i in range(requests)]


def test_a_full_cache_preempts_the_youngest_and_computes_it_again() -> None:
    requests = crowded()
    steps, engine = steps_of(replace(asked(*requests), kv_blocks=30))
    assert engine.counters.preemptions == sum(step.preemptions for step in steps) > 0
    assert sum(step.recomputed_tokens for step in steps) > 0
    assert engine.counters.generated_tokens == sum(r.output_tokens for r in requests)


def test_trap_recompute_after_preemption_is_executed_and_not_in_the_counters() -> None:
    requests = crowded()
    steps, engine = steps_of(replace(asked(*requests), kv_blocks=30))
    told = engine.counters
    asked_tokens = sum(r.prompt_tokens for r in requests)
    assert told.prompt_tokens == told.computed_prompt_tokens == asked_tokens
    assert told.prefix_query_tokens == asked_tokens
    assert sum(step.fresh_prompt_tokens for step in steps) == asked_tokens
    executed = sum(step.prefill_tokens for step in steps)
    again = sum(step.recomputed_tokens for step in steps)
    # A resumed context ends with the token that it was about to feed when it was preempted.
    resumed = executed - asked_tokens - again
    assert 0 < resumed <= told.preemptions
    assert sum(step.decode_tokens for step in steps) == told.generated_tokens - told.first_tokens - resumed


def test_the_cache_never_holds_more_than_there_is() -> None:
    scenario = node(replace(asked(*crowded(12)), kv_blocks=30), seconds=2)
    snapshots, _ = ran(scenario, tick_ns=9_000_000)
    usage = [counters_of(snapshot).kv_usage_ratio or 0.0 for snapshot in snapshots]
    assert 0.9 < max(usage) <= 1.0


def test_a_request_that_never_fits_is_an_error_that_names_it() -> None:
    with pytest.raises(ScenarioError, match=r"small: a request of 16384 tokens .* never fits 16000"):
        steps_of(replace(asked(Request(0, 16_000, 385)), kv_blocks=1000))


def test_a_closed_loop_never_has_more_requests_than_users() -> None:
    loop = ClosedLoop(users=3, mix=(Sizes((20, 40), (5, 9)),), think_ns=20_000_000, stop_ns=2 * SECOND_NS)
    steps, engine = steps_of(replace(SMALL, arrivals=(loop,)))
    assert max(step.sequences for step in steps) == 3
    assert engine.counters.first_tokens > 30
    assert engine.counters.requests_running == 0
    assert steps[-1].end_ns < 3 * SECOND_NS


def test_time_to_first_token_is_from_arrival() -> None:
    steps, engine = steps_of(asked(Request(0, 512, 1), Request(0, 256, 1)))
    assert engine.counters.time_to_first_token_ns == steps[1].end_ns + steps[2].end_ns


def test_the_time_between_tokens_is_from_one_step_of_a_sequence_to_the_next() -> None:
    steps, engine = steps_of(asked(Request(0, 100, 4)))
    assert engine.counters.inter_token_ns == steps[-1].end_ns - steps[0].end_ns
