"""Bounds of a step's time on a device: no step is faster than its arithmetic or its traffic allows.

Compute and memory overlap, so the bound is the larger of the two, never their sum.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.physics.parts import WeightFormat
from gpuidle.agent.physics.peaks import DevicePeaks
from gpuidle.agent.physics.work import Column, Number, Work

Limiter = Literal["compute", "memory"]
Experts = Literal["fewest", "uniform"]


class Bound(msgspec.Struct, frozen=True, eq=False):
    """Lower bound of a step's time in seconds, and what it is made of."""

    seconds: Column
    """max(compute_s, memory_s)."""
    compute_s: Column
    memory_s: Column
    in_l2: bool | NDArray[np.bool_] | None = None
    """Whether the weights fit the L2 cache: read again and again they may beat the bound. None: unknown."""


def compute_time_s(
    work: Work, peaks: DevicePeaks, *, at_max_clock: bool = False, executed: bool = False
) -> Column:
    """Return the seconds at the dense peak of each op's dtype: sum over dtypes of FLOPs / peak."""
    total: Column | None = None
    for dtype, flops in (work.executed_flops if executed else work.flops).items():
        if np.count_nonzero(flops):
            seconds = flops / peaks.rate(dtype, at_max_clock=at_max_clock)
            total = seconds if total is None else total + seconds
    return 0.0 if total is None else total


def step_time_s(
    work: Work, peaks: DevicePeaks, *, at_max_clock: bool = True, experts: Experts = "fewest"
) -> Bound:
    """Return the lower bound of the time of a step (or of a window's steps) on one GPU.

    At the maximum clock, with the fewest experts, the bound is hard; at the sheet's clock and with uniform
    routing it is what the sheet lets one expect, and a boosting card can beat it. Weights that fit the L2
    cache can beat either.
    """
    compute = compute_time_s(work, peaks, at_max_clock=at_max_clock)
    weights = work.weight_bytes_low if experts == "fewest" else work.weight_bytes
    memory = (weights + work.kv_bytes) / peaks.memory_bytes_per_s
    return Bound(_maximum(compute, memory), compute, memory, fits_l2(weights, peaks))


def matmul_time_s(
    rows: Number,
    inputs: int,
    outputs: int,
    fmt: WeightFormat,
    peaks: DevicePeaks,
    *,
    at_max_clock: bool = True,
) -> Bound:
    """Return the lower bound of one product alone, its activations read and written once in 16 bits.

    2 m n k FLOPs; n k weights, m k inputs and m n outputs. In a benchmark loop the operands can stay in L2
    (`in_l2`), and the bound on memory does not hold.
    """
    m = np.asarray(rows, dtype=np.float64)
    compute = 2.0 * m * inputs * outputs / peaks.rate(fmt.compute, at_max_clock=at_max_clock)
    entering = 1 if fmt.compute in {"fp8", "int8"} else 2
    moved = inputs * outputs * fmt.bits / 8 + m * inputs * entering + m * outputs * 2
    memory = moved / peaks.memory_bytes_per_s
    held = fits_l2(inputs * outputs * fmt.bits / 8, peaks)
    return Bound(_maximum(compute, memory), _scalar(compute), _scalar(memory), held)


def fits_l2(weight_bytes: Column, peaks: DevicePeaks) -> NDArray[np.bool_] | bool | None:
    """Whether weights fit the device's L2 cache, where the bound on memory may be beaten; None: unknown."""
    if peaks.l2_bytes is None:
        return None
    return (
        np.asarray(weight_bytes) <= peaks.l2_bytes
        if np.ndim(weight_bytes)
        else weight_bytes <= peaks.l2_bytes
    )


def intensity(work: Work) -> Column:
    """Return useful FLOPs a byte moved; 0 where nothing moves."""
    moved = np.asarray(work.total_bytes, dtype=np.float64)
    flops = np.asarray(work.total_flops, dtype=np.float64)
    ratio: NDArray[np.float64] = np.divide(flops, moved, out=np.zeros(moved.shape), where=moved > 0)
    return float(ratio) if ratio.ndim == 0 else ratio


def ridge(peaks: DevicePeaks, dtype: str, *, at_max_clock: bool = False) -> float:
    """Return the FLOPs a byte from which on `dtype` is bound by compute. Raises NoPeak."""
    return peaks.rate(dtype, at_max_clock=at_max_clock) / peaks.memory_bytes_per_s


def limiter(work: Work, peaks: DevicePeaks) -> Limiter | NDArray[np.str_]:
    """Return what bounds the step at the sheet's clock, by time rather than by a mixed intensity."""
    bound = step_time_s(work, peaks, at_max_clock=False, experts="uniform")
    by_compute = np.asarray(bound.compute_s) > np.asarray(bound.memory_s)
    if by_compute.ndim == 0:
        return "compute" if by_compute else "memory"
    return np.where(by_compute, "compute", "memory")


def _maximum(a: Column, b: Column) -> Column:
    return _scalar(np.maximum(a, b))


def _scalar(value: NDArray[np.float64]) -> Column:
    return float(value) if np.ndim(value) == 0 else value
