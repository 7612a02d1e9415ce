"""Speculation, pipelines, async scheduling, clocks, stragglers, roles, shared GPUs: each by its own sums."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.collectors.simulator.nodes import SMALL, asked, counters_of, node, ran, steps_of

from gpuidle.agent.model import CAUSES
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.simulator.options import (
    ClockSpell,
    Handover,
    Speculation,
    Straggler,
)
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    SECOND_NS,
    ClosedLoop,
    EngineSpec,
    GpuSpec,
    Request,
    Scenario,
    ScenarioError,
    Sizes,
)
from gpuidle.collectors.simulator.truth import Truth, phase_of

DRAFTER: Mapping[str, object] = {
    **LLAMA_3_8B,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
DECODES = asked(*(Request(i, 60, 80) for i in range(6)))
LOAD = asked(*(Request(i * SECOND_NS // 5, 400 + 90 * (i % 5), 40 + i) for i in range(12)))


def causes(truth: Truth, gpu: int = 0) -> dict[str, int]:
    return {cause: truth.gpus[gpu].total.causes_ns.get(cause, 0) for cause in CAUSES}


# ---------------------------------------------------------------------------------------- speculation


def speculative(*acceptance: float, draft: bool = False, engine: EngineSpec = DECODES) -> EngineSpec:
    return replace(engine, speculation=Speculation(acceptance, DRAFTER if draft else None))


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 50)), min_size=1, max_size=12),
    st.sampled_from([12, 64, 256]),
    st.sampled_from([40, 1000]),
)
@settings(max_examples=30, deadline=None)
def test_speculation_delivers_what_was_asked_for_and_counts_what_it_drafted(
    acceptance: list[float], sizes: list[tuple[int, int]], budget: int, blocks: int
) -> None:
    requests = [Request(i * 1000, *each) for i, each in enumerate(sizes)]
    spec = replace(
        speculative(*acceptance, engine=asked(*requests)), max_batched_tokens=budget, kv_blocks=blocks
    )
    steps, engine = steps_of(spec, seconds=100_000)
    told = engine.counters
    assert told.generated_tokens == sum(r.output_tokens for r in requests)
    assert told.generated_tokens == sum(step.delivered_tokens for step in steps)
    assert told.draft_tokens == sum(step.draft_tokens for step in steps)
    assert told.accepted_tokens == sum(step.accepted_tokens for step in steps) <= told.draft_tokens
    assert told.draft_tokens <= told.drafts * len(acceptance)
    assert told.kv_usage_ratio == 0.0
    for step in steps:
        assert 1 <= step.prefill_tokens + step.decode_tokens <= budget
        assert step.draft_tokens <= step.decode_tokens
        assert step.cost.useful_flops <= step.cost.executed_flops


def test_verification_is_one_and_k_rows_of_decode_a_sequence() -> None:
    steps, _ = steps_of(speculative(0.5, 0.5, 0.5))
    verified = [step for step in steps if step.drafts == 6]
    assert verified
    assert all((step.decode_tokens, step.draft_tokens) == (24, 18) for step in verified)
    assert all(phase_of(step) == "decode" for step in verified)


@pytest.mark.parametrize(("chance", "tokens"), [(1.0, 4), (0.0, 1)])
def test_a_step_hands_out_the_accepted_drafts_and_one_more(chance: float, tokens: int) -> None:
    steps, _ = steps_of(speculative(chance, chance, chance))
    alone = [step for step in steps if step.drafts == 6][:-1]
    assert {step.delivered_tokens for step in alone[:-1]} == {6 * tokens}


def test_acceptance_by_position_is_that_of_the_scenario() -> None:
    spec = speculative(0.9, 0.6, engine=asked(*(Request(i, 20, 900) for i in range(8))))
    _, engine = steps_of(spec)
    told = engine.counters
    assert told.accepted_tokens / told.drafts == pytest.approx(0.9 + 0.9 * 0.6, rel=0.03)


def test_speculation_saves_steps_and_rejected_rows_are_executed_not_useful() -> None:
    plain, _ = steps_of(DECODES)
    steps, _ = steps_of(speculative(0.7, 0.7))
    assert len(steps) < 0.6 * len(plain)
    useful = [sum(step.cost.useful_flops for step in run) for run in (plain, steps)]
    assert useful[1] == pytest.approx(useful[0], rel=0.02)  # drafts change how far each row looks back
    one = next(step for step in steps if step.drafts == 6 and step.accepted_tokens < 6)
    full = next(step for step in plain if step.sequences == 6 and not step.prefill_tokens)
    assert one.cost.useful_flops == pytest.approx(full.cost.useful_flops * one.delivered_tokens / 6, rel=0.02)


def test_a_draft_model_takes_time_and_is_never_useful() -> None:
    free, _ = steps_of(speculative(0.7, 0.7))
    paid, _ = steps_of(speculative(0.7, 0.7, draft=True))
    assert len(free) == len(paid)
    for one, other in zip(free, paid, strict=True):
        assert other.cost.useful_flops == one.cost.useful_flops
        assert other.cost.read_bytes >= one.cost.read_bytes
    last = free[-1], paid[-1]  # nobody drafts once all are finished
    assert last[0].cost == last[1].cost
    assert sum(s.cost.executed_flops for s in paid) > sum(s.cost.executed_flops for s in free)
    assert sum(s.cost.duration_ns for s in paid) > sum(s.cost.duration_ns for s in free)


def test_the_counters_tell_drafts_as_vllm_does_and_nothing_without_speculation() -> None:
    snapshots, truths = ran(node(speculative(0.8, 0.5), seconds=4.0))
    told, work = counters_of(snapshots[-1]), truths[-1].engines[0].total
    assert told.draft_tokens == work.draft_tokens > 0
    assert told.accepted_tokens == work.accepted_tokens > 0
    assert told.drafts is not None
    assert told.draft_tokens == 2 * told.drafts
    assert snapshots[0].engines[0].limits.speculative
    [series] = snapshots[1].steps
    assert series.draft_tokens is not None
    assert series.draft_tokens.sum() > 0
    bare = counters_of(ran(node(DECODES, seconds=1.0))[0][-1])
    assert (bare.drafts, bare.draft_tokens, bare.accepted_tokens) == (None, None, None)


# ------------------------------------------------------------------------------- pipelines, stragglers


def staged(stages: int, microbatches: int = 1, engine: EngineSpec = LOAD) -> EngineSpec:
    return replace(
        engine, gpus=tuple(range(stages)), pipeline_stages=stages, microbatches=microbatches, jitter=0.0
    )


def test_each_stage_works_its_part_of_a_step_and_waits_for_the_others() -> None:
    _, truths = ran(node(staged(2), gpus=2, seconds=6.0))
    for gpu in truths[-1].gpus:
        spent = gpu.total.causes_ns
        busy = sum(ns for phase, ns in gpu.total.phases_ns.items() if phase != "idle")
        assert spent["waiting_peer"] / busy == pytest.approx(0.5, abs=0.001)


def test_microbatches_fill_the_bubble_and_read_the_weights_again() -> None:
    crowd = asked(*(Request(0, 40, 60) for _ in range(8)))
    one, four = (steps_of(staged(2, parts, crowd))[0][30] for parts in (1, 4))
    assert one.sequences == four.sequences == 8
    assert one.cost.active_ns / one.cost.duration_ns == pytest.approx(1 / 2, abs=0.001)
    assert four.cost.active_ns / four.cost.duration_ns == pytest.approx(4 / 5, abs=0.001)
    assert 3.5 < four.cost.read_bytes / one.cost.read_bytes < 4.0


def test_stages_follow_each_other() -> None:
    steps, _ = steps_of(staged(4), clocks=4)
    for step in steps:
        stages = [step.segments(rank)[0] for rank in range(4)]
        for before, after in pairwise(stages):
            assert after[0] - before[0] == pytest.approx(before[1] - before[0], abs=2)
        assert stages[0][0] == step.start_ns
        assert stages[-1][1] == pytest.approx(step.end_ns, abs=4)


def test_the_counters_of_a_stage_show_its_bubble() -> None:
    snapshots, _ = ran(node(staged(2), gpus=2, seconds=4.0))
    assert snapshots[0].engines[0].parallelism.pipeline == 2
    assert snapshots[0].engines[0].parallelism.tensor == 1
    for gpu in snapshots[2].gpus or ():
        assert gpu.busy_ratio is not None
        assert gpu.busy_ratio < 0.55


def test_peers_of_a_straggler_spin_and_the_straggler_does_not_wait() -> None:
    pair = replace(LOAD, gpus=(0, 1), straggler=Straggler(rank=1, slower=1.5))
    snapshots, truths = ran(node(pair, gpus=2, seconds=6.0))
    peer, slow = (causes(truths[-1], gpu) for gpu in (0, 1))
    assert slow["waiting_peer"] == 0
    assert peer["waiting_peer"] > 0.2 * (6 * SECOND_NS - peer["no_request"] - peer["host_gap"])
    assert peer["waiting_peer"] + peer["latency"] == pytest.approx(slow["latency"], rel=0.01)
    first, second = snapshots[2].counters[0], snapshots[2].counters[1]
    assert first.gr_active is not None  # a spin is work to the GPU
    assert second.gr_active is not None
    assert first.gr_active.tolist() == second.gr_active.tolist()
    assert first.sm_active is not None
    assert second.sm_active is not None
    assert first.sm_active.sum() < 0.8 * second.sm_active.sum()


# ------------------------------------------------------------------------------------------ the host


def test_async_scheduling_hides_gaps_that_are_shorter_than_a_step() -> None:
    plain, _ = steps_of(DECODES)
    hidden, _ = steps_of(replace(DECODES, async_scheduling=True))
    assert all(after.start_ns == before.end_ns for before, after in pairwise(hidden))
    assert all(after.start_ns - before.end_ns == DECODES.host_gap_ns for before, after in pairwise(plain))
    _, truths = ran(node(replace(DECODES, async_scheduling=True), seconds=4.0))
    assert causes(truths[-1])["host_gap"] == DECODES.host_gap_ns  # before the first step


def test_async_scheduling_shows_what_is_left_of_a_gap_that_is_longer_than_a_step() -> None:
    steps, _ = steps_of(replace(DECODES, async_scheduling=True, host_gap_ns=50_000_000))
    for before, after in pairwise(steps):
        assert after.start_ns == max(before.end_ns, before.start_ns + 50_000_000)


# ------------------------------------------------------------------------------------------- clocks


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        ("power_cap", "throttled_power"),
        ("hw_thermal", "throttled_thermal"),
        ("applications_clocks", "throttled_other"),
    ],
)
def test_a_slow_clock_stretches_the_pipe_and_is_told_with_its_reason(event: Any, cause: str) -> None:
    spell = ClockSpell(gpu=0, clock_ratio=0.5, event=event)
    snapshots, truths = ran(replace(node(LOAD, seconds=6.0), clocks=(spell,)))
    _, plain = ran(node(LOAD, seconds=6.0))
    slow, usual = causes(truths[-1]), causes(plain[-1])
    # The same rows take twice the pipe's time: the other half is the clock's.
    assert slow[cause] == pytest.approx(slow["useful"] + slow["padding"], rel=1e-6)
    assert slow["useful"] == pytest.approx(usual["useful"], rel=1e-3)
    card = (snapshots[2].gpus or ())[0]
    sheet = find_peaks(card.name, card.memory_total_bytes)
    assert sheet is not None
    assert sheet.sheet_clock_hz is not None
    assert card.sm_clock_hz == pytest.approx(0.5 * sheet.sheet_clock_hz, abs=1)
    assert event in (card.clock_events or ())
    clock = snapshots[2].counters[0].sm_clock_hz
    assert clock is not None
    assert clock.tolist() == pytest.approx([0.5 * sheet.sheet_clock_hz] * len(clock), rel=1e-4)


def test_a_spell_begins_and_ends() -> None:
    spell = ClockSpell(gpu=0, clock_ratio=0.5, start_ns=SECOND_NS, stop_ns=2 * SECOND_NS)
    snapshots, truths = ran(replace(node(LOAD, seconds=4.0), clocks=(spell,)))
    throttled = [truth.gpus[0].window.causes_ns.get("throttled_thermal", 0) for truth in truths]
    assert throttled[2] > 0 == throttled[1] == throttled[4]
    ratios = [snapshot.counters[0].sm_clock_hz for snapshot in snapshots[1:]]
    assert [float(r.mean() / ratios[0].max()) for r in ratios if r is not None and ratios[0] is not None] == [
        pytest.approx(1.0),
        pytest.approx(0.5),
        pytest.approx(1.0),
        pytest.approx(1.0),
    ]


def test_a_power_cap_slows_what_draws_more_and_the_card_never_draws_above_it() -> None:
    prompts = asked(*(Request(i, 900, 1) for i in range(40)))
    capped = replace(node(prompts, seconds=3.0), gpus=(GpuSpec(power_cap_watts=300.0),))
    snapshots, truths = ran(capped, tick_ns=SECOND_NS // 4)
    assert max(gpu.power_watts or 0.0 for s in snapshots for gpu in s.gpus or ()) <= 300.0 + 1e-6
    assert causes(truths[-1])["throttled_power"] > 0.05 * 3 * SECOND_NS
    events = {event for s in snapshots for gpu in s.gpus or () for event in gpu.clock_events or ()}
    assert "power_cap" in events
    _, free = ran(node(prompts, seconds=3.0))
    assert causes(free[-1])["throttled_power"] == 0


def test_a_slow_clock_on_one_rank_holds_up_the_others() -> None:
    pair = replace(LOAD, gpus=(0, 1))
    spell = ClockSpell(gpu=1, clock_ratio=0.5)
    _, truths = ran(replace(node(pair, gpus=2, seconds=6.0), clocks=(spell,)))
    peer, slow = (causes(truths[-1], gpu) for gpu in (0, 1))
    assert peer["waiting_peer"] > 0 == slow["waiting_peer"]
    assert slow["throttled_thermal"] > 0 == peer["throttled_thermal"]


# -------------------------------------------------------------------------------------------- roles


def apart(*requests: Request, **way: Any) -> Scenario:
    prefill = replace(
        asked(*requests), name="prefill", role="prefill", hands_to=Handover("decode", **way), jitter=0.0
    )
    return node(prefill, replace(SMALL, name="decode", gpus=(1,), role="decode"), gpus=2, seconds=8.0)


def test_a_prefill_engine_makes_one_token_and_a_decode_engine_makes_all() -> None:
    requests = [Request(i * SECOND_NS // 4, 500, 30) for i in range(8)]
    snapshots, truths = ran(apart(*requests))
    ahead, behind = (engine.total for engine in truths[-1].engines)
    assert (ahead.prompt_tokens, ahead.first_tokens, ahead.decode_tokens) == (4000, 8, 0)
    assert (ahead.steps_decode, ahead.steps_mixed) == (0, 0)
    assert (behind.prompt_tokens, behind.first_tokens, behind.decode_tokens) == (8, 8, 8 * 29)
    roles = [(engine.role, engine.counters) for engine in snapshots[-1].engines]
    assert [role for role, _ in roles] == ["prefill", "decode"]
    told = roles[1][1]
    assert told is not None
    assert (told[0].prompt_tokens, told[0].computed_prompt_tokens) == (4000, 8)
    assert told[0].prefix_hit_tokens == 0


def test_a_decode_engine_that_waits_for_kv_waits_for_its_peer() -> None:
    slow = apart(Request(0, 500, 5), bytes_per_s=1e8)  # 500 tokens of 128 KiB: 0.66 s
    snapshots, truths = ran(slow, tick_ns=SECOND_NS // 10)
    moved = 500 * 2 * 32 * 8 * 128 * 2 / 1e8 * SECOND_NS + 2_000_000
    assert causes(truths[-1], 1)["waiting_peer"] == pytest.approx(moved, abs=2)
    assert causes(truths[-1], 0)["waiting_peer"] == 0
    waiting = [s.engines[1].counters[0].requests_waiting for s in snapshots if s.engines[1].counters]
    assert max(value or 0 for value in waiting) == 1


# ------------------------------------------------------------------------------------- shared GPUs


def sharing(one: EngineSpec, other: EngineSpec, seconds: float = 6.0) -> Scenario:
    return Scenario(
        seed=1,
        gpus=(GpuSpec(),),
        engines=(one, replace(other, name="other")),
        duration_ns=int(seconds * SECOND_NS),
        shared_gpus=True,
    )


@pytest.mark.parametrize("tick_ns", [SECOND_NS, 7_000_001])
def test_engines_that_share_a_gpu_get_the_same_work_done_in_more_time(tick_ns: int) -> None:
    _, truths = ran(sharing(LOAD, DECODES), tick_ns=tick_ns)
    for spec, engine in ((LOAD, truths[-1].engines[0]), (DECODES, truths[-1].engines[1])):
        alone, _ = steps_of(spec)
        assert engine.total.first_tokens == sum(step.first_tokens for step in alone)
        assert engine.total.decode_tokens == sum(s.delivered_tokens - s.first_tokens for s in alone)
    gpu = truths[-1].gpus[0].total
    assert sum(gpu.causes_ns.values()) == sum(gpu.phases_ns.values()) == 6 * SECOND_NS


def test_a_step_beside_another_runs_at_half_speed() -> None:
    long = asked(Request(0, 256, 1))
    snapshots, truths = ran(sharing(long, long, seconds=1.0))
    alone, _ = steps_of(long)
    work_ns = alone[0].end_ns - alone[0].start_ns
    for series in snapshots[1].steps:
        assert int(series.end_ns[0] - series.start_ns[0]) == pytest.approx(2 * work_ns, abs=2)
    busy = sum(ns for phase, ns in truths[-1].gpus[0].total.phases_ns.items() if phase != "idle")
    assert busy == 2 * work_ns


def test_the_counters_of_a_shared_gpu_are_of_all_its_engines() -> None:
    snapshots, truths = ran(sharing(LOAD, DECODES))
    for snapshot, truth in zip(snapshots[1:], truths[1:], strict=True):
        busy = sum(ns for phase, ns in truth.gpus[0].window.phases_ns.items() if phase != "idle")
        assert snapshot.gpus is not None
        assert snapshot.gpus[0].busy_ratio == pytest.approx(busy / truth.window_ns, abs=0.006)
        assert len(snapshot.gpus[0].processes or ()) == 2


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pipeline_stages": 2}, "stages"),
        ({"microbatches": 0}, "microbatches"),
        ({"straggler": Straggler(1, 2.0)}, "straggler"),
        ({"role": "prefill"}, "hands its requests on"),
        ({"hands_to": Handover("x")}, "hands its requests on"),
        (
            {
                "role": "prefill",
                "hands_to": Handover("x"),
                "arrivals": (ClosedLoop(1, (Sizes((1, 2), (1, 2)),)),),
            },
            "do not wait",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        replace(SMALL, **change)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ScenarioError, match="chance"):
        Speculation(())
    with pytest.raises(ScenarioError, match="slower"):
        Straggler(0, 0.5)
    with pytest.raises(ScenarioError, match="clock"):
        ClockSpell(0, 2.0)
    with pytest.raises(ScenarioError, match="power cap"):
        GpuSpec(power_cap_watts=20.0)
    with pytest.raises(ScenarioError, match="decode engine"):
        node(replace(SMALL, role="prefill", hands_to=Handover("nobody")))
    with pytest.raises(ScenarioError, match="share all of them"):
        replace(node(SMALL, gpus=2), shared_gpus=True, engines=(SMALL, replace(SMALL, gpus=(0, 1))))
    with pytest.raises(ScenarioError, match="take"):
        ran(sharing(replace(SMALL, kv_blocks=20_000), replace(SMALL, kv_blocks=20_000)))
