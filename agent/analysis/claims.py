"""What counters, work model and engine say of one GPU in one window, put side by side for the referee."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.enginewindow import EngineWindow
from gpuidle.agent.analysis.referee import Case, Claims, referee
from gpuidle.agent.analysis.tracks import GpuTrack, Pending
from gpuidle.agent.analysis.windowwork import window_steps
from gpuidle.agent.model import Problem
from gpuidle.agent.physics.peaks import DevicePeaks, NoPeak
from gpuidle.agent.physics.shapes import ModelShape

AGAIN_NS = 5 * 10**9
"""Verdicts stand for this long before the trailing window is judged again."""
LEAST_SPAN_NS = 20 * 10**9
"""Of the engine's own estimate, which comes with a whole page, every ten seconds."""


def judge(
    track: GpuTrack,
    window: Pending,
    seen: Activity,
    engines: Sequence[EngineWindow],
    peaks: DevicePeaks | None,
    seconds: tuple[float, float, float] | None,
    trailing_ns: int,
) -> list[Problem]:
    """Add a settled window to what is held against each other, and return the verdicts.

    `seconds` are those of the engines' useful work (`useful_s`).
    """
    one = engines[0] if len(engines) == 1 else None
    if one is None or peaks is None or one.shape is None or one.unplaced or seen.rung == "nvml":
        track.claims.clear()
        track.verdicts = ()
        return []
    key = (one.reading.engine_id, one.reading.model_text, one.reading.root_pid)
    if key != track.judged_of:
        track.claims.clear()
        track.judged_of, track.judged_ns = key, window.end_ns
        track.verdicts = ()
    track.claims.append(claims_of(window, seen, one, one.shape, peaks, seconds))
    while track.claims[0].end_ns <= window.end_ns - trailing_ns:
        track.claims.popleft()
    if window.end_ns - track.judged_ns >= AGAIN_NS:
        track.judged_ns = window.end_ns
        track.verdicts = referee(track.claims, case_of(track, one, one.shape, peaks))
    return list(track.verdicts)


def claims_of(
    window: Pending,
    seen: Activity,
    engine: EngineWindow,
    shape: ModelShape,
    peaks: DevicePeaks,
    seconds: tuple[float, float, float] | None,
) -> Claims:
    """Return what was said of the window."""
    window_ns = window.end_ns - window.start_ns
    work, sums, priced, place = engine.work, engine.sums, engine.priced, engine.reading.parallelism
    rows, steps = 0.0, None
    if priced is not None:
        rows, steps = float(np.dot(priced.tokens, priced.share)), float(np.add.reduce(priced.share))
    elif sums is not None:
        rows = ((sums.prefill_tokens or 0) + (sums.decode_tokens or 0)) / sums.cores
        counted = window_steps(sums, engine.reading)
        steps = None if counted is None else counted / sums.cores
    drafts = 0 if sums is None else sums.draft_tokens or 0
    speculates = bool(drafts or engine.reading.limits.speculative)
    clock = seen.sm_clock_hz
    return Claims(
        end_ns=window.end_ns,
        window_ns=window_ns,
        observed_ns=seen.observed_ns,
        active_ns=seen.active_ns if seen.active_measured else None,
        stepping_ns=None if engine.steps is None else float(window_ns - engine.steps.shares.idle_ns),
        pipe_ns=seen.tensor_ns,
        clock_ratio=clock / peaks.sheet_clock_hz if clock and peaks.sheet_clock_hz else 1.0,
        clock_hz=clock,
        dram_bytes=seen.dram_bytes,
        work_ns=None if seconds is None else (seconds[0] * 1e9, seconds[1] * 1e9, seconds[2] * 1e9),
        flops=None if work is None else (work.flops_low, work.flops_high),
        weight_bytes=None if steps is None else steps * shape.weight_bytes / place.tensor / place.pipeline,
        traffic_bytes=None if work is None or priced is None else work.bytes_moved,
        rows=rows,
        steps=steps,
        decode_only=engine.shares.decode_ns > 0 and engine.shares.prefill_high_ns == 0,
        exact=priced is not None,
        draft_tokens=drafts,
        prompt_tokens=sums.prefill_tokens if sums is not None and sums.prefill_exact else None,
        step_prompt_tokens=_step_prompts(engine, window) if speculates else None,
    )


def _step_prompts(engine: EngineWindow, window: Pending) -> int | None:
    """Return the prompt tokens of the steps that ended in the window, less those known to be recomputed."""
    if engine.steps is None:
        return None
    total = 0
    for s in engine.series:
        if s.prefill_tokens is None:
            return None
        first, last = np.searchsorted(s.end_ns, [window.start_ns, window.end_ns], side="right")
        total += int(s.prefill_tokens[first:last].sum())
        if s.recomputed_tokens is not None:
            total -= int(s.recomputed_tokens[first:last].sum())
    return total


def case_of(track: GpuTrack, engine: EngineWindow, shape: ModelShape, peaks: DevicePeaks) -> Case:
    """Return what the windows have in common."""
    place, limits = engine.reading.parallelism, engine.reading.limits
    try:
        own = peaks.rate(shape.compute_dtype)
    except NoPeak:
        own = 0.0
    fastest = max(peaks.flops_per_s.values())
    return Case(
        subject=track.reading.hw_id,
        device=track.reading.name,
        peak_bytes_per_s=peaks.memory_bytes_per_s,
        max_clock_hz=track.reading.sm_clock_max_hz or peaks.max_clock_hz,
        faster=fastest / own if own else 1.0,
        slower=peaks.flops_per_s.get("bf16", own) / own if own else 1.0,
        accumulates_twice=peaks.accumulate_halved,
        l2_bytes=peaks.l2_bytes,
        weight_bytes=shape.weight_bytes / place.tensor / place.pipeline,
        experts=shape.experts > 0,
        latent=shape.latent,
        budget_tokens=limits.max_batched_tokens or 8192,
        speculative=bool(limits.speculative),
        engine_ratio=_engine_ratio(track, engine, shape),
        lag_ns=track.lag_ns,
    )


def _engine_ratio(track: GpuTrack, engine: EngineWindow, shape: ModelShape) -> tuple[float, float] | None:
    """Return the engine's estimate over the work model's high and low, over the windows that both cover.

    None where vLLM's formula is known to differ: latent attention, data-parallel replicas (its FFNs are
    divided over them), and speculation (it counts what was rejected).
    """
    claims, place = track.claims, engine.reading.parallelism
    speculates = engine.reading.limits.speculative or any(each.draft_tokens for each in claims)
    if shape.latent or place.data > 1 or speculates or not claims:
        return None
    begin, end = claims[0].end_ns - claims[0].window_ns, claims[-1].end_ns
    told = [each for each in engine.estimates if begin <= each[0] <= end]
    if len(told) < 2 or told[-1][0] - told[0][0] < LEAST_SPAN_NS or told[-1][1] <= told[0][1]:
        return None
    (first_ns, before), (last_ns, after) = told[0], told[-1]
    inside = [c for c in claims if first_ns < c.end_ns - c.window_ns // 2 <= last_ns]
    if not inside or any(c.flops is None for c in inside):
        return None
    low = sum(c.flops[0] for c in inside if c.flops is not None)
    high = sum(c.flops[1] for c in inside if c.flops is not None)
    return None if low <= 0 else ((after - before) / high, (after - before) / low)
