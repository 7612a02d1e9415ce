"""A simulated node: runs its engines and puts together, tick by tick, what a reader would have read.

`simulate` is the whole simulator as one synchronous function; `source.SimulatorSource` paces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec

from gpuidle.agent.clock import Instant
from gpuidle.agent.model import (
    Node,
    Snapshot,
)
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.simulator.batch import Step
from gpuidle.collectors.simulator.clocks import Clocks
from gpuidle.collectors.simulator.faults import CounterFaults
from gpuidle.collectors.simulator.gpu import Card, Sampling
from gpuidle.collectors.simulator.scenario import SECOND_NS, Scenario, ScenarioError
from gpuidle.collectors.simulator.served import Served
from gpuidle.collectors.simulator.sharing import Sharing
from gpuidle.collectors.simulator.truth import (
    EngineTruth,
    GpuTruth,
    Split,
    Truth,
    add_split,
    add_work,
    work_of,
)

START = Instant(
    monotonic_ns=1_000 * SECOND_NS, boottime_ns=1_000 * SECOND_NS, wall_ns=1_750_000_000 * SECOND_NS
)
"""When a simulation begins unless it is told otherwise."""

GPM_10_HZ = Sampling(rung="nvml_gpm", hz=10.0)
CUPTI_100_HZ = Sampling(rung="cupti_pm", hz=100.0)


class Visible(msgspec.Struct, frozen=True):
    """What the reader of the node is given to see. The truth is the same whatever it is."""

    gpus: bool = True
    """Readings of the driver; False: no GPU source answers."""
    counters: Sampling | None = GPM_10_HZ
    steps: bool = True
    """A stream of exact steps."""
    engine_counters: bool = True
    """The engine's own counters."""


class SimulatedNode:
    """A node from the start of its scenario on; each `tick` moves it forward.

    Raises:
        ScenarioError: the scenario cannot be (a model that does not fit its GPUs, a card without peaks).
    """

    def __init__(self, scenario: Scenario, visible: Visible, *, start: Instant, longest_tick_ns: int) -> None:
        self._visible = visible
        self._start = start
        self._node = Node(hostname=scenario.hostname, boot_id=f"simulated-{scenario.seed}", simulated=True)
        sample_ns = 0 if visible.counters is None else visible.counters.period_ns
        keep_ns = max(SECOND_NS, longest_tick_ns + sample_ns)
        clocks = Clocks(scenario.clocks)
        self._served = [
            Served(i, spec, scenario, start, keep_ns, clocks) for i, spec in enumerate(scenario.engines)
        ]
        self._texts = {served.model_text: served.config for served in self._served}
        self._by_name = {served.spec.name: served for served in self._served}
        self._shared = _shared(self._served)
        self._cards: list[tuple[Card, list[tuple[Served, int]], CounterFaults]] = []
        for index, spec in enumerate(scenario.gpus):
            peaks = find_peaks(spec.name, spec.memory_total_bytes)
            if peaks is None:
                raise ScenarioError(f"no peaks are known of {spec.name} with {spec.memory_total_bytes} bytes")
            holders = [
                (served, served.spec.gpus.index(index))
                for served in self._served
                if index in served.spec.gpus
            ]
            taken = sum(served.costs.memory_used_bytes for served, _ in holders)
            if taken > spec.memory_total_bytes:
                raise ScenarioError(f"engines take {taken} bytes of a GPU with {spec.memory_total_bytes}")
            card = Card(
                index,
                spec,
                peaks,
                [served.timelines[served.kind(rank)] for served, rank in holders],
                clocks=clocks,
                seed=scenario.seed,
            )
            self._cards.append((card, holders, CounterFaults(scenario.faults, index, scenario.seed)))
        self._totals = [Split({}, {}) for _ in self._cards]
        self._now_ns = 0
        self._sequence = 0

    def tick(self, until_ns: int) -> tuple[Snapshot, Truth]:
        """Run until `until_ns` of the simulation and return what was read then, and the truth."""
        base_ns = self._start.monotonic_ns
        visible = self._visible
        window_ns = until_ns - self._now_ns
        splits: dict[str, list[Split]] = {}
        engines, series, truths = [], [], []
        for served, steps in self._advance(until_ns, splits):
            done = work_of(steps, len(served.spec.gpus))
            served.total = add_work(served.total, done)
            truths.append(EngineTruth(served.engine_id, done, served.total))
            reading = served.reading(until_ns, counters=visible.engine_counters, steps=visible.steps)
            if reading is not None:
                engines.append(reading)
            if visible.steps:
                series.append(served.step_series(steps, base_ns))

        bare = Split({"idle": window_ns}, {"unallocated": window_ns}) if window_ns else Split({}, {})
        gpu_truths = []
        for index, (card, holders, _) in enumerate(self._cards):
            split = bare
            for served, rank in holders[:1]:
                split = splits[served.engine_id][served.kind(rank)]
            self._totals[index] = add_split(self._totals[index], split)
            gpu_truths.append(GpuTruth(card.hw_id, split, self._totals[index]))
        counters = (
            ()
            if visible.counters is None
            else tuple(
                shown
                for card, _, faults in self._cards
                if (taken := card.samples(visible.counters, until_ns, base_ns)) is not None
                and (shown := faults.shown(taken, base_ns)) is not None
            )
        )
        gpus = tuple(
            card.reading(
                until_ns,
                base_ns,
                tuple(p for served, rank in holders for p in served.process(rank, until_ns)),
            )
            for card, holders, _ in self._cards
        )
        snapshot = Snapshot(
            sequence=self._sequence,
            monotonic_ns=base_ns + until_ns,
            boottime_ns=self._start.boottime_ns + until_ns,
            wall_ns=self._start.wall_ns + until_ns,
            node=self._node,
            gpus=gpus if visible.gpus else None,
            engines=tuple(engines),
            steps=tuple(series),
            counters=counters,
            texts=self._texts,
        )
        self._now_ns = until_ns
        self._sequence += 1
        return snapshot, Truth(snapshot.monotonic_ns, window_ns, tuple(gpu_truths), tuple(truths))

    def _advance(self, until_ns: int, splits: dict[str, list[Split]]) -> list[tuple[Served, list[Step]]]:
        """Run all engines, those that hand on their requests first; fill in how the time of GPUs split."""
        ran: dict[str, list[Step]] = {}
        for served in sorted(self._served, key=lambda each: each.spec.hands_to is None):
            if served.engine_id in ran:
                continue
            sharers = self._shared.get(served.engine_id)
            if sharers is None:
                engine = served.engine
                ran[served.engine_id] = steps = engine.advance(until_ns)
                splits[served.engine_id] = [
                    account.advance(steps, engine.pending, until_ns, engine.spans)
                    for account in served.accounts
                ]
            else:
                group, sharing = sharers
                done, split = sharing.advance(until_ns)
                for each, steps in zip(group, done, strict=True):
                    ran[each.engine_id] = steps
                    splits[each.engine_id] = [split] * len(each.accounts)
            self._hand_on(served)
        for served in self._served:
            engine = served.engine
            engine.spans[:] = [span for span in engine.spans if span[1] > until_ns]
            for timeline in served.timelines:
                timeline.advance(ran[served.engine_id], engine.pending, until_ns)
        return [(served, ran[served.engine_id]) for served in self._served]

    def _hand_on(self, served: Served) -> None:
        way = served.spec.hands_to
        if way is None:
            return
        token_bytes = served.costs.shape.kv_bytes_per_token()
        for at_ns, request in served.engine.handed:
            moved_ns = way.latency_ns + request.prompt_tokens * token_bytes / way.bytes_per_s * SECOND_NS
            there = msgspec.structs.replace(
                request,
                arrival_ns=at_ns + round(moved_ns),
                prefix_hit_tokens=0,
                transferred_tokens=request.prompt_tokens - 1,
            )
            self._by_name[way.engine].engine.receive(there, at_ns)
        served.engine.handed.clear()


def _shared(served: list[Served]) -> dict[str, tuple[list[Served], Sharing]]:
    """Return, for each engine that shares its GPUs, all of its group and what drives them."""
    groups: dict[frozenset[int], list[Served]] = {}
    for each in served:
        groups.setdefault(frozenset(each.spec.gpus), []).append(each)
    found = {}
    for group in groups.values():
        if len(group) > 1:
            sharing = Sharing([each.engine for each in group])
            found.update({each.engine_id: (group, sharing) for each in group})
    return found


def simulate(
    scenario: Scenario,
    *,
    visible: Visible = Visible(),  # noqa: B008 - frozen
    tick_ns: int = SECOND_NS,
    start: Instant = START,
) -> Iterator[tuple[Snapshot, Truth]]:
    """Yield what is read every `tick_ns`, with the truth beside it, until the scenario ends, maybe never.

    The first Snapshot is read at the start, before anything has happened: the others count from it. A last,
    shorter tick ends with the scenario.

    Raises:
        ScenarioError: the scenario cannot be, or draws a request that never fits the KV cache.
    """
    if tick_ns < 1:
        raise ScenarioError(f"a tick takes time: {tick_ns} ns")
    node = SimulatedNode(scenario, visible, start=start, longest_tick_ns=tick_ns)
    for number in count():
        due_ns = number * tick_ns
        if scenario.duration_ns is not None and due_ns >= scenario.duration_ns:
            yield node.tick(scenario.duration_ns)
            return
        yield node.tick(due_ns)
