"""docs/metrics.md says what the catalogue says."""

from __future__ import annotations

from pathlib import Path

from gpuidle.exporters.catalogue import CATALOGUE
from gpuidle.exporters.reference import BEGIN, END, metrics_table

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_holds_the_table_of_the_catalogue() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index(BEGIN) : page.index(END) + len(END)] + "\n"
    assert table == metrics_table(), "write it anew: python -m gpuidle.exporters.reference"


def test_the_table_has_a_row_for_each_metric() -> None:
    rows = [line for line in metrics_table().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [metric.name for metric in CATALOGUE]
