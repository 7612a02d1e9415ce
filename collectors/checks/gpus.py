"""Checks of the driver and of each GPU: what NVML gives, which counters, which peaks."""

from __future__ import annotations

from collections.abc import Sequence

from gpuidle.agent.model import RUNGS, Check, GpuReading, Problem
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.checks.observe import Seen, measured
from gpuidle.collectors.counters.rung import RungStatus

_SESSION_KINDS = (
    "library_missing",
    "driver_not_loaded",
    "version_mismatch",
    "no_permission",
    "unknown_error",
    "nvml_error",
    "driver_hanging",
    "failed",
)
_DEVICE_KINDS = ("gpu_lost", "gpu_hanging")
_HARDWARE = ("unsupported",)


def driver_checks(seen: Seen) -> tuple[Check, ...]:
    """Return how the driver does as a whole."""
    problems = () if seen.gpus is None else seen.gpus.problems
    down = next((p for p in problems if p.kind in _SESSION_KINDS and not p.subject), None)
    if seen.gpus is None:
        return (
            Check(
                id="nvml.library",
                status="broken",
                found="the NVIDIA driver does not answer: a call into it hangs",
                remedy="see `dmesg` for Xid lines and whether `nvidia-smi` hangs too; reboot",
            ),
        )
    if down is not None and down.kind in ("library_missing", "driver_not_loaded"):
        return (_no_driver(seen, down),)
    if down is not None and down.kind == "version_mismatch":
        return (
            Check(id="nvml.library", status="ok", found="libnvidia-ml.so.1 loads"),
            Check(id="nvml.version", status="broken", found=down.message, remedy=down.remedy),
            _binding(seen),
        )
    if down is not None and seen.gpus.gpus is None:
        found = "nvml.access" if down.kind == "no_permission" else "nvml.library"
        return (
            Check(id=found, status="broken", found=down.message, remedy=down.remedy),
            _binding(seen),
        )
    versions = sorted({device.driver_version for device in seen.devices if device.driver_version})
    refused = next((p for p in problems if "ermission" in p.message or p.kind == "no_permission"), None)
    return (
        Check(id="nvml.library", status="ok", found="libnvidia-ml.so.1 loads and answers"),
        Check(
            id="nvml.version",
            status="ok",
            found=f"driver {', '.join(versions) or 'of unknown version'}, its library matches",
        ),
        _binding(seen),
        Check(id="nvml.access", status="ok", found="NVML refuses nothing")
        if refused is None
        else Check(id="nvml.access", status="limited", found=refused.message, remedy=refused.remedy),
        *_profiling(seen),
    )


def gpu_checks(seen: Seen) -> tuple[Check, ...]:
    """Return what can be measured of each device, those that do not answer included."""
    checks: list[Check] = []
    split = {device.parent_hw_id for device in seen.devices if device.parent_hw_id is not None}
    counted = {device.hw_id for device in measured(seen.devices)}
    problems = () if seen.gpus is None else seen.gpus.problems
    for device in seen.devices:
        mine = [p for p in problems if p.subject == device.hw_id]
        checks.append(_device(device))
        checks += _mig(device, split, seen.devices)
        checks += _fields(device, mine)
        if device.hw_id in counted:
            checks.append(_counters(device, [s for s in seen.statuses if s.hw_id == device.hw_id]))
            checks.append(_peaks(device))
    for problem in problems:
        if problem.kind in _DEVICE_KINDS or (problem.kind == "no_permission" and problem.subject):
            checks.append(
                Check(
                    id="gpu.device",
                    subject=problem.subject,
                    status="broken",
                    found=problem.message,
                    remedy=problem.remedy,
                )
            )
    return tuple(checks)


def _no_driver(seen: Seen, down: Problem) -> Check:
    if seen.driver_traces:
        return Check(
            id="nvml.library",
            status="broken",
            found=f"{down.message}, though {seen.driver_traces[0]} is there",
            remedy=down.remedy,
        )
    return Check(
        id="nvml.library",
        status="limited",
        found=f"{down.message}: no NVIDIA GPU can be read",
        remedy=down.remedy,
    )


def _binding(seen: Seen) -> Check:
    garbled = [p for p in (seen.gpus.problems if seen.gpus else ()) if p.kind == "garbled_processes"]
    if garbled:
        return Check(id="nvml.binding", status="limited", found=garbled[0].message, remedy=garbled[0].remedy)
    return Check(id="nvml.binding", status="ok", found=f"nvidia-ml-py {seen.binding}")


def _profiling(seen: Seen) -> tuple[Check, ...]:
    """Return whether PM sampling, which has to be asked for, would be allowed; it is never missed."""
    if not seen.devices:
        return ()
    held = [name for name in ("CAP_PERFMON", "CAP_SYS_ADMIN") if seen.rights.has(name)]
    if held or seen.profiling_open:
        found = f"PM sampling (opt-in) is allowed by {held[0] if held else 'the driver option'}"
    else:
        found = "PM sampling (opt-in) would need CAP_PERFMON, or NVreg_RestrictProfilingToAdminUsers=0"
    return (Check(id="nvml.profiling", status="ok", found=found),)


def _device(device: GpuReading) -> Check:
    total = device.memory_total_bytes
    memory = "" if total is None else f", {total / 2**30:.0f} GiB"
    capability = "" if device.compute_capability is None else f", cc {device.compute_capability}"
    return Check(
        id="gpu.device",
        subject=device.hw_id,
        status="ok",
        found=f"GPU {device.index}: {device.name}{memory}{capability}",
    )


def _mig(device: GpuReading, split: set[str], devices: Sequence[GpuReading]) -> tuple[Check, ...]:
    if device.hw_id in split:
        count = sum(other.parent_hw_id == device.hw_id for other in devices)
        found = f"split into {count} MIG instance{'s' * (count != 1)}: each is a device of its own below"
    elif device.parent_hw_id is not None:
        found = f"a MIG instance of {device.parent_hw_id}"
    else:
        return ()
    return (Check(id="gpu.mig", subject=device.hw_id, status="ok", found=found),)


def _fields(device: GpuReading, problems: Sequence[Problem]) -> tuple[Check, ...]:
    faults = [p for p in problems if p.kind not in _DEVICE_KINDS and p.kind != "garbled_processes"]
    if not faults:
        return ()
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return (
        Check(
            id="gpu.fields",
            subject=device.hw_id,
            status="limited",
            found=f"{faults[0].message}{more}",
            remedy=next((p.remedy for p in faults if p.remedy), "gpuidle goes on without; see `dmesg`"),
        ),
    )


def _counters(device: GpuReading, statuses: Sequence[RungStatus]) -> Check:
    """Return which rung serves a device, and why no better one does."""
    ranked = sorted(statuses, key=lambda status: RUNGS.index(status.rung))
    serving = next((s for s in ranked if s.state == "serving"), None)
    starting = next((s for s in ranked if s.state == "starting"), None)
    best = serving or starting
    better = ranked if best is None else ranked[: ranked.index(best)]
    why = "; ".join(f"{s.rung}: {s.message or s.state}" for s in better)
    if serving is not None:
        found = f"{serving.rung} serves"
    elif starting is not None:
        found = f"{starting.rung} answers, its first interval is not over yet"
    else:
        found = "nvml only: a GPU's busy share, no tensor and no DRAM counter"
    mendable = [s for s in better if s.state not in _HARDWARE]
    return Check(
        id="gpu.counters",
        subject=device.hw_id,
        status="ok" if best is not None and not mendable else "limited",
        found=f"{found} ({why})" if why else found,
        remedy=next((s.remedy for s in mendable if s.remedy), ""),
    )


def _peaks(device: GpuReading) -> Check:
    peaks = find_peaks(device.name, device.memory_total_bytes)
    if peaks is None:
        return Check(
            id="gpu.peaks",
            subject=device.hw_id,
            status="limited",
            found="no peak is known for a device of this name and memory size: no share of FLOPs or of "
            "bandwidth can be told",
            remedy="report the device's name and a link to its datasheet",
        )
    bf16 = peaks.flops_per_s.get("bf16")
    tera = "" if bf16 is None else f"{bf16 / 1e12:.0f} TFLOP/s in 16 bits, "
    note = ", from a formula that is often too high" if peaks.formula else ""
    return Check(
        id="gpu.peaks",
        subject=device.hw_id,
        status="limited" if peaks.formula else "ok",
        found=f"{tera}{peaks.memory_bytes_per_s / 1e9:.0f} GB/s (dense){note}",
    )
