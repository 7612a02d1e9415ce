"""Small snapshots made by hand."""

from __future__ import annotations

from typing import Any

from gpuidle.agent.model import (
    EngineCounters,
    EngineLimits,
    EngineReading,
    GpuProcess,
    GpuReading,
    Node,
    Snapshot,
)

SECOND = 10**9
H100 = "NVIDIA H100 80GB HBM3"
LLAMA_8B = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, '
    '"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, '
    '"num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16", '
    '"tie_word_embeddings": false, "max_position_embeddings": 8192}'
)


def counters(at_s: float, **values: Any) -> EngineCounters:
    known: dict[str, Any] = {
        "prompt_tokens": 0,
        "computed_prompt_tokens": 0,
        "generated_tokens": 0,
        "first_tokens": 0,
        "time_to_first_token_s": 0.0,
        "counted_steps": 0,
        "requests_running": 0,
        "requests_waiting": 0,
        "kv_usage_ratio": 0.0,
    }
    known.update(values)
    return EngineCounters(rank="0", read_ns=round(at_s * SECOND), **known)


def engine(at_s: float, *rows: EngineCounters, **values: Any) -> EngineReading:
    known: dict[str, Any] = {
        "engine_id": "vllm-tiny-1",
        "engine": "vllm",
        "state": "serving",
        "root_pid": 10,
        "root_start_ns": 1,
        "pids": (10, 11, 12),
        "model": "tiny",
        "limits": EngineLimits(max_batched_tokens=256, kv_capacity_tokens=100_000),
        "counters": rows or None,
    }
    known.update(values)
    return EngineReading(read_ns=round(at_s * SECOND), **known)


def gpu(at_s: float, busy: float | None = None, **values: Any) -> GpuReading:
    known: dict[str, Any] = {
        "hw_id": "GPU-0",
        "index": 0,
        "name": H100,
        "memory_total_bytes": 85_520_809_984,
        "processes": (GpuProcess(pid=12),),
        "busy_ratio": busy,
    }
    known.update(values)
    return GpuReading(read_ns=round(at_s * SECOND), **known)


def snapshot(at_s: float, **values: Any) -> Snapshot:
    at_ns = round(at_s * SECOND)
    known: dict[str, Any] = {
        "sequence": round(at_s),
        "boottime_ns": at_ns,
        "wall_ns": 10**18 + at_ns,
        "node": Node(hostname="node"),
    }
    known.update(values)
    return Snapshot(monotonic_ns=at_ns, **known)
