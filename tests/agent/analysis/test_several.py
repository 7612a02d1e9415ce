"""Steps of engines that share a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpuidle.agent.analysis.several import shares_of_several
from gpuidle.agent.model import PHASES, StepSeries, column

Rows = Sequence[tuple[int, int, int, int]]


def series(rows: Rows) -> list[StepSeries]:
    """Steps of (start, end, prefill tokens, decode tokens)."""
    if not rows:
        return []
    start, end, prefill, decode = (column(c, "i8") for c in zip(*rows, strict=True))
    return [StepSeries("e", "simulator", True, 0, start, end, prefill, decode)]


def test_steps_that_do_not_meet_are_each_their_own() -> None:
    found = shares_of_several([series([(0, 300, 5, 0)]), series([(300, 500, 0, 4)])], 0, 1000)
    assert (found.prefill_ns, found.decode_ns, found.idle_ns) == (300, 200, 500)
    assert (found.prefill_low_ns, found.prefill_high_ns) == (300, 300)
    assert found.evidence == "measured"


def test_steps_that_overlap_share_the_time_evenly_and_the_bounds_say_so() -> None:
    found = shares_of_several([series([(0, 600, 5, 0)]), series([(200, 800, 0, 4)])], 0, 1000)
    assert (found.prefill_ns, found.decode_ns, found.idle_ns) == (400, 400, 200)
    assert (found.prefill_low_ns, found.prefill_high_ns) == (200, 600)
    assert found.evidence == "estimated"


def test_decodes_that_overlap_are_decode_for_certain() -> None:
    found = shares_of_several([series([(0, 600, 0, 5)]), series([(200, 800, 0, 4)])], 0, 1000)
    assert (found.decode_ns, found.idle_ns, found.evidence) == (800, 200, "measured")


def test_steps_count_inside_the_window_only() -> None:
    found = shares_of_several([series([(0, 300, 5, 3), (900, 1200, 0, 1)]), []], 200, 1000)
    assert (found.mixed_ns, found.decode_ns, found.idle_ns) == (100, 100, 600)


STEPS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 400), st.integers(0, 2), st.integers(0, 2)), max_size=12
)


@given(st.lists(STEPS, min_size=1, max_size=3))
def test_shares_of_any_steps_sum_to_the_window(engines: list[list[tuple[int, int, int, int]]]) -> None:
    told = []
    for gaps in engines:
        at, rows = 0, []
        for gap, length, prefill, decode in gaps:
            rows.append((at + gap, at + gap + length, prefill, decode))
            at += gap + length
        told.append(series(rows))
    found = shares_of_several(told, 500, 2500)
    assert sum(found.of(phase) for phase in PHASES) == 2000
    assert min(found.of(phase) for phase in PHASES) >= 0
    assert found.prefill_low_ns <= found.prefill_ns + found.mixed_ns <= found.prefill_high_ns
