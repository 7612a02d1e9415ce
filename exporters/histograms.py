"""Metrics that are histograms: their rows, and the classic buckets that both paths share.

A Frame counts durations in buckets of OTLP's exponential histogram. The classic bounds are edges of such
buckets, so that the classic counts follow from them exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from gpuidle.agent.model import DURATION_SCALE, PHASES, Durations, Frame
from gpuidle.exporters.feeds import ENGINE, Attributes, clean, engine_identity
from gpuidle.exporters.naming import prometheus_name

_FIRST_EXPONENT, _LAST_EXPONENT = -11, 4
BOUNDS_S = tuple(2.0**exponent for exponent in range(_FIRST_EXPONENT, _LAST_EXPONENT + 1))
"""Upper bounds of the classic buckets, inclusive: powers of two from 0.49 ms to 16 s; one more is open."""


class Spread(NamedTuple):
    """The durations of one series."""

    attributes: Attributes
    value: Durations


@dataclass(frozen=True)
class Histogram:
    """One row of the catalogue. `read` is pure."""

    name: str
    """In OpenTelemetry."""
    unit: str
    description: str
    attributes: tuple[str, ...]
    read: Callable[[Frame], Iterable[Spread]] = field(repr=False)
    kind: ClassVar[Literal["histogram"]] = "histogram"
    since: ClassVar[Literal["agent"]] = "agent"

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, on both paths, before `_bucket`, `_sum` and `_count`."""
        return prometheus_name(self.name, self.unit, self.kind)


class HistogramPoints(NamedTuple):
    """A histogram with its series of the moment; there is at least one."""

    metric: Histogram
    points: tuple[Spread, ...]


def histogram_points(frame: Frame) -> list[HistogramPoints]:
    """Return the histograms that the Frame can feed; one without a series is left out."""
    entries: list[HistogramPoints] = []
    for metric in HISTOGRAMS:
        found: dict[Attributes, Durations] = {}
        for attributes, value in metric.read(frame):
            found.setdefault(tuple((name, clean(text)) for name, text in attributes), value)
        if found:
            entries.append(HistogramPoints(metric, tuple(Spread(*series) for series in found.items())))
    return entries


def bucket_counts(durations: Durations) -> list[int]:
    """Return the counts of the classic buckets, not cumulative: one for each bound, and the open one."""
    ends = [
        max(0, (exponent << DURATION_SCALE) - durations.offset)
        for exponent in range(_FIRST_EXPONENT, _LAST_EXPONENT + 1)
    ]
    starts = [0, *ends]
    return [sum(durations.counts[start:end]) for start, end in zip(starts, [*ends, None], strict=True)]


def less(now: Durations, before: Durations) -> Durations | None:
    """Return what came on top of `before`; None where `now` does not hold all of it."""
    start = min(now.offset, before.offset)
    counts = [0] * (now.offset - start) + list(now.counts)
    if len(before.counts) + before.offset - start > len(counts):
        return None
    for index, count in enumerate(before.counts, before.offset - start):
        counts[index] -= count
    if min(counts, default=0) < 0 or now.sum_ns < before.sum_ns:
        return None
    held = [index for index, count in enumerate(counts) if count]
    if not held:
        return Durations(offset=0, counts=(), sum_ns=0)
    first, last = held[0], held[-1]
    return Durations(
        offset=start + first, counts=tuple(counts[first : last + 1]), sum_ns=now.sum_ns - before.sum_ns
    )


def _step_durations(frame: Frame) -> Iterator[Spread]:
    for engine in frame.engines:
        identity = engine_identity(engine)
        for phase in PHASES if identity is not None else ():
            durations = engine.step_durations.get(phase)
            if identity is not None and durations is not None and durations.count:
                yield Spread((*identity, ("gpuidle.phase", phase)), durations)


HISTOGRAMS: tuple[Histogram, ...] = (
    Histogram(
        "gpuidle.step.duration",
        "s",
        "Duration of the engine's forward passes by phase, where steps and their tokens are seen.",
        (*ENGINE, "gpuidle.phase"),
        _step_durations,
    ),
)
