"""The table of docs/metrics.md, so that the page cannot say other than the catalogue.

`python -m gpuidle.exporters.reference` prints it.
"""

from __future__ import annotations

import sys

from gpuidle.exporters.catalogue import CATALOGUE, AnyMetric
from gpuidle.exporters.feeds import ENGINE, GPU, INFO

BEGIN = "<!-- begin: written by python -m gpuidle.exporters.reference -->"
END = "<!-- end -->"


def metrics_table() -> str:
    """Return the table of all metrics in Markdown, between its markers."""
    head = [
        "| OpenTelemetry | Prometheus | unit | kind | of | own attributes | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([BEGIN, *head, *(_row(metric) for metric in CATALOGUE), END]) + "\n"


def _row(metric: AnyMetric) -> str:
    owner, own = _owner(metric.attributes)
    cells = (
        f"`{metric.name}`",
        f"`{metric.prometheus}`",
        f"`{metric.unit}`" if metric.unit else "",
        metric.kind,
        owner,
        ", ".join(f"`{name}`" for name in own),
        metric.description,
    )
    return f"| {' | '.join(cells)} |"


def _owner(attributes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return whose series they are, and which attributes are the metric's own."""
    if attributes == INFO:
        return "join", attributes
    if attributes[: len(GPU)] == GPU:
        return "GPU", attributes[len(GPU) :]
    if attributes[: len(ENGINE)] == ENGINE:
        return "engine", attributes[len(ENGINE) :]
    return "agent", attributes


if __name__ == "__main__":
    sys.stdout.write(metrics_table())
