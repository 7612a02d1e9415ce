"""The monitoring plug-in: states, performance data, and what is not known."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from tests.collectors.simulator.nodes import SMALL
from tests.exporters.frames import frame, gpu
from tests.exporters.http import refusing_url

from gpuidle.agent.clock import SystemClock
from gpuidle.agent.commands.check import _measured, _Span
from gpuidle.agent.commands.check_logic import (
    CheckError,
    GpuTotals,
    Limit,
    Limits,
    State,
    Totals,
    Waste,
    totals_of_frame,
    totals_of_page,
    verdict,
    waste,
)
from gpuidle.agent.model import Frame
from gpuidle.collectors.simulator.scenario import SECOND_NS, GpuSpec, Scenario
from gpuidle.collectors.simulator.source import SimulatorSource
from gpuidle.exporters.catalogue import points
from gpuidle.exporters.naming import label_name
from gpuidle.exporters.prometheus import PrometheusExporter

ZERO = GpuTotals({}, 0.0, 2.0, "USD")
PERFORMANCE = re.compile(r"(\w+)=([\d.e+-]+)(%?);([\d.]*);([\d.]*);([\d.]*);([\d.]*)")


def grown(reclaimable: float | None = None, **seconds: float) -> GpuTotals:
    return GpuTotals(seconds, reclaimable, 2.0, "USD")


def wasted(**gpus: GpuTotals) -> Waste:
    before: Totals = {hw_id: now._replace(causes_s={}, reclaimable_s=0.0) for hw_id, now in gpus.items()}
    return waste(before, gpus)


def test_waste_is_what_grew_in_the_window() -> None:
    before: Totals = {
        "a": GpuTotals({"no_request": 100.0, "useful": 5.0}, None, 2.0, "USD"),
        "b": GpuTotals({"host_gap": 50.0, "useful": 1.0}, 7.0, None, "USD"),
    }
    after: Totals = {
        "a": GpuTotals({"no_request": 110.0, "useful": 5.0}, None, 2.0, "USD"),
        "b": GpuTotals({"host_gap": 52.5, "useful": 8.5}, 9.0, None, "USD"),
        "new": grown(useful=3.0),
    }
    found = waste(before, after)
    assert (found.gpus, found.window_s, found.unused_gpus) == (2, 10.0, 1.0)
    assert found.host_gap == pytest.approx(0.125)
    assert found.reclaimable == pytest.approx(0.2)  # of the one GPU of which it is known
    assert found.cost_per_hour == pytest.approx(2.0)  # of the one GPU that has a price


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ({}, {}, "no GPU"),
        ({"a": grown(useful=9.0)}, {"a": grown(useful=1.0)}, "anew"),
        ({"a": grown(useful=9.0)}, {"a": grown(useful=9.0)}, "nothing was measured"),
        ({"a": grown(useful=9.0)}, {"b": grown(useful=9.0)}, "nothing was measured"),
    ],
)
def test_what_cannot_be_judged_is_an_error(before: Totals, after: Totals, word: str) -> None:
    with pytest.raises(CheckError, match=word):
        waste(before, after)


def test_the_worst_of_what_was_asked_for_is_the_state() -> None:
    found = wasted(a=grown(no_request=10.0), b=grown(host_gap=3.0, useful=7.0))
    limits = Limits(unused=Limit(1, 2), host_gap=Limit(0.1, 0.15))
    state, line = verdict(found, limits)
    assert state is State.CRITICAL
    assert line.startswith("GPUIDLE CRITICAL - 1.0 of 2 GPUs unused (WARNING), host gaps 15.0% (CRITICAL)")
    assert verdict(found, Limits(unused=Limit(1, 2)))[0] is State.WARNING
    assert verdict(found, Limits(host_gap=Limit(0.2, None)))[0] is State.OK


def test_performance_data_follows_the_guidelines() -> None:
    found = wasted(a=grown(2.5, memory_bound=5.0, useful=5.0))
    _, line = verdict(found, Limits(reclaimable=Limit(0.2, 0.4), cost=Limit(None, 10)))
    _, _, performance = line.partition(" | ")
    items = {
        match[1]: match.groups()[1:] for match in map(PERFORMANCE.fullmatch, performance.split()) if match
    }
    assert len(items) == len(performance.split())
    assert items["reclaimable"] == ("25", "%", "20", "40", "0", "100")
    assert items["cost"] == ("0.5", "", "", "10", "0", "")


def test_what_was_asked_for_and_is_not_known_is_unknown() -> None:
    found = replace(wasted(a=grown(useful=10.0)), reclaimable=None)
    state, line = verdict(found, Limits(reclaimable=Limit(0.2, None)))
    assert state is State.UNKNOWN
    assert "reclaimable is not known" in line
    assert "reclaimable=" not in line
    worse, _ = verdict(
        replace(found, host_gap=0.9), Limits(reclaimable=Limit(0.2, None), host_gap=Limit(0.1, None))
    )
    assert worse is State.WARNING


def test_a_blind_node_is_not_ok() -> None:
    found = wasted(a=grown(unobserved=6.0, useful=4.0))
    assert verdict(found, Limits(host_gap=Limit(0.1, 0.2)))[0] is State.UNKNOWN


def test_a_page_tells_the_same_totals_as_its_frame() -> None:
    split = frame(gpus=(gpu(0), gpu(1), gpu(2, parent="GPU-1")))
    samples = [
        (metric.prometheus, {label_name(name): text for name, text in attributes}, float(value))
        for metric, found in points(split)
        for attributes, value in found
    ]
    assert set(totals_of_page(samples)) == {"GPU-0", "GPU-2"}
    assert totals_of_page(samples) == totals_of_frame(split)


def test_it_measures_itself_where_there_is_no_agent() -> None:
    node = Scenario(seed=1, gpus=(GpuSpec(),) * 2, engines=(SMALL,), duration_ns=60 * SECOND_NS)
    source = SimulatorSource(node, SystemClock(), paced=False)
    found = waste(*_measured(source, 20.0, {"": 3.0}, "EUR"))
    assert found.gpus == 2
    assert found.unused_gpus == pytest.approx(2.0, abs=0.01)  # one loaded and one without a process
    assert found.window_s >= 10.0
    assert found.cost_per_hour == pytest.approx(6.0, abs=0.05)
    assert found.currency == "EUR"


def test_a_gpu_that_is_split_has_no_window_and_is_not_waited_for() -> None:
    stopped: list[bool] = []
    span = _Span(5.0, lambda: stopped.append(True))
    whole = msgspec.structs.replace(gpu(0), window_ns=0)
    for second in range(8):
        parts = (whole, gpu(1, parent="GPU-0"), gpu(2, parent="GPU-0"))
        span.publish(msgspec.structs.replace(frame(gpus=parts), monotonic_ns=second * SECOND_NS))
    assert stopped
    assert span.first is not None
    assert span.last is not None
    assert set(totals_of_frame(span.last)) == {"GPU-1", "GPU-2"}


# The program --------------------------------------------------------------------------------------------


def check(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "gpuidle", "check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def agent() -> Iterator[PrometheusExporter]:
    """An agent whose GPU 0 has no request and whose GPU 1 is useful, all of the time."""
    exporter = PrometheusExporter("127.0.0.1:0")
    done = threading.Event()

    def at(seconds: float) -> Frame:
        ns = round(seconds * 1e9)
        cards = tuple(
            msgspec.structs.replace(gpu(index), causes_total_ns={cause: ns}, reclaimable_total_ns=None)
            for index, cause in enumerate(("no_request", "useful"))
        )
        return frame(gpus=cards)

    def run() -> None:
        while not done.wait(0.2):
            exporter.publish(at(time.monotonic()))

    exporter.publish(at(time.monotonic()))
    thread = threading.Thread(target=run)
    thread.start()
    yield exporter
    done.set()
    thread.join()
    exporter.close()


def test_it_asks_a_running_agent(agent: PrometheusExporter) -> None:
    code, text = check("--url", agent.url, "--window", "2", "--unused", "0.9", "--cost", "100,200")
    assert code == 1
    assert text.startswith("GPUIDLE WARNING - 1.0 of 2 GPUs unused (WARNING), 2.50 USD/h wasted, 2 GPUs over")
    assert len(text.splitlines()) == 1


def test_an_agent_is_asked_past_a_proxy(agent: PrometheusExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", refusing_url())
    assert check("--url", agent.url, "--window", "2", "--cost", "100")[0] == 0


def test_what_is_no_http_is_unknown_and_no_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as visitor:
                visitor.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                visitor.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        code, text = check("--url", f"http://127.0.0.1:{server.getsockname()[1]}/metrics", "--window", "2")
        thread.join()
    assert code == 3
    assert text.startswith("GPUIDLE UNKNOWN - ")


def test_no_agent_is_unknown() -> None:
    code, text = check("--url", f"{refusing_url()}/metrics", "--window", "2")
    assert code == 3
    assert text.startswith("GPUIDLE UNKNOWN - no metrics from")


@pytest.mark.parametrize(
    "arguments", [("--host-gap", "200%"), ("--unused", "3,1"), ("--cost", "much"), ("--no-such-option",)]
)
def test_bad_usage_is_unknown_and_not_critical(arguments: tuple[str, ...]) -> None:
    assert check(*arguments)[0] == 3
