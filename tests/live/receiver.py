"""An OTLP/HTTP collector for tests: keeps the newest value of every series it is sent."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

Series = tuple[str, tuple[tuple[str, str], ...]]


class Receiver:
    """Listens on a free loopback port."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}
        self.requests = 0
        self.lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                receiver.take(ExportMetricsServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request: ExportMetricsServiceRequest) -> None:
        with self.lock:
            self.requests += 1
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in getattr(metric, metric.WhichOneof("data")).data_points:
                            labels = tuple(sorted((a.key, a.value.string_value) for a in point.attributes))
                            if hasattr(point, "bucket_counts"):
                                value = float(point.count)  # of a histogram, how many were counted
                            else:
                                value = getattr(point, point.WhichOneof("value"))
                            self.values[metric.name, labels] = value

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of a metric whose attributes include `labels` (dots as underscores)."""
        wanted = {key.replace("__", "."): value for key, value in labels.items()}
        with self.lock:
            found = [
                value
                for (metric, attributes), value in self.values.items()
                if metric == name and wanted.items() <= dict(attributes).items()
            ]
        assert found, f"no series {name} {wanted}"
        return sum(found)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
