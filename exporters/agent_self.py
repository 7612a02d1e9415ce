"""What the agent costs and how its outlets do, read at the moment of an export."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import gpuidle
from gpuidle.agent.model import OutletStatus
from gpuidle.agent.ports import Telemetry


@dataclass(frozen=True)
class AgentReading:
    """The agent itself, at one moment."""

    version: str
    python_version: str
    cpu_seconds: float
    """User and system time of the agent's process since its start."""
    resident_bytes: int
    frame_age_seconds: float | None = None
    """Since the last Frame reached the exporter; None before the first one."""
    outlets: tuple[OutletStatus, ...] = ()


class SelfMeter:
    """Reads this process; `telemetry` tells of the outlets, where there is a pipeline."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        import psutil  # 20 ms of start-up that commands without exporters do not need

        self._process = psutil.Process()
        self._telemetry = telemetry

    @property
    def started_ns(self) -> int:
        """Start of this process, wall clock in nanoseconds: no counter of ours began before it."""
        return int(self._process.create_time() * 1e9)

    def read(self, frame_age_seconds: float | None) -> AgentReading:
        """Read the process's own cost, and the outlets."""
        with self._process.oneshot():
            times = self._process.cpu_times()
            resident = self._process.memory_info().rss
        return AgentReading(
            version=gpuidle.__version__,
            python_version=platform.python_version(),
            cpu_seconds=times.user + times.system,
            resident_bytes=resident,
            frame_age_seconds=frame_age_seconds,
            outlets=self._telemetry.outlets() if self._telemetry else (),
        )
