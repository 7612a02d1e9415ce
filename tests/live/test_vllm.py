"""The main job on the real thing: gpuidle attaches to a running vLLM and tells what it did.

Needs the interpreter of an environment with vLLM (tests/live/requirements-vllm.txt) in GPUIDLE_LIVE_PYTHON.
The engine is real and runs on the CPU; the GPU it seems to hold is the NVML double's. No cadence and no
latency is asserted: on two cores the engine starves everything else.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.promql import RULES
from tests.doubles.nvml import Gpu, Process, Scenario, build, environment
from tests.live.monitoring import (
    ALERTMANAGER,
    PROMETHEUS,
    Webhook,
    alertmanager,
    hurried,
    prometheus,
    until,
)
from tests.live.receiver import Receiver
from tests.live.server import CHUNK_TOKENS, MODEL, Ask, Server

from gpuidle.agent.physics.shapes import shape_from_config
from gpuidle.agent.physics.vllm_estimate import vllm_estimated_flops

PYTHON = os.environ.get("GPUIDLE_LIVE_PYTHON", "")
GPUIDLE = [sys.executable, "-m", "gpuidle"]
HW_ID = "GPU-00000000-0000-4000-8000-000000000000"
OTHER = "GPU-00000000-0000-4000-8000-000000000001"
SETTLED_S = 6
"""The analysis settles windows two seconds late; twice that, and a tick."""

pytestmark = pytest.mark.skipif(not PYTHON, reason="GPUIDLE_LIVE_PYTHON names no interpreter with vLLM")


class Double:
    """The GPU that the engine's worker holds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "node.txt"
        self.library = build()
        self.pids: list[int] = []
        self.set_busy(0)

    def set_busy(self, percent: int) -> None:
        held = tuple(Process(pid, 2 * 2**30) for pid in self.pids)
        busy = Gpu(utilization_gpu_percent=percent, processes=held, memory_used_bytes=4 * 2**30)
        Scenario(gpus=(busy, Gpu())).write(self.path)

    def environment(self) -> dict[str, str]:
        return environment(self.library, self.path)


class Agent:
    """`gpuidle run`, started after the engine and told nothing about it."""

    def __init__(self, double: Double, receiver: Receiver, log: Path) -> None:
        command = [
            *GPUIDLE, "run", "--interval", "0.5", "--prometheus", "127.0.0.1:0",
            "--otlp", receiver.url, "--otlp-interval", "0.5",
        ]  # fmt: skip
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=double.environment(), stdout=output, stderr=subprocess.STDOUT
            )
        self.engine_id = ""
        self.url = ""
        for _ in range(200):
            found = re.search(r"(http://127\.0\.0\.1:\d+/metrics)", log.read_text())
            if found:
                self.url = found[1]
                break
            time.sleep(0.1)
        assert self.url, log.read_text()

    def scrape(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            text = answer.read().decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of the series of a name whose labels include `labels`; None if there is none."""
        found = [
            value
            for (metric, attributes), value in self.scrape().items()
            if metric == name and labels.items() <= dict(attributes).items()
        ]
        return sum(found) if found else None

    def tokens(self) -> tuple[float, float]:
        name = "gpuidle_engine_tokens_total"
        prefill = self.total(name, gpuidle_phase="prefill", gpuidle_engine_id=self.engine_id)
        decode = self.total(name, gpuidle_phase="decode", gpuidle_engine_id=self.engine_id)
        assert prefill is not None
        assert decode is not None
        return prefill, decode

    def phases(self, hw_id: str) -> dict[str, float]:
        return {
            phase: self.total("gpuidle_phase_time_seconds_total", gpuidle_phase=phase, hw_id=hw_id) or 0.0
            for phase in ("prefill", "decode", "mixed", "idle", "unknown")
        }

    def causes(self, hw_id: str) -> dict[str, float]:
        return {
            dict(labels)["gpuidle_cause"]: value
            for (name, labels), value in self.scrape().items()
            if name == "gpuidle_compute_time_seconds_total" and dict(labels)["hw_id"] == hw_id
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(PYTHON, tmp_path_factory.mktemp("vllm") / "server.log", "--enable-mfu-metrics")
    try:
        server.wait_until_healthy()
        server.give_way()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def double(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Double:
    double = Double(tmp_path_factory.mktemp("double"))
    double.pids = server.worker_pids()[-1:]
    assert double.pids, "vLLM has no worker process"
    double.set_busy(0)
    return double


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def agent(double: Double, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(double, receiver, tmp_path_factory.mktemp("agent") / "agent.log")
    for _ in range(120):
        # Other engines may run on this machine: ours is the one that holds the double's GPU.
        agent.engine_id = next(
            (
                dict(labels)["gpuidle_engine_id"]
                for (name, labels), _ in agent.scrape().items()
                if name == "gpuidle_gpu_engine_info" and dict(labels)["hw_id"] == HW_ID
            ),
            "",
        )
        if (
            agent.engine_id
            and agent.total("gpuidle_engine_tokens_total", gpuidle_engine_id=agent.engine_id) is not None
        ):
            break
        time.sleep(0.5)
    else:
        raise AssertionError(f"the engine was not found:\n{agent.log.read_text()}")
    yield agent
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(10) == 0, agent.log.read_text()


def load(
    double: Double, agent: Agent, run: Callable[[], list[Ask]]
) -> tuple[dict[str, float], dict[str, float]]:
    """Run a load with the GPU shown busy meanwhile; check the token sums, return what phases and causes grew.

    Prompt tokens are prefill; the first token of a request comes from its prefill, the rest is decode.
    """
    time.sleep(SETTLED_S)
    phases, causes, tokens = agent.phases(HW_ID), agent.causes(HW_ID), agent.tokens()
    double.set_busy(100)
    time.sleep(1)
    asks = run()
    double.set_busy(0)
    time.sleep(SETTLED_S)
    prefill, decode = agent.tokens()
    print(f"\nprefill tokens {prefill - tokens[0]:.0f}, decode tokens {decode - tokens[1]:.0f}")
    assert prefill - tokens[0] == sum(ask.prompt_tokens for ask in asks)
    assert decode - tokens[1] == sum(ask.output_tokens - 1 for ask in asks)
    grown = (
        {phase: value - phases[phase] for phase, value in agent.phases(HW_ID).items()},
        {cause: value - causes[cause] for cause, value in agent.causes(HW_ID).items()},
    )
    print("s by phase", {phase: round(value, 2) for phase, value in grown[0].items()})
    print("s by cause", {cause: round(value, 3) for cause, value in grown[1].items() if value})
    return grown


def all_of(server: Server, asks: list[Ask], concurrency: int) -> Callable[[], list[Ask]]:
    def run() -> list[Ask]:
        server.client.complete_all(asks, concurrency)
        return asks

    return run


def share(phases: dict[str, float], phase: str) -> float:
    """Share of a phase in what was labelled; most of the load must be.

    On two cores the engine starves its own server and us: what is not read in time is unknown, and says so.
    """
    labelled = phases["prefill"] + phases["decode"] + phases["mixed"]
    assert labelled > 0.5 * (labelled + phases["unknown"]), phases
    return phases[phase] / labelled


def test_it_finds_the_engine_by_itself(agent: Agent, server: Server) -> None:
    info = [dict(labels) for (name, labels), _ in agent.scrape().items() if name == "gpuidle_gpu_engine_info"]
    mine = [labels for labels in info if labels["hw_id"] == HW_ID]
    assert len(mine) == 1
    assert mine[0]["gpuidle_model"] == "tiny"
    assert "vllm" in mine[0]["gpuidle_engine_id"]
    assert str(server.port) not in mine[0]["gpuidle_engine_id"]


def test_the_engines_own_estimate_is_reproduced_to_the_last_flop(server: Server) -> None:
    prompt, output = 600, 40
    before = server.counter("vllm:estimated_flops_per_gpu_total")
    server.client.complete(Ask(prompt, output))
    chunks = [(min(CHUNK_TOKENS, prompt - done), done) for done in range(0, prompt, CHUNK_TOKENS)]
    steps = [(tokens, done + tokens) for tokens, done in chunks]
    steps += [(1, prompt + i) for i in range(1, output)]
    shape = shape_from_config(json.loads((MODEL / "config.json").read_text()))
    expected = sum(
        vllm_estimated_flops(shape, tokens=tokens, token_context_products=tokens * context, logit_rows=1)
        for tokens, context in steps
    )
    for _ in range(40):
        counted = server.counter("vllm:estimated_flops_per_gpu_total") - before
        if counted == expected:
            break
        time.sleep(0.25)
    print(f"\nvLLM's own FLOPs {counted:.0f}, ours {expected}")
    assert counted == expected


def test_long_outputs_are_decode(server: Server, double: Double, agent: Agent, receiver: Receiver) -> None:
    phases, causes = load(double, agent, all_of(server, [Ask(8, 1900)] * 16, concurrency=8))
    assert share(phases, "decode") > 0.75
    assert causes["foreign"] == 0
    prefill, decode = agent.tokens()
    mine = {"gpuidle__engine__id": agent.engine_id}
    for _ in range(40):
        same = (
            receiver.total("gpuidle.engine.tokens", gpuidle__phase="prefill", **mine) == prefill
            and receiver.total("gpuidle.engine.tokens", gpuidle__phase="decode", **mine) == decode
        )
        if same:
            break
        time.sleep(0.25)
    assert same, "OTLP and Prometheus tell different token sums"


def test_long_prompts_are_prefill(server: Server, double: Double, agent: Agent) -> None:
    phases, _ = load(double, agent, all_of(server, [Ask(1900, 2)] * 30, concurrency=1))
    assert share(phases, "prefill") > 0.75


def test_both_at_once_are_mixed(server: Server, double: Double, agent: Agent) -> None:
    def run() -> list[Ask]:
        return server.client.complete_beside([Ask(8, 600)] * 6, Ask(1900, 2), concurrency=4)

    phases, _ = load(double, agent, run)
    assert share(phases, "mixed") > 0.75


def test_nothing_is_idle_and_not_asked_for(agent: Agent, double: Double) -> None:
    time.sleep(SETTLED_S)
    phases, causes, other = agent.phases(HW_ID), agent.causes(HW_ID), agent.causes(OTHER)
    time.sleep(SETTLED_S)
    idle = {phase: value - phases[phase] for phase, value in agent.phases(HW_ID).items()}
    why = {cause: value - causes[cause] for cause, value in agent.causes(HW_ID).items()}
    empty = {cause: value - other[cause] for cause, value in agent.causes(OTHER).items()}
    print("no load", idle, why, empty)
    assert idle["idle"] == pytest.approx(sum(idle.values()), abs=0.01)
    assert why["no_request"] == pytest.approx(sum(why.values()), abs=0.01)
    assert empty["unallocated"] == pytest.approx(sum(empty.values()), abs=0.01)
    assert sum(why.values()) > 1


@pytest.mark.skipif(
    PROMETHEUS is None or ALERTMANAGER is None, reason="no Prometheus or no Alertmanager on this machine"
)
def test_an_engine_that_nobody_asks_reaches_a_webhook(agent: Agent, double: Double, tmp_path: Path) -> None:
    """vLLM -> gpuidle -> Prometheus -> rules -> Alertmanager -> webhook, all of them real."""
    double.set_busy(0)
    time.sleep(SETTLED_S)
    webhook = Webhook()
    target = agent.url.removeprefix("http://").removesuffix("/metrics")
    rules = [hurried(path, tmp_path) for path in RULES]
    with (
        alertmanager(tmp_path, webhook) as manager,
        prometheus(tmp_path, target, rules, manager, "cpu-node") as server,
    ):
        wanted = {"GpuidleModelUnused", "GpuidleGpuUnallocated"}
        until(lambda: webhook.firing() >= wanted, f"these alerts come: {wanted}")
        mine = f'{{gpuidle_engine_id="{agent.engine_id}"}}'
        decode = server.query(f"gpuidle_engine_tokens_total{mine[:-1]},gpuidle_phase='decode'}}")
        assert [float(row["value"][1]) for row in decode] == [agent.tokens()[1]]
    webhook.close()
    unused = [a for a in webhook.alerts if a["labels"]["alertname"] == "GpuidleModelUnused"]
    assert {alert["labels"]["gpuidle_model"] for alert in unused} == {"tiny"}
    assert "cpu-node" in unused[0]["annotations"]["summary"]


def test_prometheus_and_otlp_tell_the_same_ledger(agent: Agent, receiver: Receiver) -> None:
    time.sleep(SETTLED_S)
    scraped = agent.causes(HW_ID)
    for cause in ("useful", "no_request", "unattributed"):
        sent = receiver.total("gpuidle.compute.time", hw__id=HW_ID, gpuidle__cause=cause)
        assert sent == pytest.approx(scraped[cause], abs=2.5), cause


def test_watch_once_shows_a_decode(server: Server, double: Double) -> None:
    double.set_busy(100)
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.live.server", str(server.port), "8", "1900", "96", "4"],
        cwd=Path(__file__).parents[2],
    )
    command = [*GPUIDLE, "watch", "--once"]
    environment = double.environment()

    def seen() -> dict[str, Any] | None:
        """A frame in which the engine decoded: one from the load's first second tells no phase yet."""
        out = subprocess.run(
            [*command, "--json"], env=environment, check=True, capture_output=True, timeout=120
        ).stdout
        frame: dict[str, Any] = json.loads(out)
        [engine] = [engine for engine in frame["engines"] if engine["hw_ids"] == [HW_ID]]
        assert engine["model"] == "tiny"
        assert client.poll() is None, "the load ended first"
        return frame if engine["phases"]["decode_ns"] else None

    try:
        frame = until(seen, "the engine decodes")
        text = subprocess.run(
            command, env=environment, check=True, capture_output=True, timeout=120, text=True
        ).stdout
    finally:
        client.terminate()
        client.wait(60)
        double.set_busy(0)
    print(text)
    [engine] = [engine for engine in frame["engines"] if engine["hw_ids"] == [HW_ID]]
    assert engine["decode_tokens_total"] > 0
    gpu = next(gpu for gpu in frame["gpus"] if gpu["hw_id"] == HW_ID)
    assert gpu["engine_ids"] == [engine["engine_id"]]
    assert 0.9 < gpu["idle"]["flops"]["value"] <= 1
    assert "tiny" in text
    assert "decode" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_an_engine_that_is_killed_ends_its_series_and_the_agent_goes_on(server: Server, agent: Agent) -> None:
    server.stop()
    for _ in range(60):
        if agent.total("gpuidle_engine_tokens_total", gpuidle_engine_id=agent.engine_id) is None:
            break
        time.sleep(0.5)
    else:
        raise AssertionError("the dead engine's series are still there")
    assert agent.process.poll() is None
    assert agent.total("gpuidle_compute_time_seconds_total") is not None
