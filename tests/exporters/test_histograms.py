"""Step durations on both paths: the same counts, whatever the buckets."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.sdk.metrics.export import ExponentialHistogramDataPoint, HistogramDataPoint
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.exporters.frames import DECODES, PREFILLS, engine, frame
from tests.exporters.http import otlp_server

from gpuidle.agent.model import Durations
from gpuidle.exporters.exposition import page
from gpuidle.exporters.histograms import (
    BOUNDS_S,
    HISTOGRAMS,
    HistogramPoints,
    Spread,
    bucket_counts,
    histogram_points,
    less,
)
from gpuidle.exporters.latest import Latest, frame_points
from gpuidle.exporters.otlp import OtlpExporter
from gpuidle.exporters.otlp_series import Key, Series, data_points, remember, temporality_of

NAME = "gpuidle_step_duration_seconds"
AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"


def test_classic_counts_are_those_below_each_bound() -> None:
    assert dict(zip([*BOUNDS_S, None], bucket_counts(PREFILLS), strict=True)) == {
        **dict.fromkeys([*BOUNDS_S, None], 0),
        1.0: 1,
        2.0: 2,
    }
    assert sum(bucket_counts(DECODES)) == 40
    assert bucket_counts(DECODES)[BOUNDS_S.index(2.0**-6)] == 40


@pytest.mark.parametrize(
    ("index", "place"), [(-240, 0), (-89, 0), (-88, 1), (-1, 11), (0, 12), (31, 15), (32, 16), (250, 16)]
)
def test_a_bound_is_the_edge_of_a_bucket(index: int, place: int) -> None:
    counts = bucket_counts(Durations(offset=index, counts=(5,), sum_ns=1))
    assert counts == [5 if i == place else 0 for i in range(len(BOUNDS_S) + 1)]


def test_an_engine_without_known_steps_or_model_has_no_series() -> None:
    blind = msgspec.structs.replace(engine(), step_durations={})
    empty = msgspec.structs.replace(engine(), step_durations={"decode": less(DECODES, DECODES)})
    assert histogram_points(frame(engines=(blind, empty, engine(model=None)))) == []


def test_a_series_names_the_engine_and_the_phase() -> None:
    [entry] = histogram_points(frame())
    for attributes, _ in entry.points:
        assert tuple(name for name, _ in attributes) == entry.metric.attributes
    assert [(dict(a)["gpuidle.phase"], value) for a, value in entry.points] == [
        ("prefill", PREFILLS),
        ("decode", DECODES),
    ]


def test_label_values_are_bounded_and_a_second_series_is_left_out() -> None:
    hostile = engine(model="a\udcf8b" + "x" * 10_000)
    [entry] = histogram_points(frame(engines=(hostile, hostile)))
    assert len(entry.points) == 2
    assert all(len(dict(a)["gpuidle.model"]) == 256 for a, _ in entry.points)


def test_a_stale_frame_keeps_its_histograms() -> None:
    kinds = {entry.metric.kind for entry in frame_points(Latest(frame(), 0), 10**12)}
    assert kinds == {"counter", "histogram"}


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_parser_reads_the_classic_histogram(openmetrics: bool) -> None:
    parse = parse_openmetrics if openmetrics else parse_text
    [family] = parse(page(histogram_points(frame()), openmetrics=openmetrics))
    assert (family.name, family.type) == (NAME, "histogram")
    prefills = [s for s in family.samples if s.labels["gpuidle_phase"] == "prefill"]
    buckets = {s.labels["le"]: s.value for s in prefills if s.name == f"{NAME}_bucket"}
    assert list(buckets) == [*map(repr, BOUNDS_S), "+Inf"]
    assert [buckets[le] for le in ("0.5", "1.0", "2.0", "+Inf")] == [0, 1, 3, 3]
    rest = {s.name: s.value for s in prefills if s.name != f"{NAME}_bucket"}
    assert rest == {f"{NAME}_sum": 2.9, f"{NAME}_count": 3}


def pushed() -> Metric:
    with otlp_server() as collector:
        exporter = OtlpExporter(collector.url, 3600.0)
        exporter.publish(frame())
        exporter.close()
        [resource] = collector.wait_for(1).resource_metrics
        [metric] = (m for m in resource.scope_metrics[0].metrics if m.name == "gpuidle.step.duration")
        found: Metric = metric
        return found


def test_the_classic_buckets_are_the_same_over_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGGREGATION, raising=False)
    metric = pushed()
    assert metric.unit == "s"
    cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert metric.histogram.aggregation_temporality == cumulative
    for point, durations in zip(metric.histogram.data_points, (PREFILLS, DECODES), strict=True):
        assert tuple(point.explicit_bounds) == BOUNDS_S
        assert list(point.bucket_counts) == bucket_counts(durations)
        assert (point.count, point.sum) == (durations.count, durations.sum_ns / 1e9)
        assert not point.HasField("min")
        assert not point.HasField("max")


def test_exponential_buckets_go_over_otlp_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGGREGATION, "base2_exponential_bucket_histogram")
    points = pushed().exponential_histogram.data_points
    for point, durations in zip(points, (PREFILLS, DECODES), strict=True):
        assert point.scale == 3
        assert point.positive.offset == durations.offset
        assert tuple(point.positive.bucket_counts) == durations.counts
        assert (point.count, point.sum) == (durations.count, durations.sum_ns / 1e9)
        assert (point.zero_count, len(point.negative.bucket_counts)) == (0, 0)


@pytest.mark.parametrize("aggregation", ["", "base2_exponential_bucket_histogram"])
@pytest.mark.parametrize("preference", ["", "delta", "lowmemory"])
def test_deltas_hold_what_was_added_and_start_anew_after_a_reset(aggregation: str, preference: str) -> None:
    temporality = temporality_of(preference, aggregation, 1000)
    known: OrderedDict[Key, Series] = OrderedDict()
    later = Durations(offset=-3, counts=(4, 1, 0, 5), sum_ns=7_000_000_000)
    lower = Durations(offset=1, counts=(9,), sum_ns=8_000_000_000)
    told: list[tuple[int, int, int, float]] = []
    for at, value in ((2000, PREFILLS), (3000, later), (4000, lower)):
        entry = HistogramPoints(HISTOGRAMS[0], (Spread((("gpuidle.phase", "prefill"),), value),))
        [metric], series = data_points([entry], known, temporality, at, at - 1000 if known else None)
        remember(known, series)
        [point] = metric.data.data_points
        assert isinstance(point, ExponentialHistogramDataPoint if aggregation else HistogramDataPoint)
        told.append((point.start_time_unix_nano, point.time_unix_nano, point.count, point.sum))
        if isinstance(point, ExponentialHistogramDataPoint):
            assert sum(point.positive.bucket_counts) == point.count
    second = (2000, 3000, 7, 4.1) if preference else (1000, 3000, 10, 7.0)
    assert told == [(1000, 2000, 3, 2.9), second, (3000, 4000, 9, 8.0)]


def test_what_came_on_top_is_exact_and_what_is_lower_is_a_reset() -> None:
    more = Durations(offset=-4, counts=(2, 0, 1, 0, 2, 0, 8), sum_ns=3_000_000_000)
    assert less(more, PREFILLS) == Durations(offset=-4, counts=(2, 0, 0, 0, 0, 0, 8), sum_ns=100_000_000)
    assert less(PREFILLS, PREFILLS) == Durations(offset=0, counts=(), sum_ns=0)
    assert less(PREFILLS, more) is None
    assert less(DECODES, PREFILLS) is None
