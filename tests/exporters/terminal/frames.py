"""Frames made by hand: what the screen is shown in tests."""

from __future__ import annotations

import msgspec

from gpuidle.agent.model import (
    CAUSES,
    PHASES,
    EngineFrame,
    Figure,
    Frame,
    GpuFrame,
    Node,
    Parallelism,
    Peak,
    Problem,
    Shares,
)

SECOND = 1_000_000_000
WALL_NS = 1_767_225_600 * SECOND  # 2026-01-01 00:00:00 UTC
GIB = 1 << 30

PATTERN = "ppmmddddddddddddddddpmdddddddddddddddd·······?dddddddddd"
"""Main phases of the last windows, oldest first, by letter."""

_CAUSES_OF = {
    "prefill": {"useful": 610, "memory_bound": 210, "latency": 60, "host_gap": 120},
    "mixed": {"useful": 320, "padding": 40, "memory_bound": 520, "latency": 40, "host_gap": 80},
    "decode": {"useful": 4, "memory_bound": 902, "latency": 24, "host_gap": 70},
    "idle": {"no_request": 1000},
    "unknown": {"unobserved": 1000},
}
_LETTERS = {"p": "prefill", "m": "mixed", "d": "decode", "·": "idle", "?": "unknown"}


def figure(
    value: float, low: float | None = None, high: float | None = None, evidence: str = "measured"
) -> Figure:
    return Figure(
        value=value,
        low=value if low is None else low,
        high=value if high is None else high,
        evidence=evidence,  # type: ignore[arg-type]
        window_ns=60 * SECOND,
        source="nvml_gpm",
    )


def shares(phase: str, window_ns: int = SECOND) -> Shares:
    if phase in ("idle", "unknown"):
        return Shares(window_ns=window_ns, **{f"{phase}_ns": window_ns}, evidence="measured")
    main = window_ns * 9 // 10
    return Shares(
        window_ns=window_ns,
        **{f"{phase}_ns": main},
        idle_ns=window_ns - main,
        prefill_low_ns=0 if phase == "decode" else main // 2,
        prefill_high_ns=window_ns // 20 if phase == "decode" else main,
        evidence="estimated",
    )


def uuid(index: int) -> str:
    return f"GPU-{0x4F2A91C0 + index:08x}-7c1d-4a55-9b0e-2f6d0c8e71aa"


def gpu(index: int = 0, phase: str = "decode", windows: dict[str, int] | None = None) -> GpuFrame:
    """A healthy H100 whose newest window is of `phase`, after `windows` of each phase."""
    causes: dict[str, int] = dict.fromkeys(CAUSES, 0) | {
        c: n * SECOND // 1000 for c, n in _CAUSES_OF[phase].items()
    }
    totals: dict[str, int] = dict.fromkeys(CAUSES, 0)
    phase_totals: dict[str, int] = dict.fromkeys(PHASES, 0)
    for name, number in (windows or {phase: 1}).items():
        for cause, thousandths in _CAUSES_OF[name].items():
            totals[cause] += number * thousandths * SECOND // 1000
        one = shares(name)
        for each in PHASES:
            phase_totals[each] += number * one.of(each)
    return GpuFrame(
        hw_id=uuid(index),
        index=index,
        name="NVIDIA H100 80GB HBM3",
        rung="nvml_gpm",
        window_ns=SECOND,
        causes_ns=causes,
        estimated_causes=("memory_bound", "latency"),
        causes_total_ns=totals,
        phases=shares(phase),
        phases_total_ns=phase_totals,
        reclaimable_total_ns=totals["memory_bound"] // 4,
        idle={
            "flops": figure(0.9962, 0.9941, 0.9979, "estimated"),
            "tensor_pipe": figure(0.9889),
        },
        tensor_active=figure(0.0111),
        sm_active=figure(0.873),
        dram_bandwidth=figure(0.812),
        roofline_attained=figure(0.84, 0.79, 0.88, "estimated"),
        busy=figure(1.0),
        peak=Peak(dtype="bfloat16", flops_per_s=989e12, memory_bytes_per_s=3.35e12, source="H100 SXM"),
        price_per_hour=3.2,
        engine_ids=("vllm-llama",),
        process_count=1,
        foreign_process_count=0,
        memory_total_bytes=80 * GIB,
        memory_used_bytes=71 * GIB + GIB // 4,
        power_watts=412.3,
        power_limit_watts=700.0,
        energy_joules=1e6,
        temperature_celsius=64.0,
        sm_clock_hz=1_755_000_000,
        sm_clock_max_hz=1_980_000_000,
        clock_events=(),
    )


def engine(index: int = 0, hw_ids: tuple[str, ...] = (), phase: str = "decode") -> EngineFrame:
    return EngineFrame(
        engine_id="vllm-llama" if index == 0 else f"vllm-{index}",
        engine="vllm",
        model="meta-llama/Llama-3.1-70B-Instruct",
        role="unified",
        state="serving",
        evidence="measured",
        version="0.32.0",
        hw_ids=hw_ids,
        parallelism=Parallelism(tensor=max(1, len(hw_ids))),
        window_ns=SECOND,
        prefill_tokens_per_s=1843.0,
        decode_tokens_per_s=412.5,
        phases=shares(phase),
        requests_running=23,
        requests_waiting=0,
        kv_usage_ratio=0.452,
        prefix_hit_ratio=0.31,
    )


PROBLEMS = (
    Problem(
        source="nvml",
        kind="no_permission",
        message="Graphics performance metrics of this GPU need a right that this process does not have",
        remedy="run the service with CAP_SYS_ADMIN, or ask for NVreg_RestrictProfilingToAdminUsers=0",
        subject=uuid(0),
    ),
    Problem(
        source="nvml",
        kind="no_permission",
        message="Graphics performance metrics of this GPU need a right that this process does not have",
        remedy="run the service with CAP_SYS_ADMIN, or ask for NVreg_RestrictProfilingToAdminUsers=0",
        subject=uuid(1),
    ),
    Problem(
        source="vllm",
        kind="stats_disabled",
        message="The engine at http://127.0.0.1:8000 counts no prefix queries",
        subject="vllm-llama",
    ),
)


def frame(
    gpus: int = 2,
    engines: int = 1,
    problems: tuple[Problem, ...] = (),
    *,
    sequence: int = 0,
    phase: str = "decode",
    windows: dict[str, int] | None = None,
    simulated: bool = True,
) -> Frame:
    devices = tuple(gpu(index, phase, windows) for index in range(gpus))
    hw_ids = tuple(device.hw_id for device in devices)
    return Frame(
        sequence=sequence,
        monotonic_ns=1000 * SECOND + sequence * SECOND,
        wall_ns=WALL_NS + sequence * SECOND,
        node=Node(hostname="gpu-node-17", gpuidle_version="0.1.0", simulated=simulated),
        interval_ns=SECOND,
        gpus=devices,
        gpu_source=True,
        engines=tuple(engine(index, hw_ids, phase) for index in range(engines)),
        problems=problems,
    )


def history(
    gpus: int = 2, engines: int = 1, problems: tuple[Problem, ...] = (), pattern: str = PATTERN
) -> list[Frame]:
    """Frames over `pattern`, one a second, whose totals add up."""
    windows: dict[str, int] = {}
    frames: list[Frame] = []
    for sequence, letter in enumerate(pattern):
        phase = _LETTERS[letter]
        windows[phase] = windows.get(phase, 0) + 1
        frames.append(frame(gpus, engines, problems, sequence=sequence, phase=phase, windows=dict(windows)))
    return frames


def blank_gpu(index: int = 7) -> GpuFrame:
    """A device of which nothing is known but its name."""
    return GpuFrame(
        hw_id="GPU-abcdef",
        index=index,
        name="Some accelerator",
        rung="engine",
        window_ns=0,
        causes_ns=dict.fromkeys(CAUSES, 0),
        causes_total_ns=dict.fromkeys(CAUSES, 0),
        phases=Shares(window_ns=0),
        phases_total_ns=dict.fromkeys(PHASES, 0),
    )


def blank_engine() -> EngineFrame:
    """An engine of which nothing is known but that it serves."""
    return EngineFrame(
        engine_id="vllm-x",
        engine="vllm",
        model=None,
        role="unified",
        state="serving",
        evidence="unknown",
        phases=Shares(window_ns=0),
    )


def blank_frame() -> Frame:
    """Everything that may be None is None."""
    return msgspec.structs.replace(
        frame(gpus=0, engines=0, simulated=False),
        gpus=(blank_gpu(),),
        engines=(blank_engine(),),
        wall_ns=WALL_NS + (11 * 3600 + 11 * 60 + 11) * SECOND,
        node=Node(hostname="node", gpuidle_version=""),
        interval_ns=0,
    )
