"""A node with the doubles of libcupti and libcuda, and a rung on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.doubles.cupti import Scenario, build, environment

from gpuidle.agent.model import CounterSeries, GpuReading, Problem
from gpuidle.collectors.counters.cupti import faults, rung
from gpuidle.collectors.counters.cupti.rung import CuptiPmRung, PmOptions
from gpuidle.collectors.counters.rung import RungReading, RungStatus

LIMIT_S = 30.0
"""For waits that end as soon as what is waited for is there; the machine may be slow."""


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012x}"


def gpu(index: int = 0) -> GpuReading:
    return GpuReading(hw_id=uuid(index), index=index, name="NVIDIA H100 80GB HBM3", read_ns=0)


@dataclass
class Node:
    """The double's files, and the rung with everything that it has handed over."""

    library: Path
    folder: Path
    proc: Path
    devices: list[GpuReading] = field(default_factory=lambda: [gpu()])
    rung: CuptiPmRung | None = None
    series: list[CounterSeries] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    last: RungReading = field(default_factory=RungReading)

    def play(self, scenario: Scenario) -> None:
        scenario.write(self.folder / "scenario")

    def start(self, options: PmOptions | None = None) -> None:
        self.rung = CuptiPmRung(options or self.options(), self.proc)

    def options(self, **chosen: float) -> PmOptions:
        return PmOptions(library=str(self.library / "libcupti.so.13"), **chosen)  # type: ignore[arg-type]

    def read(self) -> RungReading:
        assert self.rung is not None
        self.last = self.rung.read(time.monotonic_ns(), self.devices)
        self.series += self.last.series
        self.problems += self.last.problems
        return self.last

    def status(self, index: int = 0) -> RungStatus:
        return next(row for row in self.last.status if row.hw_id == uuid(index))

    def until(self, condition: Callable[[], bool]) -> None:
        """Read until `condition` holds."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            self.read()
            if condition():
                return
            assert time.monotonic() < deadline, (self.last, self.problems)
            time.sleep(0.05)

    def until_state(self, state: str, index: int = 0) -> RungStatus:
        self.until(lambda: self.status(index).state == state)
        return self.status(index)

    def samples(self, index: int = 0) -> int:
        return sum(len(series) for series in self.series if series.hw_id == uuid(index))

    def kinds(self) -> set[str]:
        return {problem.kind for problem in self.problems}

    def calls(self) -> list[str]:
        """The calls of a session in the order in which they were made."""
        journal = self.folder / "journal"
        return [line.split()[1] for line in journal.read_text().splitlines()] if journal.exists() else []

    def child(self, index: int = 0) -> int:
        assert self.rung is not None
        return self.rung.pids()[uuid(index)]


@pytest.fixture(scope="session")
def cupti_library() -> Path:
    return build()


@pytest.fixture
def node(cupti_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    proc = tmp_path / "proc"
    proc.mkdir()
    variables = environment(cupti_library, tmp_path / "scenario", tmp_path / "journal")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # What an operator would not mind waiting for.
    monkeypatch.setattr(faults, "OFTEN_S", 1)
    monkeypatch.setattr(rung, "HOLDERS_NS", 300_000_000)
    monkeypatch.setattr(rung, "POLL_S", 0.05)
    made = Node(cupti_library, tmp_path, proc)
    made.play(Scenario())
    yield made
    if made.rung is not None:
        made.rung.close()
        assert made.rung.pids() == {}
