"""A process that holds an NvmlCollector and prints a Reading, as JSON, for each tick it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tests.doubles.nvml import Scenario, environment

from gpuidle.agent.model import Reading

ROOT = Path(__file__).parents[3]

CODE = """
import sys
import threading
import msgspec
from gpuidle.collectors.counters.nvml import NvmlCollector

collector = None
for line in sys.stdin:
    word, _, moment = line.strip().partition(" ")
    answer = "done"
    if word == "new":
        collector = NvmlCollector(elapsed_ns=lambda: 0, limit_s=1.5)
    elif word == "read":
        answer = msgspec.json.encode(collector.read(int(moment))).decode()
    elif word == "threads":
        answer = threading.active_count()
    elif word == "close":
        collector.close()
    print(answer, flush=True)
"""


class CollectorProcess:
    """Runs the collector as it is on the double; `write` changes the node under the running process.

    One process serves many tests, since its start takes longer than most of them: `renew` gives it a new
    collector.
    """

    def __init__(self, process: subprocess.Popen[str], scenario: Path) -> None:
        self._process = process
        self.scenario = scenario

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def write(self, scenario: Scenario) -> None:
        scenario.write(self.scenario)

    def read(self, seconds: float) -> Reading:
        """Return the collector's reading at a moment of its clock."""
        return msgspec.json.decode(self._ask(f"read {round(seconds * 1e9)}"), type=Reading)

    def close(self) -> None:
        assert self._ask("close") == "done\n"

    def threads(self) -> int:
        """Return how many threads the process has."""
        return int(self._ask("threads"))

    def renew(self) -> None:
        assert self._ask("new") == "done\n"


@contextmanager
def collector_process(library: Path | None, folder: Path) -> Iterator[CollectorProcess]:
    """Start a process that sees the double in `library`, or no library of the driver at all."""
    env = dict(os.environ, PYTHONPATH=str(ROOT / ".editable"))
    env.pop("LD_LIBRARY_PATH", None)
    if library is not None:
        env = environment(library, folder / "scenario", env)
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            node = CollectorProcess(process, folder / "scenario")
            node.renew()
            yield node
        finally:
            process.kill()
