"""Memory of both exporters over many generations of engines and GPUs.

Every frame holds other engines and another GPU than the frame before; each is exported over OTLP to a
loopback collector, and some are scraped. Prints resident memory as it goes, the time that an export and a
scrape take (the collector's share included), and how often otel.metric.overflow was said.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.exporters.frames import engine, frame, gpu

from gpuidle.exporters.otlp import OtlpExporter
from gpuidle.exporters.prometheus import PrometheusExporter

ENGINES = 19
PER_FRAME = ENGINES + 1


class Collector:
    """Counts what arrives and looks for the overflow attribute."""

    def __init__(self) -> None:
        self.requests = self.bytes = self.overflows = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.requests += 1
                outer.bytes += len(body)
                outer.overflows += body.count(b"otel.metric.overflow")
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generations", type=int, default=100_000)
    arguments = parser.parse_args()

    collector = Collector()
    otlp = OtlpExporter(f"http://127.0.0.1:{collector.server.server_port}", interval_s=3600)
    prometheus = PrometheusExporter("127.0.0.1:0")
    frames = arguments.generations // PER_FRAME
    spent = {"export": 0.0, "scrape": 0.0}
    first = 0.0
    scraped = overflows = 0
    for index in range(frames):
        engines = tuple(engine(f"vllm/model-{index}-{n}/0") for n in range(ENGINES))
        device = gpu(index, engine_ids=(engines[0].engine_id,))
        state = frame(sequence=index + 1, gpus=(device,), engines=engines)
        otlp.publish(state)
        prometheus.publish(state)
        began = time.perf_counter()
        otlp._export(otlp._exporter)  # noqa: SLF001 - without waiting for the interval
        spent["export"] += time.perf_counter() - began
        if index % 100 == 0:
            began = time.perf_counter()
            with urllib.request.urlopen(f"http://{prometheus.address}/metrics") as answer:
                page = answer.read()
            spent["scrape"] += time.perf_counter() - began
            scraped += 1
            overflows += page.count(b"otel_metric_overflow")
        if index == frames // 10:
            gc.collect()
            first = resident_mb()
        if index % max(1, frames // 10) == 0:
            print(f"{(index + 1) * PER_FRAME:>8} generations  {resident_mb():7.1f} MB")
    gc.collect()
    print(f"after a tenth {first:.1f} MB, at the end {resident_mb():.1f} MB")
    print(f"{collector.requests} exports of {collector.bytes / max(1, collector.requests) / 1000:.1f} kB")
    print(
        f"export {spent['export'] / frames * 1000:.1f} ms, scrape {spent['scrape'] / scraped * 1000:.1f} ms"
    )
    print(f"otel.metric.overflow: {collector.overflows + overflows}")
    otlp.close()
    prometheus.close()


if __name__ == "__main__":
    main()
