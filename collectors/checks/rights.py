"""The rights of this process and how its /proc is mounted, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own number for the namespace of the host (PROC_PID_INIT_INO)."""

_BITS = {"CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38, "CAP_BPF": 39}
"""Numbers of capabilities (linux/capability.h)."""


@dataclass(frozen=True)
class Rights:
    """Who asks. None: /proc does not tell."""

    uid: int
    capabilities: frozenset[str] | None
    """Effective ones, of those that matter here."""
    pid_namespace: str | None
    """Such as "pid:[4026531836]"."""
    hidepid: str | None
    """The value of /proc's mount option: "0", "1", "2", "invisible", ..."""
    outer_proc: bool = False
    """Whether /proc is of a namespace around ours, such as the host's that is mounted into a container."""

    @property
    def contained(self) -> bool:
        """Whether this process, and what its /proc shows, is in a PID namespace of its own."""
        own = self.pid_namespace is not None and self.pid_namespace != INITIAL_PID_NAMESPACE
        return own and not self.outer_proc

    def has(self, capability: str) -> bool:
        """Return whether a capability is in effect."""
        return self.capabilities is not None and capability in self.capabilities


def read_rights(proc: Path) -> Rights:
    """Return the rights of this process; `proc` is where its /proc is mounted."""
    try:
        namespace: str | None = str((proc / "self" / "ns" / "pid").readlink())
    except OSError:
        namespace = None
    status = _text(proc / "self" / "status")
    return Rights(
        uid=os.geteuid(),
        capabilities=_capabilities(status),
        pid_namespace=namespace,
        hidepid=_hidepid(_text(proc / "self" / "mountinfo"), str(proc)),
        outer_proc=_count_pids(status) > 1,
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _capabilities(status: str | None) -> frozenset[str] | None:
    for line in (status or "").splitlines():
        key, _, value = line.partition(":")
        if key == "CapEff":
            try:
                mask = int(value.strip(), 16)
            except ValueError:
                return None
            return frozenset(name for name, bit in _BITS.items() if mask >> bit & 1)
    return None


def _count_pids(status: str | None) -> int:
    """Return in how many namespaces this process has a PID, from that of the /proc inwards."""
    lines = (status or "").splitlines()
    return next((len(line.split()) - 1 for line in lines if line.startswith("NSpid:")), 0)


def _hidepid(mountinfo: str | None, mount: str) -> str | None:
    """Return hidepid of the last proc file system mounted at `mount` (proc(5), mountinfo's last fields)."""
    found: str | None = None
    for line in (mountinfo or "").splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] != "proc" or fields[4] != mount:
            continue
        options = dict(option.partition("=")[::2] for option in kind[2].split(","))
        found = options.get("hidepid", "0")
    return found
