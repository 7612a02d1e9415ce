"""What a model can do on a device, from the sheet alone: the figures behind `gpuidle plan`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuidle.agent.physics.capacity import (
    Parallel,
    cards_needed,
    compute_bound_rows,
    compute_variants,
    decode_work,
    kv_limited_sequences,
    kv_room_bytes,
)
from gpuidle.agent.physics.parts import ModelShape
from gpuidle.agent.physics.peaks import DevicePeaks
from gpuidle.agent.physics.roofline import compute_time_s, intensity, limiter, step_time_s
from gpuidle.agent.physics.work import weights_held_bytes


class PlanPoint(msgspec.Struct, frozen=True):
    """A decode step at one batch size. No step is faster; a real one is slower."""

    batch: int
    """Sequences on one data-parallel rank."""
    step_s: float
    """Lower bound at the sheet's clock, experts as uniform routing has them."""
    step_hard_s: float
    """Lower bound that nothing beats: at the maximum clock, with the fewest experts."""
    tokens_per_s: float
    """Of the whole group of GPUs, at `step_s`."""
    flops_per_s: float
    """Useful, of one GPU, at `step_s`."""
    used_ratio: float
    """Useful FLOPs over what the peaks of their dtypes allow in `step_s`."""
    limiter: str
    """"compute" or "memory"."""
    intensity: float
    """Useful FLOPs a byte."""
    weight_bytes: float
    kv_bytes: float
    """Read and written by one GPU in a step."""
    cost_per_million_tokens: float | None
    """At `tokens_per_s`; None without a price."""
    fits: bool | None
    """Whether weights and caches fit the memory; None where the context is not known."""

    @property
    def idle_ratio(self) -> float:
        """The idle-compute ratio at the bound."""
        return 1 - self.used_ratio


class Plan(msgspec.Struct, frozen=True):
    """A model on a device."""

    model: str
    architecture: str
    parameters: int
    active_parameters: int
    """Multiplied by each token."""
    stored_bytes: float
    compute_dtype: str
    kv_bytes_per_token: float
    device: str
    device_source: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: float
    """Dense peak of the dtype that most of the work is in."""
    ridge: float
    """FLOPs a byte."""
    parallel: Parallel
    gpus: int
    context_tokens: int
    """Cached tokens a sequence; 0: the weights alone."""
    cards_needed: int
    """Whose memory holds the weights."""
    weights_held_bytes: float
    """On one GPU as planned."""
    points: tuple[PlanPoint, ...]
    compute_bound_batch: int | None
    """The fewest sequences that are bound by compute; None: never."""
    kv_limited_batch: int | None
    """Sequences whose caches fit beside the weights; None where the context is not known."""
    notes: tuple[str, ...]


def make_plan(
    shape: ModelShape,
    peaks: DevicePeaks,
    batches: Sequence[int],
    *,
    context_tokens: int = 0,
    parallel: Parallel | None = None,
    kv_dtype_bytes: float | None = None,
    price_per_hour: float | None = None,
    memory_share: float = 0.9,
) -> Plan:
    """Return the bounds of decode at these batch sizes. Raises NoPeak where the device has no figure.

    `price_per_hour` is that of one GPU; `memory_share` is the part of the memory that the engine may take.
    """
    spread = parallel or Parallel()
    gpus = spread.tensor * spread.pipeline * spread.data
    room = kv_room_bytes(shape, peaks, parallel=spread, memory_share=memory_share)
    kv_limit = None
    if context_tokens > 0:
        kv_limit = kv_limited_sequences(
            shape, room, context_tokens, parallel=spread, kv_dtype_bytes=kv_dtype_bytes
        )
    points = []
    for batch in batches:
        step = decode_work(shape, batch, context_tokens, parallel=spread, kv_dtype_bytes=kv_dtype_bytes)
        seconds = float(step_time_s(step, peaks, at_max_clock=False, experts="uniform").seconds)
        rate = batch * spread.data / seconds
        cost = None if price_per_hour is None else price_per_hour * gpus / 3600 / rate * 1e6
        points.append(
            PlanPoint(
                batch=batch,
                step_s=seconds,
                step_hard_s=float(step_time_s(step, peaks).seconds),
                tokens_per_s=rate,
                flops_per_s=float(step.total_flops) / seconds,
                used_ratio=float(compute_time_s(step, peaks)) / seconds,
                limiter=str(limiter(step, peaks)),
                intensity=float(intensity(step)),
                weight_bytes=float(step.weight_bytes),
                kv_bytes=float(step.kv_bytes),
                cost_per_million_tokens=cost,
                fits=None if kv_limit is None else batch <= kv_limit,
            )
        )
    rate_of_dtype = peaks.rate(shape.compute_dtype)
    return Plan(
        model=shape.name,
        architecture=shape.architecture,
        parameters=shape.parameters,
        active_parameters=shape.matmul_parameters,
        stored_bytes=shape.stored_bytes,
        compute_dtype=shape.compute_dtype,
        kv_bytes_per_token=shape.kv_bytes_per_token(kv_dtype_bytes),
        device=peaks.name,
        device_source=peaks.source,
        memory_bytes=peaks.memory_bytes,
        memory_bytes_per_s=peaks.memory_bytes_per_s,
        flops_per_s=rate_of_dtype,
        ridge=rate_of_dtype / peaks.memory_bytes_per_s,
        parallel=spread,
        gpus=gpus,
        context_tokens=context_tokens,
        cards_needed=cards_needed(shape, peaks),
        weights_held_bytes=weights_held_bytes(
            shape,
            tensor_parallel=spread.tensor,
            pipeline_parallel=spread.pipeline,
            data_parallel=spread.data,
            expert_parallel=spread.expert,
        ),
        points=tuple(points),
        compute_bound_batch=compute_bound_rows(
            shape, peaks, context_tokens, parallel=spread, kv_dtype_bytes=kv_dtype_bytes
        ),
        kv_limited_batch=kv_limit,
        notes=_notes(shape, peaks, spread, context_tokens),
    )


def _notes(shape: ModelShape, peaks: DevicePeaks, spread: Parallel, context_tokens: int) -> tuple[str, ...]:
    notes = []
    if context_tokens == 0:
        notes.append("context 0: the weights alone; a real cache adds its bytes to each step (--context)")
    if peaks.formula:
        notes.append("peaks by formula, not from a sheet: they may be too high")
    if len(compute_variants(shape, peaks)) > 1:
        notes.append("MXFP4 counted at the 16-bit peak; kernels that multiply in FP8 have a higher one")
    if shape.experts:
        notes.append("experts read as uniform routing has them; skewed routing reads fewer")
    if spread.pipeline > 1:
        notes.append("pipeline kept full by as many batches as stages; the figures are one batch's share")
    return tuple(notes)
