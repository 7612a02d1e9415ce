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
from gpuidle.agent.analysis.tracks import EngineTrack, GpuTrack, Pending, Settled
from gpuidle.agent.analysis.windowwork import (
    REACHABLE_BANDWIDTH_RATIO,
    WindowWork,
    decode_traffic,
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
    pace_ns: float | None = None
    if sums is not None:
        traffic = None if shape is None else decode_traffic(shape, sums, reading)
        if sums.moved:
            track.pace.learn(sums, following, float(window_ns) if busy_ns is None else busy_ns, traffic)
        pace_ns = track.pace.step_ns(sums, traffic)
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
    work = None if shape is None or sums is None else window_work(shape, sums, reading)
    if work is not None:
        gpus = reading.parallelism.tensor * reading.parallelism.pipeline * reading.parallelism.data
        track.flops_total = (track.flops_total or 0.0) + work.flops * gpus
    track.shares = shares
    return EngineWindow(
        reading=reading,
        sums=sums,
        steps=steps,
        work=work,
        clues=clues,
        shares=shares,
    )


def settle_gpu(
    track: GpuTrack, window: Pending, seen: Activity, engines: Sequence[EngineWindow], trailing_ns: int
) -> list[Problem]:
    """Book one window of one device; `engines` are those with a process on it."""
    reading = None if window.gpus is None else window.gpus.get(track.reading.hw_id)
    peaks = device_peaks(track.reading)
    evidence = _evidence(window, reading, seen, engines, peaks)
    booked = ledger(evidence)
    shares = _gpu_shares(evidence, engines)
    if engines and evidence.owner == "engine" and all(e.sums is None and e.steps is None for e in engines):
        shares = _fast_shares(track, window, peaks) or shares
    track.window_ns, track.causes_ns, track.estimated = booked.window_ns, booked.causes_ns, booked.estimated
    track.shares, track.rung = shares, seen.rung
    for cause, value in booked.causes_ns.items():
        track.causes_total_ns[cause] += value
    for phase in track.phases_total_ns:
        track.phases_total_ns[phase] += getattr(shares, f"{phase}_ns")
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
    gaps = [e.steps.gap_with_requests_ns for e in engines if e.steps is not None]
    because = _idle_because(engines)
    return Evidence(
        window_ns=window_ns,
        observed_ns=seen.observed_ns if seen.rung != "nvml" or reading is not None else 0,
        active_ns=seen.active_ns,
        active_measured=seen.active_measured,
        tensor_ns=None if seen.tensor_ns is None else seen.tensor_ns / TENSOR_CEILING_RATIO,
        useful_ns=None if useful_s is None else useful_s[1] * 1e9 / max(1.0, clock),
        memory_ns=memory_ns,
        memory_measured=measured,
        clock_ratio=clock,
        throttle=_throttle(reading),
        idle_because=because,
        host_gap_ns=float(min(gaps)) if len(engines) == 1 and gaps and because != "host_gap" else None,
        owner=_owner(reading, engines),
    )


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
