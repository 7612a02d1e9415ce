"""What the service manager hears, on real datagram sockets: while frames come, and when they stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.agent.analysis.builders import gpu, snapshot

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.commands.notify import ServiceManager, service_manager
from gpuidle.agent.model import Snapshot
from gpuidle.agent.pipeline import Pipeline


class Manager:
    """Stands in for systemd: a datagram socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(60)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def heard(self) -> list[str]:
        """Wait for a datagram and return its lines."""
        return self._socket.recv(65536).decode().split("\n")

    def waiting(self) -> list[list[str]]:
        """Return the datagrams that lie there now."""
        self._socket.setblocking(False)
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(65536).decode().split("\n"))
        return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = str(tmp_path / "notify")
    heard = Manager(path if request.param == "path" else f"@gpuidle-test-{os.getpid()}")
    yield heard
    heard.close()


class StopsComing:
    """A source that yields some snapshots and then never again, until it is closed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.hangs = asyncio.Event()
        self.closed = asyncio.Event()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        for t in range(self.count):
            yield snapshot(t, gpus=(gpu(t, 0.5),))
        self.hangs.set()
        await self.closed.wait()

    async def close(self) -> None:
        self.closed.set()


async def delivered(pipeline: Pipeline, count: int) -> None:
    while pipeline.outlets()[0].delivered < count:  # noqa: ASYNC110  # the outlet is a thread
        await asyncio.sleep(0.005)


async def test_a_pipe_whose_frames_stop_is_not_said_to_be_alive(manager: Manager) -> None:
    source = StopsComing(3)
    reporter = ServiceManager(manager.address, watchdog_us=60_000_000)
    pipeline = Pipeline(source, Analyzer().feed, [reporter])
    running = asyncio.ensure_future(pipeline.run())
    await source.hangs.wait()
    await delivered(pipeline, 3)
    await asyncio.sleep(0.1)  # the loop goes on turning, no frame comes
    heard = manager.waiting()
    assert ["WATCHDOG=1" in lines for lines in heard] == [True] * 3
    assert heard[0][0] == "READY=1"
    assert all("READY=1" not in lines for lines in heard[1:])
    await source.close()
    await running
    assert manager.waiting() == [["STOPPING=1"]]


async def test_without_a_watchdog_only_changes_are_said(manager: Manager) -> None:
    source = StopsComing(3)
    pipeline = Pipeline(source, Analyzer().feed, [ServiceManager(manager.address)])
    running = asyncio.ensure_future(pipeline.run())
    await source.hangs.wait()
    await source.close()
    await running
    heard = manager.waiting()
    assert heard[0] == ["READY=1", "STATUS=1 GPU, 0 engines, 0 problems"]
    assert heard[1:] == [["STOPPING=1"]]


@pytest.mark.parametrize(("interval_s", "longer"), [(1.0, []), (60.0, ["WATCHDOG_USEC=180000000"])])
def test_a_watchdog_shorter_than_the_interval_is_lengthened(
    tmp_path: Path, interval_s: float, longer: list[str]
) -> None:
    manager = Manager(str(tmp_path / "notify"))
    reporter = ServiceManager(manager.address, watchdog_us=60_000_000, interval_s=interval_s)
    reporter.publish(Analyzer().feed(snapshot(0)))
    assert [line for line in manager.heard() if line.startswith("WATCHDOG_USEC")] == longer
    reporter.close()
    manager.close()


def test_a_manager_that_is_gone_is_an_error_of_this_outlet_only(tmp_path: Path) -> None:
    reporter = ServiceManager(str(tmp_path / "nobody"), watchdog_us=1)
    with pytest.raises(FileNotFoundError):
        reporter.publish(Analyzer().feed(snapshot(0)))
    with pytest.raises(FileNotFoundError):
        reporter.close()


def test_outside_a_service_nothing_is_reported() -> None:
    assert service_manager({"WATCHDOG_USEC": "1"}, 1.0) is None


def test_a_watchdog_meant_for_another_process_is_not_ours_and_children_inherit_nothing(
    tmp_path: Path,
) -> None:
    manager = Manager(str(tmp_path / "notify"))
    environ = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "60000000",
        "WATCHDOG_PID": "1",
        "HOME": "/",
    }
    reporter = service_manager(environ, 1.0)
    assert reporter is not None
    assert environ == {"HOME": "/"}
    reporter.publish(Analyzer().feed(snapshot(0)))
    assert "WATCHDOG=1" not in manager.heard()
    reporter.close()
    manager.close()


@pytest.mark.parametrize(
    "environ", [{"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}]
)
def test_what_cannot_be_read_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"vsock|soon"):
        service_manager(environ, 1.0)


def test_the_service_says_ready_alive_and_stopping(manager: Manager) -> None:
    env = {**os.environ, "NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "60000000"}
    command = [sys.executable, "-m", "gpuidle", "run", "--demo", "--interval", "0.2"]
    process = subprocess.Popen([*command, "--prometheus", "127.0.0.1:0"], env=env, stderr=subprocess.PIPE)
    try:
        first = manager.heard()
        assert first[:2] == ["READY=1", "WATCHDOG=1"]
        assert first[2].startswith("STATUS=simulated: 2 GPUs, ")
        assert "WATCHDOG=1" in manager.heard()
        process.send_signal(signal.SIGTERM)
        while (last := manager.heard()) != ["STOPPING=1"]:
            assert "WATCHDOG=1" in last
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()
