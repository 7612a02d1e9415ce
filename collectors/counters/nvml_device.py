"""Reads one NVIDIA device through `pynvml`, each field guarded on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gpuidle.agent.model import ClockEvent, GpuProcess, GpuReading, Problem
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import error_text, nvml, text
from gpuidle.collectors.counters.nvml_events import ErrorCounts
from gpuidle.collectors.counters.nvml_guard import (
    MAX_BYTES,
    MAX_CELSIUS,
    MAX_JOULES,
    MAX_MEGAHERTZ,
    MAX_WATTS,
    Guard,
)
from gpuidle.collectors.counters.nvml_processes import ShareReader, processes

MOST_INSTANCES = 16
"""NVIDIA's GPUs have 7 at most; the driver is asked, and not believed beyond this."""

CLOCK_EVENTS: tuple[tuple[int, ClockEvent], ...] = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks"),
    (0x4, "power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
    (0x100, "display_clocks"),
    (0x200, "board_limit"),
    (0x400, "reliability"),
)
"""Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h)."""


Mig = Literal["never", "whole", "split", "unknown"]
"""Whether a GPU is split into MIG instances now; "unknown": the driver fails to say."""


@dataclass(frozen=True)
class Device:
    """What does not change from second to second: read once, and again every minute."""

    handle: object
    index: int
    hw_id: str
    name: str
    compute_capability: str | None
    power_limit_watts: float | None
    sm_clock_max_hz: int | None
    memory_clock_max_hz: int | None
    can_split: bool
    """Whether it can be split into MIG instances."""
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Moment:
    """What a reading needs besides the device."""

    now_ns: int
    """The tick's, CLOCK_MONOTONIC."""
    clock: Callable[[], int]
    """Gives the moment of each reading, CLOCK_MONOTONIC."""
    wall_us: int
    driver_version: str | None
    pid_max: int
    binding: str
    """The version of nvidia-ml-py, for a Problem's text."""


def open_device(index: int) -> Device:
    """Return the device at NVML's `index`.

    Raises:
        DeviceLost: it has no handle or no UUID.
        SessionLost: NVML as a whole failed.
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        hw_id = text("nvmlDeviceGetUUID", handle)
    except nvml.NVMLError as error:
        if error.value in faults.SESSION_LOST:
            raise faults.SessionLost(faults.session_problem(error.value, error_text(error.value))) from None
        raise faults.DeviceLost(error.value) from None
    guard = Guard(hw_id)
    name = guard.get("the name", text, "nvmlDeviceGetName", handle)
    capability = guard.get("compute capability", nvml.nvmlDeviceGetCudaComputeCapability, handle)
    limit = guard.number("power limit (mW)", MAX_WATTS * 1000, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    sm_max = _clock(guard, "maximum SM clock", nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM)
    memory_max = _clock(
        guard, "maximum memory clock", nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM
    )
    return Device(
        handle=handle,
        index=index,
        hw_id=hw_id,
        name=name or "unknown GPU",
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        power_limit_watts=None if limit is None else limit / 1000,
        sm_clock_max_hz=sm_max,
        memory_clock_max_hz=memory_max,
        can_split=_mig(guard, handle) != "never",
        problems=tuple(guard.problems),
    )


def read_device(
    device: Device, moment: Moment, shares: ShareReader, errors: ErrorCounts
) -> tuple[list[GpuReading], list[Problem]]:
    """Return the device at this moment, with its MIG instances after it, and what could not be read.

    Raises:
        DeviceLost: the device does not answer.
        SessionLost: NVML as a whole failed.
    """
    guard = Guard(device.hw_id)
    mig = _mig(guard, device.handle) if device.can_split else "never"
    whole = _read_whole(device, moment, guard, shares, errors, mig)
    if guard.unknown and not guard.answered:
        raise faults.DeviceLost(faults.UNKNOWN)
    instances = _read_instances(device, whole, moment, guard) if mig == "split" else []
    return [whole, *instances], guard.problems


def _mig(guard: Guard, handle: object) -> Mig:
    before = len(guard.problems)
    mode = guard.get("MIG mode", nvml.nvmlDeviceGetMigMode, handle)
    if mode is None:
        return "unknown" if len(guard.problems) > before else "never"
    return "split" if mode[0] == 1 else "whole"


def _read_whole(
    device: Device, moment: Moment, guard: Guard, shares: ShareReader, errors: ErrorCounts, mig: Mig
) -> GpuReading:
    handle = device.handle
    energy = guard.number("energy (mJ)", MAX_JOULES * 1000, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    read_ns = moment.clock()
    power = guard.number("power (mW)", MAX_WATTS * 1000, nvml.nvmlDeviceGetPowerUsage, handle)
    celsius = guard.number(
        "temperature (°C)", MAX_CELSIUS, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
    )
    total, used = _memory(guard, handle)
    utilization = guard.get("utilisation", nvml.nvmlDeviceGetUtilizationRates, handle)
    gpu_percent = memory_percent = None
    if utilization is not None:
        gpu_percent = guard.bounded("GPU utilisation (%)", 100, utilization.gpu)
        memory_percent = guard.bounded("memory utilisation (%)", 100, utilization.memory)
    return GpuReading(
        hw_id=device.hw_id,
        index=device.index,
        name=device.name,
        read_ns=read_ns,
        driver_version=moment.driver_version,
        compute_capability=device.compute_capability,
        memory_total_bytes=total,
        memory_used_bytes=used,
        power_watts=None if power is None else power / 1000,
        power_limit_watts=device.power_limit_watts,
        energy_joules=None if energy is None else energy / 1000,
        temperature_celsius=None if celsius is None else float(celsius),
        sm_clock_hz=_clock(guard, "SM clock", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        sm_clock_max_hz=device.sm_clock_max_hz,
        memory_clock_hz=_clock(
            guard, "memory clock", nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM
        ),
        memory_clock_max_hz=device.memory_clock_max_hz,
        clock_events=_clock_events(guard, handle),
        busy_ratio=None if gpu_percent is None else gpu_percent / 100,
        memory_busy_ratio=None if memory_percent is None else memory_percent / 100,
        # The processes of a split GPU are those of its instances: listed here too, they would count twice.
        # Where the driver does not say whether it is split, they are not known either.
        processes=None if mig in ("split", "unknown") else _processes(guard, handle, moment, total, shares),
        error_counts=_errors(guard, errors, moment.now_ns),
    )


def _processes(
    guard: Guard, handle: object, moment: Moment, total: int | None, shares: ShareReader | None
) -> tuple[GpuProcess, ...] | None:
    found = processes(guard, handle, moment.pid_max, total, moment.binding)
    return shares.read(guard, handle, found, moment.wall_us) if shares is not None and found else found


def _errors(guard: Guard, errors: ErrorCounts, now_ns: int) -> dict[str, int] | None:
    if errors.events is not None:
        guard.problems.extend(guard.get("events", errors.read, now_ns) or ())
    return None if errors.counts is None else dict(errors.counts)


def _read_instances(device: Device, whole: GpuReading, moment: Moment, guard: Guard) -> list[GpuReading]:
    """Return the MIG instances of a split GPU.

    Power, energy, temperature and utilisation are told of the whole only; the clock is the chip's.
    """
    count = guard.number(
        "number of MIG devices", MOST_INSTANCES, nvml.nvmlDeviceGetMaxMigDeviceCount, device.handle
    )
    found: list[GpuReading] = []
    for index in range(count or 0):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device.handle, index)
            hw_id = text("nvmlDeviceGetUUID", handle)
            gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
        except nvml.NVMLError as error:
            if error.value in faults.SESSION_LOST:
                raise faults.SessionLost(
                    faults.session_problem(error.value, error_text(error.value))
                ) from None
            if error.value not in (faults.NOT_FOUND, faults.INVALID_ARGUMENT):
                guard.problems.append(
                    faults.field_problem(
                        f"MIG device {index}", error.value, error_text(error.value), device.hw_id
                    )
                )
            continue
        own = Guard(hw_id)
        total, used = _memory(own, handle)
        found.append(
            msgspec.structs.replace(
                whole,
                hw_id=hw_id,
                name=own.get("the name", text, "nvmlDeviceGetName", handle) or f"{device.name} MIG",
                read_ns=moment.clock(),
                parent_hw_id=device.hw_id,
                instance_id=gpu_instance,
                memory_total_bytes=total,
                memory_used_bytes=used,
                power_watts=None,
                power_limit_watts=None,
                energy_joules=None,
                temperature_celsius=None,
                busy_ratio=None,
                memory_busy_ratio=None,
                processes=_processes(own, handle, moment, total, None),
                error_counts=None,
            )
        )
        guard.problems.extend(own.problems)
    return found


def _clock(guard: Guard, name: str, call: Callable[..., Any], handle: object, domain: int) -> int | None:
    megahertz = guard.number(f"{name} (MHz)", MAX_MEGAHERTZ, call, handle, domain)
    return None if megahertz is None else megahertz * 1_000_000


def _memory_info(handle: object) -> Any:
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if error.value not in (faults.FUNCTION_NOT_FOUND, faults.ARGUMENT_VERSION_MISMATCH):
            raise
        # Drivers before R510: the first form, which counts the driver's reserve as used.
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _memory(guard: Guard, handle: object) -> tuple[int | None, int | None]:
    info = guard.get("memory", _memory_info, handle)
    if info is None or not info.total:
        return None, None  # unified memory: there is none of the GPU's own
    total = guard.bounded("total memory (bytes)", MAX_BYTES, info.total)
    used = guard.bounded("used memory (bytes)", MAX_BYTES if total is None else total, info.used)
    return total, used


def _clock_events(guard: Guard, handle: object) -> tuple[str, ...] | None:
    def reasons(device: object) -> int:
        try:
            return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))
        except nvml.NVMLError as error:
            if error.value != faults.FUNCTION_NOT_FOUND:
                raise
            return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))  # drivers before R535

    mask = guard.get("clock event reasons", reasons, handle)
    if mask is None:
        return None
    known = sum(bit for bit, _ in CLOCK_EVENTS)
    if mask & ~known:
        guard.problems.append(
            Problem(
                source=faults.SOURCE,
                kind="unknown_clock_event",
                message=f"the driver gives clock event reasons unknown to gpuidle: {mask & ~known:#x}",
                remedy="A newer gpuidle may know them.",
                subject=guard.hw_id,
            )
        )
    return tuple(word for bit, word in CLOCK_EVENTS if mask & bit)
