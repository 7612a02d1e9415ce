"""The reader on sound files: any Snapshot, any series."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exporters.recording.sessions import SECOND, make_snapshot, write_session

from gpuidle.agent.codec import encode_snapshot
from gpuidle.agent.model import (
    RUNGS,
    CounterSeries,
    EngineCounters,
    EngineReading,
    GpuProcess,
    GpuReading,
    Node,
    Problem,
    Snapshot,
    StepSeries,
    column,
    rate_column,
)
from gpuidle.collectors.recording.reader import Session, SessionError, read_snapshots
from gpuidle.exporters.recording.writer import Rotation, SessionWriter

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int64 = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)


def columns(rows: int, dtype: str, elements: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.lists(elements, min_size=rows, max_size=rows).map(lambda values: column(values, dtype))


@st.composite
def step_series(draw: st.DrawFn) -> StepSeries:
    rows = draw(st.integers(0, 5))
    values = columns(rows, "i8", int64)
    optional = [draw(st.none() | values) for _ in range(8)]
    return StepSeries(
        draw(text), draw(text), draw(st.booleans()), draw(int64), draw(values), draw(values), *optional
    )


@st.composite
def counter_series(draw: st.DrawFn) -> CounterSeries:
    rows = draw(st.integers(0, 5))
    times, ratios = columns(rows, "i8", int64), columns(rows, "u2", st.integers(0, 65535))
    rates = st.lists(st.floats(0, 1e15), min_size=rows, max_size=rows).map(rate_column)
    return CounterSeries(
        draw(text),
        draw(st.sampled_from(RUNGS)),
        draw(times),
        draw(times),
        *(draw(st.none() | ratios) for _ in range(3)),
        *(draw(st.none() | rates) for _ in range(3)),
    )


def some(kind: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(kind, max_size=2).map(tuple)


problems = st.builds(Problem, source=text, kind=text, message=text, remedy=text, subject=text)
gpus = st.builds(
    GpuReading,
    hw_id=text,
    index=int64,
    name=text,
    read_ns=int64,
    energy_joules=st.none() | finite,
    memory_total_bytes=st.none() | int64,
    clock_events=st.none() | some(text),
    processes=st.none() | some(st.builds(GpuProcess, pid=int64, used_memory_bytes=st.none() | int64)),
)
engines = st.builds(
    EngineReading,
    engine_id=text,
    engine=text,
    state=st.sampled_from(["starting", "serving", "asleep", "unobserved"]),
    read_ns=int64,
    model_text=st.none() | text,
    counters=st.none() | some(st.builds(EngineCounters, rank=text, read_ns=int64, drafts=st.none() | int64)),
)
snapshots = st.builds(
    Snapshot,
    sequence=int64,
    monotonic_ns=int64,
    boottime_ns=int64,
    wall_ns=int64,
    node=st.builds(Node, hostname=text, simulated=st.booleans()),
    gpus=st.none() | some(gpus),
    engines=some(engines),
    steps=some(step_series()),
    counters=some(counter_series()),
    texts=st.dictionaries(text, text, max_size=2),
    problems=some(problems),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(snapshots, max_size=4))
def test_any_snapshots_come_back_byte_for_byte(session: list[Snapshot]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.gpuidle.mcap")
        write_session(path, session)
        again = list(read_snapshots(path))
    assert [encode_snapshot(snapshot) for snapshot in again] == [encode_snapshot(old) for old in session]


def test_columns_come_back_with_their_types_and_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    write_session(path, [make_snapshot(7)])
    (again,) = read_snapshots(path)
    before, after = make_snapshot(7).counters[0], again.counters[0]
    assert after.gr_active is not None
    assert after.gr_active.dtype == np.dtype("<u2")
    assert after.gr_active.tolist() == [50000, 7]
    assert after.sm_clock_hz is not None
    assert before.sm_clock_hz is not None
    assert after.sm_clock_hz.tolist() == before.sm_clock_hz.tolist()
    assert after.tensor_active is None
    assert not after.end_ns.flags.writeable


def test_a_session_can_be_read_twice_and_says_who_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    write_session(path, [make_snapshot(i) for i in range(3)])
    session = Session(path)
    assert len(list(session)) == len(list(session)) == 3
    assert session.opening is not None
    assert session.opening.schema == 1
    assert session.opening.part == 0


def record_series(base: Path, sequences: range) -> tuple[Path, ...]:
    writer = SessionWriter(base, rotation=Rotation(max_age_ns=2 * SECOND))
    for i in sequences:
        writer.write(make_snapshot(i))
    writer.close()
    return writer.paths


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    parts = record_series(tmp_path / "n.gpuidle.mcap", range(6))
    parts[2].rename(tmp_path / "n.10000.gpuidle.mcap")  # "10000" sorts before "9999" as text
    parts[1].rename(tmp_path / "n.9999.gpuidle.mcap")
    assert [snapshot.sequence for snapshot in read_snapshots(tmp_path)] == list(range(6))


def test_a_part_that_is_missing_in_the_middle_is_told_where_it_was(tmp_path: Path) -> None:
    parts = record_series(tmp_path / "n.gpuidle.mcap", range(6))
    parts[1].unlink()
    session = Session(tmp_path)
    told = [(snapshot.sequence, [p.kind for p in snapshot.problems]) for snapshot in session]
    assert told == [(0, []), (1, []), (4, ["missing_part"]), (5, [])]


def test_a_cut_part_is_told_with_the_first_snapshot_of_the_next(tmp_path: Path) -> None:
    parts = record_series(tmp_path / "n.gpuidle.mcap", range(4))
    parts[0].write_bytes(parts[0].read_bytes()[:-100])
    told = [(snapshot.sequence, [p.kind for p in snapshot.problems]) for snapshot in Session(tmp_path)]
    assert told == [(0, []), (2, ["cut"]), (3, [])]


def test_parts_of_another_recording_or_of_no_session_are_left_out(tmp_path: Path) -> None:
    parts = record_series(tmp_path / "n.gpuidle.mcap", range(8))
    (tmp_path / "elsewhere").mkdir()
    other = record_series(tmp_path / "elsewhere" / "n.gpuidle.mcap", range(20, 24))
    other[1].rename(parts[1])
    parts[2].write_bytes(b"")
    session = Session(tmp_path / "n.gpuidle.mcap")
    assert [snapshot.sequence for snapshot in session] == [0, 1, 6, 7]
    assert [problem.kind for problem in session.problems] == ["not_a_session"] * 2


def test_one_part_named_by_itself_is_read_alone_without_complaint(tmp_path: Path) -> None:
    parts = record_series(tmp_path / "n.gpuidle.mcap", range(6))
    session = Session(parts[1])
    assert [snapshot.sequence for snapshot in session] == [2, 3]
    assert session.problems == ()


def test_a_folder_of_several_recordings_asks_which_one(tmp_path: Path) -> None:
    record_series(tmp_path / "a.gpuidle.mcap", range(4))
    write_session(tmp_path / "b.gpuidle.mcap", [make_snapshot(1)])
    with pytest.raises(SessionError, match=r"holds 2 recordings; name one of .*/a.gpuidle.mcap, .*/b.gpu"):
        Session(tmp_path)


def test_a_part_that_rotation_deletes_before_it_is_read_is_told(tmp_path: Path) -> None:
    parts = record_series(tmp_path / "n.gpuidle.mcap", range(6))
    session = Session(tmp_path)
    parts[1].unlink()
    assert [snapshot.sequence for snapshot in session] == [0, 1, 4, 5]
    assert [problem.kind for problem in session.problems] == ["missing_part"]
