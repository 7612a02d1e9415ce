"""Whatever the node is and whatever is wrong with what is read of it: sums are exact and totals only grow."""

from __future__ import annotations

from itertools import islice

import pytest

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import CAUSES, PHASES, Frame
from gpuidle.collectors.simulator.demos import FAULTS, NODES, named
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate

SECONDS = 70
PM_200_HZ = Sampling("cupti_pm", 200.0)


def frames(name: str, faults: list[str], visible: Visible) -> list[Frame]:
    analyzer = Analyzer()
    return [
        analyzer.feed(snapshot)
        for snapshot, _ in islice(simulate(named(name, faults, seed=4), visible=visible), SECONDS)
    ]


def check(seen: list[Frame]) -> None:
    before: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    for frame in seen:
        for gpu in frame.gpus:
            assert sum(gpu.causes_ns.values()) == gpu.window_ns
            assert sum(gpu.phases.of(phase) for phase in PHASES) == gpu.phases.window_ns
            assert min(gpu.causes_ns.values()) >= 0
            causes, phases = before.get(gpu.hw_id, ({}, {}))
            assert all(gpu.causes_total_ns[cause] >= causes.get(cause, 0) for cause in CAUSES)
            assert all(gpu.phases_total_ns[phase] >= phases.get(phase, 0) for phase in PHASES)
            before[gpu.hw_id] = (dict(gpu.causes_total_ns), dict(gpu.phases_total_ns))


@pytest.mark.parametrize("name", NODES)
def test_every_node_with_everything_wrong(name: str) -> None:
    faults = [fault for fault in FAULTS if (name, fault) != ("shared", "restart")]
    check(frames(name, faults, Visible(counters=PM_200_HZ)))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_without_steps(fault: str) -> None:
    check(frames("plain", [fault], Visible(steps=False, counters=PM_200_HZ)))


def test_an_engine_that_is_gone_and_loads_again_is_told_so() -> None:
    seen = frames("plain", ["restart"], Visible())
    gpu = seen[-1].gpus[0]
    assert gpu.causes_total_ns["unallocated"] == pytest.approx(3e9, abs=1.1e9)
    assert gpu.causes_total_ns["starting"] == pytest.approx(10e9, abs=1.1e9)
