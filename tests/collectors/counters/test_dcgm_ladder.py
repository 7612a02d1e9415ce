"""The dcgm rung on the ladder, beside NVML on its double: stolen, stuck, silent, and back each time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.collectors.counters.ladder_process import LadderProcess, Tick, ladder_process
from tests.doubles.dcgm_exporter import DcgmExporter, DcgmScenario, Device, Fault, FaultKind, Level
from tests.doubles.nvml import Gpu, Scenario

from gpuidle.agent.model import RATIO_STEP

UUID = "GPU-00000000-0000-4000-8000-000000000000"
BUSY = Gpu(utilization_gpu_percent=99, power_mw=400_000)
"""Without GPM: an A100, say."""


class Node:
    """The ladder in its process, and the exporter that the tests change."""

    def __init__(self, ladder: LadderProcess, exporter: DcgmExporter) -> None:
        self._ladder = ladder
        self._exporter = exporter

    def suffer(self, *kinds: FaultKind) -> None:
        faults = tuple(Fault(kind, from_s=time.monotonic()) for kind in kinds)
        self._exporter.scenario = replace(self._exporter.scenario, faults=faults)

    def until_served(self) -> Tick:
        return self._ladder.until(lambda tick: bool(tick.counters), 300)

    def until_told(self, kind: str) -> Tick:
        return self._ladder.until(lambda tick: any(problem.kind == kind for problem in tick.problems), 300)


@pytest.fixture(scope="module")
def node(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("dcgm")
    Scenario(gpus=(BUSY,)).write(folder / "scenario")
    levels = (Level(0.0, gr=0.99, sm=0.9, tensor=0.03, dram=0.7),)
    exporter = DcgmExporter(DcgmScenario((Device(UUID, levels),), interval_s=0.4))
    with exporter.serving() as url, ladder_process(nvml_library, folder, "dcgm", url) as ladder:
        made = Node(ladder, exporter)
        made.until_served()
        yield made


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("missing", "rung_busy", "another profiler"),
        ("zero", "rung_dead", "dead counter"),
        ("frozen", "rung_lost", "has not changed"),
        ("error", "rung_lost", "500"),
    ],
)
def test_the_driver_serves_until_the_counters_are_back(
    node: Node, fault: FaultKind, kind: str, words: str
) -> None:
    node.suffer(fault)
    tick = node.until_told(kind)
    assert tick.counters == ()
    assert tick.gpus is not None
    assert tick.gpus[0].busy_ratio == 0.99
    (problem,) = (problem for problem in tick.problems if problem.kind == kind)
    assert "dcgm does not serve, nvml does" in problem.message
    assert words in problem.message
    assert problem.remedy
    node.suffer()
    series = node.until_served().counters[0]
    assert series.tensor_active is not None
    assert series.tensor_active[-1] * RATIO_STEP == pytest.approx(0.03, abs=1e-4)
