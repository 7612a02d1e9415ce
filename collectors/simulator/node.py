"""A simulated node: runs its engines and puts together, tick by tick, what a reader would have read.

`simulate` is the whole simulator as one synchronous function; `source.SimulatorSource` paces it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

import msgspec

from gpuidle.agent.clock import Instant
from gpuidle.agent.model import (
    EngineCounters,
    EngineLimits,
    EngineReading,
    Node,
    Parallelism,
    Snapshot,
    StepSeries,
    column,
)
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.simulator.costs import Costs
from gpuidle.collectors.simulator.engine import Engine, Step
from gpuidle.collectors.simulator.gpu import Card, Sampling, Timeline
from gpuidle.collectors.simulator.scenario import SECOND_NS, EngineSpec, Scenario, ScenarioError
from gpuidle.collectors.simulator.truth import (
    Account,
    EngineTruth,
    EngineWork,
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


class _Served:
    """One engine with what hangs on it."""

    def __init__(
        self, index: int, spec: EngineSpec, scenario: Scenario, start: Instant, keep_ns: int
    ) -> None:
        self.spec = spec
        self.engine_id = f"vllm:{spec.name}:{index}"
        self.model_text = f"config:{self.engine_id}"
        self.config = json.dumps(dict(spec.config), sort_keys=True)
        self.root_pid = 10_000 + 1_000 * index
        self._root_start_ns = start.boottime_ns
        self.costs = Costs(spec, scenario.gpus[spec.gpus[0]])
        self.engine = Engine(spec, self.costs, f"{scenario.seed}/{self.engine_id}")
        self.timeline = Timeline(keep_ns, self.costs.shape.layers)
        self.account = Account()
        self.total = EngineWork()

    def worker_pid(self, rank: int) -> int:
        """Return the process that holds the context on the GPU of this rank."""
        return self.root_pid + 2 + rank

    def reading(self, now_ns: int, *, counters: bool, steps: bool) -> EngineReading:
        """Return the engine as discovery and its adapter would give it."""
        spec = self.spec
        ranks = len(spec.gpus)
        return EngineReading(
            engine_id=self.engine_id,
            engine="vllm",
            state="serving" if counters or steps else "unobserved",
            read_ns=now_ns,
            version=spec.version,
            root_pid=self.root_pid,
            root_start_ns=self._root_start_ns,
            pids=(self.root_pid, self.root_pid + 1, *(self.worker_pid(rank) for rank in range(ranks))),
            model=spec.name,
            model_text=self.model_text,
            parallelism=Parallelism(tensor=ranks),
            limits=EngineLimits(
                max_batched_tokens=spec.max_batched_tokens,
                max_sequences=spec.max_sequences,
                kv_block_tokens=spec.kv_block_tokens,
                kv_capacity_tokens=spec.kv_capacity_tokens,
                dtype=str(spec.config.get("torch_dtype", "auto")),
                speculative=False,
            ),
            counters=(self._counters(now_ns),) if counters else None,
        )

    def _counters(self, now_ns: int) -> EngineCounters:
        told = self.engine.counters
        return EngineCounters(
            rank="0",
            read_ns=now_ns,
            prompt_tokens=told.prompt_tokens,
            computed_prompt_tokens=told.computed_prompt_tokens,
            generated_tokens=told.generated_tokens,
            first_tokens=told.first_tokens,
            time_to_first_token_s=told.time_to_first_token_ns / SECOND_NS,
            counted_steps=told.counted_steps,
            requests_running=told.requests_running,
            requests_waiting=told.requests_waiting,
            kv_usage_ratio=told.kv_usage_ratio,
            prefix_query_tokens=told.prefix_query_tokens,
            prefix_hit_tokens=told.prefix_hit_tokens,
            preemptions=told.preemptions,
            asleep=False,
        )

    def step_series(self, steps: list[Step], base_ns: int) -> StepSeries:
        """Return the steps as columns. Recomputed contexts stand among the prefill tokens."""

        def of(name: str) -> list[int]:
            return [getattr(step, name) for step in steps]

        return StepSeries(
            engine_id=self.engine_id,
            source="simulator",
            exact=True,
            lost=0,
            start_ns=column([step.start_ns + base_ns for step in steps], "i8"),
            end_ns=column([step.end_ns + base_ns for step in steps], "i8"),
            prefill_tokens=column(of("prefill_tokens"), "i8"),
            decode_tokens=column(of("decode_tokens"), "i8"),
            delivered_tokens=column(of("delivered_tokens"), "i8"),
            sequences=column(of("sequences"), "i8"),
            kv_tokens=column(of("kv_tokens"), "i8"),
            preemptions=column(of("preemptions"), "i8"),
        )


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
        self._served = [_Served(i, spec, scenario, start, keep_ns) for i, spec in enumerate(scenario.engines)]
        self._texts = {served.model_text: served.config for served in self._served}
        holders = {
            gpu: (served, rank) for served in self._served for rank, gpu in enumerate(served.spec.gpus)
        }
        self._cards: list[tuple[Card, _Served | None]] = []
        for index, spec in enumerate(scenario.gpus):
            peaks = find_peaks(spec.name, spec.memory_total_bytes)
            if peaks is None:
                raise ScenarioError(f"no peaks are known of {spec.name} with {spec.memory_total_bytes} bytes")
            served, rank = holders.get(index, (None, 0))
            card = Card(
                index,
                spec,
                peaks,
                None if served is None else served.timeline,
                pid=0 if served is None else served.worker_pid(rank),
                memory_used_bytes=0 if served is None else served.costs.memory_used_bytes,
                seed=scenario.seed,
            )
            self._cards.append((card, served))
        self._totals = [Split({}, {}) for _ in self._cards]
        self._now_ns = 0
        self._sequence = 0

    def tick(self, until_ns: int) -> tuple[Snapshot, Truth]:
        """Run until `until_ns` of the simulation and return what was read then, and the truth."""
        base_ns = self._start.monotonic_ns
        visible = self._visible
        window_ns = until_ns - self._now_ns
        splits: dict[str, Split] = {}
        engines, series, truths = [], [], []
        for served in self._served:
            steps = served.engine.advance(until_ns)
            pending = served.engine.pending
            served.timeline.advance(steps, pending, until_ns)
            splits[served.engine_id] = served.account.advance(steps, pending, until_ns)
            done = work_of(steps, len(served.spec.gpus))
            served.total = add_work(served.total, done)
            truths.append(EngineTruth(served.engine_id, done, served.total))
            engines.append(
                served.reading(until_ns + base_ns, counters=visible.engine_counters, steps=visible.steps)
            )
            if visible.steps:
                series.append(served.step_series(steps, base_ns))

        bare = Split({"idle": window_ns}, {"unallocated": window_ns}) if window_ns else Split({}, {})
        gpu_truths = []
        for index, (card, holder) in enumerate(self._cards):
            split = bare if holder is None else splits[holder.engine_id]
            self._totals[index] = add_split(self._totals[index], split)
            gpu_truths.append(GpuTruth(card.hw_id, split, self._totals[index]))
        counters = (
            ()
            if visible.counters is None
            else tuple(
                taken
                for card, _ in self._cards
                if (taken := card.samples(visible.counters, until_ns, base_ns)) is not None
            )
        )
        snapshot = Snapshot(
            sequence=self._sequence,
            monotonic_ns=base_ns + until_ns,
            boottime_ns=self._start.boottime_ns + until_ns,
            wall_ns=self._start.wall_ns + until_ns,
            node=self._node,
            gpus=tuple(card.reading(until_ns, base_ns) for card, _ in self._cards) if visible.gpus else None,
            engines=tuple(engines),
            steps=tuple(series),
            counters=counters,
            texts=self._texts,
        )
        self._now_ns = until_ns
        self._sequence += 1
        return snapshot, Truth(snapshot.monotonic_ns, window_ns, tuple(gpu_truths), tuple(truths))


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
