"""NVML between one initialisation and the next: the list of devices, and reading them all.

Each device is read in a thread of its own (see `workers`), so that one that hangs costs its own reading only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuidle.agent.model import GpuReading, Problem, Reading
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import error_text, nvml, reload_library, text, version
from gpuidle.collectors.counters.nvml_device import Device, Moment, open_device, read_device
from gpuidle.collectors.counters.nvml_events import ErrorCounts
from gpuidle.collectors.counters.nvml_guard import Guard
from gpuidle.collectors.counters.nvml_processes import ShareReader
from gpuidle.collectors.counters.workers import Worker

SECOND_NS = 1_000_000_000
REFRESH_NS = 60 * SECOND_NS
"""How long the facts of a device (name, limits) are taken as still true."""
INCOMPLETE_REFRESH_NS = 5 * SECOND_NS
"""The same while a device, or one of the facts, could not be read."""


@dataclass
class Memory:
    """What outlives a session: names of devices that are lost, threads that may hang, counts of errors."""

    known: dict[int, str] = field(default_factory=dict)
    """UUIDs by NVML's index."""
    workers: dict[int, Worker] = field(default_factory=dict)
    errors: dict[str, ErrorCounts] = field(default_factory=dict)
    shares: dict[str, ShareReader] = field(default_factory=dict)

    def worker(self, index: int) -> Worker:
        """Return the thread of the device at `index`."""
        return self.workers.setdefault(index, Worker(f"nvml-{index}"))

    @property
    def hanging(self) -> bool:
        """Whether a call of any device is under way."""
        return any(worker.in_flight is not None for worker in self.workers.values())


class _Answer(NamedTuple):
    """What the thread of one device brought back."""

    device: Device
    gpus: list[GpuReading]
    problems: list[Problem]


class Session:
    """NVML, initialised. Every method but `close` raises SessionLost when NVML as a whole fails."""

    def __init__(self, pid_max: int, memory: Memory) -> None:
        self._pid_max = pid_max
        self._memory = memory
        self._binding = version()
        self._count = 0
        self._devices: dict[int, Device] = {}
        self._missing: dict[int, int] = {}  # index -> NVML's error
        self._driver_version: str | None = None
        self._said: tuple[Problem, ...] = ()
        self._refresh_ns = 0
        _initialise()

    def due(self, now_ns: int) -> bool:
        """Whether it is time to refresh."""
        return now_ns >= self._refresh_ns

    def refresh(self, now_ns: int) -> None:
        """Count the devices, read the driver's version, and forget the facts of the devices."""
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise faults.SessionLost(faults.session_problem(error.value, error_text(error.value))) from None
        system = Guard("")
        self._driver_version = system.get("the driver's version", text, "nvmlSystemGetDriverVersion")
        self._said = tuple(system.problems)
        self._count = count
        self._devices, self._missing = {}, {}
        self._refresh_ns = now_ns + REFRESH_NS

    def read(self, now_ns: int, clock: Callable[[], int], wall_ns: int, limit_s: float) -> Reading:
        """Return all devices that answer; those that do not are absent, each with a Problem.

        `clock` gives the moment of each reading; a device that takes longer than `limit_s` is left alone.
        """
        moment = Moment(
            now_ns=now_ns,
            clock=clock,
            wall_us=wall_ns // 1000,
            driver_version=self._driver_version,
            pid_max=self._pid_max,
            binding=self._binding,
        )
        asked = self._ask(moment)
        wait(asked.values(), timeout=limit_s)
        gpus: list[GpuReading] = []
        problems = list(self._said)
        lost = dict(self._missing)
        hanging: list[Problem] = []
        for index in range(self._count):
            future = asked.get(index)
            if future is None or not future.done():
                if index not in lost:
                    hanging.append(self._hanging(index))
                continue
            try:
                answer = future.result()
            except faults.DeviceLost as error:
                lost[index] = error.code
                if index not in self._devices:
                    self._missing[index] = error.code
                continue
            self._devices[index] = answer.device
            self._memory.known[index] = answer.device.hw_id
            gpus += answer.gpus
            problems += answer.problems
        if self._missing or self._said or any(device.problems for device in self._devices.values()):
            self._refresh_ns = min(self._refresh_ns, now_ns + INCOMPLETE_REFRESH_NS)
        problems += [self._lost(index, code) for index, code in sorted(lost.items())] + hanging
        if lost and not gpus and not hanging:
            # No device answers: only a new initialisation can mend that.
            if set(lost.values()) == {faults.UNKNOWN}:
                problems.insert(0, faults.session_problem(faults.UNKNOWN, error_text(faults.UNKNOWN)))
            raise faults.SessionLost(*problems)
        return Reading(gpus=None if hanging and not gpus else tuple(gpus), problems=tuple(problems))

    def close(self) -> None:
        """Shut NVML down; an error of a library that is past answering is of no use to anyone.

        While a call hangs, nothing is shut down: it might be waited for.
        """
        if self._memory.hanging:
            for errors in self._memory.errors.values():
                errors.events = None
            return
        for errors in self._memory.errors.values():
            errors.forget()
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            return

    def _ask(self, moment: Moment) -> dict[int, Future[_Answer]]:
        asked: dict[int, Future[_Answer]] = {}
        for index in range(self._count):
            worker = self._memory.worker(index)
            if index in self._missing or worker.in_flight is not None:
                continue
            asked[index] = worker.start(lambda i=index: self._read_index(i, moment))  # type: ignore[misc]
        return asked

    def _read_index(self, index: int, moment: Moment) -> _Answer:
        """Read one device, in its thread. Raises DeviceLost, SessionLost."""
        device = self._devices.get(index)
        if device is None:
            device = open_device(index)
        hw_id = device.hw_id
        errors = self._memory.errors.setdefault(hw_id, ErrorCounts(hw_id))
        shares = self._memory.shares.setdefault(hw_id, ShareReader())
        problems = list(device.problems)
        if index not in self._devices:
            guard = Guard(hw_id, problems=problems)
            guard.get("events", errors.watch, device.handle)
        gpus, said = read_device(device, moment, shares, errors)
        return _Answer(device, gpus, problems + said)

    def _hanging(self, index: int) -> Problem:
        return faults.hanging(index, self._memory.worker(index).hanging_s, self._memory.known.get(index))

    def _lost(self, index: int, code: int) -> Problem:
        return faults.device_problem(code, error_text(code), index, self._memory.known.get(index))


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
