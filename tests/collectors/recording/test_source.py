"""Replay: the pace, the end, and the consumer's own time."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from tests.exporters.recording.sessions import SECOND, make_snapshot, write_session

from gpuidle.agent.clock import Instant
from gpuidle.agent.ports import Source
from gpuidle.collectors.recording.reader import SessionError
from gpuidle.collectors.recording.source import ReplaySource


class TestedClock:
    """Time that passes only where somebody waits for it."""

    __test__ = False

    def __init__(self) -> None:
        self.now_ns = 100
        self.deadlines: list[int] = []

    def now(self) -> Instant:
        return Instant(self.now_ns, self.now_ns, self.now_ns)

    async def sleep_until(self, monotonic_ns: int) -> None:
        self.deadlines.append(monotonic_ns)
        self.now_ns = max(self.now_ns, monotonic_ns)


class StoppedClock(TestedClock):
    """Time that never comes."""

    async def sleep_until(self, monotonic_ns: int) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.gpuidle.mcap"
    write_session(path, [make_snapshot(i) for i in (0, 1, 3, 4)])
    return path


@pytest.fixture
def cut_path(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-60])
    return path


async def replay(source: Source) -> list[int]:
    return [snapshot.sequence async for snapshot in source.snapshots()]


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, [1, 3, 4]), (2.0, [0.5, 1.5, 2]), (0.5, [2, 6, 8])])
async def test_the_pace_is_that_of_the_recording_divided_by_the_speed(
    path: Path, speed: float, seconds: list[float]
) -> None:
    clock = TestedClock()
    assert await replay(ReplaySource(path, clock, speed=speed)) == [0, 1, 3, 4]
    assert clock.deadlines == [100 + int(second * SECOND) for second in seconds]


@pytest.mark.parametrize("speed", [None, 0])
async def test_without_a_speed_nothing_is_waited_for(path: Path, speed: float | None) -> None:
    assert await replay(ReplaySource(path, StoppedClock(), speed=speed)) == [0, 1, 3, 4]


async def test_a_slow_consumer_loses_nothing_and_is_caught_up_with(path: Path) -> None:
    clock = TestedClock()
    sequences = []
    async for snapshot in ReplaySource(path, clock).snapshots():
        sequences.append(snapshot.sequence)
        if snapshot.sequence == 0:
            clock.now_ns += 3 * SECOND + 1
    assert sequences == [0, 1, 3, 4]
    assert clock.deadlines == [100 + 4 * SECOND]


async def test_closing_ends_a_wait_for_the_next_snapshot(path: Path) -> None:
    source = ReplaySource(path, StoppedClock())
    stream = source.snapshots()
    assert (await anext(stream)).sequence == 0
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await source.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, 30)


async def test_a_cancelled_replay_lets_go_of_the_file(path: Path) -> None:
    source = ReplaySource(path, StoppedClock())
    stream = source.snapshots()
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting  # an open file would be a ResourceWarning, and warnings are errors
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_clock_that_fails_ends_the_replay_with_its_error(path: Path) -> None:
    class FailingClock(TestedClock):
        async def sleep_until(self, monotonic_ns: int) -> None:
            raise OSError("no time")

    with pytest.raises(OSError, match="no time"):
        await replay(ReplaySource(path, FailingClock()))


async def test_what_is_wrong_at_the_end_is_told_after_it(cut_path: Path) -> None:
    source = ReplaySource(cut_path, TestedClock(), speed=None)
    assert await replay(source) == [0, 1, 3]
    assert [problem.kind for problem in source.problems] == ["cut"]


def test_a_wrong_speed_or_path_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    for speed in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="speed must be"):
            ReplaySource(path, TestedClock(), speed=speed)
    with pytest.raises(SessionError, match="does not exist"):
        ReplaySource(tmp_path / "none", TestedClock())
