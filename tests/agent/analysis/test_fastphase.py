from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuidle.agent.analysis.fastphase import Labels, Levels, label_window
from gpuidle.agent.model import RATIO_STEP, CounterSeries, column, rate_column

MS = 10**6
Row = tuple[float, float, float]


def series(rows: list[Row], width_ns: int = MS) -> CounterSeries:
    """Samples of (tensor, DRAM share of 1 TB/s, active), end to end from 0."""
    tensor, dram, active = (np.array(c) for c in zip(*rows, strict=True))
    return CounterSeries(
        hw_id="GPU-0",
        rung="cupti_pm",
        end_ns=column(np.arange(1, len(rows) + 1) * width_ns, "i8"),
        width_ns=column(np.full(len(rows), width_ns), "i8"),
        gr_active=column(np.rint(active / RATIO_STEP), "u2"),
        tensor_active=column(np.rint(tensor / RATIO_STEP), "u2"),
        dram_read_bytes_per_s=rate_column(dram * 1e12),
        dram_write_bytes_per_s=rate_column(dram * 0),
    )


DECODE, PREFILL, REST = (0.1, 0.6, 1.0), (0.6, 0.1, 1.0), (0.0, 0.0, 0.0)
QUIET, SMALL = (0.05, 0.55, 1.0), (0.26, 0.49, 1.0)
"""A decode of few rows, and a step of few more: a prompt of a hundred tokens."""


def label(levels: Levels, rows: list[Row], width_ns: int = MS) -> Labels:
    found = label_window(levels, [series(rows, width_ns)], 0, len(rows) * width_ns, 1e12)
    assert found is not None
    return found


def steps(row: Row, count: int, samples: int = 9) -> list[Row]:
    """Steps of so many samples with a gap after each."""
    tensor, dram, _ = row
    return ([row] * samples + [(0.7 * tensor, 0.7 * dram, 0.7)]) * count


def test_the_two_classes_are_told_apart_and_rest_is_idle() -> None:
    found = label(Levels(), [DECODE] * 50 + [PREFILL] * 30 + [REST] * 20)
    assert round(found.decode_ns / MS, 2) == 50
    assert round(found.containing_ns / MS, 2) == 30
    assert round(found.idle_ns / MS, 2) == 20
    assert found.unknown_ns == 0


def test_a_small_prompt_stands_out_of_a_quiet_decode() -> None:
    levels = Levels()
    assert label(levels, [SMALL] * 10).decode_ns == 10 * MS  # nothing else was seen: by the roofline
    label(levels, steps(QUIET, 90) + [PREFILL] * 100)
    later = label(levels, steps(QUIET, 5) + steps(SMALL, 1) + steps(QUIET, 5))
    assert later.containing_ns >= 9 * MS
    assert later.decode_ns >= 90 * MS


def test_a_decode_that_hides_its_gaps_is_learned_from_its_length() -> None:
    levels = Levels()
    label(levels, [QUIET] * 900 + [PREFILL] * 100)
    later = label(levels, [QUIET] * 40 + [SMALL] * 10 + [QUIET] * 40)
    assert later.containing_ns == 10 * MS
    assert later.decode_ns == 80 * MS


def test_a_decode_of_twice_the_rows_is_a_decode_once_its_steps_repeat() -> None:
    levels = Levels()
    label(levels, steps(QUIET, 100))
    one = label(levels, steps(QUIET, 20) + steps(SMALL, 1) + steps(QUIET, 20))
    assert one.containing_ns >= 9 * MS
    many = label(levels, steps(SMALL, 40))
    assert many.containing_ns == 0


def test_what_repeats_after_the_window_is_decode_in_it() -> None:
    rows = steps(QUIET, 50) + steps(SMALL, 2) + steps(PREFILL, 2) + steps(SMALL, 3)
    end_ns = 520 * MS
    known = label_window(Levels(), [series(rows)], 0, end_ns, 1e12)
    unknown = label_window(Levels(), [series(rows[:520])], 0, end_ns, 1e12)
    assert known is not None
    assert unknown is not None
    assert known.containing_ns == 0
    assert unknown.containing_ns > 17 * MS


def test_samples_around_a_window_are_not_learned_from_again() -> None:
    # What was decode three busy seconds ago is not forgotten because windows are short.
    rows = steps(SMALL, 100) + steps(QUIET, 300) + steps(SMALL, 1) + steps(QUIET, 20)
    levels = Levels()
    for start_ns in range(0, 4000 * MS, 100 * MS):
        label_window(levels, [series(rows)], start_ns, start_ns + 100 * MS, 1e12)
    found = label_window(levels, [series(rows)], 4000 * MS, 4100 * MS, 1e12)
    assert found is not None
    assert found.containing_ns == 0


def test_a_prefill_beside_a_large_batch_begins_where_dram_comes_to_rest() -> None:
    # Both compute at nearly the peak's reach, and no gap lies between.
    large, beside = (0.26, 0.46, 1.0), (0.34, 0.06, 1.0)
    levels = Levels()
    found = label(levels, ([large] * 36 + [beside] * 130) * 6)
    assert round(found.decode_ns / MS) == 6 * 36
    assert round(found.containing_ns / MS) == 6 * 130


def test_dram_tells_what_fills_a_sample_between_a_large_batch_and_a_prefill() -> None:
    large, beside = (0.26, 0.46, 1.0), (0.34, 0.06, 1.0)
    levels = Levels()
    label(levels, ([large] * 36 + [beside] * 130) * 6)
    share = 0.7
    mixed = tuple(share * a + (1 - share) * b for a, b in zip(large, beside, strict=True))
    gap = (mixed[0] * 0.9, mixed[1] * 0.9, 0.9)
    found = label(levels, [large] * 36 + [gap] + [beside] * 60)
    assert round(found.decode_ns / MS, 1) == 36.9


def test_a_series_beside_the_window_may_lack_a_column() -> None:
    rows = steps(QUIET, 100)
    other = series([(0.1, 0.1, 1.0)] * 10)
    bare = CounterSeries(
        "GPU-0", "cupti_pm", other.end_ns + 1000 * MS, other.width_ns, gr_active=other.gr_active
    )
    assert label_window(Levels(), [series(rows), bare], 0, 1000 * MS, 1e12) is not None
    assert label_window(Levels(), [series(rows), bare], 0, 1005 * MS, 1e12) is None


def test_a_step_that_reads_more_than_the_decodes_around_it_has_a_prompt() -> None:
    # With experts: a prompt of a few tokens reads twice as many of them, and is no brighter.
    levels = Levels()
    label(levels, steps(QUIET, 90))
    one = label(levels, steps(QUIET, 10) + steps(QUIET, 1, samples=19) + steps(QUIET, 10))
    assert 18 * MS < one.containing_ns < 21 * MS
    pair = label(levels, steps(QUIET, 10) + steps(QUIET, 2, samples=19) + steps(QUIET, 10))
    assert 37 * MS < pair.containing_ns < 42 * MS
    more_rows = label(levels, steps(QUIET, 10) + steps(QUIET, 10, samples=19))
    assert more_rows.containing_ns == 0


def test_steps_are_pooled_a_noisy_sample_has_its_step_for_company() -> None:
    rng = np.random.default_rng(5)
    levels = Levels()

    def noisy(rows: list[Row]) -> list[Row]:
        return [(t * rng.normal(1, 0.2), d * rng.normal(1, 0.2), a) for t, d, a in rows]

    label(levels, noisy(steps(QUIET, 90)))
    found = label(levels, noisy((steps(QUIET, 9) + steps(SMALL, 1)) * 5))
    assert found.decode_ns > 0.98 * 45 * 9.7 * MS
    assert 0.9 < found.containing_ns / (5 * 9.7 * MS) < 1.1


def test_long_samples_are_labelled_only_where_one_class_fills_most_of_them() -> None:
    levels = Levels()
    label(levels, [DECODE] * 50 + [PREFILL] * 50, 100 * MS)
    half = ((DECODE[0] + PREFILL[0]) / 2, (DECODE[1] + PREFILL[1]) / 2, 1.0)
    found = label(levels, [DECODE, half, PREFILL], 100 * MS)
    assert (found.decode_ns, found.unknown_ns, found.containing_ns) == (100 * MS, 100 * MS, 100 * MS)


def test_a_long_sample_with_a_busy_pipe_and_a_busy_dram_is_unknown() -> None:
    levels = Levels()
    label(levels, [DECODE] * 50 + [PREFILL] * 50, 100 * MS)
    assert label(levels, [(0.55, 0.58, 1.0)], 100 * MS).unknown_ns == 100 * MS


def test_short_windows_learn_as_well_as_long_ones() -> None:
    levels = Levels()
    rows = steps(QUIET, 100) + steps(SMALL, 1) + steps(QUIET, 10)
    found = [label(levels, rows[at : at + 20]) for at in range(0, len(rows), 20)]
    assert sum(each.containing_ns for each in found[50:]) >= 9 * MS
    assert sum(each.containing_ns for each in found[:50]) == 0


def test_a_missing_column_gives_no_label() -> None:
    bare = series([DECODE])
    found = CounterSeries("GPU-0", "cupti_pm", bare.end_ns, bare.width_ns, gr_active=bare.gr_active)
    assert label_window(Levels(), [found], 0, MS, 1e12) is None
    assert label_window(Levels(), [], 0, MS, 1e12) is None


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 1.2), st.floats(0, 1.2), st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from([MS, 60 * MS]),
)
def test_labels_sum_to_the_samples(rows: list[Row], cut: int, width_ns: int) -> None:
    found = label_window(Levels(), [series(rows, width_ns)], 0, cut * width_ns, 1e12)
    if found is None:
        assert cut == 0
        return
    parts = (found.decode_ns, found.containing_ns, found.unknown_ns, found.idle_ns)
    assert min(parts) >= -1e-3
    assert abs(sum(parts) - min(cut, len(rows)) * width_ns) < 1e-3
