"""Numbers, layout and sums: what the screen is made of."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.exporters.terminal import frames as made

from gpuidle.exporters.terminal import layout, numbers
from gpuidle.exporters.terminal.bars import gauge, used_sparks
from gpuidle.exporters.terminal.engines import engine_section, numbers_together
from gpuidle.exporters.terminal.history import cells, main_phase, tracks
from gpuidle.exporters.terminal.problems import ranked


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, "—"),
        (math.nan, "—"),
        (math.inf, "—"),
        (1e307, "—"),
        (0.0, "0.0 %"),
        (0.0004, "<0.1 %"),
        (0.0034, "0.3 %"),
        (0.9966, "99.7 %"),
        (0.99961, ">99.9 %"),
        (1.0, "100.0 %"),
        (1.05, "105.0 %"),
    ],
)
def test_a_share_that_is_not_quite_nothing_or_all_is_not_printed_as_such(ratio: float, text: str) -> None:
    assert numbers.percent(ratio) == text


def test_bounds_are_rounded_outwards_and_left_out_where_they_print_the_same() -> None:
    assert numbers.between(0.99412, 0.99788) == "(99.4–99.8)"
    assert numbers.between(0.994, 0.998) == "(99.4–99.8)"
    assert numbers.between(0.9941, 0.9942) == ""
    assert numbers.between(0.2, math.inf) == ""
    assert numbers.between(0.2, 1e307) == ""


def test_an_estimate_has_a_tilde_and_a_measurement_has_none() -> None:
    assert numbers.figure_percent(made.figure(0.5, 0.4, 0.6, "estimated")) == "~50.0 % (40.0–60.0)"
    assert numbers.figure_percent(made.figure(0.5)) == "50.0 %"


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (numbers.rate, 12345.6, "12,346"),
        (numbers.rate, 12.34, "12.3"),
        (numbers.rate, 0.01, "<0.1"),
        (numbers.rate, 0.0, "0"),
        (numbers.rate, 4e12, "4e+12"),
        (numbers.rate, math.nan, "—"),
        (numbers.count, 12345, "12,345"),
        (numbers.count, None, "—"),
        (numbers.gib, 80 << 30, "80.0"),
        (numbers.mhz, 1_755_000_000, "1,755"),
        (numbers.duration, 120_000_000, "120 ms"),
        (numbers.duration, 1_000_000_000, "1.0 s"),
        (numbers.duration, 999_999_999, "1.0 s"),
        (numbers.duration, 60_000_000_000, "60 s"),
        (numbers.duration, 151_000_000_000, "2 min 31 s"),
        (numbers.duration, 10_920_000_000_000, "3 h 02 min"),
        (numbers.position, 42_000_000_000, "00:42"),
        (numbers.position, 3_723_000_000_000, "1:02:03"),
    ],
)
def test_numbers_are_printed_as_people_read_them(
    form: Callable[[float | None], str], value: float | None, text: str
) -> None:
    assert form(value) == text


def test_a_total_that_is_not_known_is_left_out_and_nothing_known_is_a_dash() -> None:
    assert numbers.of("412", "700", "W") == "412/700 W"
    assert numbers.of("412", "—", "W") == "412 W"
    assert numbers.of("—", "—", "W") == "—"
    assert numbers.money(0.001, "USD") == "<0.01 USD/h"


@given(st.text(), st.integers(0, 40))
def test_no_text_is_wider_than_it_was_cropped_to(text: str, width: int) -> None:
    cleaned = layout.clean(text)
    assert cleaned.isprintable()
    assert layout.text_width(cleaned) == cell_len(cleaned)
    assert cell_len(layout.crop_text(cleaned, width)) <= width
    line = layout.crop(((cleaned, ""), (cleaned, "bold")), width)
    assert cell_len(layout.plain(line)) <= width
    assert cell_len(layout.plain(layout.pad(line, width))) == width


@given(st.text(), st.integers(2, 60))
def test_wrapping_loses_nothing_but_blanks(text: str, width: int) -> None:
    cleaned = layout.clean(text)
    lines = layout.wrap(cleaned, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == cleaned.replace(" ", "")


@given(st.text())
def test_ascii_takes_as_many_cells(text: str) -> None:
    cleaned = layout.clean(text)
    ((drawn, _),) = layout.to_ascii(((cleaned, ""),))
    assert drawn.isascii()
    assert len(drawn) == cell_len(cleaned)


def test_what_fits_stays_by_rank_and_in_order() -> None:
    items = [(3, layout.span("aaa")), (1, layout.span("bbb")), (2, layout.span("ccc"))]
    assert layout.plain(layout.fit(items, 20)) == "aaa  bbb  ccc"
    assert layout.plain(layout.fit(items, 9)) == "aaa  ccc"
    assert layout.plain(layout.fit(items, 2)) == "a…"


def test_items_flow_onto_more_lines_and_none_is_broken() -> None:
    items = [layout.span(word) for word in ("one 1", "two 2", "three 3")]
    lines = layout.flow(items, 16, label=layout.span("l"), indent=3)
    assert [layout.plain(line) for line in lines] == ["l  one 1  two 2", "   three 3"]


@given(st.lists(st.integers(0, 2**62), max_size=17), st.integers(0, 250))
def test_a_bar_is_filled_exactly_and_hides_no_part(parts: list[int], width: int) -> None:
    sizes = cells(parts, width)
    present = [part for part in parts if part > 0]
    assert sum(sizes) == (width if present else 0)
    assert all(size >= 0 for size in sizes)
    if len(present) <= width:
        assert all((size > 0) == (part > 0) for size, part in zip(sizes, parts, strict=True))


def test_a_gauge_is_full_only_at_the_whole_and_empty_only_at_nothing() -> None:
    def drawn(low: float, high: float) -> str:
        return layout.plain(gauge(low, high, 10, ""))

    assert drawn(0.0, 0.0) == "░" * 10
    assert drawn(1.0, 1.0) == "█" * 10
    assert drawn(0.0001, 0.0001) == "▏" + "░" * 9
    assert drawn(0.999, 0.999).startswith("█" * 9)
    assert drawn(0.999, 0.999) != "█" * 10
    assert drawn(0.2, 0.5) == "██▒▒▒░░░░░"
    assert drawn(-1.0, 7.0) == "▒" * 10


def test_the_ledger_is_the_difference_of_totals_over_the_last_minute() -> None:
    history = made.history(1, 1, pattern="p" * 30 + "d" * 90)
    summed = tracks(history)[made.uuid(0)].ledger
    assert summed is not None
    assert summed.window_ns == 60 * made.SECOND
    assert sum(summed.causes_ns.values()) == summed.window_ns
    assert summed.causes_ns["useful"] == 60 * 4 * made.SECOND // 1000  # decode alone: prefill is past
    assert summed.estimated == {"memory_bound", "latency"}
    assert summed.reclaimable_ns == 60 * 902 * made.SECOND // 1000 // 4
    assert sum(summed.phases_ns.values()) == 60 * made.SECOND


def test_the_ledger_of_one_frame_is_its_window_and_of_none_is_nothing() -> None:
    (frame,) = made.history(1, 1, pattern="p")
    alone = tracks([frame])[made.uuid(0)].ledger
    assert alone is not None
    assert alone.window_ns == made.SECOND
    assert alone.causes_ns == frame.gpus[0].causes_ns
    assert tracks([]) == {}
    assert tracks([made.blank_frame()])["GPU-abcdef"].ledger is None


def test_a_device_that_is_split_says_that_its_instances_have_the_time() -> None:
    frame = made.history(2, 1)[-1]
    parent, child = frame.gpus[0], frame.gpus[1]
    bare = msgspec.structs.replace(parent, window_ns=0)
    instance = msgspec.structs.replace(child, parent_hw_id=parent.hw_id)
    found = tracks([msgspec.structs.replace(frame, gpus=(bare, instance))])
    assert (found[parent.hw_id].split, found[parent.hw_id].ledger) == (True, None)
    assert not found[child.hw_id].split


def test_totals_that_go_backwards_are_not_subtracted() -> None:
    history = made.history(1, 1, pattern="ppppdd")
    wound_back = [
        *history[2:],
        msgspec.structs.replace(history[1], monotonic_ns=history[-1].monotonic_ns + 1),
    ]
    summed = tracks(wound_back)[made.uuid(0)].ledger
    assert summed is not None
    assert summed.causes_ns == history[1].gpus[0].causes_ns
    assert summed.reclaimable_ns is None


def test_a_device_that_was_away_leaves_a_gap_in_its_strip() -> None:
    history = made.history(2, 1, pattern="dddd")
    history[1] = msgspec.structs.replace(history[1], gpus=history[1].gpus[:1])
    seen = [gpu is not None for gpu in tracks(history)[made.uuid(1)].steps]
    assert seen == [True, False, True, True]


def test_the_phase_of_a_window_is_the_one_that_took_most_of_it() -> None:
    phases = [main_phase(made.gpu(0, phase)) for phase in ("prefill", "decode", "mixed", "idle", "unknown")]
    assert phases == ["prefill", "decode", "mixed", "idle", "unknown"]


def test_unknown_use_is_blank_in_the_sparkline_and_none_is_its_lowest_step() -> None:
    history = made.history(1, 1, pattern="?·p")
    drawn = layout.plain(used_sparks(tracks(history)[made.uuid(0)].steps, 3))
    assert drawn[:2] == " ▁"
    assert drawn[2] > "▃"


def test_the_same_problem_of_several_devices_is_told_once_and_what_can_be_mended_first() -> None:
    frame = made.frame(2, 1, (made.PROBLEMS[2], *made.PROBLEMS[:2]))
    told = ranked(frame)
    assert [problem.kind for problem, _ in told] == ["no_permission", "stats_disabled"]
    assert told[0][1] == (made.uuid(0), made.uuid(1))


def test_instances_of_one_gpu_share_its_number() -> None:
    parts = tuple(
        msgspec.structs.replace(made.gpu(0), hw_id=f"MIG-{number}", parent_hw_id=made.uuid(0))
        for number in range(2)
    )
    frame = msgspec.structs.replace(made.frame(1, 1), gpus=parts)
    engine = made.engine(hw_ids=("MIG-0", "MIG-1"))
    lines = engine_section(msgspec.structs.replace(frame, engines=(engine,)), 100, "full")
    assert "on GPU 0 " in layout.plain(lines[0])


def test_runs_of_numbers_are_written_together() -> None:
    assert numbers_together([0, 1, 2, 3, 6, 8, 9]) == "0-3,6,8-9"
    assert numbers_together([]) == ""
