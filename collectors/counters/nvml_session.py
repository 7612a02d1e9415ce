"""NVML between one initialisation and the next: the list of devices, and reading them all."""

from __future__ import annotations

from collections.abc import Callable

from gpuidle.agent.model import GpuReading, Problem, Reading
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import error_text, nvml, reload_library, text, version
from gpuidle.collectors.counters.nvml_device import Device, Guard, open_device, read_device

SECOND_NS = 1_000_000_000
REFRESH_NS = 60 * SECOND_NS
"""How long the facts of a device (name, limits) are taken as still true."""
INCOMPLETE_REFRESH_NS = 5 * SECOND_NS
"""The same while a device, or one of the facts, could not be read."""


class Session:
    """NVML, initialised. Every method but `close` raises SessionLost when NVML as a whole fails.

    `known` maps indices to the UUIDs that were ever seen there; it is written here and outlives the
    session, so that a device that is lost can still be named.
    """

    def __init__(self, pid_max: int, known: dict[int, str], elapsed_ns: Callable[[], int]) -> None:
        self._pid_max = pid_max
        self._known = known
        self._elapsed_ns = elapsed_ns
        self._binding = version()
        self._devices: tuple[Device, ...] = ()
        self._missing: dict[int, int] = {}  # index -> NVML's error
        self._driver_version: str | None = None
        self._said: tuple[Problem, ...] = ()
        self._refresh_ns: int | None = None
        _initialise()

    def read(self, now_ns: int) -> Reading:
        """Return all devices that answer; those that do not are absent, each with a Problem."""
        started_ns = self._elapsed_ns()
        if self._refresh_ns is None or now_ns >= self._refresh_ns:
            self._list_devices(now_ns)

        def clock() -> int:
            return now_ns + self._elapsed_ns() - started_ns

        gpus: list[GpuReading] = []
        problems = list(self._said)
        lost = dict(self._missing)
        for device in self._devices:
            try:
                reading, said = read_device(device, self._driver_version, self._pid_max, self._binding, clock)
            except faults.DeviceLost as error:
                lost[device.index] = error.code
                continue
            gpus.append(reading)
            problems += device.problems
            problems += said
        problems += [self._lost(index, code) for index, code in sorted(lost.items())]
        if lost and not gpus:
            # No device answers: only a new initialisation can mend that.
            if set(lost.values()) == {faults.UNKNOWN}:
                problems.insert(0, faults.session_problem(faults.UNKNOWN, error_text(faults.UNKNOWN)))
            raise faults.SessionLost(*problems)
        return Reading(gpus=tuple(gpus), problems=tuple(problems))

    def close(self) -> None:
        """Shut NVML down; an error of a library that is past answering is of no use to anyone."""
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            return

    def _list_devices(self, now_ns: int) -> None:
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise faults.SessionLost(faults.session_problem(error.value, error_text(error.value))) from None
        system = Guard("")
        self._driver_version = system.get("the driver's version", text, "nvmlSystemGetDriverVersion")
        self._said = tuple(system.problems)
        devices: list[Device] = []
        missing: dict[int, int] = {}
        for index in range(count):
            try:
                device = open_device(index)
            except faults.DeviceLost as error:
                missing[index] = error.code
                continue
            self._known[index] = device.hw_id
            devices.append(device)
        self._devices, self._missing = tuple(devices), missing
        incomplete = bool(missing or system.problems or any(device.problems for device in devices))
        self._refresh_ns = now_ns + (INCOMPLETE_REFRESH_NS if incomplete else REFRESH_NS)

    def _lost(self, index: int, code: int) -> Problem:
        return faults.device_problem(code, error_text(code), index, self._known.get(index))


def _initialise() -> None:
    try:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            if error.value != faults.LIB_RM_VERSION_MISMATCH:
                raise
            reload_library()
            nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise faults.SessionLost(faults.session_problem(error.value, error_text(error.value))) from None
