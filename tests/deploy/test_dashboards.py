"""The dashboards: as their generator writes them, drawable, and asking only for what is published."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.promql import DASHBOARDS, ROOT, RULES, board, of_dashboard, of_documentation, substituted

from gpuidle.exporters.catalogue import CATALOGUE
from gpuidle.exporters.naming import label_name

PANELS = {"stat", "timeseries", "table", "xychart"}
KEYS = {
    "id", "gridPos", "type", "title", "description", "datasource", "targets", "fieldConfig", "options",
    "transformations",
}  # fmt: skip
VARIABLES = {"cluster": ".*", "instance": "node", "hw_id": "GPU-0"}
LABELS = {label_name(name) for metric in CATALOGUE for name in metric.attributes} | {
    "cluster", "instance", "gpuidle_waste", "alertname", "alertstate",
}  # fmt: skip


def shipped() -> list[tuple[str, str]]:
    return [pair for path in DASHBOARDS for pair in of_dashboard(path)] + of_documentation()


def test_the_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    builder = ROOT / "deploy" / "grafana" / "build.py"
    subprocess.run([sys.executable, str(builder), str(tmp_path)], check=True, timeout=60)
    assert [path.name for path in DASHBOARDS] == ["fleet.json", "gpu.json", "node.json"]
    for path in DASHBOARDS:
        assert path.read_text(encoding="utf-8") == (tmp_path / path.name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_of_known_kinds_described_and_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board(path)["panels"]]
    assert len(ids) == len(set(ids)) > 5
    for panel in board(path)["panels"]:
        assert panel["type"] in PANELS
        assert set(panel) <= KEYS
        assert panel["description"]
        assert panel["targets"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


def test_variables_are_declared() -> None:
    for path in DASHBOARDS:
        declared = {variable["name"] for variable in board(path)["templating"]["list"]}
        text = json.dumps(board(path))
        assert set(re.findall(r"\$\{?([a-z]\w*)", text)) <= declared


@pytest.mark.parametrize(("title", "query"), shipped(), ids=lambda value: str(value)[:40])
def test_a_query_asks_for_what_is_published(title: str, query: str) -> None:
    recorded = set(re.findall(r"record: (\S+)", "".join(path.read_text() for path in RULES)))
    published = {metric.prometheus for metric in CATALOGUE} | {"ALERTS"}
    text = substituted(query, **VARIABLES)
    bare = re.sub(r'"[^"]*"', "", text)
    grouped = re.findall(r"\b(?:by|on|without|group_left)\s*\(([^)]*)\)", bare)
    labels = {name.strip() for group in grouped for name in group.split(",")}
    labels |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", bare))
    assert labels - {""} <= LABELS, title
    names = set(re.findall(r"(?<![\w:])(?:\w+:)?(?:gpuidle|hw)_\w+(?::\w+)?", bare)) - LABELS
    assert names <= recorded | published, title
    assert names or "ALERTS" in bare


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reads_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": substituted(query, **VARIABLES)}
        for number, (_, query) in enumerate(shipped())
    ]
    file = tmp_path / "queries.json"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    result = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
