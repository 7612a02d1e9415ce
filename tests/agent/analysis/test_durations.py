"""Durations of steps: every one in its bucket, none twice, the same in a replay."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.durations import durations_of, together
from gpuidle.agent.analysis.stepshares import shares_from_steps
from gpuidle.agent.codec import decode_frame, decode_snapshot, encode_frame, encode_snapshot
from gpuidle.agent.model import Durations, Snapshot, StepSeries, column
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import demo

LENGTHS = st.lists(st.integers(1, 2**62), min_size=1, max_size=20)


def of(lengths: list[int]) -> Durations:
    found = durations_of(np.array(lengths, dtype=np.int64))
    assert found is not None
    return found


def bucket(length_ns: int) -> int:
    """Return i of 2**(i/8) < seconds <= 2**((i+1)/8), by rational numbers."""
    seconds_8th = Fraction(length_ns, 10**9) ** 8
    index = -256
    while Fraction(2) ** (index + 1) < seconds_8th:
        index += 1
    return index


@settings(max_examples=30, deadline=None)
@given(LENGTHS)
def test_every_duration_is_in_its_bucket(lengths: list[int]) -> None:
    found = of(lengths)
    counted = {index: count for index, count in enumerate(found.counts, found.offset) if count}
    assert counted == Counter(bucket(length) for length in lengths)
    assert found.sum_ns == sum(lengths)
    assert found.counts[0] > 0
    assert found.counts[-1] > 0


@pytest.mark.parametrize(
    ("length_ns", "index"),
    [(1, -240), (10**9, -1), (10**9 + 1, 0), (2 * 10**9, 7), (15_625_000, -49), (15_625_001, -48)],
)
def test_a_power_of_two_is_the_last_of_its_bucket(length_ns: int, index: int) -> None:
    assert of([length_ns]) == Durations(offset=index, counts=(1,), sum_ns=length_ns)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, LENGTHS)
def test_windows_add_up(one: list[int], other: list[int]) -> None:
    assert together(of(one), of(other)) == of(one + other)


def test_no_duration_is_made_of_none() -> None:
    assert durations_of(np.array([0, -5], dtype=np.int64)) is None


def test_a_step_counts_where_it_ends_whole_and_only_with_tokens() -> None:
    rows = [(0, 150, 9, 0), (150, 260, 0, 2), (260, 270, 0, 0), (270, 270, 0, 1), (270, 340, 1, 1)]
    columns = (column(values, "i8") for values in zip(*rows, strict=True))
    window = shares_from_steps([StepSeries("e", "simulator", True, 0, *columns)], 100, 300)
    assert window is not None
    assert window.durations == {"prefill": of([150]), "decode": of([110])}


def seen() -> list[Snapshot]:
    """Return one cycle of the demo, which ends at rest."""
    visible = Visible(gpus=False, counters=None)
    return [snapshot for snapshot, _ in islice(simulate(demo(1), visible=visible), 40)]


def test_all_steps_of_the_simulator_are_counted_once() -> None:
    snapshots, analyzer = seen(), Analyzer()
    for snapshot in snapshots:
        frame = analyzer.feed(snapshot)
    lengths: dict[str, list[int]] = {}
    for series in (series for snapshot in snapshots for series in snapshot.steps):
        assert series.prefill_tokens is not None
        assert series.decode_tokens is not None
        columns = (series.start_ns, series.end_ns, series.prefill_tokens, series.decode_tokens)
        for start, end, prefill, decode in zip(*(c.tolist() for c in columns), strict=True):
            phase = "mixed" if prefill and decode else "prefill" if prefill else "decode"
            lengths.setdefault(phase, []).append(end - start)
    [engine] = frame.engines
    assert set(lengths) == {"prefill", "decode", "mixed"}
    assert engine.step_durations == {phase: of(values) for phase, values in lengths.items()}
    assert engine.steps_total == {phase: len(values) for phase, values in lengths.items()}


def test_a_replay_gives_the_same_bytes_and_an_old_frame_has_no_durations() -> None:
    live, again = Analyzer(), Analyzer()
    for snapshot in seen():
        frame = live.feed(snapshot)
        text = encode_frame(frame)
        assert encode_frame(again.feed(decode_snapshot(encode_snapshot(snapshot)))) == text
    assert decode_frame(text) == frame
    assert b"step_durations" in text
    old = decode_frame(text.replace(b"step_durations", b"of_no_version"))
    assert [engine.step_durations for engine in old.engines] == [{}]
