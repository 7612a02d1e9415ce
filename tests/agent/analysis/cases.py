"""Simulated nodes through the whole analyzer: each kind of work that phases are easily mistaken in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import CAUSES, PHASES, Cause, Frame, Phase
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import GPM_10_HZ, Visible, simulate
from gpuidle.collectors.simulator.options import ClockSpell, Handover, Speculation, Straggler
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    SECOND_NS,
    Burst,
    EngineSpec,
    GpuSpec,
    Listed,
    Poisson,
    Request,
    Scenario,
    Sizes,
)
from gpuidle.collectors.simulator.truth import Truth

REST_S = 6
"""Seconds at the end without a request, in which all windows settle."""
LOAD_S = 36

PM_1_KHZ = Sampling("cupti_pm", 1000.0)
PM_100_HZ = Sampling("cupti_pm", 100.0)
EVIDENCE: Mapping[str, Visible] = {
    "steps": Visible(counters=GPM_10_HZ),
    "sums": Visible(steps=False, counters=GPM_10_HZ),
    "sums and NVML": Visible(steps=False, counters=None),
    "sums and PM": Visible(steps=False, counters=PM_1_KHZ),
    "PM alone": Visible(engine_counters=False, steps=False, counters=PM_1_KHZ),
    "PM at 100 Hz alone": Visible(engine_counters=False, steps=False, counters=PM_100_HZ),
}

MIXTRAL: Mapping[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
CHATS = (Sizes(prompt=(200, 1200), output=(60, 160)),)
STOP_NS = LOAD_S * SECOND_NS


def chats(per_second: float, mix: tuple[Sizes, ...] = CHATS) -> Poisson:
    """Return users who come until the load ends, in time to be through before the end."""
    return Poisson(per_second, mix, stop_ns=STOP_NS - 4 * SECOND_NS)


PLAIN = EngineSpec(
    name="plain",
    config=LLAMA_3_8B,
    gpus=(0,),
    kv_blocks=20_000,
    max_batched_tokens=8192,
    arrivals=(chats(3.0),),
)
LONELY = tuple(Request((2 + 5 * i) * SECOND_NS, 7800, 40) for i in range(6))


def node(*engines: EngineSpec, gpus: int = 1, seed: int = 11, shared: bool = False) -> Scenario:
    """Return a node of H100s under a load and then at rest."""
    return Scenario(
        seed=seed,
        gpus=(GpuSpec(),) * gpus,
        engines=engines,
        duration_ns=(LOAD_S + REST_S) * SECOND_NS,
        shared_gpus=shared,
    )


CASES: Mapping[str, Scenario] = {
    "chats": node(PLAIN),
    "two engines on one GPU": node(
        replace(PLAIN, kv_blocks=8000),
        replace(PLAIN, name="other", kv_blocks=8000, arrivals=(chats(2.0, (Sizes((500, 2500), (20, 80)),)),)),
        shared=True,
    ),
    "first long prefill": node(replace(PLAIN, arrivals=(Listed(LONELY),))),
    "chunked prefill": node(
        replace(PLAIN, max_batched_tokens=512, arrivals=(chats(1.0, (Sizes((1000, 4000), (60, 200)),)),))
    ),
    "preemption": node(
        replace(PLAIN, kv_blocks=220, arrivals=(chats(2.0, (Sizes((150, 400), (200, 500)),)),))
    ),
    "prefix hits": node(
        replace(PLAIN, arrivals=(chats(3.0, (Sizes((1500, 3000), (60, 160), prefix_hit_ratio=0.8),)),))
    ),
    "speculation": node(replace(PLAIN, speculation=Speculation((0.8, 0.7, 0.6)))),
    "speculation with a draft model": node(
        replace(
            PLAIN,
            speculation=Speculation(
                (0.8, 0.7, 0.6),
                {
                    **LLAMA_3_8B,
                    "hidden_size": 2048,
                    "intermediate_size": 5632,
                    "num_hidden_layers": 6,
                    "num_attention_heads": 16,
                },
            ),
        )
    ),
    "speculation without prompts": node(
        replace(
            PLAIN,
            speculation=Speculation((0.8, 0.7, 0.6)),
            arrivals=(Burst(SECOND_NS, 8, (Sizes((100, 200), (6000, 6000)),)),),
        )
    ),
    "speculation of a large batch": node(
        replace(
            PLAIN,
            speculation=Speculation((0.8, 0.7, 0.6, 0.5)),
            arrivals=(Burst(SECOND_NS, 80, (Sizes((100, 200), (3500, 3500)),)),),
        )
    ),
    "experts": node(
        replace(PLAIN, config=MIXTRAL, gpus=(0, 1), max_batched_tokens=2048, kv_blocks=16_000), gpus=2
    ),
    "tensor parallel": node(replace(PLAIN, gpus=(0, 1)), gpus=2),
    "async scheduling": node(replace(PLAIN, async_scheduling=True)),
    "power cap": replace(node(PLAIN), gpus=(GpuSpec(power_cap_watts=300.0),)),
    "hot": replace(node(PLAIN), clocks=(ClockSpell(0, 0.6, start_ns=5 * SECOND_NS),)),
    "straggler": node(replace(PLAIN, gpus=(0, 1), straggler=Straggler(1, 1.5)), gpus=2),
    "pipeline": node(replace(PLAIN, gpus=(0, 1), pipeline_stages=2), gpus=2),
    "roles": node(
        replace(PLAIN, name="prefill", role="prefill", hands_to=Handover("decode")),
        replace(PLAIN, name="decode", gpus=(1,), role="decode", arrivals=()),
        gpus=2,
    ),
}


class Outcome(NamedTuple):
    """Shares of a run's time by phase, of each GPU: ours and the truth."""

    frame: Frame
    truth: Truth
    ours: list[dict[Phase, float]]
    theirs: list[dict[Phase, float]]
    kinds: list[dict[Phase, int]]
    """By settled window of the first GPU: our phases in ns."""
    causes: list[dict[Cause, float]]
    """By GPU: our causes less the true ones, in points of the time."""


@lru_cache(maxsize=64)
def outcome(case: str, evidence: str, seed: int | None = None) -> Outcome:
    """Run a case with this evidence to its end."""
    scenario = CASES[case] if seed is None else replace(CASES[case], seed=seed)
    analyzer = Analyzer()
    kinds, totals = [], []
    for snapshot, now in simulate(scenario, visible=EVIDENCE[evidence]):
        frame, truth = analyzer.feed(snapshot), now
        totals.append([gpu.total for gpu in now.gpus])
        if frame.gpus[0].window_ns:
            shares = frame.gpus[0].phases
            kinds.append({phase: shares.of(phase) for phase in PHASES})
    settled = totals[len(kinds)]
    ours, theirs, causes = [], [], []
    for gpu, total in zip(frame.gpus, settled, strict=True):
        real = total.phases_ns
        whole, all_ns = sum(gpu.phases_total_ns.values()), sum(real.values())
        assert whole == all_ns
        ours.append({phase: gpu.phases_total_ns[phase] / whole for phase in PHASES})
        theirs.append({phase: real.get(phase, 0) / all_ns for phase in PHASES})
        causes.append(
            {
                cause: 100 * (gpu.causes_total_ns[cause] - total.causes_ns.get(cause, 0)) / whole
                for cause in CAUSES
            }
        )
    return Outcome(frame, truth, ours, theirs, kinds, causes)
