"""Settling one window: counters, token sums and steps come together into phases and a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import msgspec

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.fastphase import label_window
from gpuidle.agent.analysis.integers import clip_to
from gpuidle.agent.analysis.ledger import Evidence, IdleBecause, ledger
from gpuidle.agent.analysis.phase import Clues, StepWindow, shares_from_steps, shares_from_sums
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.reclaim import reclaimable_ns
from gpuidle.agent.analysis.stepwork import Steps, step_terms, steps_of, summed
from gpuidle.agent.analysis.tracks import EngineTrack, GpuTrack, Pending, Settled
from gpuidle.agent.analysis.windowwork import (
    REACHABLE_BANDWIDTH_RATIO,
    DecodeStep,
    WindowWork,
    decode_step,
    window_work,
)
from gpuidle.agent.model import EngineReading, GpuReading, Problem, Shares
from gpuidle.agent.physics.peaks import DevicePeaks, find_peaks
from gpuidle.agent.physics.shapes import ModelShape

TENSOR_CEILING_RATIO = 1.0
"""What the tensor pipe's counter reaches at most (0.5 on GeForce: peaks of such cards are not used here)."""

SLOW_NS = 100_000_000
"""Width of a sample from which on it holds too many steps to say what they were."""

Throttle = Literal["throttled_power", "throttled_thermal", "throttled_other"]


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
    """Inactive time a step while requests are running."""
    clues: Clues
    shares: Shares


_peaks = lru_cache(maxsize=64)(find_peaks)


def device_peaks(reading: GpuReading) -> DevicePeaks | None:
    """Return the peaks of a device by its name and memory size."""
    return _peaks(reading.name, reading.memory_total_bytes)


def holders(gpus: Sequence[GpuReading], engines: Sequence[EngineReading]) -> dict[str, tuple[str, ...]]:
    """Return the devices that each engine's processes hold, by engine_id."""
    held: dict[str, tuple[str, ...]] = {}
    for engine in sorted(engines, key=lambda e: e.engine_id):
        pids = set(engine.pids)
        held[engine.engine_id] = tuple(
            gpu.hw_id for gpu in gpus if any(process.pid in pids for process in gpu.processes or ())
        )
    return held


def sums_within(windows: Sequence[Sums], start_ns: int, end_ns: int) -> Sums | None:
    """Return the sums that belong to [start_ns, end_ns): the engine is read near the tick, not on it.

    One reading interval that covers most of the window, and little else, is taken whole. An interval that
    spans several windows (a scrape failed) is shared out evenly. None where less than half is covered.
    """
    parts = [(w, max(0, min(w.end_ns, end_ns) - max(w.start_ns, start_ns))) for w in windows]
    parts = [(w, overlap) for w, overlap in parts if overlap > 0]
    if sum(overlap for _, overlap in parts) < 0.5 * (end_ns - start_ns):
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
    return msgspec.structs.replace(best, **scaled, start_ns=start_ns, end_ns=end_ns)


def settle_engine(
    track: EngineTrack,
    reading: EngineReading,
    window: Pending,
    shape: ModelShape | None,
    busy_ns: float | None,
) -> EngineWindow:
    """Return what the engine did; `busy_ns` is the mean over its GPUs, None without counters."""
    sums = sums_within(list(track.sums), window.start_ns, window.end_ns)
    steps = shares_from_steps(list(track.steps), window.start_ns, window.end_ns)
    window_ns = window.end_ns - window.start_ns
    later_ns = window.end_ns - window_ns // 3
    following = next((s for s in track.sums if s.moved and s.start_ns >= later_ns), None)
    priced = None
    if shape is not None and steps is not None and reading.parallelism.data == 1:
        priced = steps_of(list(track.steps), window.start_ns, window.end_ns, shape, reading)
    pace_ns: float | None = None
    decode: DecodeStep | None = None
    if sums is not None and priced is None:
        decode = None if shape is None else decode_step(shape, sums, reading)
        traffic = None if decode is None else decode.bytes_moved
        if sums.moved:
            track.pace.learn(sums, following, float(window_ns) if busy_ns is None else busy_ns, traffic)
        pace_ns = track.pace.step_ns(sums, traffic)
        track.pace_ns = track.pace_ns if pace_ns is None else pace_ns
    if sums is not None and sums.always_running and busy_ns is not None and sums.counted_steps:
        # The smallest that lasts: a window may also hold a spell without a request.
        gap = max(0.0, window_ns - busy_ns) / sums.counted_steps
        past = track.gap_ns
        track.gap_ns = gap if past is None else past + (0.2 if gap < past else 0.01) * (gap - past)
    clues = Clues(
        window_ns=window_ns,
        busy_ns=busy_ns,
        pace_ns=pace_ns,
        max_batched_tokens=reading.limits.max_batched_tokens,
        prompt_token_ns=track.prompt_token_ns,
        following=following,
    )
    if steps is not None:
        shares = steps.shares
        for phase, count in steps.steps.items():
            track.steps_total[phase] = track.steps_total.get(phase, 0) + count
    else:
        shares = shares_from_sums(sums, clues)
    work: WindowWork | None = None
    if priced is not None:
        work = summed(priced, reading.parallelism.tensor)
    elif shape is not None and sums is not None:
        work = window_work(shape, sums, reading)
    if work is not None:
        gpus = reading.parallelism.tensor * reading.parallelism.pipeline * reading.parallelism.data
        track.flops_total = (track.flops_total or 0.0) + work.flops * gpus
    lent = None
    if shape is not None and following is not None and sums is not None and priced is None:
        begun = shares.prefill_ns + shares.mixed_ns
        if begun and not sums.first_tokens and following.first_tokens:
            lent = window_work(shape, following, reading)
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
        gap_ns=track.gap_ns,
        clues=clues,
        shares=shares,
    )


def settle_gpu(
    track: GpuTrack, window: Pending, seen: Activity, engines: Sequence[EngineWindow], trailing_ns: int
) -> list[Problem]:
    """Book one window of one device; `engines` are those with a process on it."""
    reading = None if window.gpus is None else window.gpus.get(track.reading.hw_id)
    peaks = device_peaks(track.reading)
    evidence = _evidence(track, window, reading, seen, engines, peaks)
    booked = ledger(evidence)
    _learn_decode(track, seen, engines)
    shares = _gpu_shares(evidence, engines)
    if engines and evidence.owner == "engine" and all(e.sums is None and e.steps is None for e in engines):
        shares = _fast_shares(track, window, peaks) or shares
    track.window_ns, track.causes_ns, track.estimated = booked.window_ns, booked.causes_ns, booked.estimated
    track.shares, track.rung = shares, seen.rung
    for cause, value in booked.causes_ns.items():
        track.causes_total_ns[cause] += value
    for phase in track.phases_total_ns:
        track.phases_total_ns[phase] += getattr(shares, f"{phase}_ns")
    _reclaim(track, seen, engines, peaks)
    track.trailing.append(_settled(window, evidence, seen, engines, peaks))
    while track.trailing and track.trailing[0].end_ns <= window.end_ns - trailing_ns:
        track.trailing.popleft()
    while track.counters and int(track.counters[0].end_ns[-1]) <= window.end_ns:
        track.counters.popleft()
    return _referee(track, evidence)


def _owner(
    reading: GpuReading | None, engines: Sequence[EngineWindow]
) -> Literal["engine", "foreign", "starting", "suspended", "unallocated"]:
    if engines:
        states = {engine.reading.state for engine in engines}
        if states == {"starting"}:
            return "starting"
        return "suspended" if states == {"asleep"} else "engine"
    if reading is None or reading.processes is None:
        return "engine"
    return "foreign" if reading.processes else "unallocated"


def _idle_because(engines: Sequence[EngineWindow]) -> IdleBecause:
    """Say why the device was inactive, as far as its engines tell."""
    if not engines:
        return "unattributed"
    if any(e.sums is None and e.reading.counters is None for e in engines):
        return "unobserved"
    if any(e.sums is None for e in engines):
        return "unattributed"
    if all(e.sums is not None and e.sums.at_rest for e in engines):
        return "no_request"
    if any(e.sums is not None and e.sums.always_running for e in engines):
        return "host_gap"
    if all(e.steps is not None for e in engines):
        return "no_request"  # the steps told the gaps with requests apart already
    return "unattributed"


def _evidence(
    track: GpuTrack,
    window: Pending,
    reading: GpuReading | None,
    seen: Activity,
    engines: Sequence[EngineWindow],
    peaks: DevicePeaks | None,
) -> Evidence:
    window_ns = window.end_ns - window.start_ns
    clock = 1.0
    if peaks is not None and peaks.sheet_clock_hz and seen.sm_clock_hz:
        clock = seen.sm_clock_hz / peaks.sheet_clock_hz
    useful_s = _useful_s(engines, peaks)
    memory_ns, measured = _memory_ns(seen, engines, peaks)
    because = _idle_because(engines)
    useful_ns = None if useful_s is None else useful_s[1] * 1e9 / max(1.0, clock)
    tensor_ns = None if seen.tensor_ns is None else seen.tensor_ns / TENSOR_CEILING_RATIO
    if useful_ns is not None and tensor_ns is not None and (tensor_ns >= 0.5 * useful_ns or not useful_ns):
        useful_ns = _pay(track, useful_ns, tensor_ns, seen, engines, peaks)
    host_gap = _host_gap(window_ns, seen, engines)
    one = engines[0] if len(engines) == 1 else None
    excess, talk = _excess(track, seen, one, peaks)
    return Evidence(
        window_ns=window_ns,
        observed_ns=seen.observed_ns if seen.rung != "nvml" or reading is not None else 0,
        active_ns=seen.active_ns,
        active_measured=seen.active_measured,
        tensor_ns=tensor_ns,
        useful_ns=useful_ns,
        memory_ns=memory_ns,
        memory_measured=measured,
        memory_excess_ns=excess,
        padding_ns=_padding(one, peaks),
        split_rest=one is not None and one.work is not None and memory_ns is not None,
        communication_ns=talk,
        clock_ratio=clock,
        throttle=_throttle(reading),
        idle_because="no_request" if host_gap is not None else because,
        host_gap_ns=host_gap,
        owner=_owner(reading, engines),
    )


def _padding(engine: EngineWindow | None, peaks: DevicePeaks | None) -> float | None:
    """Estimate the padding of the decode steps of a window, where no counter shows the pipe."""
    if engine is None or engine.decode is None or peaks is None or not engine.clues.pace_ns:
        return None
    steps = engine.shares.decode_ns / engine.clues.pace_ns
    return steps * engine.decode.pipe_s(peaks) * 1e9 * engine.decode.padding_ratio


def _pay(
    track: GpuTrack,
    useful_ns: float,
    tensor_ns: float,
    seen: Activity,
    engines: Sequence[EngineWindow],
    peaks: DevicePeaks | None,
) -> float:
    """Return the useful time that the pipe had room for: tokens are booked late.

    What is booked beyond it is owed to the next windows; what this window computed of prompts that end in
    the next is taken from that.
    """
    owed = useful_ns + track.useful_debt_ns
    lent_ns = 0.0
    if len(engines) == 1 and engines[0].lent is not None and peaks is not None and seen.active_ns:
        begun = engines[0].shares.prefill_ns + engines[0].shares.mixed_ns
        lent_s = engines[0].lent.useful_s(peaks)
        room = max(0.0, tensor_ns * min(1.0, begun / seen.active_ns) - owed)
        lent_ns = min(room, (lent_s or 0.0) * 1e9)
    paid = min(max(0.0, owed + lent_ns), tensor_ns)
    track.useful_debt_ns = max(-1e9, min(owed - paid, 1e9))
    return paid


def _host_gap(window_ns: int, seen: Activity, engines: Sequence[EngineWindow]) -> float | None:
    """Return the inactive time that the host took of a single engine's window; None: it cannot be told.

    Exact steps tell; else each step takes what steps took while requests were running all the time.
    """
    if len(engines) != 1 or seen.active_ns is None:
        return None
    engine = engines[0]
    if engine.steps is not None:
        return float(engine.steps.gap_with_requests_ns)
    sums = engine.sums
    if sums is None or sums.reset or sums.counted_steps is None or engine.gap_ns is None:
        return None
    if not sums.moved:
        return None if any(sums.running) or any(sums.waiting) else 0.0
    inactive = max(0.0, window_ns - seen.active_ns)
    usual = sums.counted_steps * engine.gap_ns
    if sums.always_running and inactive <= 3 * usual:
        return inactive
    return min(inactive, usual)


def _excess(
    track: GpuTrack, seen: Activity, engine: EngineWindow | None, peaks: DevicePeaks | None
) -> tuple[float | None, float | None]:
    """Return what DRAM needs beyond the pipe's time, part by part of the window, and the time of messages."""
    if engine is None or peaks is None:
        return None, None
    reachable = peaks.memory_bytes_per_s * REACHABLE_BANDWIDTH_RATIO
    ranks = engine.reading.parallelism.tensor
    if engine.priced is not None:
        rows = [s for s in track.counters if s.rung == seen.rung]
        terms = step_terms(engine.priced, rows, peaks, reachable, ranks)
        return terms.memory_ns, terms.communication_ns
    talk = None if engine.work is None else engine.work.collectives_ns
    shares, clues = engine.shares, engine.clues
    if seen.active_ns is None or engine.decode is None or not clues.pace_ns or engine.sums is None:
        return None, talk
    # Decode steps and the rest apart: their traffic is known, so is what the pipe does in decode alone.
    decode_ns = float(shares.decode_ns)
    steps = decode_ns / clues.pace_ns
    memory = steps * engine.decode.bytes_moved / reachable * 1e9
    pipe = steps * engine.decode.pipe_s(peaks) * 1e9
    if track.decode_pipe_ratio is not None:
        pipe = track.decode_pipe_ratio * decode_ns
    if seen.dram_bytes is not None:
        memory = min(memory, seen.dram_bytes / reachable * 1e9)
    return min(decode_ns, max(0.0, memory - pipe)), talk


def _useful_s(
    engines: Sequence[EngineWindow], peaks: DevicePeaks | None
) -> tuple[float, float, float] | None:
    """Return low, estimate, high of the useful FLOPs over the peaks in seconds; None if a part is unknown."""
    if peaks is None or not engines:
        return None
    low = middle = high = 0.0
    for engine in engines:
        if engine.sums is not None and engine.sums.at_rest:
            continue
        seconds = None if engine.work is None else engine.work.useful_s(peaks)
        if engine.work is None or seconds is None:
            return None
        whole = engine.work.flops
        middle += seconds
        low += seconds * engine.work.flops_low / whole if whole else 0.0
        high += seconds * engine.work.flops_high / whole if whole else 0.0
    return low, middle, high


def _memory_ns(
    seen: Activity, engines: Sequence[EngineWindow], peaks: DevicePeaks | None
) -> tuple[float | None, bool]:
    if peaks is None:
        return None, False
    reachable = peaks.memory_bytes_per_s * REACHABLE_BANDWIDTH_RATIO
    if seen.dram_bytes is not None:
        return seen.dram_bytes / reachable * 1e9, True
    moved = [engine.work.bytes_moved if engine.work is not None else None for engine in engines]
    if not moved or any(value is None for value in moved):
        return None, False
    return sum(value or 0.0 for value in moved) / reachable * 1e9, False


def _throttle(reading: GpuReading | None) -> Throttle:
    events = set(reading.clock_events or ()) if reading is not None else set()
    if events & {"power_cap", "hw_power_brake"}:
        return "throttled_power"
    return "throttled_thermal" if events & {"sw_thermal", "hw_thermal"} else "throttled_other"


def _gpu_shares(evidence: Evidence, engines: Sequence[EngineWindow]) -> Shares:
    window_ns = evidence.window_ns
    if evidence.owner in ("unallocated", "suspended"):
        idle_ns = max(0, evidence.observed_ns - round(evidence.active_ns or 0.0))
        return Shares(
            window_ns=window_ns,
            idle_ns=idle_ns,
            unknown_ns=window_ns - idle_ns,
            prefill_high_ns=window_ns - idle_ns,
            evidence="measured" if evidence.active_ns is not None else "estimated",
        )
    acting = [e for e in engines if e.sums is None or not e.sums.at_rest]
    if len(engines) == 1 and engines[0].steps is not None:
        return engines[0].steps.shares
    if len(acting) == 1 or len(engines) == 1:
        engine = (acting or list(engines))[0]
        clues = msgspec.structs.replace(engine.clues, busy_ns=_known_active(evidence))
        return shares_from_sums(engine.sums, clues)
    # Several engines at work on one device: whose step it was, no slow counter can tell.
    sums = engines[0].sums if engines and not acting else None
    return shares_from_sums(sums, Clues(window_ns=window_ns, busy_ns=_known_active(evidence)))


def _reclaim(
    track: GpuTrack, seen: Activity, engines: Sequence[EngineWindow], peaks: DevicePeaks | None
) -> None:
    """Add what more rows a step could have used of the window just booked."""
    one = engines[0] if len(engines) == 1 else None
    if one is None or one.shape is None or one.sums is None or peaks is None:
        return
    ns = reclaimable_ns(
        track.gains,
        one.shape,
        peaks,
        one.reading,
        one.sums,
        track.shares.decode_ns,
        seen.active_ns or 0.0,
        track.causes_ns["memory_bound"] + track.causes_ns["padding"],
    )
    if ns is not None:
        track.reclaimable_total_ns = (track.reclaimable_total_ns or 0) + ns


def _learn_decode(track: GpuTrack, seen: Activity, engines: Sequence[EngineWindow]) -> None:
    """Learn what the tensor pipe does in decode, from windows that were decode alone."""
    if len(engines) != 1 or not seen.active_ns or seen.tensor_ns is None:
        return
    shares = engines[0].shares
    if shares.decode_ns < 0.9 * seen.active_ns or shares.prefill_high_ns:
        return
    ratio = seen.tensor_ns / seen.active_ns
    past = track.decode_pipe_ratio
    track.decode_pipe_ratio = ratio if past is None else past + 0.2 * (ratio - past)


def _fast_shares(track: GpuTrack, window: Pending, peaks: DevicePeaks | None) -> Shares | None:
    """Label by fast counters alone; samples of 100 ms and more hold many steps, and no phase is guessed.

    What contains a prefill is called mixed: these counters cannot tell it from prefill alone.
    """
    rows = [s for s in track.counters if len(s) and int(s.width_ns[0]) < SLOW_NS]
    if peaks is None or not rows:
        return None
    found = label_window(track.levels, rows, window.start_ns, window.end_ns, peaks.memory_bytes_per_s)
    if found is None:
        return None
    wanted = {"mixed": found.containing_ns, "decode": found.decode_ns, "idle": found.idle_ns}
    window_ns = window.end_ns - window.start_ns
    parts = clip_to(window_ns, wanted, "unknown")
    return Shares(
        window_ns=window_ns,
        mixed_ns=parts["mixed"],
        decode_ns=parts["decode"],
        idle_ns=parts["idle"],
        unknown_ns=parts["unknown"],
        prefill_low_ns=parts["mixed"],
        prefill_high_ns=parts["mixed"] + parts["unknown"],
        evidence="estimated",
    )


def _known_active(evidence: Evidence) -> float | None:
    """Return the active time if the counter saw the whole window: a partly seen one has no idle share."""
    seen = evidence.observed_ns >= 0.99 * evidence.window_ns
    return evidence.active_ns if seen else None


def _settled(
    window: Pending,
    evidence: Evidence,
    seen: Activity,
    engines: Sequence[EngineWindow],
    peaks: DevicePeaks | None,
) -> Settled:
    useful: tuple[float, float, float] | None = None
    if evidence.owner == "unallocated":
        useful = (0.0, 0.0, 0.0)
    elif evidence.owner in ("engine", "suspended") and engines:
        seconds = _useful_s(engines, peaks)
        useful = None if seconds is None else (seconds[0] * 1e9, seconds[1] * 1e9, seconds[2] * 1e9)
    bound_ns: float | None = None
    if useful is not None and peaks is not None and len(engines) == 1 and engines[0].work is not None:
        moved = engines[0].work.bytes_moved
        if moved is not None:
            bound_ns = max(useful[1], moved / peaks.memory_bytes_per_s * 1e9)
    return Settled(
        end_ns=window.end_ns,
        observed_ns=evidence.observed_ns,
        active_ns=seen.active_ns,
        tensor_cycles_ns=None
        if evidence.tensor_ns is None or peaks is None or not peaks.sheet_clock_hz
        else evidence.tensor_ns * evidence.clock_ratio,
        sm_ns=seen.sm_ns,
        dram_bytes=seen.dram_bytes,
        useful_ns=useful,
        bound_ns=bound_ns,
    )


def _referee(track: GpuTrack, evidence: Evidence) -> list[Problem]:
    """Say so when the work model claims more than the tensor pipe did."""
    tensor, useful = evidence.tensor_ns, evidence.useful_ns
    if not tensor or useful is None or useful <= 1.05 * tensor * min(1.0, evidence.clock_ratio):
        return []
    if useful < 0.01 * evidence.window_ns:
        return []  # a hundredth of a window is below what the sums and the counter agree on
    return [
        Problem(
            source="analysis",
            kind="useful_exceeds_tensor",
            message=f"{track.reading.name}: useful FLOPs need {useful / 1e6:.0f} ms of tensor time, "
            f"the counter saw {tensor / 1e6:.0f} ms",
            remedy="check dtype and quantisation of the model, the clock, and that the counter is alive",
            subject=track.reading.hw_id,
        )
    ]
