"""Simulated nodes for the benchmarks of accuracy: engines, loads and where the traces lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    SECOND_NS,
    EngineSpec,
    GpuSpec,
    Listed,
    Poisson,
    Scenario,
    Sizes,
)
from gpuidle.collectors.simulator.traces import read_trace, stretch

MIXTRAL_8X7B: Mapping[str, object] = {
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
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ENGINES = {
    "8B": EngineSpec(name="8b", config=LLAMA_3_8B, gpus=(0,), kv_blocks=24_000, max_batched_tokens=8192),
    "70B TP4": EngineSpec(
        name="70b", config=LLAMA_3_70B, gpus=(0, 1, 2, 3), kv_blocks=24_000, max_batched_tokens=8192
    ),
    "MoE TP2": EngineSpec(
        name="moe",
        config=MIXTRAL_8X7B,
        gpus=(0, 1),
        kv_blocks=16_000,
        max_batched_tokens=2048,
        collective_latency_ns=7_100,
    ),
}
NO_TRACES = (
    "skipped: no third-party data (set GPUIDLE_SHARED_DATA, or put it in shared/data beside the repository)"
)


def shared_data() -> Path | None:
    """Return the folder of third-party data, or None: it is not part of the repository."""
    named = os.environ.get("GPUIDLE_SHARED_DATA")
    root = Path(__file__).resolve().parent.parent
    for folder in (Path(named),) if named else (root / "shared" / "data", root.parent / "shared" / "data"):
        if folder.is_dir():
            return folder
    return None


def trace_node(trace: str, load: float, engine: str, *, seconds: int, start_s: int) -> Scenario | None:
    """Return a node under a cut of an Azure trace; None without the data."""
    folder = shared_data()
    if folder is None:
        return None
    spec = ENGINES[engine]
    requests = read_trace(folder / "traces" / f"azure_llm_2023_{trace}.csv")
    cut = stretch(requests, load=load, start_ns=start_s * SECOND_NS, duration_ns=seconds * SECOND_NS)
    return _node(spec, cut, seconds, start_s)


def steady_node(
    engine: str,
    *,
    per_second: float,
    prompt: tuple[int, int],
    output: tuple[int, int],
    seconds: int,
    seed: int,
) -> Scenario:
    """Return a node under independent users, which needs no data."""
    mix = (Sizes(prompt=prompt, output=output),)
    return _node(ENGINES[engine], Poisson(per_second=per_second, mix=mix), seconds, seed)


def _node(spec: EngineSpec, arrivals: Listed | Poisson, seconds: int, seed: int) -> Scenario:
    return Scenario(
        seed=seed,
        gpus=(GpuSpec(),) * len(spec.gpus),
        engines=(replace(spec, arrivals=(arrivals,)),),
        duration_ns=seconds * SECOND_NS,
    )
