"""gpuidle run -> OTLP -> a real collector (rotel, named by GPUIDLE_LIVE_ROTEL) -> our receiver: same values.

The collector is stopped and started in between: counters lose nothing.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.sessions import WASTED, in_pods, record
from tests.live.monitoring import answers, running, until
from tests.live.receiver import Receiver
from tests.live.server import free_port

from gpuidle.agent.analysis.analyzer import Analyzer, Settings
from gpuidle.collectors.recording.reader import Session

ROTEL = os.environ.get("GPUIDLE_LIVE_ROTEL", "")
SECONDS = 200
LEDGER = "gpuidle.compute.time"

pytestmark = pytest.mark.skipif(not ROTEL, reason="GPUIDLE_LIVE_ROTEL names no rotel-agent")


@contextmanager
def rotel(folder: Path, http: int, grpc: int, receiver: Receiver) -> Iterator[None]:
    command = [
        ROTEL, "start",
        "--otlp-http-endpoint", f"127.0.0.1:{http}", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
        "--exporter", "otlp", "--otlp-exporter-protocol", "http", "--disable-batching",
        "--otlp-exporter-metrics-endpoint", f"{receiver.url}/v1/metrics",
        "--otlp-exporter-traces-endpoint", f"{receiver.url}/v1/traces",
        "--otlp-exporter-logs-endpoint", f"{receiver.url}/v1/logs",
    ]  # fmt: skip
    with running(command, folder / "rotel.log"):
        yield


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_that_was_away_has_everything(tmp_path: Path, protocol: str) -> None:
    session = tmp_path / "wasted.gpuidle.mcap"
    record(session, WASTED, SECONDS, in_pods)
    http, grpc, address = free_port(), free_port(), f"127.0.0.1:{free_port()}"
    port = http if protocol == "http/protobuf" else grpc
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
    }
    receiver = Receiver()
    agent = [
        sys.executable, "-m", "gpuidle", "run", "--replay", str(session), "--speed", "5",
        "--prometheus", address, "--otlp", f"http://127.0.0.1:{port}", "--otlp-interval", "0.5",
    ]  # fmt: skip
    with running(agent, tmp_path / "agent.log", environment):
        with rotel(tmp_path, http, grpc, receiver):
            until(lambda: receiver.requests > 2, "the first exports arrive")
            before = receiver.total(LEDGER)
        # The collector is gone, the agent measures on.
        lost_from = served_seconds(address)
        until(lambda: served_seconds(address) > lost_from + 20, "it measures on without a collector")
        with rotel(tmp_path, http, grpc, receiver):
            until(lambda: receiver.total(LEDGER) > before + 20, "the collector is told again")
            until(lambda: not answers(f"http://{address}/healthz"), "the session and with it the agent end")
            expected = ledger_of(session)
            until(lambda: arrived(receiver) == expected, "the last export holds the whole ledger")
    receiver.close()


def ledger_of(session: Path) -> dict[tuple[str, str], float]:
    """Return the ledger at the end of a session by GPU and cause, in seconds, concluded here."""
    analyzer = Analyzer(Settings())
    *_, last = (analyzer.feed(snapshot) for snapshot in Session(session))
    return {(gpu.hw_id, cause): ns / 1e9 for gpu in last.gpus for cause, ns in gpu.causes_total_ns.items()}


def arrived(receiver: Receiver) -> dict[tuple[str, str], float]:
    """Return the newest ledger that came through the collector."""
    with receiver.lock:
        found = [(dict(labels), value) for (name, labels), value in receiver.values.items() if name == LEDGER]
    return {(labels["hw.id"], labels["gpuidle.cause"]): value for labels, value in found}


def served_seconds(address: str) -> float:
    """Return the time that the agent's own page accounts for."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    wanted = "gpuidle_compute_time_seconds_total"
    return sum(each.value for family in families for each in family.samples if each.name == wanted)
