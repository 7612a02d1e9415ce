"""Threads for calls that may never return.

A call into a driver whose GPU has fallen off the bus can block for ever, and no thread can be stopped from
outside. A child process could be killed, but not while the call sits in the kernel, and it would cost memory
and a second driver session for each GPU; a thread costs neither. So each device has a daemon thread of its
own, one call in flight: one that hangs is left alone and taken up again when it comes back, and the others
go on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """One daemon thread that does one job at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._in_flight: Future[Any] | None = None
        self._started_s = 0.0

    @property
    def in_flight(self) -> Future[Any] | None:
        """The job that is not done yet."""
        return None if self._in_flight is None or self._in_flight.done() else self._in_flight

    @property
    def hanging_s(self) -> float:
        """How long the job in flight has taken so far; 0 without one."""
        return 0.0 if self.in_flight is None else time.monotonic() - self._started_s

    def start(self, job: Callable[[], Any]) -> Future[Any]:
        """Begin a job. There must be none in flight."""
        assert self.in_flight is None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._in_flight, self._started_s = Future(), time.monotonic()
        self._jobs.put((job, self._in_flight))
        return self._in_flight

    def stop(self) -> None:
        """Let the thread end after its job; it is not waited for."""
        self._jobs.put(None)
        self._thread = None
        self._jobs = queue.SimpleQueue()

    def _work(self) -> None:
        jobs = self._jobs
        while (item := jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001  # it is raised where the result is asked for
                future.set_exception(error)
