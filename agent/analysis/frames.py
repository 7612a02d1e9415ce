"""From tracks to the frame's rows: trailing integrals with their bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpuidle.agent.analysis.enginewindow import device_peaks
from gpuidle.agent.analysis.tracks import EngineTrack, GpuTrack, Settled
from gpuidle.agent.model import (
    EngineCounters,
    EngineFrame,
    EngineReading,
    Evidence,
    Figure,
    GpuFrame,
    GpuReading,
    Peak,
    Rung,
)
from gpuidle.agent.physics.shapes import ModelShape


def gpu_frame(
    track: GpuTrack,
    here: GpuReading | None,
    engine_ids: tuple[str, ...],
    engines: Mapping[str, EngineTrack],
    shape_of: Callable[[EngineReading], ModelShape | None],
    price_per_hour: float | None,
    currency: str,
) -> GpuFrame:
    """Return one device's row; one that was not read just now (`here` is None) shows totals only."""
    known = track.reading
    peaks = device_peaks(known)
    dtypes = {shape.compute_dtype for key in engine_ids if (shape := shape_of(engines[key].reading))}
    dtype = dtypes.pop() if len(dtypes) == 1 else "bf16"
    peak = None
    if peaks is not None:
        peak = Peak(
            dtype=dtype,
            flops_per_s=peaks.rate(dtype),
            memory_bytes_per_s=peaks.memory_bytes_per_s,
            sheet_clock_hz=peaks.sheet_clock_hz,
            source=peaks.source,
        )
    trailing = list(track.trailing)
    rung: Rung = track.rung
    tensor_active = _ratio(trailing, "tensor_cycles_ns", rung)
    held = {pid for key in engine_ids for pid in engines[key].reading.pids}
    processes = None if here is None or here.processes is None else here.processes
    return GpuFrame(
        hw_id=known.hw_id,
        index=known.index,
        name=known.name,
        vendor=known.vendor,
        parent_hw_id=known.parent_hw_id,
        rung=rung,
        window_ns=track.window_ns,
        causes_ns=dict(track.causes_ns),
        estimated_causes=track.estimated,
        causes_total_ns=dict(track.causes_total_ns),
        estimated_total_ns=dict(track.estimated_total_ns),
        phases=track.shares,
        phases_total_ns=dict(track.phases_total_ns),
        reclaimable_total_ns=track.reclaimable_total_ns,
        idle=_idle(trailing, tensor_active, rung),
        tensor_active=tensor_active,
        sm_active=_ratio(trailing, "sm_ns", rung),
        dram_bandwidth=_bandwidth(trailing, peak, rung),
        roofline_attained=_attained(trailing),
        busy=_ratio(trailing, "active_ns", rung),
        counter_lag_s=_lag(track),
        peak=peak,
        price_per_hour=price_per_hour,
        currency=currency,
        engine_ids=engine_ids,
        process_count=None if processes is None else len(processes),
        foreign_process_count=None if processes is None else sum(p.pid not in held for p in processes),
        memory_total_bytes=known.memory_total_bytes,
        memory_used_bytes=here.memory_used_bytes if here else None,
        power_watts=here.power_watts if here else None,
        power_limit_watts=here.power_limit_watts if here else None,
        energy_joules=here.energy_joules if here else None,
        temperature_celsius=here.temperature_celsius if here else None,
        sm_clock_hz=here.sm_clock_hz if here else None,
        sm_clock_max_hz=known.sm_clock_max_hz,
        memory_busy_ratio=here.memory_busy_ratio if here else None,
        clock_events=here.clock_events if here else None,
        error_counts=known.error_counts,
    )


def _lag(track: GpuTrack) -> Figure | None:
    """Return the lag that was taken out of the counters; unknown while estimates do not agree."""
    reach_ns = track.lag.reach_ns
    if not reach_ns:
        return None
    known = track.lag.at(track.trailing[-1].end_ns) if track.trailing else None
    if known is None:
        return _figure(0.0, -reach_ns / 1e9, reach_ns / 1e9, "unknown", track.window_ns, track.rung)
    lag, error = known
    low, high = (lag - error) / 1e9, (lag + error) / 1e9
    return _figure(lag / 1e9, low, high, "estimated", track.window_ns, track.rung)


def engine_frame(track: EngineTrack, hw_ids: tuple[str, ...], now_ns: int) -> EngineFrame:
    """Return one engine's row."""
    reading = track.reading
    rows = _last_counters(track, now_ns)
    sums = track.last_sums if rows else None
    window_s = sums.window_ns / 1e9 if sums else 0.0
    queries = sum(row[1] for row in track.prefix)
    running = [row.requests_running for row in rows]
    waiting = [row.requests_waiting for row in rows]
    usage = [row.kv_usage_ratio for row in rows]
    return EngineFrame(
        engine_id=reading.engine_id,
        engine=reading.engine,
        model=reading.model,
        role=reading.role,
        state=reading.state,
        evidence="measured" if rows else "unknown",
        url=reading.url,
        version=reading.version,
        hw_ids=hw_ids,
        namespace=reading.namespace,
        pod=reading.pod,
        parallelism=reading.parallelism,
        window_ns=sums.window_ns if sums else 0,
        prefill_tokens_per_s=_per_s(sums.prefill_tokens if sums else None, window_s),
        decode_tokens_per_s=_per_s(sums.decode_tokens if sums else None, window_s),
        prefill_tokens_total=track.prefill_total,
        decode_tokens_total=track.decode_total,
        draft_tokens_total=track.draft_total,
        accepted_tokens_total=track.accepted_total,
        preemptions_total=track.preemptions_total,
        useful_flops_total=track.flops_total,
        steps_total=dict(track.steps_total),
        step_durations=dict(track.step_durations),
        phases=track.shares,
        requests_running=_sum_known(running),
        requests_waiting=_sum_known(waiting),
        kv_usage_ratio=mean_known(usage),
        prefix_hit_ratio=sum(row[2] for row in track.prefix) / queries if queries else None,
    )


def _last_counters(track: EngineTrack, now_ns: int) -> Sequence[EngineCounters]:
    """Return what the engine told last; nothing if it was asked in vain, or should have told again by now.

    An engine that gives whole pages only is asked every ten seconds: in between, its last word stands.
    """
    reading = track.reading
    if reading.counters or track.counted is None or reading.state == "unobserved":
        return reading.counters or ()
    rows = track.counted.counters or ()
    age_ns = now_ns - max((row.read_ns for row in rows), default=now_ns)
    return rows if age_ns <= 3 * track.cadence_ns // 2 else ()


def _per_s(count: int | None, window_s: float) -> float | None:
    return None if count is None or window_s <= 0 else count / window_s


def _sum_known(values: Sequence[int | None]) -> int | None:
    return None if not values or any(v is None for v in values) else sum(v for v in values if v is not None)


def mean_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values; None if there is none or any is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _figure(value: float, low: float, high: float, evidence: Evidence, seen_ns: int, source: str) -> Figure:
    return Figure(value=value, low=low, high=high, evidence=evidence, window_ns=seen_ns, source=source)


def _ratio(trailing: Sequence[Settled], name: str, rung: Rung) -> Figure | None:
    """Integrate a time over the windows in which it is known; None if there is none."""
    rows = [(ns, row.observed_ns) for row in trailing if (ns := getattr(row, name)) is not None]
    seen_ns = sum([observed_ns for _, observed_ns in rows])
    if not seen_ns:
        return None
    value = sum([ns for ns, observed_ns in rows if observed_ns]) / seen_ns
    evidence: Evidence = "estimated" if rung == "nvml" else "measured"
    return _figure(value, value, value, evidence, seen_ns, rung)


def _bandwidth(trailing: Sequence[Settled], peak: Peak | None, rung: Rung) -> Figure | None:
    rows = [row for row in trailing if row.dram_bytes is not None and row.observed_ns]
    seen_ns = sum([row.observed_ns for row in rows])
    if not seen_ns or peak is None:
        return None
    value = sum([row.dram_bytes or 0.0 for row in rows]) / (seen_ns / 1e9) / peak.memory_bytes_per_s
    return _figure(value, value, value, "measured", seen_ns, rung)


def _attained(trailing: Sequence[Settled]) -> Figure | None:
    """Return the roofline's time over the time with work on the GPU: 1 is all that the hardware allows."""
    rows = [row for row in trailing if row.bound_ns is not None and row.active_ns]
    active_ns = sum([row.active_ns or 0.0 for row in rows])
    if not active_ns:
        return None
    value = sum([row.bound_ns or 0.0 for row in rows]) / active_ns
    return _figure(value, value, value, "estimated", sum([row.observed_ns for row in rows]), "work model")


def _idle(trailing: Sequence[Settled], tensor: Figure | None, rung: Rung) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    rows = [row for row in trailing if row.useful_ns is not None and row.observed_ns]
    seen_ns = sum([row.observed_ns for row in rows])
    if seen_ns:
        useful = [row.useful_ns for row in rows if row.useful_ns]
        low, middle, high = (sum([each[i] for each in useful]) for i in range(3))
        figures["flops"] = _figure(
            1 - middle / seen_ns, 1 - high / seen_ns, 1 - low / seen_ns, "estimated", seen_ns, "work model"
        )
    if tensor is not None:
        idle = 1 - tensor.value
        figures["tensor_pipe"] = _figure(idle, idle, idle, tensor.evidence, tensor.window_ns, rung)
    return figures
