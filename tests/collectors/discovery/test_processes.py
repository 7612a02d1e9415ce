"""The process table on made-up proc folders and on the real one."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from tests.doubles.proc_tree import ProcTree

from gpuidle.agent.clock import Instant
from gpuidle.collectors.discovery.processes import Listener, ProcessTable, Status

HOUR_NS = 3_600_000_000_000


class AtBoottime:
    """A clock that stands."""

    def __init__(self, boottime_ns: int) -> None:
        self._boottime_ns = boottime_ns

    def now(self) -> Instant:
        return Instant(0, self._boottime_ns, 0)

    async def sleep_until(self, monotonic_ns: int) -> None:
        raise AssertionError


def table_of(root: Path) -> ProcessTable:
    table = ProcessTable(root)
    table.refresh()
    return table


def test_a_process_is_read_with_its_parent_name_words_and_start(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(42, ["python", "-m", "x", ""], ppid=7, comm=b"odd) (name", start_s=12.5)
    process = table_of(tmp_path).get(42)
    assert process is not None
    assert (process.ppid, process.comm, process.start_ns) == (7, "odd) (name", 12_500_000_000)
    assert process.cmdline == ("python", "-m", "x")


def test_a_title_with_its_padding_is_one_word_and_hides_the_environment(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(42, b"VLLM::EngineCore" + b"\0" * 60, comm=b"VLLM::EngineCor")
    table = table_of(tmp_path)
    process = table.get(42)
    assert process is not None
    assert process.title == "VLLM::EngineCore"
    assert table.environ(42) == {}


def test_a_name_in_another_code_page_is_shown_with_replacement_characters(tmp_path: Path) -> None:
    ProcTree(tmp_path).add(42, b"caf\xe9\0--x\0", comm=b"caf\xe9")
    process = table_of(tmp_path).get(42)
    assert process is not None
    assert (process.comm, process.cmdline) == ("caf�", ("caf�", "--x"))


def test_a_process_that_ends_between_two_reads_is_left_out(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(42, ["a"])
    tree.add(43, ["b"])
    (tmp_path / "43" / "cmdline").unlink()
    (tmp_path / "44").mkdir()
    (tmp_path / "45").mkdir()
    (tmp_path / "45" / "stat").write_bytes(b"45 (cut")
    assert [process.pid for process in table_of(tmp_path).all()] == [42]


def test_a_kernel_thread_goes_by_its_name(tmp_path: Path) -> None:
    ProcTree(tmp_path).add(2, b"", comm=b"kthreadd")
    process = table_of(tmp_path).get(2)
    assert process is not None
    assert (process.cmdline, process.title) == ((), "kthreadd")


def test_pids_in_namespaces_are_read_where_the_kernel_tells_them(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(42, ["a"], namespace_pids=(42, 7))
    tree.add(43, ["b"])
    table = table_of(tmp_path)
    assert table.status(42) == Status(1001, (42, 7))
    assert table.status(43) == Status(1001, ())


def test_descendants_and_ancestors(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(1, ["init"], ppid=0, start_s=1)
    tree.add(10, ["root"], ppid=1, start_s=10)
    tree.add(11, ["child"], ppid=10, start_s=11)
    tree.add(12, ["grandchild"], ppid=11, start_s=12)
    tree.add(20, ["other"], ppid=1, start_s=10)
    table = table_of(tmp_path)
    root, grandchild = table.get(10), table.get(12)
    assert root is not None
    assert grandchild is not None
    assert [p.pid for p in table.tree(root)] == [10, 11, 12]
    assert [p.pid for p in table.ancestors(grandchild)] == [11, 10, 1]


def test_a_parent_younger_than_its_child_is_another_process(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, ["new owner of the number"], ppid=0, start_s=500)
    tree.add(11, ["orphan"], ppid=10, start_s=100)
    table = table_of(tmp_path)
    orphan, parent = table.get(11), table.get(10)
    assert orphan is not None
    assert parent is not None
    assert table.ancestors(orphan) == []
    assert [p.pid for p in table.tree(parent)] == [10]


def test_a_loop_of_parents_ends(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, ["a"], ppid=11)
    tree.add(11, ["b"], ppid=10)
    table = table_of(tmp_path)
    process = table.get(10)
    assert process is not None
    assert [p.pid for p in table.ancestors(process)] == [11]
    assert len(table.tree(process)) == 2


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, ["before"], start_s=100)
    table = table_of(tmp_path)
    before = table.get(10)
    assert before is not None
    assert table.is_alive(before)
    tree.remove(10)
    assert not table.is_alive(before)
    tree.add(10, ["after"], start_s=200)
    assert not table.is_alive(before)


def test_old_processes_are_read_anew_when_watched_and_now_and_then(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, ["before"], start_s=1)
    table = ProcessTable(tmp_path, AtBoottime(HOUR_NS))
    table.refresh()
    tree.remove(10)
    tree.add(10, ["after"], start_s=2)

    def words() -> tuple[str, ...]:
        process = table.get(10)
        assert process is not None
        return process.cmdline

    table.refresh()
    assert words() == ("before",)
    table.refresh(watched=[10])
    assert words() == ("after",)
    tree.remove(10)
    tree.add(10, ["again"], start_s=3)
    for _ in range(12):
        table.refresh()
    assert words() == ("again",)


def test_a_young_process_is_read_each_time_for_its_title_may_come(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(10, ["sh"], start_s=3600)
    table = ProcessTable(tmp_path, AtBoottime(HOUR_NS + 1_000_000_000))
    table.refresh()
    (tmp_path / "10" / "cmdline").write_bytes(b"vllm\0serve\0")
    table.refresh()
    process = table.get(10)
    assert process is not None
    assert process.cmdline == ("vllm", "serve")


def test_listeners_of_both_families_come_as_addresses_to_ask(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(
        10,
        ["a"],
        listen=[
            ("127.0.0.1", 8000),
            ("0.0.0.0", 8001),
            ("10.1.2.3", 8002),
            ("::", 8003),
            ("::1", 8004),
            ("2001:db8::5", 8005),
        ],
    )
    found = table_of(tmp_path).listeners(10)
    assert [(one.address, one.port) for one in found] == [
        ("127.0.0.1", 8000),
        ("127.0.0.1", 8001),
        ("10.1.2.3", 8002),
        ("127.0.0.1", 8003),
        ("[::1]", 8004),
        ("[2001:db8::5]", 8005),
    ]


def test_without_a_proc_folder_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        ProcessTable(tmp_path / "nowhere").refresh()


def test_the_real_table_knows_this_process() -> None:
    table = ProcessTable()
    table.refresh()
    me = table.get(os.getpid())
    assert me is not None
    assert me.ppid == os.getppid()
    assert 0 < me.start_ns < time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert table.is_alive(me)
    status = table.status(me.pid)
    assert status.uid == os.geteuid()
    assert table.environ(me.pid).get("PATH") is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        mine = [one for one in table.listeners(me.pid) if one.inode in table.socket_inodes(me.pid)]
        assert Listener("127.0.0.1", port, os.fstat(server.fileno()).st_ino) in mine


def test_the_real_addresses_of_this_machine_are_read_without_its_loopback() -> None:
    import psutil

    known = [address for each in psutil.net_if_addrs().values() for address in each]
    wanted = {a.address for a in known if a.family == socket.AF_INET and not a.address.startswith("127.")}
    got = ProcessTable().addresses("self")
    assert {address for address in got if not address.startswith("[")} == wanted
    assert "[::1]" not in got
    assert not [address for address in got if address.startswith("[fe80")]
