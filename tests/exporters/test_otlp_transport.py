"""OTLP over TLS and over gRPC, to servers of this process."""

from __future__ import annotations

import shutil
import ssl
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from tests.exporters.frames import frame
from tests.exporters.http import WAIT_S, otlp_server
from tests.exporters.test_otlp import NEVER_S, SOON_S, clean_environment, closes, total, until
from tests.exporters.test_web_security import certificate

from gpuidle.exporters.otlp import OtlpExporter

__all__ = ["clean_environment"]  # the fixture that hides OTEL_* variables

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@needs_openssl
@pytest.mark.parametrize("trusted", [True, False])
def test_tls_reaches_a_collector_that_it_trusts_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trusted: bool
) -> None:
    server, other = certificate(tmp_path, "server"), certificate(tmp_path, "other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server, server.with_suffix(".key"))
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # they beat OTEL_EXPORTER_OTLP_CERTIFICATE
        monkeypatch.delenv(name, raising=False)
    with otlp_server() as collector:
        collector.server.socket = context.wrap_socket(collector.server.socket, server_side=True)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(server if trusted else other))
        exporter = OtlpExporter(collector.url.replace("http", "https"), SOON_S)
        exporter.publish(frame())
        if trusted:
            collector.wait_for(1)
        else:
            until(lambda: "do not reach" in caplog.text)
        assert closes(exporter)
        assert bool(collector.requests) is trusted


class GrpcCollector:
    """Takes OTLP/gRPC requests and keeps them."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.arrived = threading.Event()

    def export(self, request: ExportMetricsServiceRequest, context: object) -> ExportMetricsServiceResponse:
        self.metadata.append(dict(context.invocation_metadata()))  # type: ignore[attr-defined]
        self.requests.append(request)
        self.arrived.set()
        return ExportMetricsServiceResponse()


@contextmanager
def grpc_collector() -> Iterator[tuple[GrpcCollector, str]]:
    grpc = pytest.importorskip("grpc")
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc")
    collector = GrpcCollector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = type("Servicer", (service.MetricsServiceServicer,), {"Export": staticmethod(collector.export)})
    service.add_MetricsServiceServicer_to_server(servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None).wait(WAIT_S)


def test_grpc_brings_the_same_points_with_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with grpc_collector() as (collector, url):
        exporter = OtlpExporter(url, SOON_S)
        exporter.publish(frame())
        assert collector.arrived.wait(WAIT_S)
        assert closes(exporter)
        power = total(collector.requests[0], "hw.power", hw_id="GPU-1")
        assert power is not None
        assert power.as_double == 412.5
        assert collector.metadata[0]["x-tenant"] == "blue"


def test_grpc_to_nobody_does_not_hold_up_close(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    exporter = OtlpExporter("http://127.0.0.1:1", NEVER_S)
    exporter.publish(frame())
    assert closes(exporter)
