"""The Prometheus text format, read for the few sample names that are wanted.

A page of an engine has about 900 lines of which 20 matter: the others are passed over by their name alone.
The reader is tolerant: a line it cannot read is counted, the rest is used.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*(,|\})')
_NO_LABELS = re.compile(r"\s*\}")
_ESCAPE = re.compile(r'\\[\\n"]')
_ESCAPES = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[iI]nf|NaN|nan)"
)


class ExpositionError(ValueError):
    """The page is larger than any engine's: it has too many lines or too many wanted series."""


class Sample(NamedTuple):
    """One line: name, labels, value (NaN and infinities are passed on), and its time stamp if it has one."""

    name: str
    labels: dict[str, str]
    value: float
    stamp_ms: float | None = None
    """Milliseconds of the wall clock."""


@dataclass(frozen=True)
class Page:
    """The wanted samples in the order of the page."""

    samples: tuple[Sample, ...]
    malformed: int
    """Lines with a wanted name that could not be read."""
    others: int
    """Lines with another name."""


def parse_page(
    text: str, wanted: AbstractSet[str], *, max_lines: int = 200_000, max_series: int = 20_000
) -> Page:
    """Return the samples of `text` whose name is in `wanted`.

    Names in quotes (the UTF-8 form) are passed over: no engine has one.

    Raises:
        ExpositionError: more than `max_lines` lines, or more than `max_series` wanted samples.
    """
    if text.count("\n") > max_lines:
        raise ExpositionError(f"the page has more than {max_lines} lines")
    samples: list[Sample] = []
    malformed = others = 0
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        brace = line.find("{")
        name = (line[:brace] if brace > 0 else line.lstrip().partition(" ")[0].partition("\t")[0]).strip()
        if name not in wanted:
            others += 1
            continue
        sample = _labelled(name, line, brace + 1) if brace > 0 else _bare(name, line)
        if sample is None:
            malformed += 1
        elif len(samples) >= max_series:
            raise ExpositionError(f"the page has more than {max_series} series of the wanted names")
        else:
            samples.append(sample)
    return Page(tuple(samples), malformed, others)


def _bare(name: str, line: str) -> Sample | None:
    value = _value(line.strip()[len(name) :])
    return None if value is None else Sample(name, {}, *value)


def _labelled(name: str, line: str, at: int) -> Sample | None:
    labels: dict[str, str] = {}
    while True:
        match = _LABEL.match(line, at)
        if match is None:
            # An empty list, or the comma that may stand before the closing brace.
            match = _NO_LABELS.match(line, at)
            if match is None:
                return None
            at = match.end()
            break
        key, text, closing = match.groups()
        if key in labels:
            return None
        labels[key] = _ESCAPE.sub(_unescape, text) if "\\" in text else text
        at = match.end()
        if closing == "}":
            break
    value = _value(line[at:])
    return None if value is None else Sample(name, labels, *value)


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPES[match.group()]


def _value(text: str) -> tuple[float, float | None] | None:
    """Return the value and the time stamp that may follow it."""
    parts = text.split()
    if not 1 <= len(parts) <= 2 or any(_NUMBER.fullmatch(part) is None for part in parts):
        return None
    return float(parts[0]), float(parts[1]) if len(parts) == 2 else None
