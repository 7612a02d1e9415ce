"""Step times and what steps do to a GPU, against the work model and the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.collectors.simulator.nodes import SMALL

from gpuidle.agent.physics.roofline import step_time_s
from gpuidle.agent.physics.work import work
from gpuidle.collectors.simulator.costs import STEP_CAUSES, Costs, Load, split
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    EngineSpec,
    GpuSpec,
    ScenarioError,
    demo,
)

MOE: Mapping[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
ENGINES = {
    "dense": Costs(SMALL, GpuSpec()),
    "tensor-parallel": Costs(demo().engines[0], GpuSpec()),
    "experts": Costs(replace(SMALL, config=MOE), GpuSpec()),
}
RANKS = {"dense": 1, "tensor-parallel": 2, "experts": 1}


@st.composite
def loads(draw: st.DrawFn) -> Load:
    tokens = draw(st.integers(1, 256))
    again = draw(st.integers(0, tokens - 1))
    pairs = draw(st.integers(tokens, tokens * 8000))
    return Load(
        tokens=tokens,
        logit_rows=draw(st.integers(0, tokens - again)),
        attention_pairs=pairs,
        kv_tokens=draw(st.integers(0, pairs)),
        recomputed_tokens=again,
        recomputed_pairs=draw(st.integers(0, pairs // 2)) if again else 0,
    )


@given(loads(), st.sampled_from(sorted(ENGINES)), st.floats(1.0, 1.2))
@settings(max_examples=60, deadline=None)
def test_a_step_costs_what_the_work_model_says_and_never_beats_the_roofline(
    load: Load, name: str, slower: float
) -> None:
    costs = ENGINES[name]
    useful = work(
        costs.shape,
        tensor_parallel=RANKS[name],
        tokens=load.tokens - load.recomputed_tokens,
        logit_rows=load.logit_rows,
        attention_pairs=load.attention_pairs - load.recomputed_pairs,
        kv_read_tokens=load.kv_tokens,
    )
    whole = work(
        costs.shape,
        tensor_parallel=RANKS[name],
        tokens=load.tokens,
        logit_rows=load.logit_rows,
        attention_pairs=load.attention_pairs,
        kv_read_tokens=load.kv_tokens,
    )
    cost = costs.of(load, slower)
    assert cost.useful_flops == pytest.approx(float(useful.total_flops), rel=1e-9)
    assert cost.executed_flops >= float(whole.total_flops) * (1 - 1e-9)
    assert cost.read_bytes + cost.write_bytes == pytest.approx(float(whole.total_bytes), rel=1e-9)
    bound = step_time_s(whole, costs.peaks, at_max_clock=False, experts="uniform")
    assert cost.duration_ns >= float(bound.seconds) * 1e9
    assert cost.duration_ns >= cost.bound_ns
    assert sum(cost.causes_ns) == cost.duration_ns
    assert min(cost.causes_ns) >= 0
    assert cost.pipe_ns <= cost.duration_ns
    assert cost.resident_ns <= cost.duration_ns


def test_prefill_is_bound_by_compute_and_decode_by_memory() -> None:
    costs = ENGINES["tensor-parallel"]
    prefill = costs.of(Load(2048, 1, 2048 * 2049 // 2, 0), 1.0)
    decode = costs.of(Load(8, 8, 8 * 1000, 8 * 999), 1.0)
    in_prefill = dict(zip(STEP_CAUSES, prefill.causes_ns, strict=True))
    in_decode = dict(zip(STEP_CAUSES, decode.causes_ns, strict=True))
    assert in_prefill["memory_bound"] == 0
    assert 0.35 < in_prefill["useful"] / prefill.duration_ns < 0.45
    assert in_decode["useful"] / decode.duration_ns < 0.02
    assert 0.4 < in_decode["memory_bound"] / decode.duration_ns < 0.6 / 0.93
    assert in_decode["memory_bound"] == max(in_decode.values())
    assert in_decode["padding"] > 5 * in_decode["useful"]  # 8 rows fill an eighth of a tile


def test_tensor_parallel_ranks_wait_for_collectives_and_a_single_gpu_does_not() -> None:
    load = Load(8, 8, 8000, 7992)
    assert ENGINES["dense"].of(load, 1.0).causes_ns[3] == 0
    assert ENGINES["tensor-parallel"].of(load, 1.0).causes_ns[3] > 1_000_000


@given(
    st.integers(1, 10**9),
    st.floats(0, 2e9),
    st.floats(0, 2e9),
    st.floats(0, 2e9),
    st.floats(0, 2e9),
)
def test_the_causes_of_a_step_sum_to_it(
    duration: int, useful: float, pipe: float, memory: float, link: float
) -> None:
    causes = split(duration, useful, pipe, memory, link)
    assert sum(causes) == duration
    assert min(causes) >= 0


def test_measured_links_stand_for_latency_and_rate() -> None:
    plain = replace(demo().engines[0], jitter=0.0)
    load = Load(tokens=64, logit_rows=64, attention_pairs=64 * 200, kv_tokens=64 * 200)
    spec = replace(plain, link_points=((1e3, 5e3), (1e9, 5e6)))
    by_points = Costs(spec, GpuSpec()).of(load, 1.0)
    faster = replace(spec, link_points=tuple((size, ns / 2) for size, ns in spec.link_points))
    talk = STEP_CAUSES.index("communication")
    assert by_points.causes_ns[talk] > 0
    assert Costs(faster, GpuSpec()).of(load, 1.0).causes_ns[talk] == pytest.approx(
        by_points.causes_ns[talk] / 2, rel=0.01
    )


def engine(config: Mapping[str, object], gpus: tuple[int, ...] = (0,)) -> EngineSpec:
    return replace(SMALL, config=config, gpus=gpus)


def test_a_model_that_does_not_fit_its_gpu_is_refused() -> None:
    with pytest.raises(ScenarioError, match="small: weights and KV take"):
        Costs(engine(LLAMA_3_70B), GpuSpec())


def test_the_weights_of_70b_and_its_kv_fit_two_cards() -> None:
    used = ENGINES["tensor-parallel"].memory_used_bytes
    assert 70.5e9 < used < 0.93 * GpuSpec().memory_total_bytes


def test_kernels_that_beat_the_reachable_bandwidth_are_refused() -> None:
    with pytest.raises(ScenarioError, match="small: kernels cannot beat"):
        Costs(replace(SMALL, memory_efficiency=0.95), GpuSpec())


def test_a_card_without_peaks_is_refused() -> None:
    with pytest.raises(ScenarioError, match="no peaks are known of Voodoo 2"):
        Costs(SMALL, GpuSpec(name="Voodoo 2"))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ScenarioError, match="small: "):
        Costs(engine({**LLAMA_3_8B, "model_type": "nonesuch", "architectures": ["NoneSuch"]}), GpuSpec())
