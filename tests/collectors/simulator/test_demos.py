"""The nodes and faults that the command line names."""

from __future__ import annotations

from itertools import islice

import pytest

from gpuidle.agent.commands import simulated
from gpuidle.collectors.simulator.demos import FAULTS, NODES, named
from gpuidle.collectors.simulator.node import simulate
from gpuidle.collectors.simulator.scenario import ScenarioError, demo


def test_the_command_line_offers_what_there_is() -> None:
    assert tuple(NODES) == simulated.NODES
    assert tuple(FAULTS) == simulated.FAULTS


def test_the_plain_node_is_the_demo() -> None:
    assert named() == demo()


@pytest.mark.parametrize("name", NODES)
def test_every_node_works_and_can_have_every_fault_that_goes_with_it(name: str) -> None:
    faults = [fault for fault in FAULTS if (name, fault) != ("shared", "restart")]
    snapshots = [snapshot for snapshot, _ in islice(simulate(named(name, faults)), 90)]
    assert all(snapshot.node.simulated for snapshot in snapshots)
    assert sum(len(series) for snapshot in snapshots for series in snapshot.steps) > 100
    states = {engine.state for snapshot in snapshots for engine in snapshot.engines}
    assert ("starting" in states) == ("restart" in faults)


def test_what_does_not_exist_or_go_together_is_refused() -> None:
    with pytest.raises(ScenarioError, match="no such node"):
        named("warp-drive")
    with pytest.raises(ScenarioError, match="no pipeline, straggler or restart"):
        named("shared", ["restart"])
