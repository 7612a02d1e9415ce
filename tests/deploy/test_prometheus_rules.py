"""The rules: taken by promtool, each alert with a runbook entry, loud on waste, silent on a good decode."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.deploy.sessions import (
    ALL,
    HALF_EMPTY,
    PROMPTS,
    SATURATED,
    WASTED,
    Change,
    Samples,
    continued,
    frames,
    in_pods,
    notation,
    promtool_input,
    scraped,
)

from gpuidle.agent.model import Snapshot
from gpuidle.collectors.simulator.node import Visible
from gpuidle.collectors.simulator.options import ClockSpell
from gpuidle.collectors.simulator.scenario import GpuSpec, Scenario
from gpuidle.exporters.catalogue import CATALOGUE
from gpuidle.exporters.naming import label_name

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
FILES = (RULES / "recording.yml", RULES / "alerts.yml")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def alert_names() -> list[str]:
    return re.findall(r"- alert: (\w+)", FILES[1].read_text(encoding="utf-8"))


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=60)


def firing(
    folder: Path, samples: Samples, minutes: int, labels: Sequence[str], states: str = "firing"
) -> Any:
    """Return which alerts stand after so many minutes, by these labels: promtool says what it got."""
    query = f'count by (alertname, {", ".join(labels)}) (ALERTS{{alertstate=~"{states}"}})'
    return evaluated(folder, samples, minutes, query)


def evaluated(folder: Path, samples: Samples, minutes: int, query: str) -> list[str]:
    """Return the labels of a query's result under the rules; promtool tells them when it expected others."""
    nothing_so = [{"labels": '{no_such="series"}', "value": 0.123}]
    test = {
        "rule_files": [str(file) for file in FILES],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": promtool_input(samples),
                "promql_expr_test": [{"expr": query, "eval_time": f"{minutes}m", "exp_samples": nothing_so}],
            }
        ],
    }
    file = folder / "test.json"  # JSON is YAML
    file.write_text(json.dumps(test), encoding="utf-8")
    result = promtool("test", "rules", str(file))
    text = result.stdout + result.stderr
    got = re.search(r"got:\s*(.*)", text)
    assert got is not None, text
    return re.findall(r"\{[^}]*\}", got[1])


def node(scenario: Scenario, minutes: int, change: Change = in_pods, visible: Visible = ALL) -> Samples:
    samples, counters = scraped(frames(scenario, 420, change, visible), scenario.hostname)
    return continued(samples, counters, minutes)


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    result = promtool("check", "rules", "--lint=all", "--lint-fatal", *map(str, FILES))
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
@pytest.mark.parametrize("name", ["alerting.md", "export.md"])
def test_the_configuration_in_the_documents_is_taken(tmp_path: Path, name: str) -> None:
    """The reader copies two files and one block."""
    document = (ROOT / "docs" / name).read_text(encoding="utf-8")
    [block, *_] = re.findall(r"```yaml\n(.*?scrape_configs:.*?)```", document, re.DOTALL)
    for file in FILES:
        shutil.copy(file, tmp_path)
    for secret in re.findall(r"\b[\w-]+\.(?:pem|password)\b", block):
        (tmp_path / secret).touch()
    config = tmp_path / "prometheus.yml"
    config.write_text(block, encoding="utf-8")
    result = promtool("check", "config", "--syntax-only", str(config))
    assert result.returncode == 0, result.stdout + result.stderr
    if name == "alerting.md":
        result = promtool("check", "config", str(config))
        assert result.returncode == 0, result.stdout + result.stderr
        assert "11 rules found" in result.stdout


def test_each_alert_says_what_to_do_and_has_a_runbook_entry() -> None:
    text = FILES[1].read_text(encoding="utf-8")
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\w+)$", runbook, re.MULTILINE)
    assert entries == alert_names()
    for block in re.split(r"- alert: ", text)[1:]:
        name = block.split()[0]
        for key in (
            "severity:",
            "summary:",
            "description:",
            "action:",
            f"runbook: docs/runbook.md#{name.lower()}",
        ):
            assert key in block, (name, key)


def test_rules_name_only_metrics_and_labels_that_are_published() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in FILES)
    recorded = set(re.findall(r"record: (\S+)", text))
    published = {metric.prometheus for metric in CATALOGUE}
    labels = {label_name(name) for metric in CATALOGUE for name in metric.attributes}
    named = set(re.findall(r"(?<![\w:])(?:\w+:)?gpuidle_\w+(?::\w+)?", text))
    unknown = named - recorded - published - labels - {"gpuidle_waste"}
    assert not unknown
    assert len(recorded) > 30


def test_no_alert_looks_at_the_idle_ratio() -> None:
    text = FILES[1].read_text(encoding="utf-8")
    assert "idle_ratio" not in text
    assert "gpuidle_idle" not in text


@needs_promtool
def test_the_wasted_node_fires(tmp_path: Path) -> None:
    found = firing(tmp_path, node(WASTED, 100), 99, ("gpuidle_model", "hw_id"))
    assert sorted(found) == [
        '{alertname="GpuidleGpuUnallocated", hw_id="GPU-51d10103-0000-4000-8000-000000000003"}',
        '{alertname="GpuidleHostGaps", gpuidle_model="gaps"}',
        '{alertname="GpuidleModelUnused", gpuidle_model="unused"}',
        '{alertname="GpuidleReclaimableCompute", gpuidle_model="few-rows"}',
    ]


@needs_promtool
def test_a_decode_with_a_full_cache_raises_nothing(tmp_path: Path) -> None:
    samples = node(SATURATED, 100)
    # It is all there that would mislead: waiting requests, and compute that is idle for the most part.
    waiting = (
        "engine:gpuidle_requests_waiting:avg5m > 0 and on (instance) node:gpuidle_idle:ratio_rate5m > 0.7"
    )
    assert len(evaluated(tmp_path, samples, 99, waiting)) == 1
    assert firing(tmp_path, samples, 99, ("instance",), "firing|pending") == []


@needs_promtool
def test_a_decode_pool_is_judged_by_its_batch(tmp_path: Path) -> None:
    """It keeps no queue, so that the alert for unified engines never speaks for it."""
    decode = Scenario(seed=1, gpus=(GpuSpec(),) * 3, engines=(HALF_EMPTY,), hostname="decode")

    def as_decode(snapshot: Snapshot, seconds: float) -> Snapshot:
        rows = tuple(
            msgspec.structs.replace(each, role="decode") for each in in_pods(snapshot, seconds).engines
        )
        return msgspec.structs.replace(snapshot, engines=rows)

    found = firing(tmp_path, node(decode, 50, as_decode), 49, ("gpuidle_model", "gpuidle_role"))
    assert found == [
        '{alertname="GpuidleDecodePoolUnderfilled", gpuidle_model="half-empty", gpuidle_role="decode"}'
    ]


@needs_promtool
def test_counters_that_die_are_told_apart_from_idle(tmp_path: Path) -> None:
    def dying(snapshot: Snapshot, seconds: float) -> Snapshot:
        return msgspec.structs.replace(snapshot, counters=()) if seconds > 120 else snapshot

    found = firing(tmp_path, node(SATURATED, 45, dying), 44, ("instance",))
    # Without them part of the time may be told by nobody: the alert for that is right as well.
    assert '{alertname="GpuidleCountersDead", instance="saturated"}' in found
    assert set(found) <= {
        f'{{alertname="Gpuidle{name}", instance="saturated"}}' for name in ("CountersDead", "Blind")
    }


@needs_promtool
def test_a_node_whose_engine_cannot_be_asked_is_blind(tmp_path: Path) -> None:
    blind = Visible(counters=None, steps=False, engine_counters=False)
    found = firing(tmp_path, node(SATURATED, 50, visible=blind), 49, ("instance",))
    assert found == ['{alertname="GpuidleBlind", instance="saturated"}']


@needs_promtool
def test_clocks_held_down_by_heat_and_by_a_power_cap_are_told_apart(tmp_path: Path) -> None:
    capped = replace(PROMPTS, name="capped", gpus=(2, 3))
    held_down = Scenario(
        seed=1,
        gpus=(GpuSpec(), GpuSpec(), *(GpuSpec(power_cap_watts=300.0),) * 2),
        engines=(PROMPTS, capped),
        clocks=(ClockSpell(0, 0.5), ClockSpell(1, 0.5)),
        hostname="held-down",
    )
    found = firing(tmp_path, node(held_down, 30), 29, ("gpuidle_cause",))
    assert sorted(found) == [
        '{alertname="GpuidleThrottled", gpuidle_cause="throttled_power"}',
        '{alertname="GpuidleThrottled", gpuidle_cause="throttled_thermal"}',
    ]


@needs_promtool
def test_an_agent_that_is_down_is_told_and_a_node_that_was_scaled_away_is_not(tmp_path: Path) -> None:
    def up(instance: str) -> str:
        return notation("up", {"job": "gpuidle", "instance": instance})

    samples: Samples = {
        up("fine"): [1.0] * 30,
        up("down"): [*[1.0] * 10, *[0.0] * 20],
        up("scaled-away"): [*[1.0] * 10, 0.0, *[None] * 19],
        notation("up", {"job": "node", "instance": "another"}): [0.0] * 30,
    }
    # promtool carries a value on for five minutes, a real Prometheus ends it at once.
    assert firing(tmp_path, samples, 29, ("instance",)) == ['{alertname="GpuidleAgentDown", instance="down"}']


@needs_promtool
def test_an_agent_that_measures_nothing_and_a_collector_that_hangs_are_told(tmp_path: Path) -> None:
    age = notation("gpuidle_agent_frame_age_seconds", {"job": "gpuidle", "instance": "stalled"})
    success = "gpuidle_agent_collector_success"
    samples: Samples = {
        age: [10.0 + 60 * minute for minute in range(30)],
        notation(success, {"instance": "sick", "gpuidle_collector": "nvml"}): [0.0] * 30,
        notation(success, {"instance": "sick", "gpuidle_collector": "engines"}): [1.0] * 30,
    }
    assert sorted(firing(tmp_path, samples, 29, ("instance", "gpuidle_collector"))) == [
        '{alertname="GpuidleAgentStalled", instance="stalled"}',
        '{alertname="GpuidleCollectorFailing", gpuidle_collector="nvml", instance="sick"}',
    ]
