"""Settling one window: counters, token sums and steps come together into phases and a ledger."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.claims import judge
from gpuidle.agent.analysis.enginewindow import EngineWindow, device_peaks
from gpuidle.agent.analysis.evidence import evidence_of, useful_s
from gpuidle.agent.analysis.fastphase import label_window
from gpuidle.agent.analysis.integers import clip_to
from gpuidle.agent.analysis.ledger import Evidence, ledger
from gpuidle.agent.analysis.phase import Clues, shares_from_sums
from gpuidle.agent.analysis.reclaim import reclaimable_ns
from gpuidle.agent.analysis.several import shares_of_several
from gpuidle.agent.analysis.tracks import GpuTrack, Pending, Settled
from gpuidle.agent.model import PHASES, Problem, Shares
from gpuidle.agent.physics.peaks import DevicePeaks

SLOW_NS = 100_000_000
"""Width of a sample from which on it holds too many steps to say what they were."""
_PHASE_NS = {phase: f"{phase}_ns" for phase in PHASES}
"""Where `Shares` has each phase."""
KEPT_NS = 10**9
"""Counters are kept for this much longer than their window: a step may have begun there."""


def settle_gpu(
    track: GpuTrack, window: Pending, seen: Activity, engines: Sequence[EngineWindow], trailing_ns: int
) -> list[Problem]:
    """Book one window of one device; `engines` are those with a process on it."""
    reading = None if window.gpus is None else window.gpus.get(track.reading.hw_id)
    peaks = device_peaks(track.reading)
    if len(engines) == 1 and engines[0].series and seen.active_measured:
        rows = [s for s in track.counters if s.rung == seen.rung]
        track.lag.learn(engines[0].series, rows, window.start_ns)
        known = track.lag.at(window.end_ns)
        track.lag_ns = 0.0 if known is None else known[0]
    seconds = useful_s(engines, peaks)
    evidence = evidence_of(track, window, reading, seen, engines, peaks, seconds)
    booked = ledger(evidence)
    _learn_decode(track, seen, engines)
    shares = _gpu_shares(evidence, window, engines)
    if len(engines) == 1 and engines[0].steps is None and evidence.owner == "engine":
        shares = _with_fast(track, window, peaks, engines[0], shares)
        shares = _without_bubbles(shares, engines[0].reading.parallelism.pipeline)
    track.window_ns, track.causes_ns, track.estimated = booked.window_ns, booked.causes_ns, booked.estimated
    track.shares, track.rung = shares, seen.rung
    for cause, value in booked.causes_ns.items():
        track.causes_total_ns[cause] += value
    for cause in track.estimated_total_ns.keys() & set(booked.estimated):
        track.estimated_total_ns[cause] += booked.causes_ns[cause]
    for phase, name in _PHASE_NS.items():
        track.phases_total_ns[phase] += getattr(shares, name)
    _reclaim(track, seen, engines, peaks)
    track.trailing.append(_settled(window, evidence, seen, engines, peaks, seconds))
    while track.trailing and track.trailing[0].end_ns <= window.end_ns - trailing_ns:
        track.trailing.popleft()
    while track.counters and int(track.counters[0].end_ns[-1]) <= window.end_ns - KEPT_NS:
        track.counters.popleft()
    judged = engines if evidence.owner == "engine" else ()
    return judge(track, window, seen, judged, peaks, seconds, trailing_ns)


def _gpu_shares(evidence: Evidence, window: Pending, engines: Sequence[EngineWindow]) -> Shares:
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
    stepped = [e for e in engines if e.steps is not None]
    if len(stepped) == 1 and stepped[0].steps is not None and all(e.steps is not None for e in acting):
        return stepped[0].steps.shares
    if len(stepped) > 1 and all(e.series for e in (*stepped, *acting)):
        return shares_of_several([e.series for e in stepped], window.start_ns, window.end_ns)
    if len(acting) == 1 or len(engines) == 1:
        engine = (acting or list(engines))[0]
        if engine.unplaced and acting:
            return shares_from_sums(None, Clues(window_ns=window_ns, busy_ns=_known_active(evidence)))
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


def _with_fast(
    track: GpuTrack, window: Pending, peaks: DevicePeaks | None, engine: EngineWindow, shares: Shares
) -> Shares:
    """Let fast counters tell what the engine's tokens do not.

    Verification of many drafts computes as a prefill does: under speculation only a decode is believed.
    """
    fast = _fast_shares(track, window, peaks)
    if fast is None or (engine.sums is not None and shares.evidence != "unknown"):
        return shares
    containing, unknown = fast.mixed_ns, fast.unknown_ns
    if engine.reading.limits.speculative:
        return msgspec.structs.replace(
            fast,
            mixed_ns=0,
            unknown_ns=containing + unknown,
            prefill_low_ns=0,
            prefill_high_ns=containing + unknown,
        )
    if engine.sums is not None and not engine.sums.always_running:
        return msgspec.structs.replace(fast, mixed_ns=0, prefill_ns=containing)
    return fast


def _without_bubbles(shares: Shares, stages: int) -> Shares:
    """Call time unknown in which a stage of a pipeline may have waited for the others within a step.

    Each stage works as long as this one did, so they can have kept it waiting for no more than that.
    """
    bubble_ns = min(shares.idle_ns, (stages - 1) * (shares.window_ns - shares.idle_ns))
    if bubble_ns <= 0:
        return shares
    return msgspec.structs.replace(
        shares,
        idle_ns=shares.idle_ns - bubble_ns,
        unknown_ns=shares.unknown_ns + bubble_ns,
        prefill_high_ns=shares.prefill_high_ns + bubble_ns,
        evidence="estimated" if shares.evidence == "measured" else shares.evidence,
    )


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
    seconds: tuple[float, float, float] | None,
) -> Settled:
    useful: tuple[float, float, float] | None = None
    if evidence.owner == "unallocated":
        useful = (0.0, 0.0, 0.0)
    elif evidence.owner in ("engine", "suspended") and seconds is not None:
        useful = (seconds[0] * 1e9, seconds[1] * 1e9, seconds[2] * 1e9)
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
