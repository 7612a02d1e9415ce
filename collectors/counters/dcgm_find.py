"""Where on the node a dcgm-exporter answers: its process, or what listens on its port."""

from __future__ import annotations

from dataclasses import dataclass

from gpuidle.collectors.discovery.processes import Process, ProcessTable

PORT = 9400
"""Of dcgm-exporter, unless it is told another one."""
_NAME = "dcgm-exporter"


@dataclass(frozen=True)
class FoundExporter:
    """Places to ask, the likeliest first, or why there is none."""

    urls: tuple[str, ...] = ()
    message: str = ""
    remedy: str = ""


NONE = FoundExporter(
    message="no dcgm-exporter runs on this node",
    remedy="run dcgm-exporter with its profiling counters (DCGM_FI_PROF_*), or name one with --dcgm-url",
)


def find_exporter(table: ProcessTable) -> FoundExporter:
    """Return where a dcgm-exporter may answer; `table` has been refreshed by the caller.

    One in another network namespace (a pod without the host's network) listens where its own loopback is,
    which is not ours: it has to be named by the address of its pod.
    """
    ours = table.namespace("self", "net")
    listeners = table.listeners("self")
    urls: dict[str, None] = {}
    far: Process | None = None
    for process in table.all():
        if process.title.rpartition("/")[2] != _NAME and process.comm != _NAME:
            continue
        port = _port(process)
        near = [one for one in listeners if one.port == port or one.inode in _sockets(table, process)]
        theirs = table.namespace(process.pid, "net")
        if not near or (ours is not None and theirs is not None and ours != theirs):
            far = process
            continue
        urls.update((f"http://{one.address}:{one.port}", None) for one in near)
    if not urls and far is None:
        urls.update((f"http://{one.address}:{one.port}", None) for one in listeners if one.port == PORT)
    if urls:
        return FoundExporter(urls=tuple(urls)[:3])
    if far is None:
        return NONE
    return FoundExporter(
        message=f"dcgm-exporter (process {far.pid}) does not listen in this network namespace",
        remedy=f"name it by its pod's or service's address: --dcgm-url http://ADDRESS:{_port(far)}",
    )


def _port(process: Process) -> int:
    """Return the port that the command line names (`-a :9400`), or the default."""
    words = process.cmdline
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("-a", "--address"):
            text = value if equals else words[at + 1] if at + 1 < len(words) else ""
            digits = text.rpartition(":")[2]
            return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 6 else PORT
    return PORT


def _sockets(table: ProcessTable, process: Process) -> frozenset[int]:
    try:
        return table.socket_inodes(process.pid)
    except OSError:
        return frozenset()
