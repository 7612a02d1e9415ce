"""A replayed node -> gpuidle run -> a real Prometheus -> rules -> a real Alertmanager -> a webhook.

Needs `prometheus` and `prometheus-alertmanager` of the distribution, none of them running as a service.
"""

from __future__ import annotations

import math
import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.deploy.promql import DASHBOARDS, RULES, of_dashboard, of_documentation, substituted
from tests.deploy.sessions import WASTED_AND_BLIND, record, with_one_hidden
from tests.live.monitoring import (
    ALERTMANAGER,
    PROMETHEUS,
    Prometheus,
    Webhook,
    alertmanager,
    answers,
    hurried,
    prometheus,
    running,
    until,
)
from tests.live.server import free_port

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or ALERTMANAGER is None, reason="no Prometheus or no Alertmanager on this machine"
)

SESSION_S = 240
"""Longer than the tests take: the agent ends with it."""
INSTANCE = "node-a"
WASTES = {"GpuidleModelUnused", "GpuidleHostGaps", "GpuidleGpuUnallocated", "GpuidleBlind"}


class Setup(NamedTuple):
    """What runs while the tests of this file do."""

    agent: str
    prometheus: Prometheus
    webhook: Webhook


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("monitoring")
    session = folder / "wasted.gpuidle.mcap"
    record(session, WASTED_AND_BLIND, SESSION_S, with_one_hidden)
    address = f"127.0.0.1:{free_port()}"
    agent = [sys.executable, "-m", "gpuidle", "run", "--replay", str(session), "--price", "2.5"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    webhook = Webhook()
    rules = [hurried(path, folder) for path in RULES]
    with (
        running([*agent, "--prometheus", address], folder / "agent.log", environment),
        alertmanager(folder, webhook) as manager,
        prometheus(folder, address, rules, manager, INSTANCE) as server,
    ):
        until(lambda: answers(f"http://{address}/readyz"), "the agent has a frame")
        try:
            until(lambda: webhook.firing() >= WASTES, f"these alerts come: {WASTES}")
        except AssertionError as error:
            alerts = [row["metric"] for row in server.query("ALERTS")]
            blind = server.query("gpu:gpuidle_blind:ratio_rate5m")
            raise AssertionError(
                f"{error}; there came {webhook.firing()}, there are {alerts}, {blind}"
            ) from None
        yield Setup(address, server, webhook)
    webhook.close()


def test_a_webhook_hears_of_the_waste_with_what_to_do(setup: Setup) -> None:
    by_name = {alert["labels"]["alertname"]: alert for alert in setup.webhook.alerts}
    unused = by_name["GpuidleModelUnused"]
    assert unused["labels"]["gpuidle_model"] == "unused"
    assert unused["labels"]["k8s_namespace_name"] == "chat"
    assert unused["annotations"]["summary"] == f"unused on {INSTANCE} is loaded and nobody asks"
    assert "at 2.50 USD per hour" in unused["annotations"]["description"]
    assert "Scale the deployment" in unused["annotations"]["action"]
    assert by_name["GpuidleHostGaps"]["labels"]["gpuidle_model"] == "gaps"
    assert "at 2.50 USD per hour" in by_name["GpuidleGpuUnallocated"]["annotations"]["description"]
    for alert in setup.webhook.alerts:
        assert "{{" not in str(alert["annotations"])
        assert "error" not in str(alert["annotations"]).lower()


def test_the_five_queries_of_the_documentation_answer(setup: Setup) -> None:
    found = {title: setup.prometheus.query(query) for title, query in of_documentation()}
    assert len(found) == 5
    idle, gaps, unused, headroom, blind = found.values()
    shares = {row["metric"]["gpuidle_model"]: float(row["value"][1]) for row in idle}
    assert shares["unused"] == pytest.approx(1.0, abs=0.02)
    assert 0.5 < shares["few-rows"] < 1.0
    stalled = {row["metric"]["gpuidle_model"]: float(row["value"][1]) for row in gaps}
    assert set(stalled) == {"gaps", "few-rows"}  # the others keep nobody waiting
    assert stalled["gaps"] > 0.8
    assert stalled["few-rows"] < 0.1
    [namespace] = unused
    assert namespace["metric"] == {"k8s_namespace_name": "chat", "gpuidle_currency": "USD"}
    assert float(namespace["value"][1]) == pytest.approx(2.5, abs=0.25)
    # Steps of the node that waits for its host are few: more rows in them would give next to nothing.
    assert [row["metric"]["gpuidle_model"] for row in headroom] == ["few-rows"]
    assert len(blind) == 1


def test_every_query_of_the_dashboards_answers(setup: Setup) -> None:
    [gpu] = setup.prometheus.query('gpuidle_gpu_engine_info{gpuidle_model="few-rows"}')
    variables = {"cluster": ".*", "instance": INSTANCE, "hw_id": gpu["metric"]["hw_id"]}
    silent = []
    for path in DASHBOARDS:
        for title, query in of_dashboard(path):
            rows = setup.prometheus.query(substituted(query, **variables))
            if not rows or any(math.isnan(float(row["value"][1])) for row in rows):
                silent.append((title, query))
    assert silent == []


def test_prometheus_holds_what_the_agent_says(setup: Setup) -> None:
    """Every series of the page, and causes that sum to the GPUs that are watched."""
    gpus = setup.prometheus.value("sum(gpu_cause:gpuidle_compute_time:ratio_rate5m)")
    assert gpus == pytest.approx(5)
    with urllib.request.urlopen(f"http://{setup.agent}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    types = [line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE gpuidle")]
    names = {f"{name}_count" if kind == "histogram" else name for name, kind in types}
    stored = {row["metric"]["__name__"] for row in setup.prometheus.query('{__name__=~"gpuidle_.+"}')}
    assert names <= stored
