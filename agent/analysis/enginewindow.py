"""What one engine did in one window that settles: sums or steps, work, phases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import msgspec

from gpuidle.agent.analysis.durations import together
from gpuidle.agent.analysis.hostgap import SYNCHRONOUS_RATIO, request_throughout
from gpuidle.agent.analysis.localpace import Here, near, quiet
from gpuidle.agent.analysis.pace import INTENSITY, Batch
from gpuidle.agent.analysis.peers import Waits
from gpuidle.agent.analysis.phase import Clues, shares_from_sums
from gpuidle.agent.analysis.pipeclue import Pipe
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.steppricing import Stream, steps_of_each
from gpuidle.agent.analysis.stepshares import StepWindow, shares_of_each
from gpuidle.agent.analysis.stepsizes import decode_rows, prompt_sizes
from gpuidle.agent.analysis.stepwork import Steps, summed
from gpuidle.agent.analysis.tracks import EngineTrack, Pending
from gpuidle.agent.analysis.windowwork import (
    DecodeStep,
    WindowWork,
    decode_step,
    mean_of,
    prompt_bytes_ratio,
    prompt_context_tokens,
    window_work,
)
from gpuidle.agent.model import EngineReading, GpuReading, Shares, StepSeries
from gpuidle.agent.physics.peaks import DevicePeaks, find_peaks
from gpuidle.agent.physics.shapes import ModelShape

TIED = 0.5
"""`Batch.tied` of models with experts: decodes of few rows read other weights than prompts do."""


class EngineWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in one settled window."""

    reading: EngineReading
    sums: Sums | None
    steps: StepWindow | None
    work: WindowWork | None
    """Per GPU of the engine."""
    shape: ModelShape | None
    priced: Steps | None
    """Exact steps with their work."""
    decode: DecodeStep | None
    """A decode-only step of this window, on one GPU."""
    lent: WindowWork | None
    """Work booked in the next window, where this one computed prompts whose tokens come only then."""
    gap_ns: float | None
    """Inactive time a step while requests are running, for windows without steps."""
    throughout: bool = False
    """Whether a request is known to have been there all the time."""
    clues: Clues
    shares: Shares
    unplaced: bool = False
    """Which of its data-parallel cores the device belongs to is not known."""
    series: tuple[StepSeries, ...] = ()
    """The exact steps in hand, those of the windows after this one included."""
    estimates: tuple[tuple[int, float], ...] = ()
    """(read_ns, FLOPs per GPU) of the engine's own estimate, those after the window included."""
    waits: Waits | None = None
    """What the device waited for the others of its group; None: it has none, or not all were seen."""


class Made(NamedTuple):
    """An engine, or a core of one, with what its sums and steps say of a window."""

    track: EngineTrack
    reading: EngineReading
    shape: ModelShape | None
    rank: str | None = None
    """Of a core; None: the engine as a whole."""
    sums: Sums | None = None
    steps: StepWindow | None = None
    priced: Steps | None = None
    """Exact steps with their work."""


_peaks = lru_cache(maxsize=64)(find_peaks)


def device_peaks(reading: GpuReading) -> DevicePeaks | None:
    """Return the peaks of a device by its name and memory size."""
    return _peaks(reading.name, reading.memory_total_bytes)


def holders(gpus: Sequence[GpuReading], engines: Sequence[EngineReading]) -> dict[str, tuple[str, ...]]:
    """Return the devices that each engine's processes hold, by engine_id."""
    on: dict[int, dict[str, None]] = {}
    for gpu in gpus:
        for process in gpu.processes or ():
            on.setdefault(process.pid, {})[gpu.hw_id] = None
    order = {gpu.hw_id: place for place, gpu in enumerate(gpus)}
    held: dict[str, tuple[str, ...]] = {}
    for engine in sorted(engines, key=lambda e: e.engine_id):
        found = {hw_id for pid in engine.pids for hw_id in on.get(pid, ())}
        held[engine.engine_id] = tuple(sorted(found, key=order.__getitem__))
    return held


def sums_within(windows: Sequence[Sums], start_ns: int, end_ns: int) -> Sums | None:
    """Return the sums that belong to [start_ns, end_ns): the engine is read near the tick, not on it.

    One reading interval that covers most of the window, and little else, is taken whole. An interval that
    spans several windows (a scrape failed) is shared out evenly. None where less than half is covered.
    """
    parts = [
        (w, min(w.end_ns, end_ns) - max(w.start_ns, start_ns))
        for w in windows
        if w.end_ns > start_ns and w.start_ns < end_ns
    ]
    if sum([overlap for _, overlap in parts]) < 0.5 * (end_ns - start_ns):
        return None
    best, overlap = max(parts, key=lambda part: part[1])
    if overlap >= 0.6 * best.window_ns and overlap >= 0.6 * (end_ns - start_ns):
        return best
    share = min(1.0, overlap / best.window_ns)
    scaled = {
        name: None if value is None else round(value * share)
        for name in ("prefill_tokens", "generated_tokens", "first_tokens", "counted_steps")
        for value in (getattr(best, name),)
    }
    prompts = best.prompt_steps
    return msgspec.structs.replace(
        best,
        **scaled,
        inter_token_s=None,
        chunk_steps=best.chunk_steps * share,
        chunk_ns=best.chunk_ns * share,
        perhaps_steps=best.perhaps_steps * share,
        prompt_steps=None if prompts is None else tuple((size, count * share) for size, count in prompts),
        start_ns=start_ns,
        end_ns=end_ns,
    )


def hit_ratio(track: EngineTrack) -> float:
    """Return the share of prompt tokens that the prefix cache had of late; 0 where it is not told."""
    return cached_ratio(track) or 0.0


def cached_ratio(track: EngineTrack) -> float | None:
    """Return the same, of the engine's whole life where nothing was asked of late; None if it is not told."""
    asked = sum(row[1] for row in track.prefix)
    if asked:
        return sum(row[2] for row in track.prefix) / asked
    return track.prefix_last[1] / track.prefix_last[0] if track.prefix_last and track.prefix_last[0] else None


def _count(track: EngineTrack, steps: StepWindow) -> None:
    for phase, count in steps.steps.items():
        track.steps_total[phase] = track.steps_total.get(phase, 0) + count
    for phase, durations in steps.durations.items():
        past = track.step_durations.get(phase)
        track.step_durations[phase] = durations if past is None else together(past, durations)


def _throughout(track: EngineTrack, sums: Sums, window: Pending) -> bool:
    """Return whether a request was there all the time, by the readings around the window.

    `sums` may be a share of a longer interval, whose gauges are those of its own edges.
    """
    around = list(track.sums)
    for i, each in enumerate(around):
        if each is sums or (each.start_ns <= window.start_ns and each.end_ns >= window.end_ns):
            return request_throughout(each, around[i + 1] if i + 1 < len(around) else None)
    return False


def _batch(
    rows: float, sums: Sums, decode: DecodeStep | None, shape: ModelShape | None, reading: EngineReading
) -> Batch:
    usage = mean_of(sums.kv_usage_ratio)
    if decode is None or shape is None:
        return Batch(rows=rows, usage=usage)
    flops = sum(decode.padded_flops.values()) / decode.rows
    ratio, sizes = 1.0, prompt_sizes(sums)
    if sizes and shape.experts:
        tokens = sum(size * count for size, count in sizes) / sum(count for _, count in sizes)
        ratio = prompt_bytes_ratio(shape, reading, decode, rows / sums.cores, tokens)
    return Batch(
        rows=rows,
        usage=usage,
        bytes_moved=decode.bytes_moved,
        prompt_bytes_ratio=ratio,
        tied=TIED if shape.experts else 1.0,
        free_tokens=INTENSITY * decode.bytes_moved / flops,
    )


def _told_here(
    track: EngineTrack, sums: Sums, following: Sums | None, busy_ns: float | None, batch: Batch
) -> Here:
    """Return what is known of a window's steps, corrected by the windows without prompts around it.

    Not where a counter measures the busy time: what else the host does is not in it.
    """
    known = track.pace.told(batch)
    if busy_ns is not None:
        return Here(known.step_ns, known.spread, known.token_ns)
    if quiet(sums, following):
        track.local.learn(near(sums, known.step_ns))
    later = [each for each in track.sums if each.start_ns >= sums.end_ns]
    ahead = [near(each, None) for each, then in pairwise(later) if quiet(each, then)]
    here = track.local.told(known, batch.rows, sums.end_ns, ahead)
    track.local.learn_prompts(sums, here)
    return here


def with_told(engines: Sequence[Made], window: Pending) -> list[Made]:
    """Return the same with the sums and the steps of the window, where there are any."""
    span = window.start_ns, window.end_ns
    streams = [list(each.track.steps) for each in engines]
    steps = shares_of_each(streams, *span)
    asked = {
        i: Stream(streams[i], each.reading, each.shape, hit_ratio(each.track), each.track.sizes.spread())
        for i, each in enumerate(engines)
        if each.shape is not None and steps[i] is not None and each.reading.parallelism.data == 1
    }
    priced = dict(zip(asked, steps_of_each(list(asked.values()), *span), strict=True))
    return [
        Made(*each[:4], sums_within(list(each.track.sums), *span), steps[i], priced.get(i))
        for i, each in enumerate(engines)
    ]


def settle_engine(made: Made, window: Pending, busy_ns: float | None, pipe: Pipe | None) -> EngineWindow:
    """Return what the engine did; `busy_ns` is the mean over its GPUs, None without counters.

    `pipe` is what their tensor pipes did, None where that is not known.
    """
    track, reading, shape, _, sums, steps, priced = made
    window_ns = window.end_ns - window.start_ns
    later_ns = window.end_ns - window_ns // 3
    following = next((s for s in track.sums if s.moved and s.start_ns >= later_ns), None)
    pace_ns: float | None = None
    pace_spread, prompt_ratio = 0.0, 1.0
    decode: DecodeStep | None = None
    here: Here | None = None
    if sums is not None and priced is None:
        rows = decode_rows(sums, by_tokens=shape is not None)
        decode = None if shape is None else decode_step(shape, sums, reading, rows)
        batch = _batch(rows, sums, decode, shape, reading)
        if sums.moved or sums.chunk_ns:
            track.pace.learn(sums, following, busy_ns, batch)
        here = _told_here(track, sums, following, busy_ns, batch)
        pace_ns, pace_spread, prompt_ratio = here.step_ns, here.spread, batch.prompt_bytes_ratio
        track.pace_ns = track.pace_ns if pace_ns is None else pace_ns
        track.prompt_token_ns = track.prompt_token_ns if here.token_ns is None else here.token_ns
    throughout = sums is not None and _throughout(track, sums, window)
    if sums is not None and busy_ns is not None and sums.counted_steps and sums.moved and not sums.reset:
        step_ns = busy_ns / sums.counted_steps
        track.gap.learn(
            sums.counted_steps,
            max(0.0, window_ns - busy_ns),
            step_ns if pace_ns is None else min(step_ns, pace_ns),
            running=min(count or 0 for count in sums.running),
            throughout=throughout,
        )
    clues = Clues(
        window_ns=window_ns,
        busy_ns=busy_ns,
        pace_ns=pace_ns,
        pace_spread=pace_spread,
        prompt_token_steps=None if here is None else here.token_steps,
        prompt_token_spread=0.0 if here is None else here.token_spread,
        prompt_ratio=prompt_ratio,
        max_batched_tokens=reading.limits.max_batched_tokens,
        prompt_token_ns=track.prompt_token_ns,
        gap_ratio=SYNCHRONOUS_RATIO if reading.limits.async_scheduling is False else 0.0,
        following=following,
    )
    if steps is not None:
        shares = steps.shares
        _count(track, steps)
    else:
        shares = shares_from_sums(sums, clues)
        if sums is not None and decode is not None and pipe is not None and not sums.draft_tokens:
            clues = track.pipe.with_pipe(clues, shares, sums, pipe, decode.pipe_s(pipe.peaks))
            shares = shares_from_sums(sums, clues)
    work: WindowWork | None = None
    if priced is not None:
        work = summed(priced, reading.parallelism.tensor)
    elif shape is not None and sums is not None:
        work = window_work(shape, sums, reading, prompt_context_tokens(sums, track.sizes, hit_ratio(track)))
    if work is not None:
        cores = reading.parallelism.data if sums is None else sums.cores
        gpus = reading.parallelism.tensor * reading.parallelism.pipeline * cores
        track.flops_total = (track.flops_total or 0.0) + work.flops * gpus
    lent = None
    if shape is not None and following is not None and sums is not None and priced is None:
        begun = shares.prefill_ns + shares.mixed_ns
        if begun and following.first_tokens:
            context = prompt_context_tokens(following, track.sizes, hit_ratio(track))
            lent = window_work(shape, following, reading, context)
    track.shares = shares
    return EngineWindow(
        reading=reading,
        sums=sums,
        steps=steps,
        work=work,
        shape=shape,
        priced=priced,
        decode=decode,
        lent=lent,
        gap_ns=None if steps is not None else track.gap.told_ns(),
        throughout=throughout,
        clues=clues,
        shares=shares,
        series=tuple(s for s in track.steps if s.exact),
        estimates=tuple(track.estimates),
    )
