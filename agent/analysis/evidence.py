"""What is known of one device in one window that settles: the evidence that the ledger books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.bandwidth import Reachable, reachable
from gpuidle.agent.analysis.carry import counter_is_dead, pay, pay_exact
from gpuidle.agent.analysis.enginewindow import EngineWindow
from gpuidle.agent.analysis.excess import excess_of_sums
from gpuidle.agent.analysis.ledger import Evidence, IdleBecause
from gpuidle.agent.analysis.links import Floats, at_most_unheld, steps_learned, usual_ns
from gpuidle.agent.analysis.peers import idle_wait
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.stepwork import step_terms, tiles_ns, unheld_ns
from gpuidle.agent.analysis.tracks import GpuTrack, Pending
from gpuidle.agent.model import CounterSeries, GpuReading
from gpuidle.agent.physics.peaks import DevicePeaks

TENSOR_CEILING_RATIO = 1.0
"""What the tensor pipe's counter reaches at most (0.5 on GeForce: peaks of such cards are not used here)."""
MOST_USUAL = 2.0
"""Times the usual gaps of its steps: up to here a window that runs at both edges is taken to hold no rest."""

Throttle = Literal["throttled_power", "throttled_thermal", "throttled_other"]


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
    if any(e.steps is None and e.sums is None and e.reading.counters is None for e in engines):
        return "unobserved"
    if any(e.steps is None and e.sums is None for e in engines):
        return "unattributed"
    if all(e.sums is not None and e.sums.at_rest for e in engines):
        return "no_request"
    if any(e.unplaced for e in engines):
        return "unattributed"
    if len(engines) == 1 and _awaits_cache(engines[0]):
        return "waiting_peer"
    if all(e.steps is not None for e in engines):
        return "no_request"  # the steps told the gaps with requests apart already
    if any(e.throughout for e in engines):
        return "host_gap"
    return "unattributed"


def _awaits_cache(engine: EngineWindow) -> bool:
    """Whether a decode-only engine has requests and nothing to run: their KV cache is still on its way."""
    sums = engine.sums
    if engine.reading.role != "decode" or sums is None or sums.moved:
        return False
    return sums.running == (0, 0) and all(value is not None and value > 0 for value in sums.waiting)


def evidence_of(
    track: GpuTrack,
    window: Pending,
    reading: GpuReading | None,
    seen: Activity,
    engines: Sequence[EngineWindow],
    peaks: DevicePeaks | None,
    seconds: tuple[float, float, float] | None,
) -> Evidence:
    """Return what is known of the device in the window; `engines` are those with a process on it.

    `seconds` are theirs by `useful_s`.
    """
    window_ns = window.end_ns - window.start_ns
    clock = _clock_ratio(seen, peaks)
    # What was measured once holds while the driver is silent.
    rate = None if peaks is None else reachable(track.reading, peaks)
    memory_ns, measured = _memory_ns(seen, engines, rate)
    because = _idle_because(engines)
    useful_ns = None if seconds is None else seconds[1] * 1e9 / max(1.0, clock)
    tensor_ns = None if seen.tensor_ns is None else seen.tensor_ns / TENSOR_CEILING_RATIO
    one = engines[0] if len(engines) == 1 else None
    waited, waited_measured = _waited(window_ns, seen, one)
    host_gap = _host_gap(window_ns, seen, engines, waited)
    if one is not None and _turns_unseen(one):
        because = "unattributed"
    elif host_gap is not None:
        because = "no_request"
    excess, talk = _excess(track, window.end_ns, seen, one, peaks, rate)
    padding = _padding(one, seen, peaks)
    if useful_ns is not None and peaks is not None:
        room_ns = tensor_ns
        if tensor_ns is not None and tensor_ns < useful_ns and counter_is_dead(track, useful_ns, tensor_ns):
            room_ns = None
        if one is not None and one.priced is None and seen.active_ns is not None:
            paid = pay(track, one, useful_ns, room_ns, seen.active_ns, peaks, padding)
            useful_ns = paid.useful_ns
            talk = at_most_unheld(paid.talk_ns, seen.active_ns, seen.sm_ns)
        elif room_ns is not None:
            useful_ns = pay_exact(track, useful_ns, room_ns)
    return Evidence(
        window_ns=window_ns,
        observed_ns=seen.observed_ns if seen.rung != "nvml" or reading is not None else 0,
        active_ns=seen.active_ns,
        active_measured=seen.active_measured,
        tensor_ns=tensor_ns,
        useful_ns=useful_ns,
        memory_ns=memory_ns,
        memory_measured=measured,
        bandwidth_measured=rate is not None and rate.measured,
        memory_excess_ns=excess,
        padding_ns=padding,
        split_rest=one is not None and one.work is not None and memory_ns is not None,
        communication_ns=talk,
        clock_ratio=clock,
        throttle=_throttle(reading),
        idle_because=because,
        host_gap_ns=host_gap,
        waiting_idle_ns=waited,
        waiting_measured=waited_measured,
        waiting_active_ns=0.0 if one is None or one.waits is None else one.waits.spinning_ns,
        host_gap_measured=one is not None
        and one.steps is not None
        and one.steps.shares.evidence == "measured",
        owner=_owner(reading, engines),
    )


def _padding(engine: EngineWindow | None, seen: Activity, peaks: DevicePeaks | None) -> float | None:
    """Estimate the padding of the decode steps of a window, where no counter shows the pipe."""
    if engine is not None and peaks is not None and engine.priced is not None and seen.tensor_ns is None:
        return tiles_ns(engine.priced, peaks)
    if engine is None or engine.decode is None or peaks is None or not engine.clues.pace_ns:
        return None
    steps = engine.shares.decode_ns / engine.clues.pace_ns
    return steps * engine.decode.pipe_s(peaks) * 1e9 * engine.decode.padding_ratio


def _turns_unseen(engine: EngineWindow) -> bool:
    """Whether a stage of a pipeline is inactive for reasons that no step tells: its turn, or the host."""
    at_rest = engine.sums is not None and engine.sums.at_rest
    return engine.reading.parallelism.pipeline > 1 and engine.steps is None and not at_rest


def _stepping_ns(window_ns: int, seen: Activity, engine: EngineWindow) -> float | None:
    """Return the time with a step under way, where steps and counters saw the whole window."""
    if engine.steps is None or seen.observed_ns < 0.98 * window_ns:
        return None
    return float(window_ns - engine.steps.shares.idle_ns)


def _waited(window_ns: int, seen: Activity, engine: EngineWindow | None) -> tuple[float, bool]:
    if engine is None or seen.active_ns is None or not seen.active_measured:
        return 0.0, False
    return idle_wait(engine.waits, seen.active_ns, _stepping_ns(window_ns, seen, engine), window_ns)


def _clock_ratio(seen: Activity, peaks: DevicePeaks | None) -> float:
    """Return the live SM clock over the sheet's, 1 where either is not known."""
    if peaks is None or not peaks.sheet_clock_hz or not seen.sm_clock_hz:
        return 1.0
    return seen.sm_clock_hz / peaks.sheet_clock_hz


def _ended_at_first(sums: Sums) -> bool:
    """Whether a window began and ended without a request, and each that came made one token."""
    gauges = (*sums.running, *sums.waiting)
    return not sums.reset and bool(sums.first_tokens) and sums.decode_tokens == 0 and gauges == (0, 0, 0, 0)


def _host_gap(
    window_ns: int, seen: Activity, engines: Sequence[EngineWindow], waited_ns: float
) -> float | None:
    """Return the inactive time that the host took of a single engine's window; None: it cannot be told.

    Exact steps tell; else each step takes what steps took while requests were running all the time.
    """
    if len(engines) != 1 or seen.active_ns is None:
        return None
    engine = engines[0]
    if engine.unplaced:
        return None
    sums = engine.sums
    if engine.reading.role == "decode" and sums is not None and not sums.moved and sums.running == (0, 0):
        return None if any(sums.waiting) else 0.0  # what begins decoding later lived elsewhere
    if engine.steps is not None:
        # Inactive within a step is the host's as well, but for turns of other stages: between launches
        # nothing runs.
        stepping_ns = _stepping_ns(window_ns, seen, engine)
        launching = 0.0 if stepping_ns is None else max(0.0, stepping_ns - seen.active_ns - waited_ns)
        return engine.steps.gap_with_requests_ns + launching
    if _turns_unseen(engine):
        if engine.waits is None or sums is None or not sums.always_running:
            return None
        return max(0.0, window_ns - seen.active_ns - engine.waits.idle_high_ns)
    inactive = max(0.0, window_ns - seen.active_ns)
    if sums is not None and _ended_at_first(sums) and sums.time_to_first_token_s is not None:
        # Its requests lived no longer than they waited for their only token: the rest had none.
        return min(inactive, max(0.0, sums.time_to_first_token_s * 1e9 - seen.active_ns))
    return inactive if engine.throughout else _usual_gap(engine, inactive)


def _usual_gap(engine: EngineWindow, inactive: float) -> float | None:
    """Return what the gaps of a window's steps usually take of its inactive time; None: not known."""
    sums = engine.sums
    if sums is None or sums.reset or sums.counted_steps is None or engine.gap_ns is None:
        return None
    if not sums.moved:
        return None if any(sums.running) or any(sums.waiting) else 0.0
    usual = sums.counted_steps * engine.gap_ns
    if sums.always_running and inactive <= MOST_USUAL * usual:
        return inactive
    return min(inactive, usual)


def _excess(
    track: GpuTrack,
    until_ns: int,
    seen: Activity,
    engine: EngineWindow | None,
    peaks: DevicePeaks | None,
    rate: Reachable | None,
) -> tuple[float | None, float | None]:
    """Return what DRAM needs beyond the pipe's time, part by part of the window, and the time of messages."""
    if engine is None or peaks is None or rate is None:
        return None, None
    ranks = engine.reading.parallelism.tensor
    if engine.priced is not None:
        rows = [s for s in track.counters if s.rung == seen.rung]
        clock = _clock_ratio(seen, peaks)
        own = _messages_ns(track, until_ns, rows, engine)
        terms = step_terms(engine.priced, rows, peaks, rate.bytes_per_s, ranks, track.lag_ns, clock, own)
        return terms.memory_ns, terms.communication_ns
    talk = None if engine.work is None else engine.work.collectives_ns
    return excess_of_sums(engine, seen, track.decode_pipe_ratio, peaks, rate), talk


def _messages_ns(
    track: GpuTrack, until_ns: int, counters: Sequence[CounterSeries], engine: EngineWindow
) -> Floats | None:
    """Learn from a window's steps how fast the links are; return the time of each step's messages by that.

    None where it is not known.
    """
    place, priced = engine.reading.parallelism, engine.priced
    if priced is None or place.tensor < 2 or place.pipeline > 1:
        return None
    usual = usual_ns(priced, place.tensor)
    # A rank that spins for a peer holds no SM either.
    if engine.waits is not None and engine.waits.spinning_ns == 0:
        unheld = unheld_ns(priced, counters, track.lag_ns)
        track.links = steps_learned(track.links, priced, until_ns, usual, unheld)
    told = track.links.factor()
    return None if told is None else told[0] * usual


def useful_s(engines: Sequence[EngineWindow], peaks: DevicePeaks | None) -> tuple[float, float, float] | None:
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
    seen: Activity, engines: Sequence[EngineWindow], rate: Reachable | None
) -> tuple[float | None, bool]:
    if rate is None:
        return None, False
    if seen.dram_bytes is not None:
        return seen.dram_bytes / rate.bytes_per_s * 1e9, True
    moved = [engine.work.bytes_moved if engine.work is not None else None for engine in engines]
    if not moved or any(value is None for value in moved):
        return None, False
    return sum(value or 0.0 for value in moved) / rate.bytes_per_s * 1e9, False


def _throttle(reading: GpuReading | None) -> Throttle:
    events = set(reading.clock_events or ()) if reading is not None else set()
    if events & {"power_cap", "hw_power_brake"}:
        return "throttled_power"
    return "throttled_thermal" if events & {"sw_thermal", "hw_thermal"} else "throttled_other"
