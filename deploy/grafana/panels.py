"""The kinds of panels of the dashboards, and the page that they are placed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24

CAUSE_COLOURS = {
    "useful": "green",
    "padding": "light-green",
    "memory_bound": "blue",
    "communication": "purple",
    "latency": "light-purple",
    "throttled_power": "dark-orange",
    "throttled_thermal": "dark-red",
    "throttled_other": "orange",
    "host_gap": "red",
    "no_request": "yellow",
    "unallocated": "light-yellow",
    "waiting_peer": "light-orange",
    "starting": "light-blue",
    "suspended": "super-light-blue",
    "foreign": "super-light-purple",
    "unattributed": "#808080",
    "unobserved": "#404040",
}
PHASE_COLOURS = {
    "prefill": "green",
    "decode": "blue",
    "mixed": "purple",
    "idle": "yellow",
    "unknown": "#808080",
}


class Board:
    """A dashboard that is filled from left to right, row by row."""

    def __init__(self, uid: str, title: str, description: str, variables: Sequence[Json]) -> None:
        self.uid, self.title, self.description = uid, title, description
        self.variables = variables
        self.panels: list[Json] = []
        self._x = self._y = self._row_height = 0

    def add(self, panel: Json, width: int, height: int) -> None:
        """Place a panel."""
        if self._x + width > WIDTH:
            self._x, self._y, self._row_height = 0, self._y + self._row_height, 0
        position = {"x": self._x, "y": self._y, "w": width, "h": height}
        self.panels.append({"id": len(self.panels) + 1, "gridPos": position, **panel})
        self._x += width
        self._row_height = max(self._row_height, height)

    def json(self) -> Json:
        """Return what Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["gpuidle"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [_datasource(), *self.variables]},
            "annotations": {"list": []},
            "links": [
                {
                    "type": "dashboards",
                    "title": "gpuidle",
                    "tags": ["gpuidle"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "panels": self.panels,
        }


def _datasource() -> Json:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def variable(name: str, label: str, query: str, *, every: bool) -> Json:
    """Return a variable that is filled by a query; `every` allows several values and all of them."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": every,
        "includeAll": every,
        "allValue": ".*" if every else None,
    }


def _targets(queries: Sequence[tuple[str, str]], *, instant: bool = False) -> list[Json]:
    return [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expr,
            "legendFormat": legend,
            "instant": instant,
            "range": not instant,
            **({"format": "table"} if instant else {}),
        }
        for number, (expr, legend) in enumerate(queries)
    ]


def stat(title: str, description: str, expr: str, unit: str, *, decimals: int | None = None) -> Json:
    """Return one number."""
    defaults: Json = {"unit": unit, "color": {"mode": "fixed", "fixedColor": "text"}}
    if decimals is not None:
        defaults["decimals"] = decimals
    return {
        "type": "stat",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": _targets([(expr, "{{gpuidle_currency}}")]),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"},
    }


def series(
    title: str,
    description: str,
    queries: Sequence[tuple[str, str]],
    unit: str,
    *,
    stacked: bool = False,
    colours: dict[str, str] | None = None,
    highest: float | None = None,
) -> Json:
    """Return lines over time, or a stacked area."""
    custom: Json = {"lineWidth": 1, "fillOpacity": 80 if stacked else 10, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: Json = {"unit": unit, "min": 0, "custom": custom}
    if highest is not None:
        defaults["max"] = highest
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": _targets(queries),
        "fieldConfig": {
            "defaults": defaults,
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": name},
                    "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
                }
                for name, colour in (colours or {}).items()
            ],
        },
        "options": {
            "legend": {"displayMode": "table", "placement": "right", "calcs": ["mean"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def table(title: str, description: str, expr: str, unit: str, value: str) -> Json:
    """Return the series of one instant, the highest first."""
    return {
        "type": "table",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": _targets([(expr, "")], instant=True),
        "transformations": [
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True, "__name__": True},
                    "renameByName": {"Value": value},
                },
            }
        ],
        "fieldConfig": {
            "defaults": {},
            "overrides": [
                {"matcher": {"id": "byName", "options": value}, "properties": [{"id": "unit", "value": unit}]}
            ],
        },
        "options": {"sortBy": [{"displayName": value, "desc": True}], "showHeader": True},
    }


def scatter(title: str, description: str, x: str, y: str) -> Json:
    """Return points over time in the plane of two queries."""
    return {
        "type": "xychart",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": _targets([(x, "DRAM bandwidth"), (y, "tensor pipe")]),
        "transformations": [{"id": "joinByField", "options": {"byField": "Time", "mode": "inner"}}],
        "fieldConfig": {
            "defaults": {"unit": "percentunit", "min": 0, "max": 1, "custom": {"show": "points"}},
            "overrides": [],
        },
        "options": {
            "mapping": "manual",
            "series": [
                {
                    "x": {"matcher": {"id": "byName", "options": "DRAM bandwidth"}},
                    "y": {"matcher": {"id": "byName", "options": "tensor pipe"}},
                }
            ],
            "legend": {"showLegend": False},
        },
    }


def rate(counter: str, labels: str) -> str:
    """Return the rate of a counter over the interval that Grafana finds right."""
    return f"rate({counter}{{{labels}}}[$__rate_interval])"
