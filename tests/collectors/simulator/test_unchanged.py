"""Nodes without the newer options are what they were before those options came: bit by bit, for a seed.

Benchmarks and thresholds rest on these runs. A change here is a change of every figure that was published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from tests.collectors.simulator.nodes import SMALL, asked, node

from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import (
    SECOND_NS,
    Burst,
    ClosedLoop,
    Poisson,
    Request,
    Scenario,
    Sizes,
    demo,
)

MIX = (Sizes((40, 900), (5, 60), prefix_hit_ratio=0.3), Sizes((1500, 3000), (1, 9), weight=0.2))
BUSY = replace(SMALL, jitter=0.05, arrivals=(Poisson(6.0, MIX), Burst(SECOND_NS, 4, MIX), ClosedLoop(3, MIX)))
TIGHT = replace(asked(*(Request(i, 60, 60) for i in range(9))), kv_blocks=30, jitter=0.02)

NODES: dict[str, tuple[Scenario, float, str]] = {
    "demo": (
        replace(demo(0), duration_ns=40 * SECOND_NS),
        10.0,
        "16c53b57f3a901b8",
    ),
    "demo, other seed": (
        replace(demo(7), duration_ns=25 * SECOND_NS),
        100.0,
        "aea0bbf2410434cd",
    ),
    "two engines": (
        node(BUSY, replace(BUSY, name="pair", gpus=(1, 2)), gpus=4, seconds=6, seed=3),
        1000.0,
        "2e224828852a8b8e",
    ),
    "preemption": (
        node(TIGHT, seconds=4, seed=5),
        300.0,
        "2d48f888a8f1a636",
    ),
}


def told(scenario: Scenario, hz: float) -> Iterator[object]:
    """Yield all integers of a run: truth, steps, counters, tokens; other fields may come and go."""
    for snapshot, truth in simulate(scenario, visible=Visible(counters=Sampling("cupti_pm", hz))):
        for gpu in truth.gpus:
            yield gpu.hw_id, sorted(gpu.window.phases_ns.items()), sorted(gpu.total.causes_ns.items())
        for work in (engine.total for engine in truth.engines):
            yield work.prompt_tokens, work.recomputed_tokens, work.first_tokens, work.decode_tokens
            yield work.steps_prefill, work.steps_decode, work.steps_mixed, work.preemptions
        for engine in snapshot.engines:
            yield engine.root_pid, engine.root_start_ns, engine.pids
            for row in engine.counters or ():
                yield row.prompt_tokens, row.computed_prompt_tokens, row.generated_tokens, row.counted_steps
                yield row.requests_running, row.requests_waiting, row.prefix_hit_tokens, row.preemptions
        for steps in snapshot.steps:
            for column in (steps.start_ns, steps.end_ns, steps.prefill_tokens, steps.decode_tokens):
                yield None if column is None else column.tolist()
            for column in (steps.delivered_tokens, steps.sequences, steps.kv_tokens, steps.preemptions):
                yield None if column is None else column.tolist()
        for series in snapshot.counters:
            yield series.end_ns.tolist(), series.width_ns.tolist()
            for ratio in (series.gr_active, series.sm_active, series.tensor_active):
                yield None if ratio is None else ratio.tolist()
            for rate in (series.dram_read_bytes_per_s, series.dram_write_bytes_per_s, series.sm_clock_hz):
                yield None if rate is None else rate.tolist()
        for card in snapshot.gpus or ():
            yield card.energy_joules, card.power_watts, card.busy_ratio, card.memory_used_bytes
            yield card.clock_events, card.sm_clock_hz, card.temperature_celsius


def digest(scenario: Scenario, hz: float) -> str:
    whole = hashlib.sha256()
    for item in told(scenario, hz):
        whole.update(repr(item).encode())
    return whole.hexdigest()[:16]


@pytest.mark.parametrize("name", NODES)
def test_a_node_without_options_is_bit_for_bit_what_it_was(name: str) -> None:
    scenario, hz, expected = NODES[name]
    assert digest(scenario, hz) == expected
