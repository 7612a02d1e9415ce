"""A recorded session as a source: downstream cannot tell it from a live node."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from gpuidle.agent.clock import Clock
from gpuidle.agent.model import Problem, Snapshot
from gpuidle.collectors.recording.reader import Session


class ReplaySource:
    """Replays a recording (ports.Source) and waits for its consumer: nothing is dropped.

    The pace is that of `monotonic_ns`, with absolute deadlines: after a slow consumer it catches up.
    """

    def __init__(self, path: Path, clock: Clock, *, speed: float | None = 1.0) -> None:
        """Find the recording.

        Args:
            path: as for Session.
            clock: where the pace comes from.
            speed: 1.0 is real time, 10.0 ten times as fast; None or 0 is as fast as the consumer.

        Raises:
            SessionError: there is nothing to read.
            ValueError: the speed is negative or not finite.
        """
        if speed is not None and not (math.isfinite(speed) and speed >= 0):
            raise ValueError(f"speed must be a number from 0 up, not {speed}")
        self._session = Session(path)
        self._clock = clock
        self._speed = speed or None
        self._closed = asyncio.Event()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is missing or damaged in the part that was replayed, the end included."""
        return self._session.problems

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield the recorded Snapshots until they end or the source is closed.

        Raises:
            SessionError: a later file of the recording cannot be read.
        """
        begin_ns = self._clock.now().monotonic_ns
        first_ns: int | None = None
        recorded = iter(self._session)
        try:
            while not self._closed.is_set():
                snapshot = await asyncio.to_thread(next, recorded, None)
                if snapshot is None:
                    return
                if first_ns is None:
                    first_ns = snapshot.monotonic_ns
                if self._speed is not None:
                    elapsed_ns = round((snapshot.monotonic_ns - first_ns) / self._speed)
                    if not await self._wait_until(begin_ns + elapsed_ns):
                        return
                yield snapshot
        finally:
            _let_go(recorded)

    async def close(self) -> None:
        """Stop yielding, also in the middle of a wait."""
        self._closed.set()

    async def _wait_until(self, monotonic_ns: int) -> bool:
        """Return True at that time, or False as soon as the source is closed."""
        if self._clock.now().monotonic_ns >= monotonic_ns:
            return not self._closed.is_set()
        sleep = asyncio.ensure_future(self._clock.sleep_until(monotonic_ns))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({sleep, closed}, return_when=asyncio.FIRST_COMPLETED)
            if sleep.done():
                sleep.result()  # a clock that failed must not pass for one that waited
        finally:
            sleep.cancel()
            closed.cancel()
        return not self._closed.is_set()


def _let_go(recorded: Iterator[Snapshot]) -> None:
    close = getattr(recorded, "close", None)
    if close is not None:
        with contextlib.suppress(ValueError):  # a thread still reads: it lets go of the file when it ends
            close()
