"""A process that holds the ladder over NVML and its rungs on the double, and tells what each tick brought."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tests.collectors.counters.nvml_process import ROOT
from tests.doubles.nvml import Scenario, environment

from gpuidle.agent.model import RATIO_STEP, GpuReading, Problem
from gpuidle.collectors.counters.rung import RungStatus

CODE = """
import sys, threading, time
import msgspec, numpy
from gpuidle.collectors.counters.dcgm import DcgmRung
from gpuidle.collectors.counters.gpm import GpmRung
from gpuidle.collectors.counters.ladder import LadderCollector
from gpuidle.collectors.counters.nvml import NvmlCollector

class Tap:
    def __init__(self, rung):
        self.rung, self.name, self.close = rung, rung.name, rung.close
    def read(self, now_ns, devices):
        answer = self.rung.read(now_ns, devices)
        status.extend(answer.status)
        raw.extend(answer.series)
        return answer

def plain(value):
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    raise NotImplementedError

status, raw = [], []
rungs = [GpmRung()] if "gpm" in sys.argv else []
rungs += [DcgmRung(url) for url in sys.argv if url.startswith("http://")]
ladder = LadderCollector(NvmlCollector(), [Tap(rung) for rung in rungs])
for line in sys.stdin:
    status.clear()
    raw.clear()
    reading = ladder.read(time.monotonic_ns())
    tick = {"gpus": reading.gpus, "counters": reading.counters, "problems": reading.problems,
            "status": status, "raw": raw, "threads": threading.active_count()}
    print(msgspec.json.encode(tick, enc_hook=plain).decode(), flush=True)
"""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A CounterSeries with plain lists."""

    hw_id: str
    rung: str
    end_ns: list[int]
    width_ns: list[int]
    gr_active: list[int] | None = None
    sm_active: list[int] | None = None
    tensor_active: list[int] | None = None
    dram_bytes_per_s: list[float] | None = None


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """What one reading of the ladder brought."""

    gpus: tuple[GpuReading, ...] | None
    counters: tuple[Series, ...]
    problems: tuple[Problem, ...]
    status: tuple[RungStatus, ...]
    """What the rungs themselves said."""
    raw: tuple[Series, ...]
    """What all rungs gave, those that the ladder did not hand on included."""
    threads: int

    def state(self, hw_id: str, rung: str = "nvml_gpm") -> str | None:
        return next((row.state for row in self.status if (row.hw_id, row.rung) == (hw_id, rung)), None)

    def kinds(self) -> set[tuple[str, str]]:
        return {(problem.kind, problem.subject) for problem in self.problems}


class LadderProcess:
    """Runs the ladder; `write` changes the node under the running process."""

    def __init__(self, process: subprocess.Popen[str], scenario: Path) -> None:
        self._process = process
        self._scenario = scenario
        self.ticks: list[Tick] = []

    def write(self, scenario: Scenario) -> None:
        scenario.write(self._scenario)

    def tick(self) -> Tick:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("tick\n")
        self._process.stdin.flush()
        self.ticks.append(msgspec.json.decode(self._process.stdout.readline(), type=Tick))
        return self.ticks[-1]

    def run(self, ticks: int, pause_s: float = 0.5) -> list[Tick]:
        """Tick some times, a pause before each."""
        made = []
        for _ in range(ticks):
            time.sleep(pause_s)
            made.append(self.tick())
        return made

    def until(self, holds: Callable[[Tick], bool], ticks: int = 100, pause_s: float = 0.1) -> Tick:
        """Tick until something holds; ten seconds of pauses at most."""
        for _ in range(ticks):
            (tick,) = self.run(1, pause_s)
            if holds(tick):
                return tick
        raise AssertionError(self.ticks[-1])


def rows(
    ticks: Sequence[Tick], hw_id: str, column: str, rung: str = "nvml_gpm"
) -> list[tuple[int, int, float]]:
    """Return (begin_ns, end_ns, value) of all samples of a column; ratios as ratios."""
    found = []
    for tick in ticks:
        for series in tick.counters:
            if (series.hw_id, series.rung) == (hw_id, rung):
                values = getattr(series, column)
                scale = 1.0 if column.endswith("_per_s") else RATIO_STEP
                for end, width, value in zip(series.end_ns, series.width_ns, values or (), strict=False):
                    found.append((end - width, end, value * scale))
    return found


@contextmanager
def ladder_process(library: Path, folder: Path, *rungs: str) -> Iterator[LadderProcess]:
    """Start a process with these rungs: "gpm", and the URLs of dcgm-exporters."""
    env = environment(library, folder / "scenario", dict(os.environ, PYTHONPATH=str(ROOT / ".editable")))
    command = [sys.executable, "-c", CODE, *rungs]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield LadderProcess(process, folder / "scenario")
        finally:
            process.kill()
