"""The queries that we ship: of the dashboards and of docs/queries.md, with Grafana's macros put in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
QUERIES = ROOT / "docs" / "queries.md"
RULES = tuple((ROOT / "deploy" / "prometheus").glob("*.yml"))

_MACROS = {"$__rate_interval": "1m", "$__range": "5m", "$__interval": "15s"}


def board(path: Path) -> dict[str, Any]:
    """Return a dashboard."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def of_dashboard(path: Path) -> Iterator[tuple[str, str]]:
    """Yield title and query of each target, variables still in it."""
    for panel in board(path)["panels"]:
        for target in panel["targets"]:
            yield f"{path.stem}: {panel['title']}", target["expr"]


def substituted(query: str, **variables: str) -> str:
    """Return a query as Grafana sends it."""
    for macro, value in _MACROS.items():
        query = query.replace(macro, value)
    for name, value in variables.items():
        query = query.replace(f"${name}", value)
    assert "$" not in query, query
    return query


def of_documentation() -> list[tuple[str, str]]:
    """Return title and query of each section of docs/queries.md."""
    text = QUERIES.read_text(encoding="utf-8")
    return re.findall(r"^## ([^\n]*)\n.*?```promql\n(.*?)```", text, re.DOTALL | re.MULTILINE)
