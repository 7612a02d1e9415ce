"""The engines of a node in one reading: on made-up trees with scripted servers, and on a real process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.doubles.http_server import FakeVllm, answer, raw_server, read_request
from tests.doubles.proc_tree import ProcTree

from gpuidle.agent.codec import decode_snapshot, encode_snapshot
from gpuidle.agent.model import EngineReading, Node, Reading, Snapshot
from gpuidle.collectors.engines.collector import EnginesCollector
from gpuidle.collectors.engines.track import NamedEndpoint
from gpuidle.collectors.support.http import HttpError, parse_base_url
from gpuidle.collectors.table import ENGINES

REPOSITORY = Path(__file__).parents[3]
DATA = REPOSITORY / "tests" / "data" / "vllm"
SECOND = 1_000_000_000
SERVE = ["/opt/venv/bin/python", "/opt/venv/bin/vllm", "serve", "/models/tiny-llama"]
CONFIG = '{"architectures":["LlamaForCausalLM"],"hidden_size":128}'
Gpus = dict[str, tuple[int, ...]]


def page(name: str) -> str:
    return next(DATA.glob(f"metrics_{name}_*.txt")).read_text()


class Bench:
    """A collector under a clock of its own; `gpus` is what the driver told last."""

    def __init__(
        self, root: Path | str, *, endpoints: tuple[NamedEndpoint, ...] = (), patience_s: float = 10.0
    ) -> None:
        self.gpus: Gpus | None = {}
        self.now_ns = 1_000 * SECOND
        self.collector = EnginesCollector(
            ENGINES,
            proc_root=str(root),
            endpoints=endpoints,
            gpu_processes=lambda: self.gpus,
            timeout_s=5.0,
            patience_s=patience_s,
        )

    def read(self, after_s: float = 1.0) -> Reading:
        self.now_ns += int(after_s * SECOND)
        return self.collector.read(self.now_ns)

    def engine(self, after_s: float = 1.0) -> EngineReading:
        (engine,) = self.read(after_s).engines
        return engine


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options: object) -> Bench:
        benches.append(Bench(tmp_path / "proc", **options))  # type: ignore[arg-type]
        return benches[-1]

    yield make
    for one in benches:
        one.collector.close()
    for thread in threading.enumerate():
        if thread.name == "gpuidle-engine":
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    (tmp_path / "files" / "models" / "tiny-llama").mkdir(parents=True)
    (tmp_path / "files" / "models" / "tiny-llama" / "config.json").write_text(CONFIG)
    return ProcTree(tmp_path / "proc")


def port_of(url: str) -> int:
    return parse_base_url(url).port or 0


def add_server(
    tree: ProcTree, url: str, *, pid: int = 10, start_s: float = 10.0, model: str = SERVE[-1]
) -> None:
    files = tree.root.parent / "files"
    words = [*SERVE[:-1], model, "--port", str(port_of(url)), "-tp", "2"]
    tree.add(pid, words, start_s=start_s, listen=[("127.0.0.1", port_of(url))], files=files)


def kinds(reading: Reading) -> list[str]:
    return [problem.kind for problem in reading.problems]


def test_an_engine_is_found_named_and_read(tree: ProcTree, bench: Callable[..., Bench]) -> None:
    with FakeVllm(page("4")).serving() as url:
        add_server(tree, url)
        one = bench()
        one.gpus = {"GPU-a": (10,), "GPU-b": (10,)}
        reading = one.read()
    (engine,) = reading.engines
    assert (engine.engine, engine.state, engine.url, engine.version) == ("vllm", "serving", url, "0.32.0")
    assert (engine.root_pid, engine.root_start_ns, engine.pids) == (10, 10 * SECOND, (10,))
    assert (engine.model, engine.model_path) == ("tiny", "/models/tiny-llama")
    assert engine.engine_id.startswith("vllm-tiny-llama-")
    assert (
        "10" not in engine.engine_id.removeprefix("vllm-tiny-llama-")
        or str(port_of(url)) not in engine.engine_id
    )
    assert engine.parallelism.tensor == 2
    assert (engine.limits.kv_capacity_tokens, engine.limits.kv_dtype, engine.limits.dtype) == (
        2097152,
        "auto",
        "auto",
    )
    assert engine.counters is not None
    assert engine.counters[0].generated_tokens == 12624
    assert engine.model_text is not None
    assert reading.texts == {engine.model_text: CONFIG}
    assert reading.problems == ()
    snapshot = Snapshot(
        sequence=0, monotonic_ns=0, boottime_ns=0, wall_ns=0, node=Node(hostname="n"), engines=reading.engines
    )
    assert decode_snapshot(encode_snapshot(snapshot)).engines == reading.engines


def test_the_name_is_the_same_after_a_restart_of_the_engine_or_of_the_agent(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    fake = FakeVllm(page("4"))
    one = bench()
    one.gpus = {"GPU-a": (10,)}
    with fake.serving() as url:
        add_server(tree, url)
        before = one.engine()
    tree.remove(10)
    one.gpus = {"GPU-a": ()}
    assert one.read().engines == ()
    fake = FakeVllm(page("0"))
    with fake.serving() as other:
        add_server(tree, other, pid=77, start_s=500)
        one.gpus = {"GPU-a": (77,)}
        after = one.engine()
        again = bench()
        again.gpus = one.gpus
        assert again.engine().engine_id == before.engine_id
    assert after.engine_id == before.engine_id
    assert (after.root_pid, after.root_start_ns) != (before.root_pid, before.root_start_ns)
    # The counters went back and are told as they are: the analysis sees the other root.
    assert after.counters is not None
    assert after.counters[0].generated_tokens == 0


def test_a_reused_pid_is_another_engine_at_once(tree: ProcTree, bench: Callable[..., Bench]) -> None:
    with FakeVllm(page("4")).serving() as url:
        add_server(tree, url)
        one = bench()
        before = one.engine()
        tree.remove(10)
        tree.add(10, ["python", "train.py"], start_s=99)
        reading = one.read()
    assert before.root_pid == 10
    assert reading.engines == ()


def test_names_differ_by_model_place_and_number(tree: ProcTree, bench: Callable[..., Bench]) -> None:
    a, b, c, d = (FakeVllm(page("0"), root=root) for root in ("/m/x", "/m/x", "/m/x", "/n/x"))
    with a.serving() as ua, b.serving() as ub, c.serving() as uc, d.serving() as ud:
        for pid, url in ((10, ua), (20, ub), (30, uc), (40, ud)):
            add_server(tree, url, pid=pid, model="/m/x" if url != ud else "/n/x")
        one = bench()
        one.gpus = {"GPU-a": (10,), "GPU-b": (20, 30), "GPU-c": (40,)}
        first = {e.root_pid: e.engine_id for e in one.read().engines}
        other = bench()
        other.gpus = one.gpus
        second = {e.root_pid: e.engine_id for e in other.read().engines}
    assert len(set(first.values())) == 4
    assert first == second
    assert all(name.startswith("vllm-x-") for name in first.values())


def test_engines_wait_for_the_first_word_of_the_driver_but_not_for_ever(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with FakeVllm(page("0")).serving() as url:
        add_server(tree, url)
        one = bench()
        one.gpus = None
        assert [len(one.read().engines) for _ in range(10)] == [0] * 10
        assert len(one.read().engines) == 1


def test_an_engine_that_loads_is_starting_and_keeps_its_name_when_it_serves(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with FakeVllm(page("0")).serving() as url:
        tree.add(10, [*SERVE, "--port", str(port_of(url))])
        one = bench()
        one.gpus = {"GPU-a": (10,)}
        loading = one.engine()
        assert (loading.state, loading.counters, loading.url) == ("starting", None, None)
        tree.listen(10, "127.0.0.1", port_of(url))
        serving = one.engine(5.0)
    assert serving.state == "serving"
    assert serving.engine_id == loading.engine_id


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ("--headless", "no_api_process"),
        ("--disable-log-stats", "stats_disabled"),
        ("--uds=/x", "no_tcp_port"),
    ],
)
def test_an_engine_that_cannot_be_asked_is_unobserved(
    tree: ProcTree, bench: Callable[..., Bench], flag: str, kind: str
) -> None:
    tree.add(10, [*SERVE, flag], listen=[("127.0.0.1", 8000)])
    reading = bench().read()
    (engine,) = reading.engines
    assert (engine.state, engine.counters, engine.pids) == ("unobserved", None, (10,))
    assert kinds(reading) == [kind]
    assert reading.problems[0].subject == engine.engine_id


def test_running_zero_during_a_prefill_is_told_as_it_is_and_the_state_stays_serving(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with FakeVllm(page("5")).serving() as url:
        add_server(tree, url)
        engine = bench().engine()
    assert engine.state == "serving"
    assert engine.counters is not None
    assert engine.counters[0].requests_running == 0


def test_several_front_ends_make_steps_unreliable_and_pages_rare(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with FakeVllm(page("8"), filters=False).serving() as url:
        add_server(tree, url)
        for number in range(2):
            tree.add(11 + number, b"VLLM::APIServer_%d\0" % number, ppid=10, start_s=11)
        one = bench()
        readings = [one.read() for _ in range(12)]
    told = [reading.engines[0].counters is not None for reading in readings]
    assert told == [True, *[False] * 9, True, False]
    for reading in readings:
        assert reading.engines[0].state == "serving"
        assert not reading.engines[0].steps_reliable
        assert kinds(reading) == ["filter_refused"]


def test_missing_families_are_unobserved(tree: ProcTree, bench: Callable[..., Bench]) -> None:
    with FakeVllm("python_info 1.0\n").serving() as url:
        add_server(tree, url)
        reading = bench().read()
    assert reading.engines[0].state == "unobserved"
    assert reading.engines[0].counters is None
    assert "engine_metrics_missing" in kinds(reading)


def test_an_engine_that_sleeps_is_asleep_until_it_wakes(tree: ProcTree, bench: Callable[..., Bench]) -> None:
    awake = page("0")
    fake = FakeVllm(awake.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0'))
    with fake.serving() as url:
        add_server(tree, url)
        one = bench()
        assert [one.engine().state, one.engine().state] == ["asleep", "asleep"]
        fake.page = awake
        assert one.engine().state == "serving"


def test_a_server_that_hangs_delays_nobody_and_its_last_values_are_not_repeated(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    good, bad = FakeVllm(page("0")), FakeVllm(page("4"))
    with good.serving() as good_url, bad.serving() as bad_url:
        add_server(tree, good_url, pid=10)
        add_server(tree, bad_url, pid=20, model="/models/other")
        one = bench(patience_s=0.5)
        while any(e.counters is None for e in one.read().engines):
            time.sleep(0.05)
        bad.hang.set()
        healthy_reads = 0
        for _ in range(200):
            reading = one.read(0.9)
            healthy, hung = reading.engines
            assert (hung.state, hung.counters) == ("unobserved", None)
            assert kinds(reading)[-1] == "timeout"
            assert reading.problems[-1].subject == hung.engine_id
            asking = [thread for thread in threading.enumerate() if thread.name == "gpuidle-engine"]
            assert len(asking) == 2
            healthy_reads += healthy.counters is not None
            if healthy_reads == 3:
                break
        assert healthy_reads == 3
        bad.hang.clear()
        bad.release.set()
        while one.read(10).engines[1].counters is None:
            time.sleep(0.05)


def test_an_endpoint_that_dies_costs_its_own_reading_only_and_is_found_again(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    one = bench()
    with FakeVllm(page("0")).serving() as stays:
        add_server(tree, stays, pid=20, model="/models/other")
        with FakeVllm(page("4")).serving() as url:
            add_server(tree, url, pid=10)
            assert [e.state for e in one.read().engines] == ["serving", "serving"]
        dead = one.read()
        assert [(e.state, e.counters is None) for e in dead.engines] == [
            ("unobserved", True),
            ("serving", False),
        ]
        assert kinds(dead)[0] in ("refused", "protocol")
        assert dead.problems[0].subject == dead.engines[0].engine_id
        with FakeVllm(page("4")).serving(port_of(url)):
            back = [one.read(10) for _ in range(3)][-1]
        assert [e.state for e in back.engines] == ["serving", "serving"]


def nonsense(link: socket.socket) -> None:
    while read_request(link):
        link.sendall(answer(b"<html>welcome</html>"))


def redirecting(link: socket.socket) -> None:
    read_request(link)
    link.sendall(answer(b"", status="302 Found", headers="Location: http://169.254.169.254/\r\n"))


def flooding(link: socket.socket) -> None:
    read_request(link)
    link.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        link.sendall(b"vllm:num_requests_running 1\n" * 2000)


def garbage(link: socket.socket) -> None:
    read_request(link)
    link.sendall(b"\x1f\x8b\xff\xfe not http")


@pytest.mark.parametrize(
    ("handle", "kind"),
    [(nonsense, "not_an_engine"), (redirecting, "redirect"), (flooding, "too_large"), (garbage, "protocol")],
    ids=["nonsense", "redirect", "flood", "garbage"],
)
def test_what_only_looks_like_an_engine_is_a_problem_and_all_else_goes_on(
    tree: ProcTree, bench: Callable[..., Bench], handle: Callable[[socket.socket], None], kind: str
) -> None:
    with FakeVllm(page("4")).serving() as good, raw_server(handle) as bad:
        add_server(tree, good, pid=10)
        add_server(tree, bad, pid=20, model="/models/other")
        reading = bench().read()
    assert [e.state for e in reading.engines] == ["serving", "unobserved"]
    assert reading.engines[1].counters is None
    assert kinds(reading) == [kind]
    assert reading.problems[0].remedy


def test_a_model_that_may_not_be_read_is_a_problem_with_its_remedy(
    tree: ProcTree, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_table: object, _pid: int) -> dict[str, str]:
        raise PermissionError

    monkeypatch.setattr("gpuidle.collectors.discovery.processes.ProcessTable.environ", forbidden)
    with FakeVllm(page("4")).serving() as url:
        add_server(tree, url)
        reading = bench().read()
    assert kinds(reading) == ["permission"]
    assert "CAP_SYS_PTRACE" in reading.problems[0].remedy
    assert reading.engines[0].counters is not None
    assert reading.engines[0].model_text is None


def test_an_endpoint_named_by_hand_needs_no_process(tree: ProcTree, bench: Callable[..., Bench]) -> None:
    with FakeVllm(page("4")).serving() as url:
        one = bench(endpoints=(NamedEndpoint(url, name="front door", bearer="key"),))
        engine = one.engine()
        assert engine.engine_id.startswith("vllm-front-door-")
        assert (
            bench(endpoints=(NamedEndpoint(url, name="front door"),)).engine().engine_id == engine.engine_id
        )
    assert (engine.state, engine.url, engine.root_pid, engine.pids) == ("serving", url, None, ())
    assert engine.counters is not None


def test_an_endpoint_whose_models_need_a_key_has_its_name_from_its_metrics(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    del tree
    with FakeVllm(page("0"), models_status=401).serving() as url:
        engine = bench(endpoints=(NamedEndpoint(url=url),)).engine()
    assert engine.model == "tiny"
    assert engine.counters is not None


def test_an_endpoint_named_by_hand_that_does_not_answer_is_a_problem(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    reading = bench(endpoints=(NamedEndpoint(url),)).read()
    assert reading.engines == ()
    assert [(problem.kind, problem.subject) for problem in reading.problems] == [("refused", url)]


def test_an_endpoint_named_by_hand_and_its_process_are_one_engine(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with FakeVllm(page("4")).serving() as url:
        add_server(tree, url)
        engine = bench(endpoints=(NamedEndpoint(url.replace("127.0.0.1", "localhost")),)).engine()
    assert engine.root_pid == 10


def test_a_container_reached_by_hand_is_joined_with_its_processes(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with FakeVllm(page("4"), root=SERVE[-1]).serving() as url:
        tree.add(
            10, SERVE, listen=[("0.0.0.0", 8000)], net="net:[4026532999]", files=tree.root.parent / "files"
        )
        one = bench(endpoints=(NamedEndpoint(url),))
        one.gpus = {"GPU-a": (10,)}
        first = one.read()
        assert "foreign_network_namespace" in kinds(first)
        engine = one.engine(5.0)
    assert (engine.root_pid, engine.url, engine.state) == (10, url, "serving")
    assert engine.model_text is not None


def test_a_container_found_at_its_own_address_and_named_by_hand_is_one_engine(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    with FakeVllm(page("4"), root=SERVE[-1]).serving() as url:
        tree.add(10, SERVE, listen=[("0.0.0.0", 1)], net="net:[4026532999]", files=tree.root.parent / "files")
        # It leads to this machine and is no loopback address by its look. Nothing answers at that port.
        tree.addresses(10, "0.0.0.0")
        one = bench(endpoints=(NamedEndpoint(url),))
        one.read()
        engine = one.engine(5.0)
    assert (engine.root_pid, engine.url, engine.state) == (10, url, "serving")


def test_a_wrong_url_is_refused_at_once() -> None:
    with pytest.raises(HttpError, match="neither"):
        EnginesCollector(ENGINES, endpoints=(NamedEndpoint("localhost:8000"),))


def test_gpu_processes_of_another_pid_namespace_are_a_problem_with_its_remedy(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path / "proc", own_pid="pid:[4026532777]")
    tree.add(10, [*SERVE, "--headless"])
    one = Bench(tmp_path / "proc")
    one.gpus = {"GPU-a": (90210,)}
    reading = one.read()
    assert kinds(reading) == ["foreign_pid_namespace", "no_api_process"]
    assert "hostPID" in reading.problems[0].remedy
    assert reading.engines[0].pids == ()


def test_a_gpu_process_that_just_ended_is_no_problem_but_one_that_stays_hidden_is(
    tree: ProcTree, bench: Callable[..., Bench]
) -> None:
    one = bench()
    one.gpus = {"GPU-a": (4711,)}
    assert kinds(one.read()) == []
    assert kinds(one.read(5)) == ["hidden_process"]


def test_without_processes_there_is_a_problem_and_named_endpoints_go_on(tmp_path: Path) -> None:
    with FakeVllm(page("0")).serving() as url:
        one = Bench(tmp_path / "nowhere", endpoints=(NamedEndpoint(url),))
        reading = one.read()
        one.collector.close()
    assert kinds(reading)[0] == "no_proc"
    assert reading.engines[0].state == "serving"


SERVER = """
import sys
from pathlib import Path
from tests.doubles.http_server import FakeVllm
port = int(sys.argv[sys.argv.index("--port") + 1])
model = sys.argv[sys.argv.index("--model") + 1]
with FakeVllm(Path({page!r}).read_text(), root=model).serving(port):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def real_server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """Start a process whose command line is a vLLM's; yield it, its port and its model's folder."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for place in (package.parents[1], package.parent, package):
        (place / "__init__.py").touch()
    recorded = next(DATA.glob("metrics_4_*.txt"))
    (package / "api_server.py").write_text(SERVER.format(page=str(recorded)))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--model", str(model)]
    with subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{folder}:{REPOSITORY}:{REPOSITORY / '.editable'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process, port, model
        finally:
            process.communicate()


def test_a_real_process_is_found_and_read_through_the_real_proc(tmp_path: Path) -> None:
    with real_server(tmp_path) as (process, port, model):
        collector = EnginesCollector(ENGINES, timeout_s=10, patience_s=30)
        reading = collector.read(time.monotonic_ns())
        collector.close()
    (engine,) = [e for e in reading.engines if e.root_pid == process.pid]
    assert (engine.state, engine.url) == ("serving", f"http://127.0.0.1:{port}")
    assert (engine.model_path, engine.version) == (str(model), "0.32.0")
    assert reading.texts[engine.model_text or ""] == CONFIG
    assert engine.counters is not None
    assert engine.counters[0].generated_tokens == 12624


OTHER_USER = """
import encodings.idna, os, sys, time
from gpuidle.agent.codec import encode_snapshot
from gpuidle.agent.model import Node, Snapshot
from gpuidle.collectors.engines.collector import EnginesCollector
from gpuidle.collectors.table import ENGINES
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
reading = EnginesCollector(ENGINES, timeout_s=10, patience_s=30).read(time.monotonic_ns())
snapshot = Snapshot(sequence=0, monotonic_ns=0, boottime_ns=0, wall_ns=0, node=Node(hostname="n"),
                    engines=reading.engines, problems=reading.problems)
sys.stdout.buffer.write(encode_snapshot(snapshot))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_engine_of_another_user_is_read_and_what_is_hidden_is_told(tmp_path: Path) -> None:
    with real_server(tmp_path) as (process, port, _model):
        done = subprocess.run(
            [sys.executable, "-c", OTHER_USER],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / ".editable")},
            check=True,
            capture_output=True,
        )
    snapshot = decode_snapshot(done.stdout)
    (engine,) = [e for e in snapshot.engines if e.root_pid == process.pid]
    assert (engine.state, engine.url) == ("serving", f"http://127.0.0.1:{port}")
    assert engine.counters is not None
    assert engine.model_text is None
    told = [problem for problem in snapshot.problems if problem.subject == engine.engine_id]
    assert {problem.kind for problem in told} == {"permission"}
