"""The one pipe: source -> (recorder) -> Analyzer -> outlets.

The event loop owns the state. Each outlet has a bounded queue and a thread of its own: a slow or dead sink
costs its own frames, which are counted. Live, an outlet that is full drops its oldest frame and the recorder
writes a counted gap; a replay waits instead, so that nothing is lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from gpuidle.agent.model import Frame, OutletStatus, Snapshot
from gpuidle.agent.ports import Exporter, SnapshotSink, Source

T = TypeVar("T")

QUEUE_LENGTH = 16
"""Frames that an outlet may be behind before it drops."""

CLOSE_TIMEOUT_S = 2.0


class Outlet(Generic[T]):
    """A sink with a bounded queue and a daemon thread."""

    def __init__(
        self,
        name: str,
        take: Callable[[T], None],
        close: Callable[[], None],
        *,
        overflowed: Callable[[int], None] | None = None,
        length: int = QUEUE_LENGTH,
    ) -> None:
        """Start the thread.

        Args:
            name: Of the sink.
            take: Called in the thread with each item.
            close: Called in the thread once, after the last item.
            overflowed: Called in the thread, before the next item, with the number dropped since the last.
            length: Of the queue.
        """
        self.name = name
        self._take, self._close, self._overflowed = take, close, overflowed
        self._items: deque[T] = deque()
        self._length = length
        self._changed = threading.Condition()
        self._ending = False
        self._delivered = self._dropped = self._failed = self._new_drops = 0
        self._last_error = ""
        self._thread = threading.Thread(target=self._work, name=f"outlet-{name}", daemon=True)
        self._thread.start()

    def offer(self, item: T) -> None:
        """Queue an item; if the queue is full its oldest one is dropped and counted."""
        with self._changed:
            if len(self._items) >= self._length:
                self._items.popleft()
                self._dropped += 1
                self._new_drops += 1
            self._items.append(item)
            self._changed.notify_all()

    def offer_waiting(self, item: T) -> None:
        """Queue an item, blocking while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._length or not self._thread.is_alive())
            self._items.append(item)
            self._changed.notify_all()

    def end(self) -> None:
        """Say that no item will follow."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None) -> bool:
        """Wait until everything queued is delivered and the sink is closed; return whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def status(self) -> OutletStatus:
        """Return the counts."""
        with self._changed:
            return OutletStatus(
                outlet=self.name,
                delivered=self._delivered,
                dropped=self._dropped,
                failed=self._failed,
                last_error=self._last_error,
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._ending)
                if not self._items:
                    break
                item, drops = self._items.popleft(), self._new_drops
                self._new_drops = 0
                self._changed.notify_all()
            self._guard(lambda item=item, drops=drops: self._deliver(item, drops))  # type: ignore[misc]
        self._guard(self._close)

    def _deliver(self, item: T, drops: int) -> None:
        if drops and self._overflowed is not None:
            self._overflowed(drops)
        self._take(item)
        self._delivered += 1

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a sink's fault is its own: it is counted and shown
            with self._changed:
                self._failed += 1
                self._last_error = f"{type(error).__name__}: {error}"


class Pipeline:
    """Runs one session from its source to its outlets."""

    def __init__(
        self,
        source: Source,
        analyze: Callable[[Snapshot], Frame],
        exporters: Sequence[Exporter],
        *,
        recorder: SnapshotSink | None = None,
        lossless: bool = False,
    ) -> None:
        """Prepare; `run` starts it.

        Args:
            source: Where Snapshots come from.
            analyze: `Analyzer.feed`.
            exporters: Where Frames go.
            recorder: Where Snapshots go before the analysis.
            lossless: Wait for full outlets instead of dropping: replay.
        """
        self._source = source
        self._analyze = analyze
        self._exporters = tuple(exporters)
        self._recorder = recorder
        self._lossless = lossless
        self._frames: list[Outlet[Frame]] = []
        self._snapshots: Outlet[Snapshot] | None = None

    def outlets(self) -> tuple[OutletStatus, ...]:
        """Return the state of every outlet (ports.Telemetry)."""
        recorder = (self._snapshots.status(),) if self._snapshots is not None else ()
        return (*recorder, *(outlet.status() for outlet in self._frames))

    async def run(self) -> None:
        """Run until the source ends; then deliver what is queued and close every sink."""
        if self._recorder is not None:
            self._snapshots = Outlet(
                "recorder", self._recorder.write, self._recorder.close, overflowed=self._recorder.gap
            )
        self._frames = [Outlet(each.name, each.publish, each.close) for each in self._exporters]
        try:
            async with aclosing(self._source.snapshots()) as snapshots:  # type: ignore[type-var]
                async for snapshot in snapshots:
                    if self._snapshots is not None:
                        await self._offer(self._snapshots, snapshot)
                    frame = self._analyze(snapshot)
                    for outlet in self._frames:
                        await self._offer(outlet, frame)
        finally:
            await self._source.close()
            await self._end()

    async def _offer(self, outlet: Outlet[T], item: T) -> None:
        if self._lossless:
            await asyncio.get_running_loop().run_in_executor(None, outlet.offer_waiting, item)
        else:
            outlet.offer(item)

    async def _end(self) -> None:
        outlets: list[Outlet[Frame] | Outlet[Snapshot]] = [*self._frames]
        if self._snapshots is not None:
            outlets.append(self._snapshots)
        for outlet in outlets:
            outlet.end()
        loop = asyncio.get_running_loop()
        timeout_s = None if self._lossless else CLOSE_TIMEOUT_S
        await asyncio.gather(*(loop.run_in_executor(None, o.join, timeout_s) for o in outlets))
