"""The reader of the text format agrees with prometheus_client's and survives anything."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpuidle.collectors.support.exposition import ExpositionError, Sample, parse_page

DATA = Path(__file__).parents[2] / "data" / "vllm"
PAGES = sorted(DATA.glob("metrics_*.txt"))

names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,12}", fullmatch=True)
# What begins with two underscores is Prometheus' own, and refused by the client.
label_names = st.from_regex(r"_?[a-zA-Z][a-zA-Z0-9_]{0,8}|_", fullmatch=True)
label_values = st.text(st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029"), max_size=12)
numbers = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(["+Inf", "-Inf", "Inf", "NaN", "1e5", "1E-7", ".5", "5.", "+3"]),
)
spaces = st.text(" \t", min_size=1, max_size=3)


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def line_of(
    name: str, labels: dict[str, str], braces: bool, comma: bool, space: str, value: str, stamp: int | None
) -> str:
    if labels or braces:
        inside = ",".join(f'{key}="{escaped(value)}"' for key, value in labels.items())
        name += "{" + inside + ("," if labels and comma else "") + "}"
    return name + space + value + ("" if stamp is None else f"{space}{stamp}")


lines = st.builds(
    line_of,
    name=names,
    labels=st.dictionaries(label_names, label_values, max_size=4),
    braces=st.booleans(),
    comma=st.booleans(),
    space=spaces,
    value=numbers,
    stamp=st.none() | st.integers(0, 2**42),
)


def theirs(text: str) -> list[Sample]:
    return [
        Sample(sample.name, dict(sample.labels), float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def same(one: Sample, other: Sample) -> bool:
    values = one.value == other.value or (math.isnan(one.value) and math.isnan(other.value))
    return one.name == other.name and one.labels == other.labels and values


def test_the_test_data_is_there() -> None:
    assert len(PAGES) == 8


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_recorded_pages_read_as_prometheus_client_reads_them(page: Path) -> None:
    text = page.read_text()
    expected = theirs(text)
    got = parse_page(text, {sample.name for sample in expected})
    # The other parser groups by family, which keeps the order of these pages.
    assert list(got.samples) == expected
    assert (got.malformed, got.others) == (0, 0)


@given(st.lists(lines, max_size=8))
@settings(deadline=None, max_examples=100)
def test_generated_pages_read_as_prometheus_client_reads_them(page: list[str]) -> None:
    text = "".join(f"{line}\n" for line in page)
    expected = theirs(text)
    got = parse_page(text, {sample.name for sample in expected})
    assert got.malformed == 0
    assert len(got.samples) == len(expected)
    assert all(map(same, got.samples, expected))


@given(st.text())
@example('a{b="c"')
@example('a{b="c\\"} 1')
@example("a{} 1_0")
@example("a ١")
@example("a{,} 1")
@example('{"a",b="c"} 1')
@settings(deadline=None, max_examples=300)
def test_any_text_gives_a_page(text: str) -> None:
    page = parse_page(text, {"a", "b", ""})
    assert page.malformed + page.others + len(page.samples) <= text.count("\n") + 1


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a{",
        'a{b="c} 1',
        'a{b="c"} ',
        'a{b="c"} x',
        "a 1 2 3",
        "a 1_000",
        "a 0x1p3",
        'a{b="1",b="2"} 1',
        "a ١",
    ],
)
def test_a_line_that_cannot_be_read_is_counted_and_left_out(line: str) -> None:
    page = parse_page(f"{line}\na 7\n", {"a"})
    assert [sample.value for sample in page.samples] == [7.0]
    assert page.malformed == 1


def test_lines_of_other_names_are_counted_but_not_read() -> None:
    page = parse_page('# HELP b x\nb{c="d"} 1\nb 2\na 3\n', {"a"})
    assert (len(page.samples), page.others, page.malformed) == (1, 2, 0)


def test_a_million_series_are_an_error_not_a_million_objects() -> None:
    flood = "".join(f'a{{i="{i}"}} 1\n' for i in range(1001))
    with pytest.raises(ExpositionError, match="1000 series"):
        parse_page(flood, {"a"}, max_series=1000)
    with pytest.raises(ExpositionError, match="1000 lines"):
        parse_page("\n" * 1001, {"a"}, max_lines=1000)
