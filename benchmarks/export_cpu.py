"""CPU time of export: 8 GPUs at 1 s over OTLP and to Prometheus together, beside the SDK's own two readers.

Three children run at the same time for the same seconds, each asked by one scraper a second and sending to
one loopback collector a second: gpuidle's two exporters, the OpenTelemetry SDK's observable instruments with
its PeriodicExportingMetricReader and its PrometheusMetricReader, and a bare child that only makes the Frames.
All publish the same points of the same Frames. What the bare child takes is taken off both. CPU time is the
kernel's count for each process; the collector and the scraper stand in the parent.

Run from the root of the repository, with opentelemetry-exporter-prometheus installed:

    python -m benchmarks.export_cpu --seconds 60
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import psutil
from tests.exporters.frames import engine, frame, gpu

from gpuidle.agent.model import Frame
from gpuidle.agent.ports import Exporter
from gpuidle.exporters.catalogue import FRAME_METRICS, points

GPUS = 8
INTERVAL_S = 1.0


def frames() -> Iterable[Frame]:
    """Yield Frames of 8 GPUs and 2 engines whose counters move."""
    number = 0
    while True:
        number += 1
        yield frame(
            sequence=number,
            gpus=tuple(
                msgspec.structs.replace(
                    gpu(index),
                    causes_total_ns={
                        cause: ns + number * 10**8 for cause, ns in gpu(index).causes_total_ns.items()
                    },
                    power_watts=400.0 + number % 7,
                )
                for index in range(GPUS)
            ),
            engines=(engine("vllm/a/0", tokens=100 * number), engine("vllm/b/0", tokens=50 * number)),
            wall_ns=time.time_ns(),
        )


def each_second(publish: Callable[[Frame], None]) -> None:
    """Publish a Frame a second for ever."""
    due = time.monotonic()
    for each in frames():
        publish(each)
        due += INTERVAL_S
        time.sleep(max(0.0, due - time.monotonic()))


def ours(collector: str, port: int) -> None:
    """Run gpuidle's exporters."""
    from gpuidle.exporters.otlp import OtlpExporter
    from gpuidle.exporters.prometheus import PrometheusExporter

    exporters: list[Exporter] = [PrometheusExporter(f"127.0.0.1:{port}"), OtlpExporter(collector, INTERVAL_S)]

    def publish(each: Frame) -> None:
        for exporter in exporters:
            exporter.publish(each)

    each_second(publish)


def sdk(collector: str, port: int) -> None:
    """Run the SDK's readers over observable instruments that read the last Frame."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from prometheus_client import start_http_server

    periodic = PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=f"{collector}/v1/metrics"), export_interval_millis=INTERVAL_S * 1000
    )
    provider = MeterProvider(metric_readers=[periodic, PrometheusMetricReader()])
    meter = provider.get_meter("gpuidle")
    held: list[Frame] = [next(iter(frames()))]

    def reading(metric: Any) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(value, dict(attributes)) for attributes, value in metric.read(held[0])]

    make: dict[str, Any] = {
        "counter": meter.create_observable_counter,
        "updowncounter": meter.create_observable_up_down_counter,
        "gauge": meter.create_observable_gauge,
    }
    for metric in FRAME_METRICS:
        make[metric.kind](metric.name, [reading(metric)], metric.unit, metric.description)
    start_http_server(port, "127.0.0.1")

    def publish(each: Frame) -> None:
        held[0] = each

    each_second(publish)


def bare(_collector: str, _port: int) -> None:
    """Make the Frames and nothing else."""
    each_second(lambda _: None)


CHILDREN: dict[str, Callable[[str, int], None]] = {"gpuidle": ours, "sdk": sdk, "bare": bare}


class Collector:
    """Takes OTLP requests and counts their bytes by child."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                child = self.path.split("/")[1]
                outer.requests[child] = outer.requests.get(child, 0) + 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--child", choices=sorted(CHILDREN))
    parser.add_argument("--collector", default="")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.child:
        CHILDREN[arguments.child](arguments.collector, arguments.port)
        return
    from tests.live.server import free_port

    collector = Collector()
    ports = {name: free_port() for name in CHILDREN}
    children = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.export_cpu", "--child", name,
             "--collector", f"{collector.url}/{name}", "--port", str(ports[name])]
        )
        for name in CHILDREN
    }  # fmt: skip
    try:
        time.sleep(8)  # imports, and the first exports
        processes = {name: psutil.Process(child.pid) for name, child in children.items()}
        before, sent = {name: cpu_s(each) for name, each in processes.items()}, dict(collector.requests)
        scrapes: dict[str, list[int]] = {"gpuidle": [], "sdk": []}
        began = time.monotonic()
        for second in range(arguments.seconds):
            for name, sizes in scrapes.items():
                with urllib.request.urlopen(f"http://127.0.0.1:{ports[name]}/metrics", timeout=10) as answer:
                    sizes.append(len(answer.read()))
            time.sleep(max(0.0, began + second + 1 - time.monotonic()))
        spent = time.monotonic() - began
        used = {name: cpu_s(processes[name]) - before[name] for name in processes}
    finally:
        for child in children.values():
            child.terminate()
    series = sum(len(found) for _, found in points(next(iter(frames()))))
    print(f"{GPUS} GPUs, {series} series of frames, {spent:.0f} s, ms of CPU a second:")
    for name in CHILDREN:
        exports = collector.requests.get(name, 0) - sent.get(name, 0)
        page = scrapes.get(name, [])
        size = f"{len(page)} scrapes of {page[-1]} bytes" if page else ""
        print(f"  {name:8} {1000 * used[name] / spent:6.1f}   {exports} exports {size}")
    ratio = (used["gpuidle"] - used["bare"]) / (used["sdk"] - used["bare"])
    print(f"gpuidle over the SDK's readers, both less the bare child: {ratio:.2f}")


if __name__ == "__main__":
    main()
