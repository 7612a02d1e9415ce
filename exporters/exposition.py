"""Points as a page for Prometheus: the text format 0.0.4, or OpenMetrics 1.0.0.

Written here rather than through prometheus_client's families: a page a second over 8 GPUs is most of what
export costs, and there a sample becomes several objects before it is a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from gpuidle.exporters.catalogue import MetricPoints
from gpuidle.exporters.feeds import Attributes
from gpuidle.exporters.naming import label_name

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_SERIES_KEPT = 16_384
"""Label sets whose text is kept: more than a node has, and a bound on those that come and go."""


def page(entries: Iterable[MetricPoints], *, openmetrics: bool) -> str:
    """Return the page; each metric with its help and type, and values as the shortest exact number."""
    lines: list[str] = []
    for metric, found in entries:
        name = metric.prometheus
        counter = metric.kind == "counter"
        family = name.removesuffix("_total") if counter and openmetrics else name
        lines.append(f"# HELP {family} {_help(metric.description, openmetrics=openmetrics)}")
        lines.append(f"# TYPE {family} {'counter' if counter else 'gauge'}")
        lines += [f"{name}{_labels(attributes)} {float(value)!r}" for attributes, value in found]
    if openmetrics:
        lines.append("# EOF")
    return "\n".join([*lines, ""])


def _help(text: str, *, openmetrics: bool) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if openmetrics else escaped


@lru_cache(maxsize=_SERIES_KEPT)
def _labels(attributes: Attributes) -> str:
    if not attributes:
        return ""
    pairs = sorted((label_name(name), text) for name, text in attributes)
    return "{" + ",".join(f'{name}="{_escape(text)}"' for name, text in pairs) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
