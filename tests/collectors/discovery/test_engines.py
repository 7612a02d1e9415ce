"""From recorded and made-up process trees to engines, their GPUs and their endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.doubles.proc_tree import ProcTree, recorded

from gpuidle.collectors.discovery.engines import Discovered, FoundEngine, find_engines
from gpuidle.collectors.discovery.processes import ProcessTable
from gpuidle.collectors.table import ENGINES

DATA = Path(__file__).parents[2] / "data" / "vllm"
SERVE = ["/opt/venv/bin/python", "/opt/venv/bin/vllm", "serve", "org/model"]
CORE = b"VLLM::EngineCore" + b"\0" * 40


def discovered(root: Path, gpus: Mapping[str, Sequence[int]] | None = None) -> Discovered:
    table = ProcessTable(root)
    table.refresh()
    return find_engines(table, ENGINES, gpus or {})


def found(root: Path, gpus: Mapping[str, Sequence[int]] | None = None) -> FoundEngine:
    (engine,) = discovered(root, gpus).engines
    return engine


@pytest.mark.parametrize(
    ("file", "port", "pids"),
    [("proctree_vllm_serve", 8102, 4), ("proctree_api_server_module", 8101, 4)],
)
def test_a_recorded_server_is_found_with_its_own_port_and_none_of_its_workers(
    tmp_path: Path, file: str, port: int, pids: int
) -> None:
    root = recorded(ProcTree(tmp_path), DATA / f"{file}.json")
    engine = found(tmp_path)
    assert engine.root.pid == root
    assert len(engine.pids) == pids
    assert engine.urls == (f"http://127.0.0.1:{port}",)
    assert (engine.settings.model, engine.settings.front_ends) == ("/models/tiny-llama", 1)
    assert engine.problems == ()


def test_two_front_ends_and_two_ranks_are_one_engine(tmp_path: Path) -> None:
    recorded(ProcTree(tmp_path), DATA / "proctree_apiserver2_dp2.json")
    engine = found(tmp_path)
    assert engine.urls == ("http://127.0.0.1:8104",)
    assert engine.settings.front_ends == 2
    assert engine.settings.parallelism.data == 2


def test_front_ends_that_share_the_listener_are_counted_where_no_flag_tells(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, [*SERVE, "-dp", "2"], ppid=1, start_s=10)
    inode = tree.listen(10, "0.0.0.0", 8000)
    for number in range(2):
        tree.add(11 + number, b"VLLM::APIServer_%d\0\0\0" % number, ppid=10, start_s=11)
        tree.share(11 + number, inode)
    engine = found(tmp_path)
    assert engine.settings.front_ends == 2
    assert engine.urls == ("http://127.0.0.1:8000",)


def test_a_listener_held_only_by_front_ends_is_the_engines(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, SERVE, start_s=10)
    tree.add(11, b"VLLM::APIServer_0\0", ppid=10, start_s=11, listen=[("127.0.0.1", 8000)])
    assert found(tmp_path).urls == ("http://127.0.0.1:8000",)


def test_gpus_follow_from_the_processes_that_hold_them(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, [*SERVE, "-tp", "2"], start_s=10)
    tree.add(11, CORE, ppid=10, start_s=11)
    for number in range(2):
        tree.add(12 + number, b"VLLM::Worker_TP%d\0" % number, ppid=11, start_s=12)
    tree.add(50, ["python", "train.py"], start_s=10)
    engine = found(tmp_path, {"GPU-b": [13], "GPU-a": [12, 50], "GPU-c": [50], "GPU-d": []})
    assert engine.hw_ids == ("GPU-a", "GPU-b")
    assert engine.pids == (10, 11, 12, 13)


def test_the_highest_process_that_matches_is_the_root(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(9, ["bash", "-c", "vllm serve org/model"], start_s=9)
    tree.add(10, SERVE, ppid=9, start_s=10, listen=[("0.0.0.0", 8000)])
    tree.add(11, SERVE, ppid=10, start_s=11)
    assert found(tmp_path).root.pid == 10


def test_two_servers_are_two_engines(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, SERVE, start_s=10, listen=[("0.0.0.0", 8000)])
    tree.add(20, [*SERVE, "--port", "8001"], start_s=20, listen=[("0.0.0.0", 8001)])
    tree.add(21, CORE, ppid=20, start_s=21)
    engines = discovered(tmp_path, {"GPU-a": [10], "GPU-b": [21]}).engines
    assert [(e.urls, e.hw_ids) for e in engines] == [
        (("http://127.0.0.1:8000",), ("GPU-a",)),
        (("http://127.0.0.1:8001",), ("GPU-b",)),
    ]


def test_a_listener_on_another_port_than_the_flags_say_is_taken_if_it_is_the_roots(tmp_path: Path) -> None:
    ProcTree(tmp_path).add(10, SERVE, listen=[("127.0.0.1", 9999)])
    assert found(tmp_path).urls == ("http://127.0.0.1:9999",)


def test_flags_in_a_file_are_read_in_the_files_of_the_process(tmp_path: Path) -> None:
    files = tmp_path / "container"
    (files / "srv" / "llm").mkdir(parents=True)
    (files / "srv" / "llm" / "c.yaml").write_text("port: 8123\nmax-num-seqs: 7\n")
    tree = ProcTree(tmp_path / "proc")
    tree.add(10, [*SERVE, "--config", "c.yaml"], listen=[("0.0.0.0", 8123), ("0.0.0.0", 5000)], files=files)
    engine = found(tmp_path / "proc")
    assert engine.urls == ("http://127.0.0.1:8123",)
    assert engine.settings.limits.max_sequences == 7


def test_an_engine_that_loads_has_no_place_to_ask_yet(tmp_path: Path) -> None:
    ProcTree(tmp_path).add(10, SERVE)
    engine = found(tmp_path)
    assert (engine.urls, engine.unreachable, engine.hidden) == ((), None, False)


def test_another_network_namespace_is_never_asked_on_our_own_loopback(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(5, ["nginx"], listen=[("0.0.0.0", 8000)])
    tree.add(10, SERVE, listen=[("0.0.0.0", 8000)], net="net:[4026532999]")
    engine = found(tmp_path)
    assert engine.urls == ()
    assert engine.unreachable is not None
    assert engine.unreachable.kind == "foreign_network_namespace"
    assert "--engine-url" in engine.unreachable.remedy


POD_NET = "net:[4026532999]"


def test_an_engine_in_a_pod_is_asked_at_the_pods_address(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.addresses("self", "10.0.0.1")
    tree.add(10, SERVE, listen=[("0.0.0.0", 8000)], net=POD_NET)
    tree.addresses(10, "10.1.2.3", "fd00::3")
    engine = found(tmp_path)
    assert engine.urls == ("http://10.1.2.3:8000", "http://[fd00::3]:8000")
    assert engine.unreachable is None


def test_a_listener_on_one_address_of_a_pod_is_asked_there(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, SERVE, listen=[("10.1.2.4", 8000)], net=POD_NET)
    tree.addresses(10, "10.1.2.3", "10.1.2.4")
    assert found(tmp_path).urls == ("http://10.1.2.4:8000",)


@pytest.mark.parametrize(
    ("listens", "ours"), [("127.0.0.1", "10.0.0.1"), ("::1", "10.0.0.1"), ("0.0.0.0", "10.1.2.3")]
)
def test_a_pods_loopback_and_an_address_that_is_ours_too_lead_nowhere(
    tmp_path: Path, listens: str, ours: str
) -> None:
    tree = ProcTree(tmp_path)
    tree.addresses("self", ours)
    tree.add(10, SERVE, listen=[(listens, 8000)], net=POD_NET)
    tree.addresses(10, "10.1.2.3")
    engine = found(tmp_path)
    assert engine.urls == ()
    assert engine.unreachable is not None
    assert "--host" in engine.unreachable.remedy


def test_two_containers_with_one_address_are_not_taken_for_each_other(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    for pid, more in ((10, ["10.5.0.9"]), (11, [])):
        tree.add(pid, SERVE, listen=[("0.0.0.0", 8000)], net=f"net:[40265330{pid}]")
        tree.addresses(pid, "172.17.0.2", *more)
    one, other = discovered(tmp_path).engines
    assert (one.urls, one.unreachable) == (("http://10.5.0.9:8000",), None)
    assert other.urls == ()
    assert other.unreachable is not None
    assert other.unreachable.kind == "foreign_network_namespace"


def test_where_namespaces_may_not_be_compared_the_sockets_inode_decides(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, SERVE, listen=[("0.0.0.0", 8000)], net=None)
    assert found(tmp_path).urls == ("http://127.0.0.1:8000",)
    tree.add(20, [*SERVE, "--port", "8001"], listen=[("0.0.0.0", 8001)], net="net:[4026532999]")
    (tmp_path / "20" / "ns" / "net").unlink()
    (_, engine) = discovered(tmp_path).engines
    assert engine.urls == ()
    assert engine.unreachable is not None


def test_hidden_sockets_are_a_problem_and_the_flags_port_must_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_table: ProcessTable, _pid: int) -> frozenset[int]:
        raise PermissionError

    tree = ProcTree(tmp_path)
    tree.add(10, SERVE, listen=[("0.0.0.0", 8000), ("0.0.0.0", 5555)])
    monkeypatch.setattr(ProcessTable, "socket_inodes", forbidden)
    engine = found(tmp_path)
    assert engine.urls == ("http://127.0.0.1:8000",)
    assert [problem.kind for problem in engine.problems] == ["permission"]
    assert "CAP_SYS_PTRACE" in engine.problems[0].remedy


def test_a_part_without_an_api_process_is_an_engine_that_cannot_be_asked(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(9, ["python", "offline.py"], start_s=9)
    tree.add(10, CORE, ppid=9, start_s=10)
    tree.add(11, b"VLLM::Worker\0", ppid=10, start_s=11)
    engine = found(tmp_path, {"GPU-a": [11]})
    assert engine.root.pid == 10
    assert engine.hw_ids == ("GPU-a",)
    assert engine.settings.blind is not None
    assert engine.settings.blind.kind == "no_api_process"


@pytest.mark.parametrize("flag", ["--headless", "--disable-log-stats", "--uds=/run/v.sock"])
def test_a_server_that_cannot_be_asked_is_still_found(tmp_path: Path, flag: str) -> None:
    ProcTree(tmp_path).add(10, [*SERVE, flag], listen=[("0.0.0.0", 8000)])
    engine = found(tmp_path, {"GPU-a": [10]})
    assert engine.urls == ()
    assert engine.settings.blind is not None
    assert engine.hw_ids == ("GPU-a",)


def test_a_gpu_process_that_ended_is_given_to_nobody(tmp_path: Path) -> None:
    ProcTree(tmp_path).add(10, SERVE)
    got = discovered(tmp_path, {"GPU-a": [10, 4711]})
    assert got.missing_pids == {4711}
    assert not got.foreign_namespace
    assert got.engines[0].hw_ids == ("GPU-a",)


def test_pids_of_the_host_are_not_matched_with_those_of_a_container(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, own_pid="pid:[4026532777]")
    tree.add(10, SERVE, listen=[("0.0.0.0", 8000)])
    got = discovered(tmp_path, {"GPU-a": [10, 90210]})
    assert got.foreign_namespace
    assert (got.engines[0].hw_ids, got.engines[0].pids) == ((), ())
    assert got.engines[0].urls == ("http://127.0.0.1:8000",)


def test_in_a_container_the_driver_may_tell_no_process_at_all(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, own_pid="pid:[4026532777]")
    tree.add(10, SERVE)
    assert discovered(tmp_path, {"GPU-a": []}).foreign_namespace
    assert not discovered(tmp_path, {}).foreign_namespace
    assert not discovered(tmp_path, {"GPU-a": [10]}).foreign_namespace


def test_a_recorded_tree_shows_how_little_a_worker_tells(tmp_path: Path) -> None:
    recorded(ProcTree(tmp_path), DATA / "proctree_vllm_serve.json")
    table = ProcessTable(tmp_path)
    table.refresh()
    worker = table.get(29322)
    assert worker is not None
    assert worker.title == "VLLM::Worker"
    assert table.environ(29322) == {}
    assert table.environ(26795)["HF_HUB_OFFLINE"] == "1"
    assert len([one for one in table.listeners(29322) if one.inode in table.socket_inodes(29322)]) == 13
