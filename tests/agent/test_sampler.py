from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from tests.agent.analysis.builders import SECOND, gpu
from tests.agent.fakes import FakeClock, FakeCollector

from gpuidle.agent.model import Node, Problem, Reading, Snapshot
from gpuidle.agent.ports import Collector
from gpuidle.agent.sampler import Sampler

NODE = Node(hostname="node")


async def take(sampler: Sampler, count: int) -> list[Snapshot]:
    taken: list[Snapshot] = []
    async for snapshot in sampler.snapshots():
        taken.append(snapshot)
        if len(taken) == count:
            await sampler.close()
    return taken


def sampler(collectors: Sequence[Collector], clock: FakeClock, **options: int) -> Sampler:
    return Sampler(collectors, clock, NODE, seed=1, **options)


async def test_readings_of_all_collectors_come_together() -> None:
    first = FakeCollector("nvml", lambda now: Reading(gpus=(gpu(now / SECOND, 0.5),)))
    second = FakeCollector("engines", lambda _: Reading(texts={"a": "{}"}))
    snapshots = await take(sampler([first, second], FakeClock()), 3)
    assert [s.sequence for s in snapshots] == [0, 1, 2]
    assert all(
        s.gpus is not None and s.gpus[0].hw_id == "GPU-0" and s.texts == {"a": "{}"} for s in snapshots
    )
    assert [run.collector for run in snapshots[0].runs] == ["nvml", "engines"]
    assert len(first.threads) == 1
    assert first.closed.wait(5)
    assert second.closed.wait(5)


async def test_ticks_are_absolute_deadlines_with_jitter() -> None:
    clock = FakeClock()
    await take(sampler([], clock), 50)
    origin = 1_000_000_000
    offsets = [due - origin - tick * SECOND for tick, due in enumerate(clock.slept[:50])]
    assert max(abs(offset) for offset in offsets) <= 0.05 * SECOND
    assert len(set(offsets)) > 40


async def test_a_failing_collector_costs_its_own_reading_only() -> None:
    def fail(_: int) -> Reading:
        raise RuntimeError("boom")

    good = FakeCollector("nvml", lambda now: Reading(gpus=(gpu(now / SECOND),)))
    snapshot = (await take(sampler([FakeCollector("bad", fail), good], FakeClock()), 1))[0]
    assert snapshot.gpus is not None
    assert [(p.source, p.kind, p.message) for p in snapshot.problems] == [
        ("bad", "failed", "RuntimeError: boom")
    ]
    assert [run.ok for run in snapshot.runs] == [False, True]


async def test_a_hanging_collector_is_left_alone_until_it_answers() -> None:
    gate, calls = threading.Event(), []

    def hang(_: int) -> Reading:
        calls.append(1)
        gate.wait(30)
        return Reading(problems=(Problem(source="slow", kind="late", message="from the past"),))

    slow = FakeCollector("slow", hang)
    good = FakeCollector("nvml", lambda now: Reading(gpus=(gpu(now / SECOND),)))
    snapshots = await take(sampler([slow, good], FakeClock(), limit_ns=10**7), 20)
    gate.set()
    assert len(calls) == 1
    assert all(s.gpus is not None for s in snapshots)
    assert all([p.kind for p in s.problems] == ["timeout"] for s in snapshots)


async def test_ticks_that_were_missed_are_counted() -> None:
    clock = FakeClock()

    def stall(_: int) -> Reading:
        if len(clock.slept) == 2:
            clock.now_ns += 5 * SECOND
        return Reading()

    snapshots = await take(sampler([FakeCollector("x", stall)], clock), 5)
    times = [s.monotonic_ns for s in snapshots]
    assert times == sorted(times)
    # The tick that is late runs at once; those between it and the one before never do.
    assert [s.missed_ticks for s in snapshots if s.missed_ticks] in ([3], [4])
    longest = max(b - a for a, b in itertools.pairwise(times))
    assert longest >= 4.5 * SECOND


async def test_no_gpu_source_is_none_and_no_gpu_is_empty() -> None:
    none = (await take(sampler([FakeCollector("a", lambda _: Reading())], FakeClock()), 1))[0]
    empty = (await take(sampler([FakeCollector("a", lambda _: Reading(gpus=()))], FakeClock()), 1))[0]
    assert none.gpus is None
    assert empty.gpus == ()
