"""The processes on a device: who holds it, how much of its memory, and for what share of the time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpuidle.agent.model import GpuProcess, Problem
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import check, function, nvml, process_list
from gpuidle.collectors.counters.nvml_guard import MAX_BYTES, Guard

PROCESS_LISTS = ("Compute", "Graphics", "MPSCompute")

STALE_US = 2_500_000
"""The driver samples each process about once a second; what is older tells of another time."""
FUTURE_US = 1_000_000
"""No sample can be from later than this: room for clocks that are set apart."""
SAMPLE_ROOM = 128


class Share(NamedTuple):
    """How much of the driver's last sample period a process had a kernel resident."""

    percent: int
    timestamp_us: int


def processes(
    guard: Guard, handle: object, pid_max: int, total: int | None, binding: str
) -> tuple[GpuProcess, ...] | None:
    """Merge the three lists by PID: a process can stand in several, with the same memory.

    `total` is the device's memory in bytes, `binding` the version of nvidia-ml-py for a Problem's text.
    """
    lists = [guard.get(f"{kind.lower()} processes", process_list, kind, handle) for kind in PROCESS_LISTS]
    if lists[0] is None:
        return None  # without the compute processes the others would look like all there is
    entries = [entry for some in lists if some is not None for entry in some]
    bad = tuple(pid for pid, _ in entries if not 0 < pid <= pid_max)
    if bad:
        guard.problems.append(faults.garbled_processes(bad, len(entries), binding, guard.hw_id))
    merged: dict[int, int | None] = {}
    for pid, used in entries:
        if not 0 < pid <= pid_max:
            continue
        memory = guard.bounded(f"memory of process {pid} (bytes)", total or MAX_BYTES, used)
        before = merged.get(pid)
        merged[pid] = memory if before is None else max(before, memory or 0)
    if bad and not merged:
        return None  # nothing of the list can be believed, which is not the same as no process
    return tuple(GpuProcess(pid=pid, used_memory_bytes=merged[pid]) for pid in sorted(merged))


class ShareReader:
    """Reads the time shares of one device's processes; remembers what it has seen already."""

    def __init__(self) -> None:
        self._seen_us = 0

    def read(
        self, guard: Guard, handle: object, found: tuple[GpuProcess, ...], now_us: int
    ) -> tuple[GpuProcess, ...]:
        """Return `found` with the newest share of each; `now_us` is the wall clock's, as the stamps are."""
        if self._seen_us > now_us + FUTURE_US:
            self._seen_us = 0  # the wall clock was set back
        samples = guard.get("process utilisation", _samples, handle, self._seen_us)
        if not samples or not found:
            return found
        fresh, garbage = newest_shares(samples, self._seen_us, now_us, frozenset(p.pid for p in found))
        if garbage:
            guard.problems.append(_garbage(garbage, len(samples), guard.hw_id))
        if not fresh:
            return found
        self._seen_us = max(share.timestamp_us for share in fresh.values())
        return tuple(self._with_share(guard, process, fresh.get(process.pid), now_us) for process in found)

    @staticmethod
    def _with_share(guard: Guard, process: GpuProcess, share: Share | None, now_us: int) -> GpuProcess:
        if share is None:
            return process
        percent = guard.bounded(f"SM utilisation of process {process.pid} (%)", 100, share.percent)
        return GpuProcess(
            pid=process.pid,
            used_memory_bytes=process.used_memory_bytes,
            sm_busy_ratio=None if percent is None else percent / 100,
            sm_busy_stale=percent is not None and now_us - share.timestamp_us > STALE_US,
        )


def newest_shares(
    samples: Iterable[tuple[int, int, int]], seen_us: int, now_us: int, pids: frozenset[int]
) -> tuple[Mapping[int, Share], int]:
    """Return the newest share by PID of `samples` (PID, percent, time in us), and how many make no sense.

    Some drivers fill the rest of their buffer with what was there before: samples of no time, of the future,
    or of a time that was not asked for. A sample of a process that is not on the device any more is none of
    those; it is left out.
    """
    newest: dict[int, Share] = {}
    garbage = 0
    for pid, percent, timestamp_us in samples:
        if not seen_us < timestamp_us <= now_us + FUTURE_US:
            garbage += 1
        elif pid in pids and (pid not in newest or newest[pid].timestamp_us < timestamp_us):
            newest[pid] = Share(percent, timestamp_us)
    return newest, garbage


def _samples(handle: object, since_us: int) -> list[tuple[int, int, int]]:
    """Return (PID, SM percent, time in us); NotFound is NVML's word for none.

    Not pynvml's own function: it asks twice, and the number of samples can grow between.
    """
    call: Any = function("nvmlDeviceGetProcessUtilization")
    room = SAMPLE_ROOM
    while True:
        rows = (nvml.c_nvmlProcessUtilizationSample_t * room)()
        count = ctypes.c_uint(room)
        code = call(handle, rows, ctypes.byref(count), ctypes.c_ulonglong(since_us))
        if code != faults.INSUFFICIENT_SIZE or room > 16 * SAMPLE_ROOM:
            break
        room = max(2 * room, count.value)
    if code == faults.NOT_FOUND:
        return []
    check(code)
    return [(row.pid, row.smUtil, row.timeStamp) for row in rows[: min(count.value, room)]]


def _garbage(count: int, of: int, hw_id: str) -> Problem:
    return Problem(
        source=faults.SOURCE,
        kind="garbage_samples",
        message=f"{count} of {of} samples of process utilisation are of an impossible time: left out",
        subject=hw_id,
    )
