"""How far decode can grow: rows until it is bound by compute, sequences until the KV cache is full."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from gpuidle.agent.physics.parts import ModelShape, kv_cache_bytes
from gpuidle.agent.physics.peaks import DevicePeaks
from gpuidle.agent.physics.roofline import step_time_s
from gpuidle.agent.physics.work import Work, kv_held_share, weights_held_bytes, work

_NEVER_ABOVE = 1 << 26


class Parallel(msgspec.Struct, frozen=True):
    """How a model is spread: see `work`."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False


def decode_work(
    shape: ModelShape,
    rows: float,
    context_tokens: float,
    *,
    parallel: Parallel | None = None,
    kv_dtype_bytes: float | None = None,
) -> Work:
    """Return the work of a decode step of `rows` sequences with `context_tokens` cached tokens each."""
    spread = parallel or Parallel()
    windows = [a.window for a in shape.attentions if a.window is not None]
    in_window = min(context_tokens + 1, windows[0]) if windows else context_tokens + 1
    return work(
        shape,
        tensor_parallel=spread.tensor,
        pipeline_parallel=spread.pipeline,
        data_parallel=spread.data,
        expert_parallel=spread.expert,
        tokens=rows,
        logit_rows=rows,
        attention_pairs=rows * (context_tokens + 1) if context_tokens else 0,
        kv_read_tokens=rows * context_tokens,
        windowed_attention_pairs=rows * in_window if context_tokens else 0,
        windowed_kv_read_tokens=rows * max(in_window - 1, 0),
        decode_pairs=rows * (context_tokens + 1) if context_tokens else 0,
        kv_dtype_bytes=kv_dtype_bytes,
    )


def compute_bound_rows(
    shape: ModelShape,
    peaks: DevicePeaks,
    context_tokens: float,
    *,
    parallel: Parallel | None = None,
    kv_dtype_bytes: float | None = None,
) -> int | None:
    """Return the fewest decode rows a step that are bound by compute at the sheet's clock; None: never.

    Each row brings its own KV cache to read: where that costs more time than the row's FLOPs, no batch
    reaches the ridge.
    """

    def by_compute(rows: int) -> bool:
        step = decode_work(shape, rows, context_tokens, parallel=parallel, kv_dtype_bytes=kv_dtype_bytes)
        bound = step_time_s(step, peaks, at_max_clock=False, experts="uniform")
        return bool(bound.compute_s >= bound.memory_s)

    if not by_compute(_NEVER_ABOVE):
        return None
    low, high = 0, 1
    while not by_compute(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if by_compute(middle) else (middle, high)
    return high


def headroom_rows(
    shape: ModelShape,
    peaks: DevicePeaks,
    rows: float,
    context_tokens: float,
    *,
    parallel: Parallel | None = None,
    kv_dtype_bytes: float | None = None,
) -> float | None:
    """Return the rows that a decode step could still take before compute binds it; None: it never does."""
    turning = compute_bound_rows(
        shape, peaks, context_tokens, parallel=parallel, kv_dtype_bytes=kv_dtype_bytes
    )
    return None if turning is None else max(0.0, turning - rows)


def kv_room_bytes(
    shape: ModelShape,
    peaks: DevicePeaks,
    *,
    parallel: Parallel | None = None,
    memory_share: float = 0.9,
    other_bytes: float = 0.0,
) -> float:
    """Return the bytes of one GPU left for the KV cache; negative where the weights do not fit.

    `memory_share` is what the engine may take of the memory (vLLM's default is 0.9), `other_bytes` what its
    activations and graphs take.
    """
    spread = parallel or Parallel()
    held = weights_held_bytes(
        shape,
        tensor_parallel=spread.tensor,
        pipeline_parallel=spread.pipeline,
        data_parallel=spread.data,
        expert_parallel=spread.expert,
    )
    return peaks.memory_bytes * memory_share - held - other_bytes


def kv_limited_sequences(
    shape: ModelShape,
    room_bytes: float,
    context_tokens: int,
    *,
    parallel: Parallel | None = None,
    block_tokens: int = 16,
    kv_dtype_bytes: float | None = None,
) -> int:
    """Return how many sequences of `context_tokens` the room holds on each rank, blocks rounded up."""
    spread = parallel or Parallel()
    each = kv_cache_bytes(shape, context_tokens, block_tokens=block_tokens, kv_dtype_bytes=kv_dtype_bytes)
    each *= kv_held_share(shape, spread.tensor) / spread.pipeline
    return 0 if room_bytes <= 0 else int(room_bytes // each)


def cards_needed(shape: ModelShape, peaks: DevicePeaks) -> int:
    """Return the fewest cards whose memory together holds the weights."""
    return max(1, math.ceil(shape.stored_bytes / peaks.memory_bytes))


def compute_variants(shape: ModelShape, peaks: DevicePeaks) -> tuple[ModelShape, ...]:
    """Return the shape as each of the dtypes would have it that engines multiply MXFP4 in on this device.

    Up to Hopper MXFP4 is unpacked to 16 bits. On Blackwell the backend decides between 16 bits and FP8: two
    shapes, the slower first, make a range.
    """
    if "fp4" not in peaks.flops_per_s or not any(m.format.name == "mxfp4" for m in shape.matmuls):
        return (shape,)
    faster = tuple(
        replace(m, format=replace(m.format, compute="fp8")) if m.format.name == "mxfp4" else m
        for m in shape.matmuls
    )
    return (shape, replace(shape, matmuls=faster))
