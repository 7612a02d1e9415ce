"""OTLP: the same names and values as the scrape, and a collector that is down costs nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric, NumberDataPoint
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.exporters.frames import SECOND, WALL_NS, engine, frame, gpu
from tests.exporters.http import WAIT_S, OtlpServer, black_hole, get, otlp_server, refusing_url

import gpuidle
from gpuidle.agent.model import Node
from gpuidle.exporters import otlp
from gpuidle.exporters.naming import Kind, label_name, prometheus_name
from gpuidle.exporters.otlp import OtlpConfigError, OtlpExporter
from gpuidle.exporters.otlp_resource import resource_of
from gpuidle.exporters.prometheus import PrometheusExporter

SOON_S = 0.05
NEVER_S = 3600.0

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[OtlpServer]:
    with otlp_server() as server:
        yield server


def metrics_of(request: ExportMetricsServiceRequest) -> dict[str, Metric]:
    [resource] = request.resource_metrics
    [scope] = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def data_of(metric: Metric) -> tuple[Kind, list[NumberDataPoint]]:
    if metric.WhichOneof("data") == "gauge":
        return "gauge", list(metric.gauge.data_points)
    return "counter" if metric.sum.is_monotonic else "updowncounter", list(metric.sum.data_points)


def samples_of(metric: Metric) -> Samples:
    """Return a classic histogram as the OTLP-to-Prometheus translation writes it."""
    name, found = prometheus_name(metric.name, metric.unit, "histogram"), Samples()
    for point in metric.histogram.data_points:
        labels = {label_name(pair.key): pair.value.string_value for pair in point.attributes}
        bounds = [*map(str, point.explicit_bounds), "+Inf"]
        for le, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
            found[f"{name}_bucket", frozenset({**labels, "le": le}.items())] = count
        found[f"{name}_sum", frozenset(labels.items())] = point.sum
        found[f"{name}_count", frozenset(labels.items())] = point.count
    return found


def value_of(point: NumberDataPoint) -> float:
    return float(point.as_int if point.WhichOneof("value") == "as_int" else point.as_double)


def total(request: ExportMetricsServiceRequest, name: str, **attributes: str) -> NumberDataPoint | None:
    """Return the one point of `name` that has the attributes (with _ for .), or None."""
    metric = metrics_of(request).get(name)
    for point in data_of(metric)[1] if metric else ():
        labels = {label_name(pair.key): pair.value.string_value for pair in point.attributes}
        if attributes.items() <= labels.items():
            return point
    return None


def closes(exporter: OtlpExporter) -> bool:
    """Return whether close() comes back; how fast is left to benchmarks."""
    thread = threading.Thread(target=exporter.close, daemon=True)
    thread.start()
    thread.join(timeout=5)
    return not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_both_paths_give_the_same_names_labels_and_values(collector: OtlpServer) -> None:
    scraped, pushed = PrometheusExporter("127.0.0.1:0"), OtlpExporter(collector.url, NEVER_S)
    shown = frame(gpus=(gpu(0), gpu(1), gpu(2, parent="GPU-1")))
    scraped.publish(shown)
    pushed.publish(shown)
    page = get(f"http://{scraped.address}/metrics")[2].decode()
    scraped.close()
    pushed.close()

    by_scrape = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(page)
        for sample in family.samples
    }
    by_push: Samples = {}
    for metric in metrics_of(collector.wait_for(1)).values():
        assert metric.description
        if metric.WhichOneof("data") == "histogram":
            by_push.update(samples_of(metric))
            continue
        kind, points = data_of(metric)
        for point in points:
            labels = frozenset((label_name(pair.key), pair.value.string_value) for pair in point.attributes)
            by_push[prometheus_name(metric.name, metric.unit, kind), labels] = value_of(point)
    assert len(by_push) > 100
    assert set(by_push) == set(by_scrape)
    moving = ("gpuidle_agent_cpu_time", "gpuidle_agent_memory_usage", "gpuidle_agent_frame_age")
    assert {key: value for key, value in by_push.items() if not key[0].startswith(moving)} == {
        key: value for key, value in by_scrape.items() if not key[0].startswith(moving)
    }


def test_frames_are_sent_again_and_again_and_once_at_the_end(collector: OtlpServer) -> None:
    exporter = OtlpExporter(collector.url, SOON_S)
    exporter.publish(frame())
    collector.wait_for(2)
    exporter.publish(frame(sequence=9))
    exporter.close()
    last = total(collector.requests[-1], "hw.power")
    assert last is not None
    assert last.time_unix_nano == WALL_NS + 9 * SECOND
    assert set(collector.paths) == {"/v1/metrics"}


def test_the_series_of_what_is_gone_are_not_sent_again(collector: OtlpServer) -> None:
    exporter = OtlpExporter(collector.url, NEVER_S)
    exporter.publish(frame())
    exporter.publish(frame(sequence=2, gpus=(gpu(0, engine_ids=()),), engines=()))
    exporter.close()
    text = str(collector.wait_for(1))
    assert "vllm/llama/0" not in text
    assert "GPU-1" not in text
    assert "otel.metric.overflow" not in text


def test_the_environment_names_the_collector_and_the_sender(
    collector: OtlpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"{collector.url}/custom/path")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.cluster.name=c1,host.name=told")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    exporter = OtlpExporter()
    exporter.publish(frame())
    collector.wait_for(2)
    exporter.close()
    assert collector.paths[0] == "/custom/path"
    assert collector.headers[0]["x-tenant"] == "blue"
    assert collector.headers[0]["content-encoding"] == "gzip"
    [resource] = collector.requests[0].resource_metrics
    told = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert told["service.name"] == "mine"
    assert told["service.version"] == gpuidle.__version__
    assert told["service.instance.id"]
    assert told["host.name"] == "told"
    assert told["k8s.cluster.name"] == "c1"


def test_without_an_environment_the_node_and_the_program_are_named() -> None:
    told = resource_of(Node(hostname="node-a")).attributes
    assert told["service.name"] == "gpuidle"
    assert told["service.instance.id"] == told["host.name"] == "node-a"
    assert "gpuidle.simulated" not in told
    assert resource_of(Node(hostname="demo", simulated=True)).attributes["gpuidle.simulated"] is True


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, True),
        ({"OTEL_METRICS_EXPORTER": "console, otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_the_environment_switches_otlp_on_and_off(environment: dict[str, str], expected: bool) -> None:
    assert otlp.wanted(environment) is expected


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan", "inf"])
def test_an_interval_that_is_none_is_named_and_replaced(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", text)
    assert otlp._interval_from_environment() == otlp.DEFAULT_INTERVAL_S
    assert "OTEL_METRIC_EXPORT_INTERVAL" in caplog.text


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OtlpConfigError, match="localhost:4317"):
        OtlpExporter("localhost:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(OtlpConfigError, match="http/json"):
        OtlpExporter("http://localhost:4318")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://c:4318", "http://c:4318/v1/metrics"),
        ("http://c:4318/", "http://c:4318/v1/metrics"),
        ("http://vm:8428/opentelemetry/v1/metrics", "http://vm:8428/opentelemetry/v1/metrics"),
    ],
)
def test_an_endpoint_is_a_base_url_or_names_the_metrics_itself(endpoint: str, expected: str) -> None:
    assert otlp._metrics_url(endpoint) == expected


# A collector that is down (fault 53) -------------------------------------------------------------------


def test_refused_exports_are_said_once_without_the_sdks_own_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    url = refusing_url().replace("http://", "http://user:secret@")
    outcomes = []
    note = otlp._Complaints.note

    def counting(self: otlp._Complaints, *, arrived: bool, reason: str, now: float) -> None:
        note(self, arrived=arrived, reason=reason, now=now)
        outcomes.append(arrived)

    monkeypatch.setattr(otlp._Complaints, "note", counting)
    with caplog.at_level(logging.INFO):
        exporter = OtlpExporter(url, SOON_S)
        exporter.publish(frame())
        until(lambda: len(outcomes) >= 3)
        exporter.close()
    assert not any(outcomes)
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.name == "gpuidle.exporters.otlp"
    assert "secret" not in record.getMessage()
    assert refusing_url().rpartition(":")[0] in record.getMessage()


def test_complaints_come_once_a_minute_and_recovery_is_said(caplog: pytest.LogCaptureFixture) -> None:
    complaints = otlp._Complaints("http://c", 10)
    with caplog.at_level(logging.INFO):
        for second in range(0, 125, 10):
            complaints.note(arrived=False, reason="refused", now=1000.0 + second)
        complaints.note(arrived=True, reason="", now=1130.0)
        complaints.note(arrived=False, reason="refused", now=1140.0)
        complaints.note(arrived=True, reason="", now=1150.0)
    assert [
        (record.levelname, record.getMessage().startswith("metrics reach")) for record in caplog.records
    ] == [
        ("WARNING", False),
        ("WARNING", False),
        ("WARNING", False),
        ("INFO", True),
    ]


def test_a_black_hole_holds_up_neither_publish_nor_close() -> None:
    with black_hole() as url:
        exporter = OtlpExporter(url, SOON_S)
        for sequence in range(200):
            exporter.publish(frame(sequence=sequence + 1))
            if sequence == 0:
                time.sleep(3 * SOON_S)  # let an export hang in it
        assert exporter._latest is not None
        assert exporter._latest.frame.sequence == 200, "one frame is kept: the newest"
        assert closes(exporter)


def test_a_black_hole_met_only_at_the_end_does_not_hold_up_close() -> None:
    with black_hole() as url:
        exporter = OtlpExporter(url, NEVER_S)
        exporter.publish(frame())
        assert closes(exporter)


def test_a_slow_collector_gets_the_newest_frame_next(collector: OtlpServer) -> None:
    collector.gate.clear()
    exporter = OtlpExporter(collector.url, SOON_S)
    exporter.publish(frame(sequence=1))
    collector.wait_for(1)
    for sequence in range(2, 50):
        exporter.publish(frame(sequence=sequence))
    assert len(collector.requests) == 1
    collector.gate.set()
    point = total(collector.wait_for(2), "hw.power")
    assert point is not None
    assert point.time_unix_nano == WALL_NS + 49 * SECOND
    assert closes(exporter)


def test_totals_catch_up_after_an_outage(collector: OtlpServer) -> None:
    collector.status = 400
    exporter = OtlpExporter(collector.url, SOON_S)
    exporter.publish(frame(engines=(engine(tokens=10),)))
    collector.wait_for(2)
    collector.status = 200
    exporter.publish(frame(sequence=2, engines=(engine(tokens=70),)))
    exporter.close()
    point = total(collector.requests[-1], "gpuidle.engine.tokens", gpuidle_phase="prefill")
    assert point is not None
    assert value_of(point) == 70
    assert point.start_time_unix_nano <= point.time_unix_nano


def test_deltas_count_from_the_last_export_that_arrived(
    collector: OtlpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    exporter = OtlpExporter(collector.url, NEVER_S)
    accepted = []
    for sequence, (tokens, status) in enumerate([(10, 200), (25, 400), (40, 400), (100, 200)], start=1):
        collector.status = status
        exporter.publish(frame(sequence=sequence, engines=(engine(tokens=tokens),)))
        exporter._export(exporter._exporter)
        if status == 200:
            accepted.append(total(collector.requests[-1], "gpuidle.engine.tokens", gpuidle_phase="prefill"))
    assert [value_of(point) for point in accepted if point] == [10, 90]
    assert accepted[1] is not None
    assert accepted[1].start_time_unix_nano == WALL_NS + 1 * SECOND
    assert accepted[1].time_unix_nano == WALL_NS + 4 * SECOND
    tokens_metric = metrics_of(collector.requests[-1])["gpuidle.engine.tokens"]
    assert tokens_metric.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
    memory = metrics_of(collector.requests[-1])["hw.gpu.memory.usage"]
    assert memory.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    exporter.close()


def test_a_fault_of_our_own_is_reported_like_any_failed_export(
    collector: OtlpServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no such thing")

    exporter = OtlpExporter(collector.url, NEVER_S)
    monkeypatch.setattr(otlp, "frame_points", broken)
    exporter.publish(frame())
    exporter._export(exporter._exporter)
    assert "RuntimeError: no such thing" in caplog.text
    monkeypatch.undo()
    exporter._export(exporter._exporter)
    assert len(collector.requests) == 1
    exporter.close()


def test_closing_twice_is_closing_once(collector: OtlpServer) -> None:
    exporter = OtlpExporter(collector.url, NEVER_S)
    exporter.publish(frame())
    exporter.close()
    exporter.close()
    assert len(collector.requests) == 1
