"""Time enters the program here and nowhere else.

Three clocks are read together: CLOCK_MONOTONIC orders everything and is shared with other processes of
the node; CLOCK_BOOTTIME also counts suspended time, so that their difference shows a suspend; the wall
clock is for people and exporters and is never subtracted.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol


class Instant(NamedTuple):
    """One reading of the three clocks, all in nanoseconds."""

    monotonic_ns: int
    boottime_ns: int
    wall_ns: int


class Clock(Protocol):
    """What the sampler asks for the time; tests and the simulator bring their own."""

    def now(self) -> Instant:
        """Read the three clocks."""
        ...

    async def sleep_until(self, monotonic_ns: int) -> None:
        """Return no earlier than `monotonic_ns`."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> Instant:
        """Read the three clocks of this machine."""
        return Instant(
            time.monotonic_ns(),
            time.clock_gettime_ns(time.CLOCK_BOOTTIME),
            time.time_ns(),
        )

    async def sleep_until(self, monotonic_ns: int) -> None:
        """Sleep on the event loop until `monotonic_ns` has passed."""
        import asyncio  # 30 ms of start-up that `--version` does not need

        await asyncio.sleep(max(0, monotonic_ns - time.monotonic_ns()) / 1e9)
