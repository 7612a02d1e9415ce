"""The truth sums up to the time that passed, and agrees with the steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.collectors.simulator.nodes import asked, counters_of, node, ran, steps_of

from gpuidle.collectors.simulator.batch import apportion
from gpuidle.collectors.simulator.scenario import SECOND_NS, Request
from gpuidle.collectors.simulator.truth import phase_of

LOAD = asked(*(Request(i * SECOND_NS // 5, 400 + 90 * (i % 5), 40 + i) for i in range(12)))


@pytest.mark.parametrize("tick_ns", [SECOND_NS, 37_000_001, 2_500_000])
def test_phases_and_causes_of_a_tick_sum_to_it(tick_ns: int) -> None:
    _, truths = ran(node(LOAD, gpus=2, seconds=1.5), tick_ns=tick_ns)
    assert sum(truth.window_ns for truth in truths) == 3 * SECOND_NS // 2
    for truth in truths:
        for gpu in truth.gpus:
            assert sum(gpu.window.phases_ns.values()) == truth.window_ns
            assert sum(gpu.window.causes_ns.values()) == truth.window_ns
            assert min(gpu.window.causes_ns.values(), default=0) >= 0
    for gpu in truths[-1].gpus:
        assert sum(gpu.total.phases_ns.values()) == sum(gpu.total.causes_ns.values()) == 3 * SECOND_NS // 2


@pytest.mark.parametrize("tick_ns", [SECOND_NS, 6_500_000])
def test_the_truth_does_not_depend_on_the_tick(tick_ns: int) -> None:
    _, truths = ran(node(LOAD, seconds=4.0), tick_ns=tick_ns)
    steps, engine = steps_of(LOAD, seconds=4.0)
    assert engine.pending is None
    for phase in ("prefill", "decode", "mixed"):
        exact = sum(step.end_ns - step.start_ns for step in steps if phase_of(step) == phase)
        assert truths[-1].gpus[0].total.phases_ns[phase] == exact > 0
    for index, cause in enumerate(("useful", "padding", "memory_bound", "communication", "latency")):
        exact = sum(step.cost.causes_ns[index] for step in steps)
        assert truths[-1].gpus[0].total.causes_ns.get(cause, 0) == exact  # type: ignore[call-overload]


def test_time_between_steps_is_a_host_gap_and_time_without_a_request_is_not() -> None:
    requests = (Request(0, 100, 3), Request(SECOND_NS, 100, 1))
    _, truths = ran(node(asked(*requests), seconds=2.0))
    steps, _ = steps_of(asked(*requests))
    causes = truths[-1].gpus[0].total.causes_ns
    assert causes["host_gap"] == 4 * asked().host_gap_ns
    busy = sum(step.end_ns - step.start_ns for step in steps)
    assert causes["no_request"] == 2 * SECOND_NS - busy - causes["host_gap"]


def test_an_unallocated_gpu_and_one_that_waits_for_requests_are_told_apart() -> None:
    _, truths = ran(node(asked(), gpus=2, seconds=2.0))
    served, bare = truths[-1].gpus
    assert served.total.causes_ns == {"no_request": 2 * SECOND_NS}
    assert bare.total.causes_ns == {"unallocated": 2 * SECOND_NS}


def test_tokens_agree_with_the_counters_once_all_is_done() -> None:
    snapshots, truths = ran(node(LOAD, seconds=8.0))
    told, work = counters_of(snapshots[-1]), truths[-1].engines[0].total
    assert work.prompt_tokens == told.computed_prompt_tokens
    assert work.first_tokens == told.first_tokens
    assert work.decode_tokens == (told.generated_tokens or 0) - (told.first_tokens or 0)
    assert sum(truth.engines[0].window.decode_tokens for truth in truths) == work.decode_tokens


def test_recompute_is_executed_and_not_useful() -> None:
    requests = [Request(i, 60, 60) for i in range(6)]
    tight, roomy = (replace(asked(*requests), kv_blocks=blocks) for blocks in (30, 300))
    _, with_preemption = ran(node(tight, seconds=8.0))
    _, without = ran(node(roomy, seconds=8.0))
    work, plain = with_preemption[-1].engines[0].total, without[-1].engines[0].total
    assert work.recomputed_tokens > 0 == plain.recomputed_tokens
    assert work.prompt_tokens == plain.prompt_tokens
    assert work.decode_tokens == plain.decode_tokens
    assert work.useful_flops == pytest.approx(plain.useful_flops, rel=1e-9)
    assert work.executed_flops > plain.executed_flops


def test_flops_are_of_all_gpus_of_the_engine() -> None:
    requests = (Request(0, 200, 4),)
    _, one = ran(node(asked(*requests), seconds=1.0))
    _, two = ran(node(replace(asked(*requests), gpus=(0, 1)), gpus=2, seconds=1.0))
    assert two[-1].engines[0].total.useful_flops == pytest.approx(one[-1].engines[0].total.useful_flops)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6), st.data())
def test_apportioned_parts_sum_and_never_exceed_what_is_there(parts: list[int], data: st.DataObject) -> None:
    parts[0] += 1
    amount = data.draw(st.integers(0, sum(parts)))
    taken = apportion(parts, amount)
    assert sum(taken) == amount
    assert all(0 <= part <= whole for part, whole in zip(taken, parts, strict=True))
