"""The reading end of the plugin's ring, which is trusted with nothing.

It is read with pread and never mapped: a file that is truncated under a mapping would kill the reader. Each
record must name its own index and pass its checksum; what does not is counted as lost.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import StepSeries, column
from gpuidle.collectors.steps import vllm_plugin as layout
from gpuidle.collectors.support.text import clean

SOURCE = "plugin"
_CAPACITIES = range(16, (1 << 20) + 1)
_LARGEST_COUNT = 1 << 40
"""No honest number of tokens in a step is larger."""
_PLACE = {name: at for at, name in enumerate(layout.FIELDS)}


class RingError(ValueError):
    """What is read is no ring of this layout; the message says why."""


@dataclass(frozen=True)
class RingHeader:
    """What a ring says of itself."""

    capacity: int
    pid: int
    """In the PID namespace of the writer."""
    created_ns: int
    rank: int
    number: int
    version: str


@dataclass(frozen=True, eq=False)
class Records:
    """Records of a ring in order, one row a step, columns as in `vllm_plugin.FIELDS`."""

    rows: NDArray[np.int64]
    lost: int
    """Steps known to be missing before and among the rows."""

    def of(self, field: str) -> NDArray[np.int64]:
        """Return one column."""
        values: NDArray[np.int64] = self.rows[:, _PLACE[field]]
        return values


def read_header(descriptor: int) -> RingHeader:
    """Return the header of a ring.

    Raises:
        RingError: it is none, or of another layout, or cut short.
        OSError: it cannot be read.
    """
    data = os.pread(descriptor, layout.HEADER.size, 0)
    if len(data) < layout.HEADER.size or data[: len(layout.MAGIC)] != layout.MAGIC:
        raise RingError("this is no ring of steps")
    _, version, header, record, capacity, pid, created_ns, rank, number, engine = layout.HEADER.unpack(data)
    if version != layout.LAYOUT:
        raise RingError(
            f"the ring has layout {version}, this gpuidle reads {layout.LAYOUT}: upgrade the older"
        )
    if header != layout.HEADER_BYTES or record != layout.RECORD_BYTES or capacity not in _CAPACITIES:
        raise RingError("the ring's header is damaged")
    if os.fstat(descriptor).st_size != header + capacity * record:
        raise RingError("the ring is cut short or not of its size")
    name = engine.rstrip(b"\0").decode("ascii", "replace")
    return RingHeader(capacity, pid, created_ns, rank, number, clean(name))


class RingReader:
    """Follows one ring; owns the descriptor."""

    def __init__(self, descriptor: int, since_ns: int | None = None) -> None:
        """Begin to follow.

        Args:
            descriptor: open for reading; closed by `close`, and here if this raises.
            since_ns: records are read from the ring's beginning if it was made later than this
                (CLOCK_MONOTONIC), and from now on otherwise. None: everything that is still there.

        Raises:
            RingError: it is no ring.
            OSError: it cannot be read.
        """
        try:
            self.header = read_header(descriptor)
            self._descriptor = descriptor
            committed, self._faults = self._counters()
        except BaseException:
            os.close(descriptor)
            raise
        young = since_ns is None or self.header.created_ns >= since_ns
        self._next = max(0, committed - self.header.capacity) if young else committed
        self._faults = 0 if young else self._faults
        self._all_faults = self._faults
        self._last_end_ns = 0

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def is_written(self) -> bool:
        """Whether the writer lives: it holds the lock until it dies, in whatever PID namespace."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    @property
    def stopped(self) -> bool:
        """Whether the plugin gave up, as of the last reading: it does not understand this engine."""
        return self._all_faults >= layout.MOST_FAULTS

    def records(self) -> Records:
        """Return what was written since the last call.

        Raises:
            RingError: the file was cut short, or goes backwards, or holds nothing that it announces.
            OSError: it cannot be read.
        """
        committed, faults = self._counters()
        if committed < self._next or faults < self._faults:
            raise RingError("the ring goes backwards: something else wrote to it")
        if faults > 100 * layout.MOST_FAULTS:
            raise RingError("the ring counts more faults than its writer would")
        capacity = self.header.capacity
        begin = max(self._next, committed - capacity)
        lost = begin - self._next + faults - self._faults
        data = self._slots(begin, committed)
        # What the writer reached meanwhile may have been overwritten while it was read.
        overtaken = min(max(begin, self._counters()[0] - capacity), committed)
        lost += overtaken - begin
        rows = [
            row
            for index in range(overtaken, committed)
            if (row := _row(data, (index - begin) * layout.RECORD_BYTES, index)) is not None
        ]
        torn = committed - overtaken - len(rows)
        if torn and not rows and committed - begin == capacity:
            raise RingError("the ring announces records that it does not hold")
        self._next, self._faults, self._all_faults = committed, faults, faults
        flat = np.array(rows, dtype=np.int64).reshape(len(rows), len(layout.FIELDS))
        return Records(flat, lost + torn)

    def series(self, engine_id: str, records: Records) -> StepSeries:
        """Return records as steps: each begins at its submission or at the end of the one before."""
        end_ns = records.of("end_ns")
        before = np.concatenate(([self._last_end_ns], end_ns[:-1])) if len(end_ns) else end_ns
        if len(end_ns):
            self._last_end_ns = int(end_ns[-1])

        def of(field: str) -> NDArray[np.int64]:
            return column(records.of(field), "i8")

        return StepSeries(
            engine_id=engine_id,
            source=SOURCE,
            exact=True,
            lost=records.lost,
            start_ns=column(np.maximum(records.of("submit_ns"), before), "i8"),
            end_ns=of("end_ns"),
            prefill_tokens=of("prefill_tokens"),
            decode_tokens=of("decode_tokens"),
            delivered_tokens=of("delivered_tokens"),
            sequences=of("sequences"),
            kv_tokens=of("kv_tokens"),
            draft_tokens=of("draft_tokens"),
            accepted_tokens=of("accepted_tokens"),
            preemptions=of("preemptions"),
            recomputed_tokens=of("recomputed_tokens"),
            rank=str(self.header.rank),
        )

    def _counters(self) -> tuple[int, int]:
        data = os.pread(self._descriptor, 2 * layout.COUNTER.size, layout.COMMITTED_AT)
        if len(data) < 2 * layout.COUNTER.size:
            raise RingError("the ring was cut short")
        return layout.COUNTER.unpack_from(data)[0], layout.COUNTER.unpack_from(data, 8)[0]

    def _slots(self, begin: int, end: int) -> bytes:
        """Return the records from `begin` to `end` in order; the ring may wrap once in between."""
        size, capacity = layout.RECORD_BYTES, self.header.capacity
        parts = []
        while begin < end:
            slot = begin % capacity
            count = min(end - begin, capacity - slot)
            part = os.pread(self._descriptor, count * size, layout.HEADER_BYTES + slot * size)
            if len(part) < count * size:
                raise RingError("the ring was cut short")
            parts.append(part)
            begin += count
        return b"".join(parts)


def _row(data: bytes, at: int, index: int) -> tuple[int, ...] | None:
    """Return one record, or None if it is torn, not the one expected, or says what cannot be."""
    *fields, check = layout.RECORD.unpack_from(data, at)
    row = tuple(fields)
    if row[0] != index or layout.checksum(row) != check:
        return None
    _, submit_ns, end_ns, *counts = row
    if not 0 < submit_ns <= end_ns <= time.monotonic_ns():
        return None
    return row if all(0 <= count < _LARGEST_COUNT for count in counts) else None
