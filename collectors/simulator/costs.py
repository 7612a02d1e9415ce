"""How long a simulated step takes and what it does to its GPUs, from the work model and the peaks.

    t = max(executed FLOPs / (peak x compute efficiency), bytes / (bandwidth x memory efficiency))
        + collectives + launches, never shorter, sometimes longer by a jitter

The work model is linear in its sums but for the experts read, so it is asked once, for every number of
tokens that a step can have, and a step costs a few multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpuidle.agent.model import Cause
from gpuidle.agent.physics.peaks import NoPeak, find_peaks
from gpuidle.agent.physics.shapes import (
    ModelShape,
    UnknownArchitecture,
    shape_from_config,
)
from gpuidle.agent.physics.work import Work, work
from gpuidle.collectors.simulator.scenario import EngineSpec, GpuSpec, ScenarioError

STEP_CAUSES: tuple[Cause, ...] = ("useful", "padding", "memory_bound", "communication", "latency")
"""The causes that a step's time is split over, in the order of `Cost.causes_ns`."""

BARE_BYTES = 2_500_000_000
"""Memory of an engine on each GPU besides weights and KV: context, activations, captured graphs."""


class Load(NamedTuple):
    """What a step computes, summed over its sequences."""

    tokens: int
    logit_rows: int
    attention_pairs: int
    kv_tokens: int
    """Context found in the cache."""
    recomputed_tokens: int = 0
    recomputed_pairs: int = 0


class Cost(NamedTuple):
    """A step on each GPU of its engine."""

    duration_ns: int
    bound_ns: float
    """The roofline's lower bound for the useful work, at the sheet's peaks."""
    useful_flops: float
    executed_flops: float
    """With recompute and the rows that fill up tiles."""
    pipe_ns: float
    """How long the tensor pipe is busy."""
    resident_ns: float
    """How long the SMs hold a warp: all but launches and collectives."""
    read_bytes: float
    write_bytes: float
    power_share: float
    """Of the range from loaded idle to the limit."""
    causes_ns: tuple[int, int, int, int, int]
    """`duration_ns` split over STEP_CAUSES by the ledger's rules."""


class Costs:
    """The cost of the steps of one engine on its GPUs.

    Raises:
        ScenarioError: the card has no peaks in the table, the model does not fit, or its attention is of a
            kind that is not linear in its sums (sliding windows, MLA), which is not simulated.
    """

    def __init__(self, spec: EngineSpec, gpu: GpuSpec) -> None:
        peaks = find_peaks(gpu.name, gpu.memory_total_bytes)
        if peaks is None:
            raise ScenarioError(f"no peaks are known of {gpu.name} with {gpu.memory_total_bytes} bytes")
        try:
            shape = shape_from_config(spec.config)
        except UnknownArchitecture as error:
            raise ScenarioError(f"{spec.name}: {error}") from error
        if shape.windowed or shape.latent:
            raise ScenarioError(f"{spec.name}: sliding windows and MLA are not simulated")
        self.peaks = peaks
        self.shape = shape
        self._spec = spec
        self._reachable = gpu.reachable_bandwidth_ratio
        if spec.memory_efficiency > self._reachable:
            raise ScenarioError(f"{spec.name}: kernels cannot beat the bandwidth that is reachable")
        self.memory_used_bytes = _memory(spec, shape)
        if self.memory_used_bytes > gpu.memory_total_bytes:
            raise ScenarioError(
                f"{spec.name}: weights and KV take {self.memory_used_bytes} bytes on each GPU,"
                f" which has {gpu.memory_total_bytes}"
            )

        # The last row of the table is padding of the largest step.
        padded = math.ceil(spec.max_batched_tokens / spec.tile_rows) * spec.tile_rows
        table = self._ask(tokens=np.arange(padded + 1, dtype=np.int64))
        one = self._ask(tokens=1)
        row = self._ask(tokens=1, logit_rows=1)
        pair = self._ask(tokens=1, attention_pairs=1)
        cached = self._ask(tokens=1, kv_read_tokens=1)
        self._weight_bytes: list[float] = np.asarray(table.weight_bytes).tolist()
        self._head_bytes = float(row.weight_bytes) - float(one.weight_bytes)
        self._kv_write_bytes = float(one.kv_bytes)
        self._kv_read_bytes = float(cached.kv_bytes) - float(one.kv_bytes)
        self._messages = float(one.collectives)
        self._payload_per_token = float(one.collective_bytes)
        self._payload_per_row = float(row.collective_bytes) - float(one.collective_bytes)
        self._flops = _Linear.of(one, row, pair, lambda _dtype: 1.0)
        try:
            self._pipe = _Linear.of(one, row, pair, lambda dtype: 1e9 / peaks.rate(dtype))
        except NoPeak as error:
            raise ScenarioError(f"{spec.name}: {error}") from error
        self._per_byte_ns = 1e9 / peaks.memory_bytes_per_s

    def of(self, load: Load, slower: float) -> Cost:
        """Return what `load` costs; `slower` >= 1 stretches its kernels."""
        spec = self._spec
        tile = spec.tile_rows
        useful = (
            load.tokens - load.recomputed_tokens,
            load.logit_rows,
            load.attention_pairs - load.recomputed_pairs,
        )
        padded = (-(-load.tokens // tile) * tile, -(-load.logit_rows // tile) * tile, load.attention_pairs)
        useful_ns = self._pipe.at(*useful)
        pipe_ns = self._pipe.at(*padded)

        read_bytes = self._weight_bytes[load.tokens] + load.kv_tokens * self._kv_read_bytes
        if load.logit_rows:
            read_bytes += self._head_bytes
        write_bytes = load.tokens * self._kv_write_bytes
        sheet_ns = (read_bytes + write_bytes) * self._per_byte_ns

        kernels_ns = max(pipe_ns / spec.compute_efficiency, sheet_ns / spec.memory_efficiency) * slower
        payload = load.tokens * self._payload_per_token + load.logit_rows * self._payload_per_row
        link_ns = self._messages * spec.collective_latency_ns + payload / spec.link_bytes_per_s * 1e9
        duration_ns = math.ceil(kernels_ns + link_ns + spec.launch_ns)
        share = (0.15 * duration_ns + 1.5 * pipe_ns + 0.5 * sheet_ns) / duration_ns
        return Cost(
            duration_ns=duration_ns,
            bound_ns=max(useful_ns, sheet_ns),
            useful_flops=self._flops.at(*useful),
            executed_flops=self._flops.at(*padded),
            pipe_ns=pipe_ns,
            resident_ns=kernels_ns,
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            power_share=min(1.0, share),
            causes_ns=split(duration_ns, useful_ns, pipe_ns, sheet_ns / self._reachable, link_ns),
        )

    def _ask(
        self,
        *,
        tokens: int | np.ndarray[tuple[int], np.dtype[np.int64]],
        logit_rows: int = 0,
        attention_pairs: int = 0,
        kv_read_tokens: int = 0,
    ) -> Work:
        return work(
            self.shape,
            tensor_parallel=len(self._spec.gpus),
            tokens=tokens,
            logit_rows=logit_rows,
            attention_pairs=attention_pairs,
            kv_read_tokens=kv_read_tokens,
        )


def split(
    duration_ns: int, useful_ns: float, pipe_ns: float, memory_ns: float, link_ns: float
) -> tuple[int, int, int, int, int]:
    """Split a step over STEP_CAUSES in whole nanoseconds, by the rules of the ledger.

    The pipe's time is useful or padding (recompute included); of the rest, what the memory still needs
    at its reachable rate while the pipe stands is memory-bound, then come the collectives, and what remains
    is latency: launches, and that kernels reach neither the pipe's peak nor the memory's.
    """
    busy = min(round(pipe_ns), duration_ns)
    useful = min(round(useful_ns), busy)
    rest = duration_ns - busy
    memory = min(rest, max(0, round(memory_ns) - busy))
    link = min(rest - memory, round(link_ns))
    return useful, busy - useful, memory, link, rest - memory - link


class _Linear(NamedTuple):
    """A figure that is a sum over tokens, rows of logits and attention pairs."""

    per_token: float
    per_row: float
    per_pair: float

    @staticmethod
    def of(one: Work, row: Work, pair: Work, weight: Callable[[str], float]) -> _Linear:
        def total(asked: Work) -> float:
            return sum(float(flops) * weight(dtype) for dtype, flops in asked.flops.items() if np.any(flops))

        base = total(one)
        return _Linear(base, total(row) - base, total(pair) - base)

    def at(self, tokens: int, rows: int, pairs: int) -> float:
        return tokens * self.per_token + rows * self.per_row + pairs * self.per_pair


def _memory(spec: EngineSpec, shape: ModelShape) -> int:
    """Return the bytes that the engine holds on each of its GPUs from its start on."""
    ranks = len(spec.gpus)
    heads = -(-shape.kv_heads // ranks) / shape.kv_heads  # copied once ranks outnumber them
    cache = spec.kv_capacity_tokens * shape.kv_bytes_per_token() * heads
    return int(shape.stored_bytes / ranks + cache) + BARE_BYTES
