"""Devices, processes, memory, power, energy and clocks, as NVML gives them: the slow rung, always there.

NVML can fail as a whole and come back: a container loses its devices, a driver is upgraded under way. The
collector then says why, tries again after 1, 2, 4, ... 30 seconds, and goes on when it works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from gpuidle.agent.model import Problem, Reading
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.workers import Worker

if TYPE_CHECKING:
    from gpuidle.collectors.counters.nvml_session import Memory, Session

SECOND_NS = 1_000_000_000
BACKOFF_S = (1, 2, 4, 8, 16, 30)
LIMIT_S = 0.8
"""How long a tick waits for the driver: below the second that the sampler waits for all."""
PID_LIMIT = 4_194_304
"""PID_MAX_LIMIT of a 64-bit kernel: where /proc does not tell."""


def read_pid_max(proc: Path) -> int:
    """Return the largest PID that the kernel gives out."""
    try:
        return int((proc / "sys/kernel/pid_max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return PID_LIMIT


class NvmlCollector:
    """Reads every NVIDIA device of the node through `pynvml`; the name in Problems is "nvml".

    `proc` is where the kernel's /proc is mounted; `elapsed_ns` a monotonic clock that tells how long after
    the tick each device was read; `limit_s` how long a tick waits for a device before it is left alone. NVML
    is global to a process and counts its users: `close` ends one use.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        elapsed_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._pid_max = read_pid_max(proc)
        self._elapsed_ns = elapsed_ns
        self._wall_ns = wall_ns
        self._limit_s = limit_s
        self._memory: Memory | None = None
        self._main = Worker("nvml")
        self._session: Session | None = None
        self._starting: Future[Session] | None = None
        self._failures = 0
        self._retry_ns = 0
        self._down: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """The collector's name."""
        return "nvml"

    def read(self, now_ns: int) -> Reading:
        """Return all devices at `now_ns`, or `gpus` None with the reason while NVML does not answer."""
        if self._session is None and self._failures and now_ns < self._retry_ns:
            return Reading(problems=self._down)
        started_ns = self._elapsed_ns()
        try:
            session = self._ready(now_ns)
            if session is None:
                return Reading(problems=(faults.session_hanging(self._main.hanging_s),))
            reading = session.read(
                now_ns, lambda: now_ns + self._elapsed_ns() - started_ns, self._wall_ns(), self._limit_s
            )
        except faults.SessionLost as lost:
            self._end()
            delay_s = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            self._failures += 1
            self._retry_ns = now_ns + delay_s * SECOND_NS
            self._down = lost.problems
            return Reading(problems=lost.problems)
        self._failures = 0
        return reading

    def close(self) -> None:
        """Shut NVML down if it is up, and let the threads end."""
        self._end()
        self._main.stop()
        for worker in self._memory.workers.values() if self._memory is not None else ():
            worker.stop()

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._starting is None:
            session.close()

    def _ready(self, now_ns: int) -> Session | None:
        """Return the session with its list of devices, or None while the driver is silent.

        The driver can hang as a whole: it is asked in a thread too, and what it says late is taken.
        """
        if self._starting is None:
            if self._session is not None and not self._session.due(now_ns):
                return self._session
            self._starting = self._main.start(lambda: self._refreshed(now_ns))
        job = self._starting
        wait([job], timeout=self._limit_s)
        if not job.done():
            return None
        self._starting = None
        self._session = session = job.result()
        return session

    def _refreshed(self, now_ns: int) -> Session:
        # The binding takes a noticeable part of the start-up that commands without a GPU need not pay.
        from gpuidle.collectors.counters.nvml_session import Memory, Session

        if self._memory is None:
            self._memory = Memory()
        session = self._session
        if session is None:
            session = Session(self._pid_max, self._memory)
        try:
            session.refresh(now_ns)
        except faults.SessionLost:
            session.close()
            self._session = None
            raise
        return session
