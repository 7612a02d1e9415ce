"""Devices, processes, memory, power, energy and clocks, as NVML gives them: the slow rung, always there.

NVML can fail as a whole and come back: a container loses its devices, a driver is upgraded under way. The
collector then says why, tries again after 1, 2, 4, ... 30 seconds, and goes on when it works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpuidle.agent.model import Problem, Reading
from gpuidle.collectors.counters.nvml_faults import SessionLost

if TYPE_CHECKING:
    from gpuidle.collectors.counters.nvml_session import Session

SECOND_NS = 1_000_000_000
BACKOFF_S = (1, 2, 4, 8, 16, 30)
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
    the tick each device was read. NVML is global to a process and counts its users: `close` ends one use.
    """

    def __init__(self, proc: Path = Path("/proc"), elapsed_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._pid_max = read_pid_max(proc)
        self._elapsed_ns = elapsed_ns
        self._known: dict[int, str] = {}
        self._session: Session | None = None
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
        try:
            if self._session is None:
                self._session = self._start()
            reading = self._session.read(now_ns)
        except SessionLost as lost:
            self.close()
            delay_s = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            self._failures += 1
            self._retry_ns = now_ns + delay_s * SECOND_NS
            self._down = lost.problems
            return Reading(problems=lost.problems)
        self._failures = 0
        return reading

    def close(self) -> None:
        """Shut NVML down if it is up."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _start(self) -> Session:
        # The binding takes a noticeable part of the start-up that commands without a GPU need not pay.
        from gpuidle.collectors.counters.nvml_session import Session

        return Session(self._pid_max, self._known, self._elapsed_ns)
