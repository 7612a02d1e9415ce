"""The Prometheus endpoint: what it says, to whom, and when it says nothing."""

from __future__ import annotations

import gzip
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.exporters.frames import AGENT, engine, frame, gpu
from tests.exporters.http import WAIT_S, get

from gpuidle.agent.model import OutletStatus
from gpuidle.exporters import latest
from gpuidle.exporters.catalogue import MetricPoints, agent_points, points
from gpuidle.exporters.exposition import page
from gpuidle.exporters.histograms import HistogramPoints, histogram_points
from gpuidle.exporters.naming import label_name
from gpuidle.exporters.prometheus import ListenError, PrometheusExporter

GOLDEN = Path(__file__).parents[1] / "data" / "exporters" / "metrics.txt"
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter("127.0.0.1:0")
    yield exporter
    exporter.close()


def scrape(exporter: PrometheusExporter) -> str:
    status, headers, body = get(f"http://{exporter.address}/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    return body.decode()


def by_value(text: str) -> list[tuple[str, float | str]]:
    """Return the lines with their values as numbers: versions of prometheus_client write them differently."""
    lines = [line.rpartition(" ") for line in text.splitlines()]
    return [(head, last if head.startswith("#") else float(last)) for head, _, last in lines]


def test_the_page_of_two_gpus_and_one_engine_is_the_golden_one() -> None:
    entries: list[MetricPoints | HistogramPoints] = [*points(frame()), *histogram_points(frame())]
    text = page([*entries, *agent_points(AGENT)], openmetrics=False)
    assert by_value(text) == by_value(GOLDEN.read_text(encoding="utf-8"))


def test_a_strict_openmetrics_parser_takes_the_page(exporter: PrometheusExporter) -> None:
    exporter.publish(frame(gpus=(gpu(0), gpu(1), gpu(2, parent="GPU-1")), engines=(engine(model='a"\\\nb'),)))
    status, headers, body = get(f"http://{exporter.address}/metrics", OPENMETRICS)
    assert status == 200
    assert headers["content-type"].startswith("application/openmetrics-text")
    parsed: Iterable[Metric] = parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
    found = {family.name: family for family in parsed}
    assert found["gpuidle_engine_tokens"].type == "counter"
    assert {sample.labels["gpuidle_model"] for sample in found["gpuidle_engine_tokens"].samples} == {
        'a"\\\nb'
    }
    assert all(family.documentation for family in found.values())
    assert not [s for family in found.values() for s in family.samples if s.name.endswith("_created")]


def test_promtool_has_no_complaint(exporter: PrometheusExporter) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    exporter.publish(frame())
    done = subprocess.run(
        [promtool, "check", "metrics"], input=scrape(exporter), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_ready_only_after_the_first_frame_and_alive_before(exporter: PrometheusExporter) -> None:
    base = f"http://{exporter.address}"
    assert get(f"{base}/healthz")[0] == 200
    assert get(f"{base}/readyz")[0] == 503
    assert "gpuidle_agent_build_info" in scrape(exporter)
    exporter.publish(frame())
    assert get(f"{base}/readyz")[0] == 200
    assert get(f"{base}/elsewhere")[0] == 404


@pytest.mark.parametrize(
    ("interval_s", "age_s", "status"),
    [(1, 59, 200), (1, 61, 503), (30, 89, 200), (30, 91, 503), (0, 999, 200)],
)
def test_it_is_not_healthy_once_frames_have_stopped(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch, interval_s: int, age_s: int, status: int
) -> None:
    exporter.publish(msgspec.structs.replace(frame(), interval_ns=interval_s * 10**9))
    monkeypatch.setattr(latest.Latest, "age_s", lambda *_: float(age_s))
    assert get(f"http://{exporter.address}/healthz")[0] == status
    assert get(f"http://{exporter.address}/readyz")[0] == 200


def test_the_series_of_what_is_gone_end_with_the_next_frame(exporter: PrometheusExporter) -> None:
    exporter.publish(frame())
    assert 'gpuidle_engine_id="vllm/llama/0"' in scrape(exporter)
    exporter.publish(frame(sequence=2, gpus=(gpu(0, engine_ids=()),), engines=()))
    page = scrape(exporter)
    assert "vllm/llama/0" not in page
    assert "GPU-1" not in page
    assert "GPU-0" in page


def test_an_old_frame_loses_its_gauges_and_keeps_its_counters(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.publish(frame())
    fresh = {family.name: family.type for family in parse_text(scrape(exporter))}
    monkeypatch.setattr(latest, "STALE_AFTER_S", -1.0)
    monkeypatch.setattr(latest.Latest, "age_s", lambda *_: 3.5)
    old = {family.name: family.type for family in parse_text(scrape(exporter))}
    gone = set(fresh) - set(old)
    assert {"hw_power_watts", "hw_gpu_memory_usage_bytes", "gpuidle_gpu_engine_info"} <= gone
    assert "gpuidle_compute_time_seconds" in old
    assert "gpuidle_engine_tokens" in old
    assert "gpuidle_step_duration_seconds" in old
    assert all(fresh[name] == "gauge" for name in gone)
    ages = [
        s.value
        for f in parse_text(scrape(exporter))
        for s in f.samples
        if s.name.endswith("frame_age_seconds")
    ]
    assert ages == [3.5]


def test_slow_sources_keep_their_gauges_for_three_intervals() -> None:
    import msgspec

    slow = latest.Latest(msgspec.structs.replace(frame(), interval_ns=60 * 10**9), 0)
    assert not slow.stale(170 * 10**9)
    assert slow.stale(181 * 10**9)
    assert latest.Latest(frame(), 0).stale(11 * 10**9)
    assert not latest.Latest(frame(), 0).stale(9 * 10**9)


def test_an_address_in_use_is_named_with_a_remedy(exporter: PrometheusExporter) -> None:
    with pytest.raises(ListenError) as caught:
        PrometheusExporter(exporter.address)
    assert exporter.address in str(caught.value)
    assert "another address" in str(caught.value)


@pytest.mark.parametrize("address", ["9405", "localhost", "127.0.0.1:http", ":9405", "127.0.0.1:70000", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ListenError, match="host:port"):
        PrometheusExporter(address)


def test_the_port_is_free_again_after_close() -> None:
    first = PrometheusExporter("127.0.0.1:0")
    address = first.address
    first.close()
    second = PrometheusExporter(address)
    assert second.address == address
    second.close()


def test_a_reader_that_never_reads_holds_up_nobody(exporter: PrometheusExporter) -> None:
    exporter.publish(frame())
    host, _, port = exporter.address.rpartition(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
        assert "gpuidle_compute_time_seconds_total" in scrape(exporter)


def test_scrapes_and_frames_at_once_give_whole_pages(exporter: PrometheusExporter) -> None:
    exporter.publish(frame())
    stop = threading.Event()

    def publish() -> None:
        sequence = 1
        while not stop.is_set():
            sequence += 1
            count = 1 + sequence % 2
            exporter.publish(frame(sequence=sequence, gpus=tuple(gpu(i) for i in range(count))))
            time.sleep(0.001)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for _ in range(10):
            found = {family.name: family for family in parse_text(scrape(exporter))}
            gpus = {sample.labels["hw_id"] for sample in found["hw_power_watts"].samples}
            for name in ("gpuidle_compute_time_seconds", "gpuidle_gpu_engine_info"):
                assert {sample.labels["hw_id"] for sample in found[name].samples} == gpus
    finally:
        stop.set()
        thread.join(WAIT_S)


def test_outlets_are_asked_at_each_scrape() -> None:
    class Pipe:
        dropped = 0

        def outlets(self) -> tuple[OutletStatus, ...]:
            return (OutletStatus(outlet="otlp", dropped=self.dropped),)

    pipe = Pipe()
    exporter = PrometheusExporter("127.0.0.1:0", pipe)
    try:
        pipe.dropped = 7
        line = 'gpuidle_agent_outlet_frames_total{gpuidle_outlet="otlp",gpuidle_result="dropped"} 7.0'
        assert line in scrape(exporter)
    finally:
        exporter.close()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_parser_reads_back_what_was_written(openmetrics: bool) -> None:
    entries = points(frame(engines=(engine(model='a"\\\nb\\n{}=, é'),)))
    parse = parse_openmetrics if openmetrics else parse_text
    families: Iterable[Metric] = parse(page(entries, openmetrics=openmetrics))
    read = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    assert read == {
        (metric.prometheus, frozenset((label_name(name), text) for name, text in attributes)): value
        for metric, found in entries
        for attributes, value in found
    }


def test_a_scraper_that_takes_gzip_gets_it(exporter: PrometheusExporter) -> None:
    exporter.publish(frame())
    _, headers, body = get(f"http://{exporter.address}/metrics", {"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert "gpuidle_compute_time_seconds_total" in gzip.decompress(body).decode()
