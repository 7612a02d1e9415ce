"""Processes of the node, read from a proc folder that the caller names.

Every process may vanish between two reads: then it is left out. Names in another code page come out with
replacement characters. What another user's process hides raises PermissionError, for the caller to report.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuidle.agent.clock import Clock, SystemClock

_YOUNG_NS = 120_000_000_000
"""A process sets its title, or becomes another program by exec, in its first two minutes."""
_FULL_EVERY = 12
"""Each so many refreshes also old processes are read anew: a PID may have been reused."""
_FILE_LIMIT = 1024 * 1024


@dataclass(frozen=True)
class Process:
    """One process. (`pid`, `start_ns`) is its identity: a PID alone is used again."""

    pid: int
    ppid: int
    comm: str
    """At most 15 characters."""
    cmdline: tuple[str, ...]
    """A process that set its title has that title alone; a kernel thread has nothing."""
    start_ns: int
    """CLOCK_BOOTTIME."""

    @property
    def title(self) -> str:
        """The first word of the command line: the title, where the process set one."""
        return self.cmdline[0] if self.cmdline else self.comm


@dataclass(frozen=True)
class Status:
    """What /proc/PID/status tells."""

    uid: int | None
    """Effective user."""
    namespace_pids: tuple[int, ...]
    """The PID in each namespace, outermost first; () on a kernel that does not tell."""


@dataclass(frozen=True)
class Listener:
    """A TCP socket in state LISTEN."""

    address: str
    """As in a URL: "127.0.0.1", "[::1]"; any-address comes out as loopback."""
    port: int
    inode: int
    anywhere: bool = False
    """Whether it listens on all addresses of its network namespace."""


class ProcessTable:
    """The processes under `root`; `refresh` reads them, the other methods look at one of them now."""

    def __init__(self, root: str | Path = "/proc", clock: Clock | None = None) -> None:
        self.root = Path(root)
        self._clock = clock or SystemClock()
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._processes: dict[int, Process] = {}
        self._refreshes = 0

    def refresh(self, watched: Iterable[int] = ()) -> None:
        """Read the table again: new, young and `watched` processes now, the others now and then.

        Raises:
            OSError: there is no proc folder.
        """
        full = self._refreshes % _FULL_EVERY == 0
        self._refreshes += 1
        again = set(watched)
        now_ns = self._clock.now().boottime_ns
        found: dict[int, Process] = {}
        for name in os.listdir(self.root):  # noqa: PTH208 (no Path a process)
            if not name.isdigit():
                continue
            pid = int(name)
            known = self._processes.get(pid)
            if known is None or full or pid in again or now_ns - known.start_ns < _YOUNG_NS:
                known = self.read(pid)
            if known is not None:
                found[pid] = known
        self._processes = found

    def __len__(self) -> int:
        """Return how many processes the last refresh found."""
        return len(self._processes)

    def get(self, pid: int) -> Process | None:
        """Return a process of the last refresh."""
        return self._processes.get(pid)

    def all(self) -> tuple[Process, ...]:
        """Return the processes of the last refresh by PID."""
        return tuple(self._processes[pid] for pid in sorted(self._processes))

    def ancestors(self, process: Process) -> list[Process]:
        """Return the parents from the nearest to the highest that is known; never the process itself."""
        line: list[Process] = []
        seen = {process.pid}
        parent = self._processes.get(process.ppid)
        while parent is not None and parent.pid not in seen:
            # A parent that is younger than its child is another process under a reused PID.
            if parent.start_ns > process.start_ns:
                break
            line.append(parent)
            seen.add(parent.pid)
            parent = self._processes.get(parent.ppid)
        return line

    def tree(self, root: Process) -> tuple[Process, ...]:
        """Return `root` and all that descend from it, by PID."""
        children: dict[int, list[Process]] = {}
        for process in self._processes.values():
            children.setdefault(process.ppid, []).append(process)
        found = {root.pid: root}
        queue = [root]
        while queue:
            parent = queue.pop()
            for child in children.get(parent.pid, ()):
                if child.pid not in found and child.start_ns >= parent.start_ns:
                    found[child.pid] = child
                    queue.append(child)
        return tuple(found[pid] for pid in sorted(found))

    def read(self, pid: int) -> Process | None:
        """Read one process now; None when it is gone."""
        try:
            text = self._bytes(pid, "stat")
            # The name stands in parentheses and may hold any byte, parentheses too.
            head, _, tail = text.rpartition(b")")
            fields = tail.split()
            comm = head.partition(b"(")[2].decode("utf-8", "replace")
            ppid, ticks = int(fields[1]), int(fields[19])
            words = self._bytes(pid, "cmdline").rstrip(b"\0").decode("utf-8", "replace")
        except (OSError, ValueError, IndexError):
            return None
        return Process(
            pid=pid,
            ppid=ppid,
            comm=comm,
            cmdline=tuple(words.split("\0")) if words else (),
            start_ns=ticks * 1_000_000_000 // self._ticks_per_s,
        )

    def is_alive(self, process: Process) -> bool:
        """Return whether this very process still runs under its PID."""
        now = self.read(process.pid)
        return now is not None and now.start_ns == process.start_ns

    def environ(self, pid: int) -> dict[str, str]:
        """Return the environment it was started with; empty where it overwrote it (by setting a title).

        Raises:
            OSError: gone, or (PermissionError) of another user.
        """
        text = self._bytes(pid, "environ").decode("utf-8", "replace")
        pairs = (entry.partition("=") for entry in text.split("\0"))
        return {name: value for name, equals, value in pairs if equals and name}

    def status(self, pid: int) -> Status:
        """Return user and PIDs in namespaces.

        Raises:
            OSError: gone.
        """
        uid: int | None = None
        pids: tuple[int, ...] = ()
        for line in self._bytes(pid, "status").splitlines():
            key, _, value = line.partition(b":")
            words = [int(word) for word in value.split() if word.isdigit()]
            if key == b"Uid" and len(words) > 1:
                uid = words[1]
            elif key == b"NSpid":
                pids = tuple(words)
        return Status(uid, pids)

    def namespace(self, pid: int | str, kind: str) -> str | None:
        """Return the name of a namespace ("net", "pid") such as "net:[4026531840]"; None: not allowed."""
        try:
            return str((self.root / str(pid) / "ns" / kind).readlink())
        except OSError:
            return None

    def folder(self, pid: int, link: str) -> Path:
        """Return the path of "root" or "cwd" of a process, through which its files are reached."""
        return self.root / str(pid) / link

    def working_folder(self, pid: int) -> str:
        """Return the folder in which a process works, as the process sees it.

        Raises:
            OSError: gone, or (PermissionError) of another user.
        """
        return str(self.folder(pid, "cwd").readlink())

    def listeners(self, pid: int | str) -> tuple[Listener, ...]:
        """Return all LISTEN sockets of the network namespace that `pid` lives in ("self": our own)."""
        found: list[Listener] = []
        for name in ("tcp", "tcp6"):
            try:
                text = self._bytes(pid, f"net/{name}", 64 * 1024 * 1024)
            except OSError:
                continue
            for line in text.splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == b"0A":
                    listener = _listener(fields[1], fields[9])
                    found += [listener] if listener is not None else []
        return tuple(found)

    def addresses(self, pid: int | str) -> tuple[str, ...]:
        """Return the addresses of the network namespace that `pid` lives in, as in a URL, without loopback.

        Those of the routing table of type "local" (IPv4) and those of global scope (IPv6).
        """
        found: dict[str, None] = {}
        last = b""
        for line in self._lines(pid, "net/fib_trie"):
            words = line.split()
            if words[:1] == [b"|--"]:
                last = words[-1]
            elif words == [b"/32", b"host", b"LOCAL"] and not last.startswith(b"127."):
                found[last.decode("ascii", "replace")] = None
        for line in self._lines(pid, "net/if_inet6"):
            words = line.split()
            if len(words) > 3 and words[3] == b"00" and len(words[0]) == 32:
                found[f"[{ipaddress.IPv6Address(bytes.fromhex(words[0].decode('ascii')))}]"] = None
        return tuple(found)

    def _lines(self, pid: int | str, name: str) -> list[bytes]:
        try:
            return self._bytes(pid, name).splitlines()
        except OSError:
            return []

    def socket_inodes(self, pid: int) -> frozenset[int]:
        """Return the inodes of the sockets that a process holds.

        Raises:
            OSError: gone, or (PermissionError) of another user.
        """
        folder = self.root / str(pid) / "fd"
        inodes: set[int] = set()
        for name in os.listdir(folder):  # noqa: PTH208
            try:
                target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 (hundreds of them)
            except FileNotFoundError:
                continue  # closed in between
            if target.startswith("socket:[") and target[8:-1].isdigit():
                inodes.add(int(target[8:-1]))
        return frozenset(inodes)

    def _bytes(self, pid: int | str, name: str, limit: int = _FILE_LIMIT) -> bytes:
        with open(f"{self.root}/{pid}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            parts: list[bytes] = []
            while limit > 0 and (part := file.read(min(limit, 1 << 16))):
                parts.append(part)
                limit -= len(part)
            return b"".join(parts)


def _listener(address: bytes, inode: bytes) -> Listener | None:
    host, _, port = address.partition(b":")
    try:
        return Listener(_host(host.decode("ascii")), int(port, 16), int(inode), anywhere=not host.strip(b"0"))
    except ValueError:
        return None


def _host(digits: str) -> str:
    """Turn the kernel's form (words in the byte order of this machine, little-endian) into a URL's."""
    raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    address = ipaddress.ip_address(raw)
    if isinstance(address, ipaddress.IPv6Address):
        if address == ipaddress.IPv6Address(0):
            return "127.0.0.1"  # such sockets take IPv4 too unless told otherwise
        return str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address}]"
    return "127.0.0.1" if address == ipaddress.IPv4Address(0) else str(address)
