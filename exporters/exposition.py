"""Points as a page for Prometheus: the text format 0.0.4, or OpenMetrics 1.0.0.

Written here rather than through prometheus_client's families: a page a second over 8 GPUs is most of what
export costs, and there a sample becomes several objects before it is a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from gpuidle.agent.model import Durations
from gpuidle.exporters.catalogue import MetricPoints
from gpuidle.exporters.feeds import Attributes
from gpuidle.exporters.histograms import BOUNDS_S, HistogramPoints, bucket_counts
from gpuidle.exporters.naming import label_name

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_TYPES = {"counter": "counter", "histogram": "histogram"}
_BOUNDS = (*(repr(bound) for bound in BOUNDS_S), "+Inf")

_SERIES_KEPT = 16_384
"""Label sets whose text is kept: more than a node has, and a bound on those that come and go."""


def page(entries: Iterable[MetricPoints | HistogramPoints], *, openmetrics: bool) -> str:
    """Return the page; each metric with its help and type, and values as the shortest exact number."""
    lines: list[str] = []
    for entry in entries:
        metric, name = entry.metric, entry.metric.prometheus
        counter = metric.kind == "counter"
        family = name.removesuffix("_total") if counter and openmetrics else name
        lines.append(f"# HELP {family} {_help(metric.description, openmetrics=openmetrics)}")
        lines.append(f"# TYPE {family} {_TYPES.get(metric.kind, 'gauge')}")
        if isinstance(entry, HistogramPoints):
            for attributes, durations in entry.points:
                lines += _histogram(name, attributes, durations)
        else:
            lines += [f"{name}{_labels(attributes)} {float(value)!r}" for attributes, value in entry.points]
    if openmetrics:
        lines.append("# EOF")
    return "\n".join([*lines, ""])


def _histogram(name: str, attributes: Attributes, durations: Durations) -> list[str]:
    """Return the cumulative classic buckets, then the sum in seconds and the count."""
    counts = accumulate(bucket_counts(durations))
    lines = [
        f"{name}_bucket{_labels((*attributes, ('le', bound)))} {float(count)!r}"
        for bound, count in zip(_BOUNDS, counts, strict=True)
    ]
    labels = _labels(attributes)
    return [
        *lines,
        f"{name}_sum{labels} {durations.sum_ns / 1e9!r}",
        f"{name}_count{labels} {float(durations.count)!r}",
    ]


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
