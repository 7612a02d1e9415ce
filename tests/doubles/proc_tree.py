"""A proc folder on disk, made by hand or from a process tree that was recorded beside a real server."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOST_NET = "net:[4026531840]"
HOST_PID = "pid:[4026531836]"
TICKS = os.sysconf("SC_CLK_TCK")


class ProcTree:
    """Writes processes under `root`; sockets of one network namespace are seen by all that live in it."""

    def __init__(self, root: Path, *, own_net: str = HOST_NET, own_pid: str | None = HOST_PID) -> None:
        self.root = root
        self._inode = 1000
        self._net_of: dict[int, str] = {}
        self._sockets: dict[str, list[tuple[str, int, int]]] = {}
        folder = root / "self"
        (folder / "ns").mkdir(parents=True)
        (folder / "net").mkdir()
        self._own_net = own_net
        (folder / "ns" / "net").symlink_to(own_net)
        if own_pid is not None:
            (folder / "ns" / "pid").symlink_to(own_pid)
        self._write_sockets(own_net)

    def add(
        self,
        pid: int,
        cmdline: Sequence[str] | bytes,
        *,
        ppid: int = 1,
        comm: bytes = b"python",
        start_s: float = 1000.0,
        environ: Mapping[str, str] | None = None,
        listen: Sequence[tuple[str, int]] = (),
        net: str | None = HOST_NET,
        namespace_pids: Sequence[int] | None = None,
        files: Path | None = None,
        cwd: str = "/srv/llm",
    ) -> None:
        """Add a process; `files` is its root folder, `net` None leaves out the namespace links."""
        folder = self.root / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "net").mkdir()
        (folder / "fd").mkdir()
        rest = [b"S", str(ppid).encode(), *[b"0"] * 17, str(int(start_s * TICKS)).encode(), *[b"0"] * 30]
        (folder / "stat").write_bytes(b"%d (%s) %s\n" % (pid, comm, b" ".join(rest)))
        spid = "" if namespace_pids is None else "NSpid:\t" + "\t".join(map(str, namespace_pids)) + "\n"
        (folder / "status").write_text(f"Name:\tpython\nPid:\t{pid}\nUid:\t1000\t1001\t1000\t1000\n{spid}")
        text = cmdline if isinstance(cmdline, bytes) else b"\0".join(w.encode() for w in cmdline) + b"\0"
        (folder / "cmdline").write_bytes(text)
        pairs = [f"{key}={value}" for key, value in (environ or {}).items()]
        (folder / "environ").write_bytes("".join(f"{pair}\0" for pair in pairs).encode())
        (folder / "root").symlink_to(files or self.root)
        (folder / "cwd").symlink_to(cwd)
        if net is not None:
            (folder / "ns" / "net").symlink_to(net)
        self._net_of[pid] = net or self._own_net
        (folder / "fd" / "0").symlink_to("/dev/null")
        self._write_sockets(self._net_of[pid])
        for number, (address, port) in enumerate(listen):
            self.listen(pid, address, port, fd=3 + number)

    def addresses(self, pid: int | str, *addresses: str) -> None:
        """Give the network namespace of a process ("self": our own) addresses beside its loopback."""
        four = [address for address in addresses if ":" not in address]
        lines = ["Main:", "  +-- 0.0.0.0/0 3 0 5", "     |-- 0.0.0.0", "        /0 universe UNICAST"]
        for address in ["127.0.0.1", *four]:
            lines += [f"           |-- {address}", "              /32 host LOCAL"]
        lines += ["        |-- 10.255.255.255", "           /32 link BROADCAST"]
        # The kernel lists the same once more, as the table "local".
        text = "\n".join([*lines, "Local:", *lines[1:]]) + "\n"
        rows = [f"{'0' * 31}1 01 80 10 80       lo", "fe80000000000000000000fffe000001 04 40 20 80     eth0"]
        rows += [f"{_hex(address)} 04 40 00 82     eth0" for address in addresses if ":" in address]
        (self.root / str(pid) / "net" / "fib_trie").write_text(text)
        (self.root / str(pid) / "net" / "if_inet6").write_text("\n".join(rows) + "\n")

    def listen(self, pid: int, address: str, port: int, *, fd: int = 3) -> int:
        """Let a process listen; return the socket's inode."""
        self._inode += 1
        (self.root / str(pid) / "fd" / str(fd)).symlink_to(f"socket:[{self._inode}]")
        net = self._net_of[pid]
        self._sockets.setdefault(net, []).append((address, port, self._inode))
        self._write_sockets(net)
        return self._inode

    def share(self, pid: int, inode: int, *, fd: int = 3) -> None:
        """Give a process a socket that another one opened."""
        (self.root / str(pid) / "fd" / str(fd)).symlink_to(f"socket:[{inode}]")

    def remove(self, pid: int) -> None:
        """Let a process end."""
        import shutil

        shutil.rmtree(self.root / str(pid))
        del self._net_of[pid]

    def _write_sockets(self, net: str) -> None:
        members = [str(pid) for pid, own in self._net_of.items() if own == net]
        if net == self._own_net:
            members.append("self")
        four, six = ["  sl  local_address rem_address   st"], ["  sl  local_address remote_address  st"]
        # A connection of somebody, which is no listener.
        four.append(_row(0, "0100007F", 5555, "01", 999))
        for at, (address, port, inode) in enumerate(self._sockets.get(net, []), 1):
            digits = _digits(address)
            (four if len(digits) == 8 else six).append(_row(at, digits, port, "0A", inode))
        for member in members:
            (self.root / member / "net" / "tcp").write_text("\n".join(four) + "\n")
            (self.root / member / "net" / "tcp6").write_text("\n".join(six) + "\n")


def _row(at: int, digits: str, port: int, state: str, inode: int) -> str:
    return (
        f"{at:4}: {digits}:{port:04X} {'0' * len(digits)}:0000 {state} 00000000:00000000 00:00000000 "
        f"00000000  1000        0 {inode} 1 0000000000000000 100 0 0 10 0"
    )


def _hex(address: str) -> str:
    """The kernel's form of an IPv6 address in if_inet6: its bytes in order."""
    import socket

    return socket.inet_pton(socket.AF_INET6, address).hex()


def _digits(address: str) -> str:
    """The kernel's form: words of the address as this machine's (little-endian) integers."""
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    raw = socket.inet_pton(family, address)
    return "".join(f"{word:08X}" for word in struct.unpack(f"<{len(raw) // 4}I", raw))


def recorded(tree: ProcTree, file: Path, *, shared_listener: bool = True, files: Path | None = None) -> int:
    """Add a tree recorded by psutil; return the root's PID.

    psutil had split a title with its NUL padding into empty words: they are NULs again here.
    """
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    begin = min(row["create_time"] for row in rows)
    for row in rows:
        environ = row["environ_sel"] if row["environ_readable"] else {}
        tree.add(
            row["pid"],
            "\0".join(row["cmdline"]).encode() + b"\0",
            ppid=row["ppid"],
            comm=row["comm"].encode(),
            start_s=1000.0 + row["create_time"] - begin,
            environ=environ,
            listen=[(address, port) for _family, address, port in row["listen"]],
            files=files,
            cwd=row["cwd"],
        )
    root: int = rows[0]["pid"]
    return root
