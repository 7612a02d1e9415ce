"""FLOPs and bytes of a window from its token sums: the bridge from `rates` to `physics`.

The sums do not tell each request's context, so the attention term is estimated from means and carries wide
bounds; the linear terms are exact for the tokens counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from gpuidle.agent.analysis.collectives import collectives_ns
from gpuidle.agent.analysis.rates import PromptSizes, Sums
from gpuidle.agent.analysis.stepsizes import decode_sizes
from gpuidle.agent.model import EngineReading
from gpuidle.agent.physics.peaks import DevicePeaks, NoPeak
from gpuidle.agent.physics.shapes import ModelShape
from gpuidle.agent.physics.work import Work, work

TILE_ROWS = 64
"""Rows of the tensor instruction on Hopper; where no counter shows the pipe, padding is estimated by it."""


class WindowWork(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one engine in one window on one of its GPUs."""

    flops_by_dtype: dict[str, float]
    flops_low: float
    flops_high: float
    bytes_moved: float | None
    """Weights once a step and the KV read; None where the steps are not known."""
    collectives_ns: float = 0.0
    """Time of the messages between the ranks."""
    prompt_ratio: float = 0.0
    """Of the FLOPs, those of prompts: they are booked in the window in which a prompt ends."""
    prompt_collectives_ns: float = 0.0
    """Of `collectives_ns`, what the prompts' tokens add."""

    @property
    def flops(self) -> float:
        """All dtypes together."""
        return sum(self.flops_by_dtype.values())

    def useful_s(self, peaks: DevicePeaks) -> float | None:
        """Return the seconds this work takes at the dense peaks; None where a dtype has no peak."""
        try:
            return sum(flops / peaks.rate(dtype) for dtype, flops in self.flops_by_dtype.items() if flops)
        except NoPeak:
            return None


def mean_context_tokens(sums: Sums, reading: EngineReading) -> float | None:
    """Return the mean context of the running sequences from KV usage and capacity; None if not known."""
    capacity = reading.limits.kv_capacity_tokens
    usage = [value for value in sums.kv_usage_ratio if value is not None]
    running = [value for value in sums.running if value is not None]
    if capacity is None or not usage or not running or sum(running) == 0:
        return None
    # The capacity is one core's, the sequences are those of all.
    return capacity * (sum(usage) / len(usage)) * sums.cores / (sum(running) / len(running))


def window_steps(sums: Sums, reading: EngineReading) -> float | None:
    """Return the steps of a window: those counted, and a lower bound of the chunks that were not."""
    if sums.counted_steps is None:
        return None
    budget = reading.limits.max_batched_tokens
    if sums.always_running or not budget or not sums.prefill_tokens:
        return float(sums.counted_steps)
    chunks = math.ceil(sums.prefill_tokens / budget)
    return float(max(sums.counted_steps, sums.counted_steps - (sums.first_tokens or 0) + chunks))


def _one_gpus(shape: ModelShape, reading: EngineReading) -> Callable[..., Work]:
    """Return `work` of one GPU of the engine: what is left to say is the tokens of its core."""
    place = reading.parallelism
    return partial(
        work,
        shape,
        tensor_parallel=place.tensor,
        pipeline_parallel=place.pipeline,
        expert_parallel=place.expert,
        data_parallel=max(1, place.data),
    )


class DecodeStep(msgspec.Struct, frozen=True, kw_only=True):
    """A decode-only step of a window's batch and contexts, on one GPU."""

    bytes_moved: float
    padded_flops: dict[str, float]
    """By dtype, with the rows that fill up the tiles."""
    rows: int
    """Those of `padded_flops`."""
    padding_ratio: float
    """Of the rows, those that fill up the tiles."""

    def pipe_s(self, peaks: DevicePeaks) -> float:
        """Return the seconds that the tensor pipe is busy; 0 where a dtype has no peak."""
        try:
            return sum(flops / peaks.rate(dtype) for dtype, flops in self.padded_flops.items() if flops)
        except NoPeak:
            return 0.0


def decode_step(shape: ModelShape, sums: Sums, reading: EngineReading, rows: float) -> DecodeStep:
    """Return a decode-only step of `rows` sequences of this window, all its cores together.

    Without a known KV capacity its contexts are left out.
    """
    one = _one_gpus(shape, reading)
    running = max(1.0, rows / sums.cores)
    context = (reading.limits.kv_capacity_tokens or 0) * mean_of(sums.kv_usage_ratio)
    context *= min(2.0, rows / max(1.0, mean_of(sums.running)))
    filled = math.ceil(running / TILE_ROWS) * TILE_ROWS
    # Few rows choose few experts, so that steps of different rows are not averaged.
    sizes = decode_sizes(sums, rows) if shape.experts else ((rows, 1.0),)
    shares = np.array([share for _, share in sizes])
    moved, padded = (
        one(
            tokens=tokens,
            logit_rows=tokens,
            attention_pairs=context + running,
            kv_read_tokens=context,
        )
        for tokens in (np.array([max(1.0, size / sums.cores) for size, _ in sizes]), filled)
    )
    return DecodeStep(
        bytes_moved=float(np.asarray(moved.total_bytes) @ shares),
        padded_flops={dtype: float(flops) for dtype, flops in padded.flops.items()},
        rows=filled,
        padding_ratio=1 - running / filled,
    )


def prompt_bytes_ratio(
    shape: ModelShape, reading: EngineReading, decode: DecodeStep, rows: float, tokens: float
) -> float:
    """Return what a step of so many tokens moves for its weights to what one of `rows` moves.

    Only experts make a difference: more tokens ask for more of them.
    """
    one = _one_gpus(shape, reading)
    more, less = (
        one(
            tokens=count,
            logit_rows=rows,
            attention_pairs=0.0,
            kv_read_tokens=0.0,
        )
        for count in (max(rows, tokens), rows)
    )
    return 1 + max(0.0, float(more.weight_bytes) - float(less.weight_bytes)) / decode.bytes_moved


def mean_of(values: Sequence[float | None]) -> float:
    """Return the mean of the known values, 0 without one."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def prompt_context_tokens(sums: Sums, sizes: PromptSizes, hit_ratio: float) -> float:
    """Return the keys that a prompt token attends to, the mean over the tokens computed in a window.

    A prompt of L tokens attends L(L+1)/2 pairs, so long prompts weigh more: with a mean L and a variance V of
    n prompts it is (L + V/L (n-1)/n + 1)/2 a token, and what was found in the prefix cache on top.
    """
    usual = sizes.mean()
    size = sums.whole_prompt_tokens or usual or float(sums.prefill_tokens or 0)
    count = (sums.first_tokens or 0) if sums.whole_prompt_tokens else 0
    others = 1 - 1 / count if count else 1.0
    cached = size * hit_ratio / (1 - min(0.99, hit_ratio))
    return (size * (1 + sizes.spread() * others) + 1) / 2 + cached


def window_work(
    shape: ModelShape, sums: Sums, reading: EngineReading, prompt_context: float
) -> WindowWork | None:
    """Return the work of a window per GPU of the engine; None where the tokens are not known.

    Attention pairs are taken from means: a prompt token attends `prompt_context` keys, a decode row its mean
    context. Their bounds are none and twice the estimate.
    """
    prefill, decode = sums.prefill_tokens, sums.decode_tokens
    if prefill is None or decode is None:
        return None
    firsts = sums.first_tokens or 0
    prompt = prefill / max(1, firsts)
    context = mean_context_tokens(sums, reading)
    prefill_pairs = prefill * prompt_context
    decode_pairs = decode * (context or 0.0)
    steps = window_steps(sums, reading)
    one = _one_gpus(shape, reading)
    # Data-parallel cores each do their share: sums are over the cores that were read, a GPU does its core's.
    ranks = sums.cores
    pairs = (prefill_pairs + decode_pairs) / ranks
    kv_tokens = (
        None if steps is None else decode_pairs / ranks + prefill_pairs / ranks / max(1.0, min(prompt, 512.0))
    )
    done = one(
        tokens=(prefill + decode) / ranks,
        logit_rows=(sums.generated_tokens or 0) / ranks,
        attention_pairs=pairs,
        decode_pairs=decode_pairs / ranks,
        kv_read_tokens=kv_tokens or 0.0,
        steps=(steps or 0.0) / ranks,
    )
    linear = one(
        tokens=(prefill + decode) / ranks,
        logit_rows=(sums.generated_tokens or 0) / ranks,
        attention_pairs=0.0,
        kv_read_tokens=0.0,
        steps=(steps or 0.0) / ranks,
    )
    decoded = one(
        tokens=decode / ranks,
        logit_rows=decode / ranks,
        attention_pairs=decode_pairs / ranks,
        kv_read_tokens=0.0,
        steps=(steps or 0.0) / ranks,
    )
    # Few tokens a step choose few experts: steps with a prompt are not averaged with the others.
    part = _prompt_steps(sums, reading, steps) / steps if steps else 0.0
    apart = one(
        tokens=(prefill + decode * part) / ranks,
        logit_rows=decode * part / ranks,
        attention_pairs=0.0,
        kv_read_tokens=0.0,
        steps=(steps or 0.0) * part / ranks,
    )
    weights = float(decoded.weight_bytes) * (1 - part) + float(apart.weight_bytes)
    flops = {dtype: float(value) for dtype, value in done.flops.items()}
    whole, least = sum(flops.values()), float(linear.total_flops)
    if not sums.prefill_exact:
        least = 0.0
    talking, prompts_talk = _talk(done, decoded, part, reading.parallelism.tensor)
    return WindowWork(
        collectives_ns=talking,
        prompt_ratio=max(0.0, 1 - float(decoded.total_flops) / whole) if whole else 0.0,
        prompt_collectives_ns=prompts_talk,
        flops_by_dtype=flops,
        flops_low=least,
        flops_high=whole + (whole - least if context is not None or not decode else whole),
        bytes_moved=None if steps is None else weights + float(done.kv_bytes),
    )


def _prompt_steps(sums: Sums, reading: EngineReading, steps: float) -> float:
    """Return about how many of the steps computed prompts."""
    prompts, budget = sums.prefill_tokens or 0, reading.limits.max_batched_tokens
    if not prompts:
        return 0.0
    return min(steps, max(1.0, sums.first_tokens or 0, prompts / budget if budget else 0.0))


def _talk(done: Work, decoded: Work, part: float, ranks: int) -> tuple[float, float]:
    """Return the time of all messages, and what the prompts' tokens make of it: theirs are larger ones.

    `part` is the share of the steps that computed prompts.
    """
    messages, payload = float(done.collectives), float(decoded.collective_bytes)
    small = float(collectives_ns(messages, payload, ranks))
    added = float(done.collective_bytes) - payload
    larger = float(collectives_ns(messages * part, payload * part + added, ranks))
    added_ns = max(0.0, larger - float(collectives_ns(messages * part, payload * part, ranks)))
    return small + added_ns, added_ns
