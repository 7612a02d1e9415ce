"""Hand-made Frames: two GPUs that one engine holds with tensor parallelism, and what the agent costs."""

from __future__ import annotations

from gpuidle.agent.model import (
    CAUSES,
    ESTIMABLE,
    PHASES,
    CollectorRun,
    Durations,
    EngineFrame,
    Figure,
    Frame,
    GpuFrame,
    Node,
    OutletStatus,
    Parallelism,
    Peak,
    Shares,
)
from gpuidle.exporters.agent_self import AgentReading

SECOND = 1_000_000_000
PREFILLS = Durations(offset=-2, counts=(1, 0, 2), sum_ns=2_900_000_000)
"""One step of (2**(-2/8), 2**(-1/8)] s, two of (1, 2**(1/8)] s."""
DECODES = Durations(offset=-53, counts=(7, 30, 0, 0, 3), sum_ns=420_000_000)
"""Around 2**-6.5 s = 11 ms."""
WALL_NS = 1_800_000_000 * SECOND


def figure(value: float) -> Figure:
    return Figure(
        value=value,
        low=value,
        high=value,
        evidence="measured",
        window_ns=60 * SECOND,
        source="nvml_gpm",
    )


def gpu(
    index: int, *, engine_ids: tuple[str, ...] = ("vllm/llama/0",), parent: str | None = None
) -> GpuFrame:
    causes: dict[str, int] = {
        cause: (position + index) * SECOND // 4 for position, cause in enumerate(CAUSES)
    }
    return GpuFrame(
        hw_id=f"GPU-{index}",
        index=index,
        name="NVIDIA H100 80GB HBM3",
        parent_hw_id=parent,
        rung="nvml_gpm",
        window_ns=SECOND,
        causes_ns=causes,
        causes_total_ns=causes,
        estimated_total_ns={cause: causes[cause] // 2 for cause in ESTIMABLE},
        phases=Shares(window_ns=SECOND),
        phases_total_ns={phase: position * SECOND for position, phase in enumerate(PHASES)},
        reclaimable_total_ns=1_500_000_000,
        idle={"flops": figure(0.997), "tensor_pipe": figure(0.98)},
        tensor_active=figure(0.02),
        sm_active=figure(0.9),
        dram_bandwidth=figure(0.75),
        roofline_attained=figure(0.5),
        busy=figure(1.0),
        peak=Peak(dtype="bf16", flops_per_s=989.4e12, memory_bytes_per_s=3.35e12, source="H100 SXM"),
        price_per_hour=2.5,
        engine_ids=engine_ids,
        memory_total_bytes=85_899_345_920,
        memory_used_bytes=64_424_509_440,
        power_watts=412.5,
        energy_joules=123_456.789,
        error_counts={"ecc_double_bit": 0, "xid_79": 2} if index == 0 else None,
    )


def engine(
    engine_id: str = "vllm/llama/0", *, tokens: int = 1000, model: str | None = "meta-llama/Llama-3-70B"
) -> EngineFrame:
    return EngineFrame(
        engine_id=engine_id,
        engine="vllm",
        model=model,
        role="unified",
        state="serving",
        evidence="measured",
        hw_ids=("GPU-0", "GPU-1"),
        parallelism=Parallelism(tensor=2),
        prefill_tokens_total=tokens,
        decode_tokens_total=2 * tokens,
        useful_flops_total=1.4e14,
        executed_flops_total=1.5e14,
        steps_total={"prefill": 3, "decode": 40, "mixed": 2},
        step_durations={"prefill": PREFILLS, "decode": DECODES},
        phases=Shares(window_ns=SECOND),
        requests_running=4,
        requests_waiting=0,
        kv_usage_ratio=0.25,
    )


def frame(
    *,
    sequence: int = 1,
    gpus: tuple[GpuFrame, ...] | None = None,
    engines: tuple[EngineFrame, ...] | None = None,
    wall_ns: int | None = None,
) -> Frame:
    return Frame(
        sequence=sequence,
        monotonic_ns=sequence * SECOND,
        wall_ns=WALL_NS + sequence * SECOND if wall_ns is None else wall_ns,
        node=Node(hostname="node-a", gpuidle_version="0.1.0"),
        interval_ns=SECOND,
        lateness_ns=2_000_000,
        missed_ticks_total=3,
        gpus=(gpu(0), gpu(1)) if gpus is None else gpus,
        gpu_source=True,
        engines=(engine(),) if engines is None else engines,
        runs=(
            CollectorRun(collector="nvml", duration_ns=4_000_000, ok=True),
            CollectorRun(collector="vllm", duration_ns=1_000_000_000, ok=False),
        ),
    )


AGENT = AgentReading(
    version="0.1.0",
    python_version="3.11.2",
    cpu_seconds=1.25,
    resident_bytes=40_000_000,
    frame_age_seconds=0.5,
    outlets=(OutletStatus(outlet="otlp", delivered=10, dropped=2, failed=1),),
)
