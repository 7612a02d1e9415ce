"""Samples in shared memory, as columns: one process writes, one reads. Standard library only.

The memory is an anonymous file whose descriptor the child inherits, so that nothing is left behind. A column
is an array of `capacity` 64-bit words; sample number n stands at n % capacity. How many were written travels
in the child's messages, behind the samples themselves, so the reader needs no lock.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

WORD = 8
SECONDS = 8
"""How much time a ring holds: far more than the reader's pause between two visits."""


class Layout(NamedTuple):
    """Size of a ring: the start and end of each sample, then its `values` counters."""

    capacity: int
    values: int

    @property
    def size(self) -> int:
        """Bytes of the shared memory."""
        return (2 + self.values) * self.capacity * WORD


def layout(rate_hz: int, values: int) -> Layout:
    """Return the layout for `rate_hz` samples a second."""
    return Layout(capacity=max(1024, rate_hz * SECONDS), values=values)


def create(of: Layout) -> int:
    """Return the descriptor of new shared memory, not inherited unless asked for."""
    descriptor = os.memfd_create("gpuidle-pm")
    os.ftruncate(descriptor, of.size)
    return descriptor


class RingWriter:
    """The child's end."""

    def __init__(self, descriptor: int, of: Layout) -> None:
        self._layout = of
        self.head = 0
        memory = memoryview(mmap.mmap(descriptor, of.size))
        width = of.capacity * WORD
        columns = [memory[i * width : (i + 1) * width] for i in range(2 + of.values)]
        self._start, self._end = (column.cast("Q") for column in columns[:2])
        self._values = [column.cast("d") for column in columns[2:]]

    def append(self, start: memoryview, end: memoryview, values: list[memoryview[float]]) -> None:
        """Copy samples in: views of equal length, strided ones too, fewer than the ring holds."""
        count = len(start)
        place = self.head % self._layout.capacity
        first = min(count, self._layout.capacity - place)
        for column, new in ((self._start, start), (self._end, end)):
            column[place : place + first] = new[:first]
            column[: count - first] = new[first:]
        for numbers, more in zip(self._values, values, strict=True):
            numbers[place : place + first] = more[:first]
            numbers[: count - first] = more[first:]
        self.head += count
