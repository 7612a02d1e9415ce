"""How long a simulated step takes and what it does to its GPUs, from the work model and the peaks.

    t = max(executed FLOPs / (peak x clock x compute efficiency), bytes / (bandwidth x memory efficiency))
        + collectives + launches, never shorter, sometimes longer by a jitter

A step lasts as long as its slowest rank; the others spin in the collective. In a pipeline each stage does its
part of the step and stands in the rest.

The work model is linear in its sums but for the experts read, so it is asked once, for every number of
tokens that a step can have, and a step costs a few multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from gpuidle.agent.model import Cause
from gpuidle.agent.physics.peaks import NoPeak, find_peaks
from gpuidle.agent.physics.shapes import (
    ModelShape,
    UnknownArchitecture,
    shape_from_config,
)
from gpuidle.agent.physics.work import Work, work
from gpuidle.collectors.simulator.options import throttle_of
from gpuidle.collectors.simulator.scenario import EngineSpec, GpuSpec, ScenarioError

STEP_CAUSES: tuple[Cause, ...] = (
    "useful",
    "padding",
    "memory_bound",
    "communication",
    "latency",
    "waiting_peer",
    "throttled_power",
    "throttled_thermal",
    "throttled_other",
)
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
    rejected_rows: int = 0
    """Of `tokens` and of `logit_rows`: drafts that were thrown away."""
    rejected_pairs: int = 0
    drafting: int = 0
    """Sequences that a draft model drafts for at the end of the step."""
    drafting_kv_tokens: int = 0
    """Their context by then."""


class Clock(NamedTuple):
    """The SM clock of a GPU, over the sheet's, and why it is not that."""

    ratio: float = 1.0
    event: str = ""


SHEET = Clock()


class Cost(NamedTuple):
    """A step on one GPU of its engine."""

    duration_ns: int
    """Of the whole step, the same on all of them."""
    bound_ns: float
    """The roofline's lower bound for the useful work, at the sheet's peaks."""
    useful_flops: float
    executed_flops: float
    """With recompute, rejected drafts, the draft model, and the rows that fill up tiles."""
    pipe_ns: float
    """How long the tensor pipe is busy."""
    resident_ns: float
    """How long the SMs hold a warp: all but launches and collectives."""
    read_bytes: float
    write_bytes: float
    power_share: float
    """Of the range from loaded idle to the limit, while active."""
    causes_ns: tuple[int, ...]
    """`duration_ns` split over STEP_CAUSES by the ledger's rules."""
    lead_ns: int
    """Waiting for the stages before it in the pipeline."""
    active_ns: int
    """Then with work on the GPU, a spin in a collective included; the rest waits for the stages after it."""
    capped_ratio: float = 1.0
    """By how much a power cap lowers the clock while active."""


class _Done(NamedTuple):
    """What a rank does in a step: times at the sheet's peaks and clock, and amounts."""

    useful_ns: float
    pipe_ns: float
    sheet_ns: float
    """Of DRAM."""
    drafts: tuple[tuple[float, float], ...]
    """(pipe, DRAM) of each pass of the draft model."""
    link_ns: float
    launch_ns: float
    useful_flops: float
    executed_flops: float
    read_bytes: float
    write_bytes: float


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
        self._gpu = gpu
        self._reachable = gpu.reachable_bandwidth_ratio
        if spec.memory_efficiency > self._reachable:
            raise ScenarioError(f"{spec.name}: kernels cannot beat the bandwidth that is reachable")
        self.memory_used_bytes = _memory(spec, shape)
        drafter = spec.speculation.draft_config if spec.speculation is not None else None
        self._draft: Costs | None = None
        if drafter is not None:
            self._draft = Costs(replace(spec, config=drafter, speculation=None), gpu)
            self.memory_used_bytes += self._draft.memory_used_bytes - BARE_BYTES
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

    def of(self, load: Load, slower: float, clock: Clock = SHEET) -> Cost:
        """Return what `load` costs where all ranks are alike; `slower` >= 1 stretches its kernels."""
        return self.by_rank(load, slower, (clock,))[0]

    def by_rank(self, load: Load, slower: float, clocks: Sequence[Clock]) -> tuple[Cost, ...]:
        """Return what `load` costs on each rank, of which `clocks` has one entry; the slowest sets the pace.

        With one entry for ranks that are alike the stages of a pipeline are told apart by their place only.
        """
        spec = self._spec
        done = self._done(load)
        straggler = spec.straggler
        known: dict[tuple[Clock, float], tuple[float, float, float, Clock, float]] = {}
        ran = []
        for rank, clock in enumerate(clocks):
            own = straggler.slower if straggler is not None and straggler.rank == rank else 1.0
            if (clock, own) not in known:
                known[clock, own] = self._run(done, slower * own, clock)
            ran.append(known[clock, own])
        works = [math.ceil(kernels + done.link_ns + done.launch_ns) for kernels, *_ in ran]
        active_ns = max(works)
        stages = spec.pipeline_stages
        parts = min(spec.microbatches, load.tokens)
        bubble_ns = (stages - 1) * active_ns // parts
        costs = []
        for rank, (work_ns, (kernels_ns, pipe_ns, share, clock, capped)) in enumerate(
            zip(works, ran, strict=True)
        ):
            causes = split(
                work_ns,
                done.useful_ns / max(1.0, clock.ratio),
                pipe_ns,
                (done.sheet_ns + sum(d[1] for d in done.drafts)) / self._reachable,
                done.link_ns,
                clock,
            )
            waited = causes[5] + active_ns - work_ns + bubble_ns
            costs.append(
                Cost(
                    duration_ns=active_ns + bubble_ns,
                    bound_ns=max(done.useful_ns / max(1.0, clock.ratio), done.sheet_ns),
                    useful_flops=done.useful_flops,
                    executed_flops=done.executed_flops,
                    pipe_ns=pipe_ns,
                    resident_ns=kernels_ns,
                    read_bytes=done.read_bytes,
                    write_bytes=done.write_bytes,
                    power_share=share,
                    causes_ns=(*causes[:5], waited, *causes[6:]),
                    lead_ns=rank // spec.tensor_parallel * active_ns // parts,
                    active_ns=active_ns,
                    capped_ratio=capped,
                )
            )
        return tuple(costs)

    def _run(self, done: _Done, slower: float, clock: Clock) -> tuple[float, float, float, Clock, float]:
        """Return time of kernels, time of the pipe, share of power, the clock, and what a cap made of it."""
        spec, gpu = self._spec, self._gpu

        def kernels(ratio: float) -> tuple[float, float, float]:
            pipe_ns = done.pipe_ns / ratio
            time = max(pipe_ns / spec.compute_efficiency, done.sheet_ns / spec.memory_efficiency)
            sheet_ns = done.sheet_ns
            for draft_pipe, draft_sheet in done.drafts:
                own_pipe = draft_pipe / ratio
                time += max(own_pipe / spec.compute_efficiency, draft_sheet / spec.memory_efficiency)
                pipe_ns += own_pipe
                sheet_ns += draft_sheet
            time *= slower
            whole = math.ceil(time + done.link_ns + done.launch_ns)
            return time, pipe_ns, min(1.0, (0.15 * whole + 1.5 * pipe_ns + 0.5 * sheet_ns) / whole)

        time, pipe_ns, share = kernels(clock.ratio)
        cap = gpu.power_cap_watts
        most = 1.0 if cap is None else (cap - gpu.loaded_watts) / (gpu.power_limit_watts - gpu.loaded_watts)
        if share <= most:
            return time, pipe_ns, share, clock, 1.0
        capped = max(0.3, math.sqrt(most / share))
        slow = Clock(clock.ratio * capped, "power_cap")
        time, pipe_ns, _ = kernels(slow.ratio)
        return time, pipe_ns, most, slow, capped

    def _done(self, load: Load) -> _Done:
        spec = self._spec
        tile = spec.tile_rows
        parts = min(spec.microbatches, load.tokens)
        useful = (
            load.tokens - load.recomputed_tokens - load.rejected_rows,
            load.logit_rows - load.rejected_rows,
            load.attention_pairs - load.recomputed_pairs - load.rejected_pairs,
        )
        tokens, rows = -(-load.tokens // parts), -(-load.logit_rows // parts)
        padded = (
            parts * (-(-tokens // tile) * tile),
            parts * (-(-rows // tile) * tile),
            load.attention_pairs,
        )
        read_bytes = parts * self._weight_bytes[tokens] + load.kv_tokens * self._kv_read_bytes
        if load.logit_rows:
            read_bytes += parts * self._head_bytes
        write_bytes = load.tokens * self._kv_write_bytes
        payload = load.tokens * self._payload_per_token + load.logit_rows * self._payload_per_row
        link_ns = self._link(parts * self._messages, payload)
        executed = self._flops.at(*padded)
        launch_ns = parts * (spec.launch_ns / spec.pipeline_stages)
        drafts = []
        for each in self._draft_passes(load):
            drafts.append((each.pipe_ns, each.sheet_ns))
            link_ns += each.link_ns
            launch_ns += 0 if spec.speculation is None else spec.speculation.draft_launch_ns
            executed += each.executed_flops
            read_bytes += each.read_bytes
            write_bytes += each.write_bytes
        return _Done(
            useful_ns=self._pipe.at(*useful),
            pipe_ns=self._pipe.at(*padded),
            sheet_ns=(read_bytes + write_bytes) * self._per_byte_ns - sum(sheet for _, sheet in drafts),
            drafts=tuple(drafts),
            link_ns=link_ns,
            launch_ns=launch_ns,
            useful_flops=self._flops.at(*useful),
            executed_flops=executed,
            read_bytes=read_bytes,
            write_bytes=write_bytes,
        )

    def _link(self, messages: float, payload_bytes: float) -> float:
        """Return the ns of so many all-reduces of one size."""
        spec = self._spec
        if not messages or not spec.link_points:
            return messages * spec.collective_latency_ns + payload_bytes / spec.link_bytes_per_s * 1e9
        sizes, times = zip(*spec.link_points, strict=True)
        size = math.log(max(1.0, payload_bytes / messages))
        return messages * math.exp(np.interp(size, np.log(sizes), np.log(times)))

    def _draft_passes(self, load: Load) -> list[_Done]:
        """Return the passes of the draft model: first over all rows of the step, then over its own."""
        if self._draft is None or self._spec.speculation is None or not load.drafting:
            return []
        rows, context = load.drafting, load.drafting_kv_tokens
        first = Load(load.tokens, rows, load.attention_pairs, load.kv_tokens)
        others = [
            Load(rows, rows, context + rows * (place + 1), context + rows * place)
            for place in range(len(self._spec.speculation.acceptance) - 1)
        ]
        return [self._draft._done(each) for each in (first, *others)]  # noqa: SLF001 - another of its kind

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
            tensor_parallel=self._spec.tensor_parallel,
            pipeline_parallel=self._spec.pipeline_stages,
            tokens=tokens,
            logit_rows=logit_rows,
            attention_pairs=attention_pairs,
            kv_read_tokens=kv_read_tokens,
        )


def split(
    duration_ns: int,
    useful_ns: float,
    pipe_ns: float,
    memory_ns: float,
    link_ns: float,
    clock: Clock = SHEET,
) -> tuple[int, ...]:
    """Split a rank's work of a step over STEP_CAUSES in whole nanoseconds, by the rules of the ledger.

    The pipe's time is useful, what a slow clock added to it, or padding (recompute, drafts included); of the
    rest, what the memory still needs at its reachable rate while the pipe stands is memory-bound, then come
    the collectives, and what remains is latency: launches, and that kernels reach neither the pipe's peak nor
    the memory's.
    """
    busy = min(round(pipe_ns), duration_ns)
    useful = min(round(useful_ns), busy)
    slowed = min(busy - useful, round(busy * max(0.0, 1.0 - clock.ratio)))
    rest = duration_ns - busy
    memory = min(rest, max(0, round(memory_ns) - busy))
    link = min(rest - memory, round(link_ns))
    cause = throttle_of(clock.event)
    throttled = (slowed if cause == name else 0 for name in STEP_CAUSES[6:])
    return useful, busy - useful - slowed, memory, link, rest - memory - link, 0, *throttled


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
    ranks = spec.tensor_parallel
    heads = -(-shape.kv_heads // ranks) / shape.kv_heads  # copied once ranks outnumber them
    cache = spec.kv_capacity_tokens * shape.kv_bytes_per_token() * heads / spec.pipeline_stages
    return int(shape.stored_bytes / len(spec.gpus) + cache) + BARE_BYTES
