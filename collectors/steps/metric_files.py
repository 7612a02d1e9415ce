"""The memory-mapped metric files of prometheus_client's multiprocess mode, as vLLM's API server has them.

A file holds the bytes in use (int32), 4 bytes of padding, then entries: length of the key (int32), the key
(JSON: family, sample, labels, help) padded with spaces to a multiple of 8, value and timestamp (float64, of
the writer's byte order). Entries are only ever appended, so that a place once known stays. The file is read
with pread: a mapping would die with a file that is cut short.
"""

from __future__ import annotations

import json
import operator
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

NAME = re.compile(r"/(counter|histogram)_\d+\.db$")
"""Of the files that hold counters of steps."""
_LIMIT = 16 * 1024 * 1024
_INT = struct.Struct("=i")
_VALUE = struct.Struct("=d")
_ITERATIONS = "vllm:iteration_tokens_total"
_FIRST_TOKENS = "vllm:time_to_first_token_seconds"
MARK = "step_tokens"
"""The sum of the histogram of steps, written before the count: 8 bytes tell whether there is more to see."""
_PLACES = {
    f"{_ITERATIONS}_bucket": "steps",
    f"{_ITERATIONS}_sum": MARK,
    f"{_FIRST_TOKENS}_bucket": "first_tokens",
    f"{_FIRST_TOKENS}_sum": "first_token_s",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:num_preemptions_total": "preemptions",
}


class MetricFileError(ValueError):
    """What is read is no such file; the message says why."""


class Totals(NamedTuple):
    """Counters of one engine core since its start."""

    steps: float = 0
    """Engine steps with output; a chunk of a prompt that gives no token is not counted."""
    computed_prompt_tokens: float = 0
    prompt_tokens: float = 0
    """With cached ones: older versions tell no others."""
    generated_tokens: float = 0
    first_tokens: float = 0
    first_token_s: float = 0
    draft_tokens: float = 0
    accepted_tokens: float = 0
    preemptions: float = 0

    def minus(self, other: Totals) -> Totals:
        """Return the difference."""
        return Totals(*map(operator.sub, self, other))


@dataclass(frozen=True)
class Span:
    """A stretch of a file, and the counters in it: equal bytes, equal counters."""

    begin: int
    end: int
    places: Mapping[str, Mapping[str, Sequence[int]]]
    """Places from `begin`, in steps of 8 bytes, by engine core and name of Totals: a histogram has many."""

    def columns(self, read: Sequence[bytes], rank: str) -> dict[str, list[float]]:
        """Return the counters of one engine core in what was read of this stretch, a value each time."""
        # Keys are in between, and no number; values stand at multiples of 8.
        words = np.frombuffer(b"".join(read), dtype=np.float64).reshape(len(read), -1)
        return {
            name: (words[:, places].sum(axis=1) if len(places) > 1 else words[:, places[0]]).tolist()
            for name, places in self.places.get(rank, {}).items()
        }


class MetricFile:
    """One file and the places of the counters in it; owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._used = 0
        self._places: dict[str, dict[str, list[int]]] = {}

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def refresh(self) -> bool:
        """Look for new entries; return whether there were any.

        Raises:
            MetricFileError: the file is not as it should be.
            OSError: it cannot be read.
        """
        used = self._used_bytes()
        if used == self._used:
            return False
        self._places = _places(os.pread(self._descriptor, used, 0), used)
        self._used = used
        return True

    @property
    def ranks(self) -> frozenset[str]:
        """The engine cores with counters here."""
        return frozenset(self._places)

    def counts_steps(self) -> bool:
        """Whether this file has the histogram whose count is the number of steps."""
        return any("steps" in by_name for by_name in self._places.values())

    def span(self, wanted: Callable[[str], bool]) -> Span:
        """Return the stretch that holds the counters with `wanted` names."""
        chosen = {
            rank: {name: places for name, places in by_name.items() if wanted(name)}
            for rank, by_name in self._places.items()
        }
        every = [at for by_name in chosen.values() for places in by_name.values() for at in places]
        begin = min(every, default=0)
        return Span(
            begin,
            max(every) + _VALUE.size if every else 0,
            {
                rank: {
                    name: [(at - begin) // _VALUE.size for at in places] for name, places in by_name.items()
                }
                for rank, by_name in chosen.items()
            },
        )

    def mark(self) -> Callable[[], bytes]:
        """Return what reads the shortest stretch that changes with every step that has tokens.

        It does so in one call of the system's, and gives less than the stretch where the file was cut short.
        """
        marked = all(MARK in by_name for by_name in self._places.values())
        span = self.span(lambda name: name == (MARK if marked else "steps"))
        return partial(os.pread, self._descriptor, span.end - span.begin, span.begin)

    def read(self, span: Span) -> bytes:
        """Return the bytes of a stretch.

        Raises:
            MetricFileError: the file was cut short.
            OSError: it cannot be read.
        """
        data = os.pread(self._descriptor, span.end - span.begin, span.begin)
        if len(data) != span.end - span.begin:
            raise MetricFileError("the file was cut short")
        return data

    def _used_bytes(self) -> int:
        data = os.pread(self._descriptor, _INT.size, 0)
        if len(data) < _INT.size:
            raise MetricFileError("the file is empty")
        used: int = _INT.unpack(data)[0]
        if not 0 <= used <= min(_LIMIT, os.fstat(self._descriptor).st_size):
            raise MetricFileError("the file says that it is longer than it is")
        return used


def _places(data: bytes, used: int) -> dict[str, dict[str, list[int]]]:
    """Return the offsets of the values of interest, by engine core and name."""
    if len(data) < used:
        raise MetricFileError("the file was cut short")
    found: dict[str, dict[str, list[int]]] = {}
    for key, at in _entries(data, used):
        if b'"vllm:' not in key:
            continue
        try:
            _family, sample, labels, _help = json.loads(key)
            rank = str(labels.get("engine", "0"))
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
        name = _PLACES.get(sample) or _prompt_tokens(sample, labels)
        if name is not None:
            found.setdefault(rank, {}).setdefault(name, []).append(at)
    return found


def _prompt_tokens(sample: str, labels: dict[str, object]) -> str | None:
    if sample == "vllm:prompt_tokens_total":
        return "prompt_tokens"
    computed = sample == "vllm:prompt_tokens_by_source_total" and labels.get("source") == "local_compute"
    return "computed_prompt_tokens" if computed else None


def _entries(data: bytes, used: int) -> Iterator[tuple[bytes, int]]:
    at = 8
    while at + _INT.size <= used:
        length: int = _INT.unpack_from(data, at)[0]
        padded = length + 8 - (length + _INT.size) % 8
        value_at = at + _INT.size + padded
        if length < 0 or value_at + 2 * _VALUE.size > used:
            raise MetricFileError("an entry reaches beyond the end")
        yield data[at + _INT.size : at + _INT.size + length], value_at
        at = value_at + 2 * _VALUE.size
