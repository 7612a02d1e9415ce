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
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)

from gpuidle.agent.model import DURATION_SCALE, Durations
from gpuidle.exporters.catalogue import MetricPoints
from gpuidle.exporters.feeds import Attributes, Number
from gpuidle.exporters.histograms import BOUNDS_S, HistogramPoints, bucket_counts, less
from gpuidle.exporters.naming import Kind

ENDED_SERIES_KEPT = 4096
"""How many series that ended are remembered: one that comes back must not be counted a second time."""

Key = tuple[str, Attributes]


Value = Number | Durations
DataPoint = NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint


class Series(NamedTuple):
    """A counter or a histogram as the receiver knows it."""

    start_ns: int
    value: Value
    time_ns: int


class Temporality(NamedTuple):
    """How counters and histograms are sent, and the earliest time at which one of ours can have been 0."""

    delta: bool
    process_start_ns: int
    delta_histograms: bool = False
    exponential: bool = False
    """Histograms with exponential buckets instead of the classic ones."""

    def is_delta(self, kind: Kind) -> bool:
        """Return whether metrics of the kind are sent as what was added since the last export."""
        return (self.delta and kind == "counter") or (self.delta_histograms and kind == "histogram")


def temporality_of(preference: str, aggregation: str, process_start_ns: int) -> Temporality:
    """Return what the two variables OTEL_EXPORTER_OTLP_METRICS_... ask for.

    These are ..._TEMPORALITY_PREFERENCE and ..._DEFAULT_HISTOGRAM_AGGREGATION.

    Our counters are of the kind that is read, not counted by calls: `lowmemory` leaves them cumulative.
    """
    preference = preference.strip().lower()
    return Temporality(
        preference == "delta",
        process_start_ns,
        preference in {"delta", "lowmemory"},
        aggregation.strip().lower() == "base2_exponential_bucket_histogram",
    )


def data_points(
    entries: Iterable[MetricPoints | HistogramPoints],
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
        found: list[DataPoint] = []
        for attributes, value in points:
            if metric.kind not in {"counter", "histogram"}:
                start = min(temporality.process_start_ns, time_ns)
                found.append(_data_point(attributes, Series(start, value, time_ns), temporality))
                continue
            key = (metric.name, attributes)
            before = known.get(key)
            start = _start(before, value, metric.since, temporality, time_ns, last_export_ns)
            now = counters[key] = Series(start, value, time_ns)
            told = _delta(before, now, metric.since) if temporality.is_delta(metric.kind) else now
            if told is not None:
                found.append(_data_point(attributes, told, temporality))
        if found:
            data = _data(metric.kind, found, temporality)
            metrics.append(Metric(metric.name, metric.description, metric.unit, data))
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
    value: Value,
    since: str,
    temporality: Temporality,
    time_ns: int,
    last_export_ns: int | None,
) -> int:
    if before is not None and _added(before.value, value) is not None:
        return min(before.start_ns, time_ns)
    if since == "device" and before is None:
        return time_ns  # it began at an unknown time: the data model writes that as start = time
    # New, or back to 0: it was 0 at some time after the receiver last heard of us.
    return min(max(last_export_ns or 0, temporality.process_start_ns), time_ns)


def _delta(before: Series | None, now: Series, since: str) -> Series | None:
    """Return what was added since the last export that arrived, or None where there is nothing to tell."""
    if before is None:
        # The first sight of a device's counter is only a place to count from.
        return None if since == "device" else now
    if now.time_ns == before.time_ns and now.value == before.value:
        return None  # the same reading again
    added = _added(before.value, now.value)
    return Series(min(before.time_ns, now.time_ns), now.value if added is None else added, now.time_ns)


def _added(before: Value, now: Value) -> Value | None:
    """Return what came on top of `before`; None where `now` does not hold it: it began anew."""
    if isinstance(now, Durations):
        return less(now, before) if isinstance(before, Durations) else None
    if isinstance(before, Durations):
        return None
    return now - before if now >= before else None


def _data_point(attributes: Attributes, series: Series, temporality: Temporality) -> DataPoint:
    start_ns, value, time_ns = series
    if not isinstance(value, Durations):
        return NumberDataPoint(dict(attributes), start_ns, time_ns, value)
    # OTLP lets a point do without the least and the greatest, which nobody kept; the SDK's classes do not.
    if temporality.exponential:
        return ExponentialHistogramDataPoint(
            attributes=dict(attributes),
            start_time_unix_nano=start_ns,
            time_unix_nano=time_ns,
            count=value.count,
            sum=value.sum_ns / 1e9,
            scale=DURATION_SCALE,
            zero_count=0,
            positive=Buckets(value.offset, value.counts),
            negative=Buckets(0, ()),
            flags=0,
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )
    return HistogramDataPoint(
        attributes=dict(attributes),
        start_time_unix_nano=start_ns,
        time_unix_nano=time_ns,
        count=value.count,
        sum=value.sum_ns / 1e9,
        bucket_counts=bucket_counts(value),
        explicit_bounds=BOUNDS_S,
        min=None,  # type: ignore[arg-type]
        max=None,  # type: ignore[arg-type]
    )


def _data(
    kind: Kind, points: list[DataPoint], temporality: Temporality
) -> Gauge | Sum | Histogram | ExponentialHistogram:
    delta = temporality.is_delta(kind)
    aggregation = AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
    if kind == "histogram":
        if temporality.exponential:
            exponential = [p for p in points if isinstance(p, ExponentialHistogramDataPoint)]
            return ExponentialHistogram(exponential, aggregation)
        return Histogram([p for p in points if isinstance(p, HistogramDataPoint)], aggregation)
    numbers = [p for p in points if isinstance(p, NumberDataPoint)]
    if kind == "gauge":
        return Gauge(numbers)
    return Sum(numbers, aggregation, is_monotonic=kind == "counter")
