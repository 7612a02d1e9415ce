"""The simulator as a Source: history at once, then real time; the same Snapshots whatever the pace."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.agent.fakes import FakeClock
from tests.collectors.simulator.nodes import asked, node, ran

from gpuidle.agent.clock import Instant
from gpuidle.agent.codec import decode_snapshot, encode_snapshot
from gpuidle.agent.model import Snapshot
from gpuidle.agent.ports import Source
from gpuidle.collectors.simulator.node import CUPTI_100_HZ, Visible, simulate
from gpuidle.collectors.simulator.scenario import SECOND_NS, Poisson, Request, Scenario, Sizes
from gpuidle.collectors.simulator.source import SimulatorSource

USERS = replace(asked(), arrivals=(Poisson(3.0, (Sizes((100, 800), (5, 40)),)),), jitter=0.03)
SCENARIO = node(USERS, seconds=10.0)


async def taken(source: Source, count: int = 1000) -> list[Snapshot]:
    snapshots = []
    async for snapshot in source.snapshots():
        snapshots.append(snapshot)
        if len(snapshots) == count:
            break
    return snapshots


def bytes_of(scenario: Scenario, visible: Visible) -> list[bytes]:
    return [encode_snapshot(snapshot) for snapshot, _ in simulate(scenario, visible=visible)]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    visible = Visible(counters=CUPTI_100_HZ)
    assert bytes_of(SCENARIO, visible) == bytes_of(SCENARIO, visible)
    assert bytes_of(SCENARIO, visible) != bytes_of(replace(SCENARIO, seed=2), visible)


def test_what_is_visible_does_not_change_what_happens() -> None:
    whole = [truth for _, truth in simulate(SCENARIO)]
    for visible in (
        Visible(gpus=False, counters=None, steps=False),
        Visible(engine_counters=False),
        Visible(counters=CUPTI_100_HZ),
    ):
        assert [truth for _, truth in simulate(SCENARIO, visible=visible)] == whole


def test_each_kind_of_evidence_can_be_taken_away() -> None:
    nothing = Visible(gpus=False, counters=None, steps=False, engine_counters=False)
    for snapshot, _ in simulate(SCENARIO, visible=nothing):
        assert snapshot.gpus is None
        assert not snapshot.counters
        assert not snapshot.steps
        assert snapshot.engines[0].counters is None
        assert snapshot.engines[0].state == "unobserved"
    for snapshot, _ in simulate(SCENARIO):
        assert snapshot.gpus
        assert snapshot.engines[0].counters
        assert snapshot.engines[0].state == "serving"


def test_snapshots_say_that_the_node_is_simulated_and_carry_the_model() -> None:
    snapshots, _ = ran(SCENARIO)
    for snapshot in snapshots:
        assert snapshot.node.simulated
        engine = snapshot.engines[0]
        assert engine.model_text is not None
        assert '"hidden_size": 4096' in snapshot.texts[engine.model_text]
        assert snapshot.gpus is not None
        assert snapshot.gpus[0].processes is not None
        assert {process.pid for process in snapshot.gpus[0].processes} <= set(engine.pids)


def test_snapshots_survive_the_codec() -> None:
    for snapshot in ran(SCENARIO)[0]:
        data = encode_snapshot(snapshot)
        assert encode_snapshot(decode_snapshot(data)) == data


def test_the_steps_of_a_session_are_in_order_and_none_is_lost_between_ticks() -> None:
    snapshots, truths = ran(SCENARIO, tick_ns=230_000_000)
    rows = [
        (int(series.start_ns[i]), int(series.end_ns[i]))
        for snapshot in snapshots
        for series in snapshot.steps
        for i in range(len(series))
    ]
    assert all(before[1] <= after[0] < after[1] for before, after in pairwise(rows))
    total = truths[-1].engines[0].total
    assert len(rows) == total.steps_prefill + total.steps_decode + total.steps_mixed > 100
    for snapshot in snapshots:
        for series in snapshot.steps:
            assert all(end <= snapshot.monotonic_ns for end in series.end_ns.tolist())


async def test_history_comes_at_once_and_the_rest_when_it_is_due() -> None:
    clock = FakeClock()
    clock.now_ns = 100 * SECOND_NS
    source = SimulatorSource(replace(SCENARIO, duration_ns=None), clock, warm_up_ns=6 * SECOND_NS)
    snapshots = await taken(source, 10)
    times = [snapshot.monotonic_ns // SECOND_NS for snapshot in snapshots]
    assert times == list(range(94, 104))
    assert clock.slept == [due * SECOND_NS for due in (101, 102, 103)]
    assert [snapshot.wall_ns - snapshot.monotonic_ns for snapshot in snapshots] == [clock.wall_offset_ns] * 10


async def test_an_unpaced_source_never_sleeps_and_ends_with_its_scenario() -> None:
    clock = FakeClock()
    snapshots = await taken(SimulatorSource(SCENARIO, clock, paced=False))
    assert len(snapshots) == 11
    assert clock.slept == []


async def test_history_does_not_reach_back_before_the_boot() -> None:
    clock = FakeClock()
    clock.now_ns = 2 * SECOND_NS
    snapshots = await taken(SimulatorSource(SCENARIO, clock, warm_up_ns=60 * SECOND_NS), 3)
    assert [snapshot.monotonic_ns for snapshot in snapshots] == [0, SECOND_NS, 2 * SECOND_NS]


class StoppedClock:
    """A clock on which nothing is ever due."""

    def now(self) -> Instant:
        return Instant(SECOND_NS, SECOND_NS, SECOND_NS)

    async def sleep_until(self, monotonic_ns: int) -> None:
        await asyncio.Event().wait()


async def test_closing_ends_a_source_that_waits() -> None:
    source = SimulatorSource(SCENARIO, StoppedClock())
    task = asyncio.create_task(taken(source))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    await source.close()
    assert len(await task) == 1


async def test_a_cancelled_reader_is_cancelled() -> None:
    task = asyncio.create_task(taken(SimulatorSource(SCENARIO, StoppedClock())))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class BrokenClock(StoppedClock):
    """A clock that fails."""

    async def sleep_until(self, monotonic_ns: int) -> None:
        raise OSError("no clock")


async def test_a_fault_of_the_clock_is_not_swallowed() -> None:
    with pytest.raises(OSError, match="no clock"):
        await taken(SimulatorSource(SCENARIO, BrokenClock()))


def test_two_engines_of_one_node_do_not_touch_each_other() -> None:
    left = asked(Request(0, 300, 20))
    right = replace(asked(Request(SECOND_NS, 200, 9)), name="right", gpus=(1,))
    snapshots, truths = ran(node(left, right, gpus=2, seconds=4.0))
    alone = ran(node(left, seconds=4.0))[1]
    assert truths[-1].engines[0].total == alone[-1].engines[0].total
    assert truths[-1].engines[1].total.decode_tokens == 8
    assert [engine.engine_id for engine in snapshots[-1].engines] == ["vllm:small:0", "vllm:right:1"]
