"""A clock that tests move, and collectors that misbehave on command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from gpuidle.agent.clock import Instant
from gpuidle.agent.model import Frame, Reading, Snapshot


class FakeClock:
    """Sleeping takes no time: it moves the clock to the deadline."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.wall_offset_ns = 10**18
        self.slept: list[int] = []

    def now(self) -> Instant:
        return Instant(self.now_ns, self.now_ns, self.now_ns + self.wall_offset_ns)

    async def sleep_until(self, monotonic_ns: int) -> None:
        await asyncio.sleep(0)
        self.slept.append(monotonic_ns)
        self.now_ns = max(self.now_ns, monotonic_ns)


class FakeCollector:
    """Answers by a function."""

    def __init__(self, name: str, answer: Callable[[int], Reading]) -> None:
        self.name = name
        self.closed = threading.Event()
        self.threads: set[int] = set()
        self._answer = answer

    def read(self, now_ns: int) -> Reading:
        self.threads.add(threading.get_ident())
        return self._answer(now_ns)

    def close(self) -> None:
        self.closed.set()


class ListSource:
    """Yields what it was given."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self.items = snapshots
        self.closed = False

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        for snapshot in self.items:
            await asyncio.sleep(0)
            yield snapshot

    async def close(self) -> None:
        self.closed = True


class ListExporter:
    """Keeps what it gets; waits at `gate` and raises what `fault` returns."""

    def __init__(self, name: str = "list", gate: threading.Event | None = None) -> None:
        self.name = name
        self.frames: list[Frame] = []
        self.closed = False
        self.gate = gate
        self.fault: Callable[[Frame], None] = lambda _: None

    def publish(self, frame: Frame) -> None:
        if self.gate is not None:
            self.gate.wait(10)
        self.fault(frame)
        self.frames.append(frame)

    def close(self) -> None:
        self.closed = True
