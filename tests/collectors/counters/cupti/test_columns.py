"""The clock fit, and what is left out of raw samples."""

from __future__ import annotations

import os
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuidle.agent.model import RATIO_STEP
from gpuidle.collectors.counters.cupti.clockfit import Anchor, ClockFit
from gpuidle.collectors.counters.cupti.columns import RATES, RATIOS, Converted, Raw, RingReader, convert
from gpuidle.collectors.counters.cupti.ring import RingWriter, create, layout

MS = 1_000_000
NAMES = (*RATIOS, *RATES)


def fit_at(offset_ns: int = 0) -> ClockFit:
    fit = ClockFit()
    fit.add(Anchor(theirs_ns=10**18 + offset_ns, ours_ns=10**18, doubt_ns=100))
    return fit


def raw(start: list[int], end: list[int], **values: list[float]) -> Raw:
    usual = {name: [50.0] * len(start) for name in NAMES} | values
    return Raw(
        start=np.array([10**18 + each * MS for each in start], dtype=np.uint64),
        end=np.array([10**18 + each * MS for each in end], dtype=np.uint64),
        values={name: np.array(column) for name, column in usual.items()},
    )


def converted(of: Raw, not_before: int = 0, not_after: int = 10**6) -> Converted:
    return convert(
        of,
        fit_at(),
        hw_id="GPU-a",
        period_ns=MS,
        not_before_ns=10**18 + not_before * MS,
        not_after_ns=10**18 + not_after * MS,
    )


def ends(of: Converted) -> list[int]:
    assert of.series is not None
    return [int(each) for each in (of.series.end_ns - 10**18) // MS]


@pytest.mark.parametrize(
    ("start", "end", "kept", "bad"),
    [
        ([1, 2, 3], [2, 3, 4], [2, 3, 4], 0),
        ([1, 5, 3], [2, 3, 4], [2, 4], 1),  # ends before it starts
        ([1, 2, 3], [2, 3603, 4], [2, 4], 1),  # an hour long
        ([1, 2, 3], [2, 2, 4], [2, 4], 1),  # of no length
        ([1, 5, 2], [2, 6, 3], [2, 6], 1),  # out of order
    ],
)
def test_impossible_times_are_left_out(start: list[int], end: list[int], kept: list[int], bad: int) -> None:
    done = converted(raw(start, end))
    assert ends(done) == kept
    assert done.bad_times == bad


def test_a_sample_without_a_start_is_left_out() -> None:
    of = raw([1, 2], [2, 3])
    of.start[0] = 0
    assert ends(converted(of)) == [3]


def test_samples_handed_over_before_or_from_the_future_are_left_out() -> None:
    done = converted(raw([1, 2, 3, 40], [2, 3, 4, 41]), not_before=2, not_after=10)
    assert ends(done) == [3, 4]
    assert done.bad_times == 2


@pytest.mark.parametrize("value", [-1.0, 131.1, float("nan"), float("inf"), 4294967295.0])
def test_ratios_that_cannot_be_are_left_out(value: float) -> None:
    done = converted(raw([1, 2], [2, 3], tensor_active=[value, 40.0]))
    assert ends(done) == [3]
    assert (done.bad_times, done.bad_values) == (0, 1)


def test_nothing_left_is_no_series() -> None:
    assert converted(raw([2], [1])).series is None
    assert converted(raw([], [])) == Converted(None, 0, 0)


def test_overlapping_samples_are_cut_so_that_no_time_counts_twice() -> None:
    done = converted(raw([1, 1], [2, 3]), not_before=1)
    assert done.series is not None
    assert done.series.width_ns.tolist() == [MS, MS]


def test_percents_become_steps() -> None:
    done = converted(raw([1], [2], tensor_active=[37.5], dram_read_bytes_per_s=[2.5e12]))
    assert done.series is not None
    assert done.series.tensor_active is not None
    assert done.series.dram_read_bytes_per_s is not None
    assert done.series.tensor_active[0] * RATIO_STEP == pytest.approx(0.375, abs=RATIO_STEP)
    assert done.series.dram_read_bytes_per_s[0] == pytest.approx(2.5e12, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    offset=st.integers(-(10**17), 10**18),
    drift=st.floats(-2e-4, 2e-4),
    doubts=st.lists(st.integers(-500, 500), min_size=2, max_size=30),
)
def test_the_fit_is_as_good_as_its_anchors(offset: int, drift: float, doubts: list[int]) -> None:
    fit = ClockFit()

    def theirs(second: float) -> int:
        return 10**18 + offset + round(second * 1e9 * (1 + drift))

    for second, doubt in enumerate(doubts):
        ours = 10**15 + second * 10**9 + doubt
        assert not fit.add(Anchor(theirs_ns=theirs(second), ours_ns=ours, doubt_ns=500))
    last = len(doubts) - 1
    asked = np.array([theirs(last - 0.5), theirs(last + 0.1)], dtype=np.uint64)
    truth = np.array([10**15 + round((last - 0.5) * 1e9), 10**15 + round((last + 0.1) * 1e9)])
    assert np.abs(fit.to_monotonic(asked) - truth).max() < 2500


def test_a_clock_that_was_set_is_noticed_and_fitted_anew() -> None:
    fit = fit_at()
    assert not fit.add(Anchor(theirs_ns=10**18 + 10**9, ours_ns=10**18 + 10**9, doubt_ns=100))
    assert fit.add(Anchor(theirs_ns=10**18 + 7 * 10**9, ours_ns=10**18 + 2 * 10**9, doubt_ns=100))
    after = fit.to_monotonic(np.array([10**18 + 7 * 10**9 + 5], dtype=np.uint64))
    assert after[0] == 10**18 + 2 * 10**9 + 5


def test_a_ring_keeps_order_over_its_end_and_counts_what_it_lost() -> None:
    of = layout(100, 2)
    descriptor = create(of)
    writer, reader = RingWriter(descriptor, of), RingReader(descriptor, of)
    os.close(descriptor)

    def write(first: int, count: int) -> None:
        words = memoryview(array("Q", range(first, first + count)))
        values = [
            array("d", [factor * each for each in range(first, first + count)]) for factor in (1.0, 2.0)
        ]
        writer.append(words, words, [memoryview(each).cast("B").cast("d") for each in values])

    write(0, 600)
    taken, lost = reader.take(writer.head, ("a", "b"))
    assert taken.end.tolist() == list(range(600))
    write(600, 700)  # over the end of the ring
    taken, lost = reader.take(writer.head, ("a", "b"))
    assert taken.values["b"].tolist() == [2.0 * each for each in range(600, 1300)]
    assert lost == 0
    write(1300, 1000)
    write(2300, 1000)
    taken, lost = reader.take(writer.head, ("a", "b"))
    assert lost == 2000 - of.capacity * 7 // 8
    assert taken.end.tolist() == list(range(1300 + lost, 3300))
