"""The collector beside real processes: engines with rings and metric files, their ends and their restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuidle.agent.model import EngineReading, Parallelism, StepSeries
from gpuidle.collectors.steps import vllm_plugin as layout
from gpuidle.collectors.steps.collector import StepsCollector
from gpuidle.collectors.steps.finding import find_files
from gpuidle.collectors.steps.fpm import FpmEndpoint
from gpuidle.collectors.steps.sources import step_sources

ROOT = Path(__file__).parents[3]
PROC = Path("/proc")
ENGINE = """
import sys
from tests.collectors.steps.fake_scheduler import Plan, scheduler_class, step
ranks = [int(rank) for rank in sys.argv[1:]]
made = [scheduler_class("0.32")(rank) for rank in ranks]
for one in made:
    one.add("a", 4)
print("up", flush=True)
first = {"a": 4}
for line in sys.stdin:
    for _ in range(int(line)):
        for one in made:
            step(one, Plan(first))
        first = {"a": 1}
    print("done", flush=True)
"""
METRICS = """
import os, sys, time
from prometheus_client import Counter, Histogram
names = ["engine", "model_name"]
steps = Histogram("vllm:iteration_tokens_total", "h", names).labels("0", "m")
first = Histogram("vllm:time_to_first_token_seconds", "h", names).labels("0", "m")
prompt = Counter("vllm:prompt_tokens", "h", names).labels("0", "m")
made = Counter("vllm:generation_tokens", "h", names).labels("0", "m")
if len(sys.argv) > 1 and os.fork() == 0:
    time.sleep(300)
print("up", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        prompt.inc(0)
        made.inc(3)
        steps.observe(3)
        time.sleep(0.02)
    print("done", flush=True)
"""


class Process:
    """A program that works when it is told to."""

    def __init__(self, code: str, *arguments: str, **environ: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / ".editable")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": path, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        self._expect("up")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def work(self, steps: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._expect("done")

    def end(self, how: int = signal.SIGKILL) -> None:
        self._process.send_signal(how)
        self._process.communicate()


class Node:
    """Engines that come and go, and the collector that reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[EngineReading] = []
        self.processes: list[Process] = []
        self.collector = StepsCollector(lambda: self.engines)
        self.now_ns = time.monotonic_ns()
        self.problems: list[str] = []
        self.read(0)

    def start(self, engine_id: str, *ranks: int) -> Process:
        process = Process(ENGINE, *[str(rank) for rank in ranks or (0,)], GPUIDLE_STEPS_DIR=str(self.folder))
        self.processes.append(process)
        self.serve(engine_id, process.pid)
        return process

    def serve(self, engine_id: str, *pids: int) -> None:
        self.engines = [each for each in self.engines if each.engine_id != engine_id]
        self.engines.append(
            EngineReading(
                engine_id=engine_id,
                engine="vllm",
                state="serving",
                read_ns=0,
                pids=pids,
                parallelism=Parallelism(),
            )
        )

    def read(self, seconds: float = 6.0) -> dict[tuple[str, str], int]:
        """Return the steps of one reading by engine and rank."""
        self.now_ns += round(seconds * 1e9)
        reading = self.collector.read(self.now_ns)
        self.problems = [problem.kind for problem in reading.problems]
        self.steps: tuple[StepSeries, ...] = reading.steps
        return {(one.engine_id, one.rank): len(one) for one in reading.steps}

    def close(self) -> None:
        self.collector.close()
        for process in self.processes:
            process.end()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_two_engines_and_two_ranks_are_told_apart(node: Node) -> None:
    one, two = node.start("one"), node.start("two", 0, 1)
    one.work(3)
    two.work(5)
    assert node.read() == {("one", "0"): 3, ("two", "0"): 5, ("two", "1"): 5}
    assert node.read() == {}
    one.work(2)
    assert node.read(1) == {("one", "0"): 2}
    assert node.problems == []


def test_an_engine_that_is_killed_is_read_to_its_end_and_its_successor_from_its_beginning(
    node: Node,
) -> None:
    first = node.start("one")
    first.work(3)
    node.read()
    first.work(4)
    first.end()
    assert node.read(1) == {("one", "0"): 4}
    second = node.start("one")
    second.work(2)
    assert node.read(1) == {("one", "0"): 2}
    assert node.problems == []


def test_a_ring_left_under_the_pid_of_another_process_is_not_read(node: Node) -> None:
    """Only what a process has mapped is its own: names and numbers prove nothing."""
    folder = node.folder / f"gpuidle-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    living = node.start("one")
    stale = layout.Ring(str(folder), 0, "x", 64)
    now = time.monotonic_ns()
    stale.write(now - 5, now, *[1] * 10)
    Path(stale.path).rename(folder / f"steps-{living.pid}-7-1.ring")
    living.work(1)
    assert node.read() == {("one", "0"): 1}


def test_a_file_put_in_the_place_of_a_ring_is_refused(node: Node, tmp_path: Path) -> None:
    process = node.start("one")
    process.work(2)
    (path,) = (tmp_path / f"gpuidle-{os.geteuid()}").iterdir()
    (tmp_path / "kept").hardlink_to(path)
    path.unlink()
    path.write_bytes(b"GPUIDLE\x01" + bytes(100))
    (ring,) = find_files(PROC, [process.pid]).rings
    try:
        os.close(os.open(f"/proc/{process.pid}/map_files/{ring.address}", os.O_RDONLY))
    except OSError:
        assert node.read() == {}
        assert node.problems == ["bad_ring"]
    else:  # where the kernel lets us through to the mapping itself, that is what is read
        assert node.read() == {("one", "0"): 2}


def test_a_ring_that_turns_bad_costs_its_own_steps_only(node: Node, tmp_path: Path) -> None:
    bad, good = node.start("bad"), node.start("good")
    node.read()
    bad.work(1)
    good.work(1)
    for path in (tmp_path / f"gpuidle-{os.geteuid()}").iterdir():
        if f"-{bad.pid}-" in path.name:
            with path.open("r+b") as file:
                file.seek(layout.COMMITTED_AT)
                file.write(b"\xff" * 8)
    assert node.read(1) == {("good", "0"): 1}
    assert node.problems == ["bad_ring"]
    good.work(1)
    assert node.read() == {("good", "0"): 1}
    assert node.problems == ["bad_ring"]


def test_lost_steps_are_said(node: Node) -> None:
    process = node.start("one")
    process.work(1)
    node.read()
    process.work(3)
    ring = next(iter(node.collector._sources["one"].rings.values()))
    ring._next -= 1
    node.read(1)
    ring._faults -= 2
    node.read(1)
    assert node.problems == ["steps_lost"]


def test_a_plugin_that_gave_up_is_said(node: Node) -> None:
    process = node.start("one")
    process.work(1)
    node.read()
    (ring,) = find_files(PROC, [process.pid]).rings
    with Path(ring.path).open("r+b") as file:
        file.seek(layout.FAULTS_AT)
        file.write(layout.COUNTER.pack(layout.MOST_FAULTS))
    node.read()
    assert node.problems == ["steps_lost", "plugin_stopped"]
    node.read()
    assert node.problems == ["plugin_stopped"]


def test_metric_files_of_one_front_end_give_steps(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    process = Process(METRICS, PROMETHEUS_MULTIPROC_DIR=str(folder))
    node.processes.append(process)
    node.serve("one", process.pid)
    node.read()
    process.work(5)
    time.sleep(0.1)
    node.now_ns = time.monotonic_ns() + 1_000_000_000
    node.read(1)
    assert (
        sum(int(one.delivered_tokens.sum()) for one in node.steps if one.delivered_tokens is not None) == 15
    )
    assert sum(len(one) + one.lost for one in node.steps) == 5
    assert {one.source for one in node.steps} == {"mmap"}


def test_metric_files_of_a_forked_child_are_its_parents(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    process = Process(METRICS, "fork", PROMETHEUS_MULTIPROC_DIR=str(folder))
    node.processes.append(process)
    (child,) = psutil.Process(process.pid).children()
    try:
        assert find_files(PROC, [child.pid]).front_ends
        assert len(find_files(PROC, [process.pid, child.pid]).front_ends) == 1
    finally:
        child.kill()


def test_several_front_ends_give_no_steps_and_a_remedy(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    fronts = [Process(METRICS, PROMETHEUS_MULTIPROC_DIR=str(folder)) for _ in range(2)]
    node.processes += fronts
    node.serve("one", *[front.pid for front in fronts])
    node.read()
    assert node.problems == ["several_front_ends"]
    states = {one.source: one.state for one in step_sources(node.engines)}
    assert states["mmap"] == "impossible"


def test_an_engine_whose_processes_are_gone_has_no_source_and_no_fault(node: Node) -> None:
    process = node.start("one")
    process.end()
    assert node.read() == {}
    assert node.problems == []
    states = {one.source: (one.state, bool(one.needs)) for one in step_sources(node.engines)}
    assert states["plugin"] == ("possible", True)
    assert states["counters"] == ("works", False)


def test_a_process_that_may_not_be_looked_at_is_told_from_one_without_a_ring(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, ends: object) -> None:
        raise PermissionError

    node.serve("one", 1)
    monkeypatch.setattr("gpuidle.collectors.steps.finding.mapped_files", refuse)
    states = {one.source: one for one in step_sources(node.engines)}
    assert states["plugin"].state == "forbidden"
    assert "CAP_SYS_PTRACE" in states["plugin"].needs


def test_a_rate_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="2000"):
        StepsCollector(list, poll_hz=5000)


def test_passes_are_compared_with_the_plugins_steps(node: Node) -> None:
    pytest.importorskip("zmq", reason="the extra fpm is not installed")
    from tests.doubles.fpm_publisher import Publisher, message, scheduled

    publisher = Publisher()
    node.collector.close()
    node.collector = StepsCollector(lambda: node.engines, fpm=[FpmEndpoint(publisher.endpoint)])
    process = node.start("one")
    node.read(0)
    publisher.wait_for_subscriber()
    for number in range(4):
        process.work(1)
        publisher.send(message(number, scheduled(decodes=9), wall_s=0.0001))
        time.sleep(0.02)
    publisher.send([b"", b"", b""])
    time.sleep(0.2)
    node.now_ns = time.monotonic_ns()
    node.read(3)
    assert "bad_passes" in node.problems
    assert [one.source for one in node.steps] == ["plugin"]
    assert len(node.steps[0]) == 4
    publisher.close()


def test_passes_without_pyzmq_have_a_remedy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    node.collector.close()
    node.collector = StepsCollector(lambda: node.engines, fpm=[FpmEndpoint("tcp://127.0.0.1:1")])
    node.read()
    assert node.problems == ["no_zmq"]
