"""Errors that the driver reports as events: each one is counted, so that two equal Xids are two.

The driver keeps no count that one could read: it tells an event once, to those who registered before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuidle.agent.model import Problem
from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import nvml

XID = 0x8
MIG_CHANGE = 0x100

ERRORS: tuple[tuple[int, str], ...] = (
    (0x1, "ecc_single_bit"),
    (0x2, "ecc_double_bit"),
    (XID, "xid"),
    (0x200, "ecc_single_bit_storm"),
    (0x400, "dram_retirement"),
    (0x800, "dram_retirement_failure"),
    (0x1000, "poison"),
    (0x2000, "poison_fatal"),
    (0x4000, "gpu_unavailable"),
)
"""Bits of nvmlEventType (nvml.h) that are errors; the other bits are changes of state."""

MOST_A_TICK = 1000
"""Where a GPU reports more than this in one tick, the rest comes in the next one."""
SHOWN_NS = 60 * 10**9
"""How long an error stands among the Problems."""


class EventSet:
    """Events of one device from now on. Every method raises pynvml.NVMLError."""

    def __init__(self, handle: object, wanted: int) -> None:
        """Register for those of the `wanted` types that the device has; NOT_SUPPORTED where it has none."""
        types = nvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted
        if not types:
            raise nvml.NVMLError(faults.NOT_SUPPORTED)
        self.types = types
        self._set: Any = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(handle, types, self._set)
        except nvml.NVMLError:
            self.close()
            raise

    def poll(self) -> list[tuple[int, int]]:
        """Return (type, data) of the events since the last call, without waiting."""
        found: list[tuple[int, int]] = []
        while len(found) < MOST_A_TICK:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError as error:
                if error.value != faults.TIMEOUT:
                    raise
                break
            found.append((event.eventType, event.eventData))
        return found

    def close(self) -> None:
        """Let go of the set; a library that is past answering takes it along."""
        events, self._set = self._set, None
        if events is None:
            return
        try:
            nvml.nvmlEventSetFree(events)
        except nvml.NVMLError:
            return


@dataclass
class ErrorCounts:
    """The errors of one device since gpuidle watches it. It outlives NVML's sessions, unlike `events`."""

    hw_id: str
    counts: dict[str, int] | None = None
    """None: the device reports no errors, or has not been asked."""
    last_ns: dict[str, int] = field(default_factory=dict)
    events: EventSet | None = None

    def watch(self, handle: object) -> None:
        """Register if that has not been done in this session of NVML. Raises pynvml.NVMLError."""
        if self.events is not None:
            return
        self.events = EventSet(handle, sum(bit for bit, _ in ERRORS))
        if self.counts is None:
            self.counts = {word: 0 for bit, word in ERRORS if bit & self.events.types and bit != XID}

    def read(self, now_ns: int) -> list[Problem]:
        """Count what came, and return the errors of the last minute. Raises pynvml.NVMLError."""
        if self.events is None or self.counts is None:
            return []
        try:
            found = self.events.poll()
        except nvml.NVMLError:
            self.forget()
            raise
        for kind, data in found:
            word = f"xid_{data}" if kind & XID else next((w for bit, w in ERRORS if bit & kind), f"{kind:#x}")
            self.counts[word] = self.counts.get(word, 0) + 1
            self.last_ns[word] = now_ns
        return [
            self._problem(word) for word, at_ns in sorted(self.last_ns.items()) if now_ns - at_ns < SHOWN_NS
        ]

    def forget(self) -> None:
        """Let go of the registration: NVML's session ends, or the device is not reached."""
        events, self.events = self.events, None
        if events is not None:
            events.close()

    def _problem(self, word: str) -> Problem:
        count = 0 if self.counts is None else self.counts[word]
        what = f"Xid {word[4:]}" if word.startswith("xid_") else word.replace("_", " ")
        return Problem(
            source=faults.SOURCE,
            kind="gpu_error",
            message=f"the driver reported {what} ({count} since gpuidle watches)",
            remedy="See `dmesg` and NVIDIA's list of Xid errors." if word.startswith("xid_") else "",
            subject=self.hw_id,
        )
