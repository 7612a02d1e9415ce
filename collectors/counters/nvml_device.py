"""Reads one NVIDIA device through `pynvml`, each field guarded on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuidle.agent.model import ClockEvent, GpuProcess, GpuReading, Problem
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import error_text, nvml, process_list, text

UNKNOWN_IN_A_ROW = 3
"""So many unknown errors before the first answer mean that the device is gone: each can take long."""

# What no device of today reaches, and every blank of a driver (0x7ffffff0, 2^32-1, 2^63...) exceeds.
MAX_WATTS = 10_000
MAX_CELSIUS = 200
MAX_MEGAHERTZ = 10_000
MAX_JOULES = 1e15
MAX_BYTES = 2**50

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

PROCESS_LISTS = ("Compute", "Graphics", "MPSCompute")


@dataclass
class Guard:
    """Runs the reads of one device, turning errors into absence and Problems.

    Raises DeviceLost or SessionLost where going on with this device makes no sense.
    """

    hw_id: str
    problems: list[Problem] = field(default_factory=list)
    answered: bool = False
    unknown: int = 0

    def get(self, name: str, call: Callable[..., Any], *args: object) -> Any:
        """Return `call(*args)`, or None with a Problem about the field `name`."""
        try:
            value = call(*args)
        except nvml.NVMLError as error:
            self._failed(name, error.value)
            return None
        self.answered = True
        return value

    def number(self, name: str, limit: float, call: Callable[..., Any], *args: object) -> Any:
        """Return a number between 0 and `limit`, or None."""
        return self.bounded(name, limit, self.get(name, call, *args))

    def bounded(self, name: str, limit: float, value: Any) -> Any:
        """Return `value` unless it is beyond `limit`: then None with a Problem."""
        if value is None or 0 <= value <= limit:
            return value
        self.problems.append(faults.bad_reading(name, value, self.hw_id))
        return None

    def _failed(self, name: str, code: int) -> None:
        if code in faults.SESSION_LOST:
            raise faults.SessionLost(faults.session_problem(code, error_text(code)))
        if code == faults.GPU_IS_LOST:
            raise faults.DeviceLost(code)
        if code == faults.UNKNOWN and not self.answered:
            self.unknown += 1
            if self.unknown == UNKNOWN_IN_A_ROW:
                raise faults.DeviceLost(code)
        if code not in faults.BY_NATURE:
            self.problems.append(faults.field_problem(name, code, error_text(code), self.hw_id))


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
    problems: tuple[Problem, ...]


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
        problems=tuple(guard.problems),
    )


def read_device(
    device: Device, driver_version: str | None, pid_max: int, binding: str, clock: Callable[[], int]
) -> tuple[GpuReading, list[Problem]]:
    """Return the device at this moment and what could not be read of it.

    `clock` gives the moment of the reading, taken beside the energy counter; `binding` is the version of
    nvidia-ml-py, for a Problem's text.

    Raises:
        DeviceLost: the device does not answer.
        SessionLost: NVML as a whole failed.
    """
    guard, handle = Guard(device.hw_id), device.handle
    energy = guard.number("energy (mJ)", MAX_JOULES * 1000, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    read_ns = clock()
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
    reading = GpuReading(
        hw_id=device.hw_id,
        index=device.index,
        name=device.name,
        read_ns=read_ns,
        driver_version=driver_version,
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
        processes=_processes(guard, handle, pid_max, total, binding),
    )
    if guard.unknown and not guard.answered:
        raise faults.DeviceLost(faults.UNKNOWN)
    return reading, guard.problems


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


def _processes(
    guard: Guard, handle: object, pid_max: int, total: int | None, binding: str
) -> tuple[GpuProcess, ...] | None:
    """Merge the three lists by PID: a process can stand in several, with the same memory."""
    lists = [guard.get(f"{kind.lower()} processes", process_list, kind, handle) for kind in PROCESS_LISTS]
    if lists[0] is None:
        return None  # without the compute processes the others would look like all there is
    entries = [entry for some in lists if some is not None for entry in some]
    bad = tuple(pid for pid, _ in entries if not 0 < pid <= pid_max)
    if bad:
        guard.problems.append(faults.garbled_processes(bad, len(entries), binding, guard.hw_id))
    merged: dict[int, int | None] = {}
    for pid, used in entries:
        if not 0 < pid <= pid_max:
            continue
        memory = guard.bounded(f"memory of process {pid} (bytes)", total or MAX_BYTES, used)
        before = merged.get(pid)
        merged[pid] = memory if before is None else max(before, memory or 0)
    if bad and not merged:
        return None  # nothing of the list can be believed, which is not the same as no process
    return tuple(GpuProcess(pid=pid, used_memory_bytes=merged[pid]) for pid in sorted(merged))
