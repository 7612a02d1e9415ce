"""The live source: asks every collector once a tick and puts the readings together into a Snapshot.

Ticks are absolute deadlines with a jitter, since engine steps are periodic and a fixed period aliases with
them. A collector reads in a daemon thread of its own, one read in flight; a read that is late is left behind
and its collector is not asked again until it comes back. So a hanging driver costs its own reading, never
the tick, never a second thread, and never the exit of the program.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import AsyncIterator, Sequence

from gpuidle.agent.clock import Clock
from gpuidle.agent.model import CollectorRun, Node, Problem, Reading, Snapshot
from gpuidle.agent.ports import Collector

JITTER_RATIO = 0.05
"""Of the interval, to both sides of the deadline."""


class _Worker:
    """One collector and its thread."""

    def __init__(self, collector: Collector, loop: asyncio.AbstractEventLoop) -> None:
        self.collector = collector
        self.in_flight: asyncio.Future[Reading] | None = None
        self.asked_ns = 0
        self._loop = loop
        self._asked: queue.SimpleQueue[tuple[int, asyncio.Future[Reading]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"collect-{collector.name}", daemon=True)
        self._thread.start()

    def ask(self, now_ns: int) -> asyncio.Future[Reading]:
        self.asked_ns = now_ns
        self.in_flight = self._loop.create_future()
        self._asked.put((now_ns, self.in_flight))
        return self.in_flight

    def stop(self) -> None:
        self._asked.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._asked.get()) is not None:
            now_ns, future = item
            try:
                answer: Reading | BaseException = self.collector.read(now_ns)
            except Exception as error:  # noqa: BLE001  # a collector's fault is its own Problem
                answer = error
            try:
                self._loop.call_soon_threadsafe(_resolve, future, answer)
            except RuntimeError:  # the loop has closed: nobody waits for this reading
                break
        self.collector.close()


def _resolve(future: asyncio.Future[Reading], answer: Reading | BaseException) -> None:
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Sampler:
    """A Source (ports.Source) over collectors of this machine."""

    def __init__(
        self,
        collectors: Sequence[Collector],
        clock: Clock,
        node: Node,
        *,
        interval_ns: int = 10**9,
        limit_ns: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Prepare; nothing is read before `snapshots` is iterated.

        Args:
            collectors: Asked in this order, at once.
            clock: The time.
            node: Said in every Snapshot.
            interval_ns: Length of a tick.
            limit_ns: How long a tick waits for its collectors; None is the interval, at least 1 s.
            seed: Of the jitter; None is random.
        """
        self._collectors = tuple(collectors)
        self._clock = clock
        self._node = node
        self._interval_ns = interval_ns
        self._limit_ns = max(interval_ns, 10**9) if limit_ns is None else limit_ns
        self._random = random.Random(seed)  # noqa: S311  # jitter, not a secret
        self._closed = asyncio.Event()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield a Snapshot a tick until closed; the first one comes at once."""
        loop = asyncio.get_running_loop()
        workers = [_Worker(collector, loop) for collector in self._collectors]
        origin_ns = self._clock.now().monotonic_ns
        tick = sequence = missed = 0
        try:
            while not self._closed.is_set():
                due_ns = self._due_ns(origin_ns, tick)
                if not await self._sleep_until(due_ns):
                    return
                yield await self._read(workers, sequence, due_ns, missed)
                sequence += 1
                behind = (self._clock.now().monotonic_ns - origin_ns) // self._interval_ns
                missed = max(0, behind - tick - 1) if tick else 0
                tick = max(tick + 1, behind if missed else tick + 1)
        finally:
            for worker in workers:
                worker.stop()
            # Handles are let go of in the threads that hold them; a hanging one is left behind.
            for worker in workers:
                await loop.run_in_executor(None, worker.join, 0.2)

    async def close(self) -> None:
        """End after the tick that is under way."""
        self._closed.set()

    def _due_ns(self, origin_ns: int, tick: int) -> int:
        if tick == 0:
            return origin_ns
        jitter = self._random.uniform(-JITTER_RATIO, JITTER_RATIO)
        return origin_ns + round((tick + jitter) * self._interval_ns)

    async def _sleep_until(self, due_ns: int) -> bool:
        """Sleep; return False if closed meanwhile."""
        sleeping = asyncio.ensure_future(self._clock.sleep_until(due_ns))
        closing = asyncio.ensure_future(self._closed.wait())
        _, pending = await asyncio.wait({sleeping, closing}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return not self._closed.is_set()

    async def _read(self, workers: Sequence[_Worker], sequence: int, due_ns: int, missed: int) -> Snapshot:
        start_ns = self._clock.now().monotonic_ns
        problems: list[Problem] = []
        runs: list[CollectorRun] = []
        readings: list[Reading] = []
        asked: list[tuple[_Worker, asyncio.Future[Reading]]] = []
        for worker in workers:
            if worker.in_flight is not None and not worker.in_flight.done():
                problems.append(_hanging(worker, start_ns))
                runs.append(_run(worker, start_ns, ok=False))
            else:
                asked.append((worker, worker.ask(start_ns)))
        if asked:
            await asyncio.wait([future for _, future in asked], timeout=self._limit_ns / 1e9)
        for worker, future in asked:
            now_ns = self._clock.now().monotonic_ns
            error = None if not future.done() else future.exception()
            if not future.done():
                problems.append(_hanging(worker, now_ns))
            elif error is not None:
                problems.append(_failed(worker, error))
            else:
                readings.append(future.result())
            runs.append(_run(worker, now_ns, ok=future.done() and error is None))
        now = self._clock.now()
        gpus = [reading.gpus for reading in readings if reading.gpus is not None]
        return Snapshot(
            sequence=sequence,
            monotonic_ns=now.monotonic_ns,
            boottime_ns=now.boottime_ns,
            wall_ns=now.wall_ns,
            lateness_ns=max(0, start_ns - due_ns),
            missed_ticks=missed,
            node=self._node,
            gpus=tuple(gpu for each in gpus for gpu in each) if gpus else None,
            engines=tuple(engine for reading in readings for engine in reading.engines),
            steps=tuple(steps for reading in readings for steps in reading.steps),
            counters=tuple(counters for reading in readings for counters in reading.counters),
            texts={key: text for reading in readings for key, text in reading.texts.items()},
            problems=(*problems, *(problem for reading in readings for problem in reading.problems)),
            runs=tuple(runs),
        )


def _run(worker: _Worker, now_ns: int, *, ok: bool) -> CollectorRun:
    return CollectorRun(collector=worker.collector.name, duration_ns=now_ns - worker.asked_ns, ok=ok)


def _hanging(worker: _Worker, now_ns: int) -> Problem:
    return Problem(
        source=worker.collector.name,
        kind="timeout",
        message=f"no answer for {(now_ns - worker.asked_ns) / 1e9:.1f} s: its values are absent",
        remedy="a call that never returns is left alone and taken up again when it comes back",
    )


def _failed(worker: _Worker, error: BaseException) -> Problem:
    return Problem(
        source=worker.collector.name,
        kind="failed",
        message=f"{type(error).__name__}: {error}",
        remedy="this is a fault of gpuidle: please report it with this message",
    )
