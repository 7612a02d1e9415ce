"""From the catalogue's points to OTLP data points: start times, resets and temporality.

OTLP wants to know since when a counter counts. The SDK's instruments would keep that, but its observable
instruments never forget an attribute set; here the memory is one dictionary, replaced after each export
that arrived, with the series that live and a bounded number of those that lately ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    NumberDataPoint,
    Sum,
)

from gpuidle.exporters.catalogue import MetricPoints
from gpuidle.exporters.feeds import Attributes, Number

ENDED_SERIES_KEPT = 4096
"""How many series that ended are remembered: one that comes back must not be counted a second time."""

Key = tuple[str, Attributes]


class Series(NamedTuple):
    """A counter as the receiver knows it."""

    start_ns: int
    value: Number
    time_ns: int


class Temporality(NamedTuple):
    """How counters are sent, and the earliest time at which one of ours can have been 0."""

    delta: bool
    process_start_ns: int


def data_points(
    entries: Iterable[MetricPoints],
    known: Mapping[Key, Series],
    temporality: Temporality,
    time_ns: int,
    last_export_ns: int | None,
) -> tuple[list[Metric], dict[Key, Series]]:
    """Return OTLP metrics of `entries`, taken at `time_ns`, and the counters as the receiver then knows them.

    `known` is what it knew after the last export that arrived, at `last_export_ns`; what is returned takes
    effect only if this export arrives too. All times are wall clock, which may step back: a start is never
    after its point.
    """
    metrics: list[Metric] = []
    counters: dict[Key, Series] = {}
    for metric, points in entries:
        found: list[NumberDataPoint] = []
        for attributes, value in points:
            if metric.kind != "counter":
                start = min(temporality.process_start_ns, time_ns)
                found.append(NumberDataPoint(dict(attributes), start, time_ns, value))
                continue
            key = (metric.name, attributes)
            before = known.get(key)
            start = _start(before, value, metric.since, temporality, time_ns, last_export_ns)
            counters[key] = Series(start, value, time_ns)
            if not temporality.delta:
                found.append(NumberDataPoint(dict(attributes), start, time_ns, value))
            elif (point := _delta(attributes, before, counters[key], metric.since)) is not None:
                found.append(point)
        if found:
            metrics.append(
                _metric(metric.name, metric.unit, metric.description, metric.kind, found, temporality)
            )
    return metrics, counters


def remember(known: OrderedDict[Key, Series], counters: Mapping[Key, Series]) -> None:
    """Let `known` be what the receiver knows after an export that arrived; the oldest ends are forgotten."""
    for key, series in counters.items():
        known[key] = series
        known.move_to_end(key)
    while len(known) - len(counters) > ENDED_SERIES_KEPT:
        known.popitem(last=False)


def _start(
    before: Series | None,
    value: Number,
    since: str,
    temporality: Temporality,
    time_ns: int,
    last_export_ns: int | None,
) -> int:
    if before is not None and value >= before.value:
        return min(before.start_ns, time_ns)
    if since == "device" and before is None:
        return time_ns  # it began at an unknown time: the data model writes that as start = time
    # New, or back to 0: it was 0 at some time after the receiver last heard of us.
    return min(max(last_export_ns or 0, temporality.process_start_ns), time_ns)


def _delta(attributes: Attributes, before: Series | None, now: Series, since: str) -> NumberDataPoint | None:
    """Return what was added since the last export that arrived, or None where there is nothing to tell."""
    if before is None:
        if since == "device":
            return None  # the first sight of a device's counter is only a place to count from
        return NumberDataPoint(dict(attributes), now.start_ns, now.time_ns, now.value)
    if now.time_ns == before.time_ns and now.value == before.value:
        return None  # the same reading again
    added = now.value - before.value if now.value >= before.value else now.value
    return NumberDataPoint(dict(attributes), min(before.time_ns, now.time_ns), now.time_ns, added)


def _metric(
    name: str,
    unit: str,
    description: str,
    kind: str,
    points: list[NumberDataPoint],
    temporality: Temporality,
) -> Metric:
    if kind == "gauge":
        return Metric(name, description, unit, Gauge(points))
    delta = temporality.delta and kind == "counter"
    aggregation = AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
    return Metric(name, description, unit, Sum(points, aggregation, is_monotonic=kind == "counter"))
