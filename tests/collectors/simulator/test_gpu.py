"""Counters, power and energy of simulated cards, against the steps that caused them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace
from tests.collectors.simulator.nodes import asked, node, ran, steps_of

from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuReading, Snapshot
from gpuidle.collectors.simulator.batch import Step
from gpuidle.collectors.simulator.gpu import START_ENERGY_JOULES, Sampling
from gpuidle.collectors.simulator.node import START, Visible, simulate
from gpuidle.collectors.simulator.scenario import SECOND_NS, EngineSpec, GpuSpec, Request

BUSY = asked(*(Request(i * SECOND_NS // 4, 700, 30) for i in range(20)))
CARD = GpuSpec()


def sampled(spec: EngineSpec, hz: float, seconds: float = 6.0) -> list[CounterSeries]:
    visible = Visible(counters=Sampling("cupti_pm", hz))
    return [
        series
        for snapshot, _ in simulate(node(spec, seconds=seconds), visible=visible)
        for series in snapshot.counters
    ]


def within(steps: list[Step], begin_ns: int, end_ns: int, amount: Callable[[Step], float]) -> float:
    """Add up what steps did between two moments, each evenly over its time."""
    total = 0.0
    for step in steps:
        overlap = min(step.end_ns, end_ns) - max(step.start_ns, begin_ns)
        if overlap > 0:
            total += amount(step) * overlap / (step.end_ns - step.start_ns)
    return total


def gpu(snapshot: Snapshot, index: int = 0) -> GpuReading:
    assert snapshot.gpus is not None
    return snapshot.gpus[index]


@pytest.mark.parametrize(("hz", "seconds"), [(7.0, 3.0), (10.0, 3.0), (100.0, 1.0), (1000.0, 0.3)])
def test_every_sample_holds_what_the_steps_did_in_it(hz: float, seconds: float) -> None:
    steps, _ = steps_of(BUSY)
    rows = 0
    for series in sampled(BUSY, hz, seconds):
        assert series.gr_active is not None
        assert series.tensor_active is not None
        assert series.dram_read_bytes_per_s is not None
        for row in range(len(series)):
            rows += 1
            width = int(series.width_ns[row])
            end = int(series.end_ns[row]) - START.monotonic_ns
            active = within(steps, end - width, end, lambda step: step.end_ns - step.start_ns)
            pipe = within(steps, end - width, end, lambda step: step.cost.pipe_ns)
            read = within(steps, end - width, end, lambda step: step.cost.read_bytes)
            assert series.gr_active[row] * RATIO_STEP == pytest.approx(active / width, abs=RATIO_STEP)
            assert series.tensor_active[row] * RATIO_STEP == pytest.approx(
                pipe / width, rel=0.06, abs=RATIO_STEP
            )
            assert series.dram_read_bytes_per_s[row] == pytest.approx(read / width * 1e9, rel=0.06)
    assert rows == int(seconds * SECOND_NS) // Sampling("cupti_pm", hz).period_ns


def test_samples_stand_end_to_end_without_a_gap() -> None:
    series = sampled(BUSY, 7.0)
    ends = np.concatenate([s.end_ns for s in series])
    widths = np.concatenate([s.width_ns for s in series])
    assert {*np.diff(ends).tolist(), *widths.tolist()} == {round(SECOND_NS / 7)}
    assert len(ends) == 41  # the sample that has not ended by the last tick is not there


def test_an_idle_engine_reads_zero_in_every_counter() -> None:
    for series in sampled(asked(Request(SECOND_NS * 3600, 10, 10)), 10.0):
        columns = (series.gr_active, series.sm_active, series.tensor_active, series.dram_read_bytes_per_s)
        for values in columns:
            assert values is not None
            assert not values.any()


@pytest.mark.parametrize("tick_ns", [SECOND_NS, 130_000_000, 3 * SECOND_NS])
def test_energy_is_the_integral_of_power_over_steps_and_gaps(tick_ns: int) -> None:
    snapshots, _ = ran(node(BUSY, seconds=6.0), tick_ns=tick_ns)
    steps, _ = steps_of(BUSY)
    span = CARD.power_limit_watts - CARD.loaded_watts
    for snapshot in snapshots:
        now_ns = snapshot.monotonic_ns - START.monotonic_ns
        busy = within(steps, 0, now_ns, lambda step: step.cost.power_share * (step.end_ns - step.start_ns))
        joules = START_ENERGY_JOULES + (CARD.loaded_watts * now_ns + span * busy) / 1e9
        assert gpu(snapshot).energy_joules == pytest.approx(joules, abs=0.001)


def test_power_is_the_mean_of_the_last_second() -> None:
    snapshots, _ = ran(node(BUSY, seconds=6.0))
    for before, after in pairwise(snapshots):
        then, now = gpu(before).energy_joules, gpu(after).energy_joules
        assert then is not None
        assert now is not None
        assert gpu(after).power_watts == pytest.approx(now - then, abs=0.003)


def test_busy_is_of_the_last_second_in_whole_percents() -> None:
    snapshots, _ = ran(node(BUSY, seconds=6.0), tick_ns=400_000_000)
    steps, _ = steps_of(BUSY)
    for snapshot in snapshots[3:]:
        now_ns = snapshot.monotonic_ns - START.monotonic_ns
        busy = within(steps, now_ns - SECOND_NS, now_ns, lambda step: step.end_ns - step.start_ns) / 1e9
        assert gpu(snapshot).busy_ratio == pytest.approx(busy, abs=0.005 + 1e-9)


def test_decode_reads_busy_and_memory_busy_though_its_tensor_pipe_is_not() -> None:
    decode = asked(*(Request(0, 16, 2000) for _ in range(4)))
    snapshots, _ = ran(node(decode, seconds=5.0))
    last = snapshots[-1]
    assert (gpu(last).busy_ratio or 0) > 0.9
    assert (gpu(last).memory_busy_ratio or 0) > 0.8
    tensor = last.counters[0].tensor_active
    assert tensor is not None
    assert tensor.max() * RATIO_STEP < 0.2


def test_a_card_without_an_engine_is_bare() -> None:
    snapshots, _ = ran(node(BUSY, gpus=2, seconds=4.0))
    bare = gpu(snapshots[-1], 1)
    assert bare.processes == ()
    assert bare.memory_used_bytes == 0
    assert bare.power_watts == CARD.bare_watts
    assert bare.energy_joules == START_ENERGY_JOULES + 4 * CARD.bare_watts
    assert bare.busy_ratio == 0.0
    assert {series.hw_id for series in snapshots[-1].counters} == {
        gpu(snapshots[-1], i).hw_id for i in (0, 1)
    }


def test_noise_is_of_one_per_cent_and_differs_between_cards() -> None:
    decode = asked(*(Request(0, 16, 4000) for _ in range(4)))
    first, second = (
        np.concatenate(
            [
                s.dram_read_bytes_per_s
                for s in sampled_two(decode, index)
                if s.dram_read_bytes_per_s is not None
            ]
        )
        for index in (0, 1)
    )
    assert not np.array_equal(first, second)
    steady = first[10:-1]
    assert 0.003 < steady.std() / steady.mean() < 0.02


def sampled_two(spec: EngineSpec, index: int) -> list[CounterSeries]:
    scenario = node(replace(spec, gpus=(0, 1)), gpus=2, seconds=6.0)
    return [snapshot.counters[index] for snapshot, _ in simulate(scenario) if snapshot.counters]
