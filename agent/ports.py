"""The protocols between the core and the world. Implementations stand in collectors/ and exporters/."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from gpuidle.agent.model import Frame, OutletStatus, Reading, Snapshot


class Collector(Protocol):
    """Reads one kind of thing. It is called once a tick, in a thread of its own, never twice at once."""

    @property
    def name(self) -> str:
        """A short stable name for Problems and metrics."""
        ...

    def read(self, now_ns: int) -> Reading:
        """Read, blocking. Faults become Problems in the Reading; an exception loses the whole reading.

        `now_ns` is CLOCK_MONOTONIC. The caller waits a bounded time; a late result is thrown away.
        """
        ...

    def close(self) -> None:
        """Let go of handles; called once, from the thread that read."""
        ...


class Source(Protocol):
    """Where Snapshots come from: live, replay and demo look the same downstream."""

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield Snapshots in order of `monotonic_ns` until the source ends or is closed."""
        ...

    async def close(self) -> None:
        """Stop yielding and let go of everything."""
        ...


class SnapshotSink(Protocol):
    """Takes Snapshots before the analysis: the recorder."""

    def write(self, snapshot: Snapshot) -> None:
        """Write one Snapshot, blocking."""
        ...

    def gap(self, snapshots: int) -> None:
        """Say that `snapshots` were dropped before the next one written."""
        ...

    def close(self) -> None:
        """Finish the file."""
        ...


class Exporter(Protocol):
    """Takes Frames: metrics, the terminal, NDJSON. `publish` runs in a thread of the exporter's outlet."""

    @property
    def name(self) -> str:
        """A short stable name for Problems and metrics."""
        ...

    def publish(self, frame: Frame) -> None:
        """Take one Frame, blocking; an exception is counted as a failure of this outlet alone."""
        ...

    def close(self) -> None:
        """Flush and stop, within two seconds."""
        ...


class Telemetry(Protocol):
    """What exporters may ask about the agent itself, at the moment of an export."""

    def outlets(self) -> tuple[OutletStatus, ...]:
        """Return the state of every outlet."""
        ...
