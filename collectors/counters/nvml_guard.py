"""Runs the reads of one device, turning errors and impossible numbers into absence with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuidle.agent.model import Problem
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import error_text, nvml

UNKNOWN_IN_A_ROW = 3
"""So many unknown errors before the first answer mean that the device is gone: each can take long."""

# What no device of today reaches, and every blank of a driver (0x7ffffff0, 2^32-1, 2^63...) exceeds.
MAX_WATTS = 10_000
MAX_CELSIUS = 200
MAX_MEGAHERTZ = 10_000
MAX_JOULES = 1e15
MAX_BYTES = 2**50


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
