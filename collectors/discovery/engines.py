"""From processes to engines: which process is an engine's root, what belongs to it, where it listens.

An engine's root is the highest ancestor that an engine's rule recognises; all that descends from it belongs
to it. GPU processes are given by the caller, as PIDs of the driver; on a node without a GPU the rules alone
find the engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from gpuidle.agent.model import Problem
from gpuidle.collectors.discovery.processes import Listener, Process, ProcessTable
from gpuidle.collectors.engines.identity import is_loopback, port_of
from gpuidle.collectors.engines.rule import EngineKind, Settings
from gpuidle.collectors.modelfiles.config_json import ConfigError, resolve_within
from gpuidle.collectors.support.files import read_regular

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own number for the namespace of the host (PROC_PID_INIT_INO)."""
_CONFIG_FILE_LIMIT = 256 * 1024
_MOST_URLS = 3


@dataclass(frozen=True)
class FoundEngine:
    """One engine's processes, and where it may answer."""

    kind: EngineKind
    root: Process
    pids: tuple[int, ...]
    """In the driver's namespace; () where ours is another one."""
    hw_ids: tuple[str, ...]
    settings: Settings
    urls: tuple[str, ...]
    """The likeliest first; () when nothing listens."""
    unreachable: Problem | None = None
    """Why what listens cannot be asked from here."""
    hidden: bool = False
    """Whether the sockets of the process may not be looked at."""
    problems: tuple[Problem, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """The identity of the root process."""
        return self.root.pid, self.root.start_ns


@dataclass(frozen=True)
class Discovered:
    """All engines of the node."""

    engines: tuple[FoundEngine, ...]
    missing_pids: frozenset[int]
    """GPU processes that are not in our proc: just gone, hidden, or of another namespace."""
    foreign_namespace: bool
    """Whether the driver's PIDs are not ours."""


def find_engines(
    table: ProcessTable,
    kinds: Sequence[EngineKind],
    gpu_processes: Mapping[str, Sequence[int]],
    answering: Mapping[tuple[int, int], FoundEngine] | None = None,
) -> Discovered:
    """Return the engines among the processes of `table` (refreshed by the caller).

    `gpu_processes` maps hw_id to the PIDs that hold a context on it, as the driver gives them. `answering`
    are engines found before, by key, whose sockets need not be looked for again: listing the sockets of a
    node costs 10 ms and more.
    """
    gpu_pids = {pid for pids in gpu_processes.values() for pid in pids}
    missing = frozenset(pid for pid in gpu_pids if table.get(pid) is None and table.read(pid) is None)
    own = table.namespace("self", "pid")
    contained = own is not None and own != _INITIAL_PID_NAMESPACE
    foreign = contained and bool(gpu_processes) and (bool(missing) or not gpu_pids)
    listing = _Listing(table)
    engines: list[FoundEngine] = []
    for kind, root in _roots(table, kinds):
        before = (answering or {}).get((root.pid, root.start_ns))
        engines.append(_found(listing, kind, root, {} if foreign else gpu_processes, before, foreign=foreign))
    return Discovered(_unmistakable(engines), missing, foreign)


def _roots(table: ProcessTable, kinds: Sequence[EngineKind]) -> list[tuple[EngineKind, Process]]:
    """Return each engine's highest process, by PID."""
    roots: dict[int, tuple[EngineKind, Process]] = {}
    parts: list[tuple[EngineKind, Process]] = []
    for process in table.all():
        for kind in kinds:
            if kind.rule.is_root(process.cmdline):
                line = table.ancestors(process)
                top = next((p for p in reversed(line) if kind.rule.is_root(p.cmdline)), process)
                roots[top.pid] = (kind, top)
                break
            if kind.rule.is_part(process.title):
                parts.append((kind, process))
                break
    for kind, part in parts:
        line = table.ancestors(part)
        if not any(p.pid in roots for p in line):
            top = next((p for p in reversed(line) if kind.rule.is_part(p.title)), part)
            roots[top.pid] = (kind, top)
    return [roots[pid] for pid in sorted(roots)]


class _Listing:
    """A process table whose listeners are listed once for each network namespace."""

    def __init__(self, table: ProcessTable) -> None:
        self.table = table
        self._listed: dict[object, tuple[Listener, ...]] = {}

    def listeners(self, pid: int | str) -> tuple[Listener, ...]:
        key = self.table.namespace(pid, "net") or pid
        if key not in self._listed:
            self._listed[key] = self.table.listeners(pid)
        return self._listed[key]


def _found(
    listing: _Listing,
    kind: EngineKind,
    root: Process,
    gpu_processes: Mapping[str, Sequence[int]],
    before: FoundEngine | None,
    *,
    foreign: bool,
) -> FoundEngine:
    table = listing.table
    tree = table.tree(root)
    pids = tuple(process.pid for process in tree)
    hw_ids = tuple(sorted(hw_id for hw_id, held in gpu_processes.items() if set(held) & set(pids)))
    fronts = [process for process in tree if kind.rule.is_front_end(process.title)]
    if kind.rule.is_root(root.cmdline):
        settings = kind.rule.settings(root.cmdline, lambda name: _read_config_file(table, root, name))
    elif fronts:
        settings = Settings()
    else:
        settings = Settings(blind=_no_api(kind, root))
    if len(fronts) > 1:
        settings = replace(settings, front_ends=max(len(fronts), settings.front_ends or 1))
    urls: tuple[str, ...] = ()
    unreachable: Problem | None = None
    hidden = False
    if before is not None:
        urls, unreachable, hidden = before.urls, before.unreachable, before.hidden
    elif settings.blind is None:
        listeners, hidden = _listeners(listing, [root, *fronts], settings.port)
        places = [
            (address, one.port)
            for one in listeners
            for address in (
                (one.address,) if _is_near(listing, root, one) else _from_afar(listing, root, one)
            )
        ]
        urls = tuple(f"{settings.scheme}://{address}:{port}" for address, port in places)[:_MOST_URLS]
        if listeners and not places:
            unreachable = _far(kind, root, listeners[0].port)
    problems = [*settings.problems]
    if hidden:
        problems.append(forbidden(kind, root, "its sockets"))
    return FoundEngine(
        kind=kind,
        root=root,
        pids=() if foreign else pids,
        hw_ids=hw_ids,
        settings=settings,
        urls=urls,
        unreachable=unreachable,
        hidden=hidden,
        problems=tuple(problems),
    )


def _read_config_file(table: ProcessTable, root: Process, name: str) -> str | None:
    try:
        cwd = table.working_folder(root.pid)
        path = resolve_within(table.folder(root.pid, "root"), str(PurePosixPath(cwd) / name))
        return read_regular(path, _CONFIG_FILE_LIMIT).decode("utf-8", "replace")
    except (OSError, ConfigError):
        return None


def _listeners(
    listing: _Listing, holders: Sequence[Process], port: int | None
) -> tuple[list[Listener], bool]:
    """Return the LISTEN sockets of `holders`, `port` first, and whether they could not be looked at.

    The workers are no holders: each has a dozen ports of its own for collectives. Where the sockets of the
    process may not be seen, the port that its flags name must do.
    """
    everyone = listing.listeners(holders[0].pid)
    inodes: set[int] = set()
    hidden = False
    for process in holders:
        held = _sockets(listing.table, process)
        hidden = hidden or held is None
        inodes |= held or frozenset()
    own = [one for one in everyone if one.inode in inodes]
    if not own and hidden:
        own = [one for one in everyone if one.port == port]
    named = [one for one in own if one.port == port]
    # One socket may be listed for each address family.
    by_port = {one.port: one for one in reversed(named or own)}
    return sorted(by_port.values(), key=lambda one: one.port), hidden


def _sockets(table: ProcessTable, process: Process) -> frozenset[int] | None:
    """Return the inodes of a process's sockets, none if it is gone; None: they may not be looked at."""
    try:
        return table.socket_inodes(process.pid)
    except PermissionError:
        return None
    except OSError:
        return frozenset()


def _is_near(listing: _Listing, process: Process, listener: Listener) -> bool:
    """Return whether a listener of `process` is in our own network namespace.

    Without it, "127.0.0.1:8000" would be somebody else's server. Where the namespaces may not be compared,
    the socket's inode, which is unique on the node, is looked for among those of our namespace.
    """
    table = listing.table
    ours, theirs = table.namespace("self", "net"), table.namespace(process.pid, "net")
    if ours is not None and theirs is not None:
        return ours == theirs
    return any(one.inode == listener.inode for one in listing.listeners("self"))


def _from_afar(listing: _Listing, process: Process, listener: Listener) -> tuple[str, ...]:
    """Return the addresses, as in a URL, at which a listener of another network namespace may be reached.

    A container's or pod's address leads from the node and from other pods to that container, unless it is an
    address of our own too.
    """
    theirs = listing.table.addresses(process.pid)
    if not listener.anywhere:
        theirs = tuple(address for address in theirs if address == listener.address)
    ours = set(listing.table.addresses("self"))
    return tuple(address for address in theirs if address not in ours)


def _unmistakable(engines: Sequence[FoundEngine]) -> tuple[FoundEngine, ...]:
    """Leave out addresses that two engines have: containers behind separate bridges may have the same one.

    On the loopback that does not happen: such addresses are of our own network namespace.
    """
    times = Counter(url for engine in engines for url in engine.urls if not is_loopback(url))
    out = []
    for engine in engines:
        urls = tuple(url for url in engine.urls if times[url] <= 1)
        unreachable = engine.unreachable
        if engine.urls and not urls:
            unreachable = _far(engine.kind, engine.root, port_of(engine.urls[0]))
        out.append(replace(engine, urls=urls, unreachable=unreachable))
    return tuple(out)


def _no_api(kind: EngineKind, root: Process) -> Problem:
    return Problem(
        source=kind.rule.engine,
        kind="no_api_process",
        message=f"process {root.pid} ({root.title[:60]}) is part of an engine without an API process here: "
        "an offline program, a node of a larger engine, or its parent was killed",
        remedy="only GPU counters tell something of it; counters of tokens are where its API process runs",
    )


def _far(kind: EngineKind, root: Process, port: int) -> Problem:
    return Problem(
        source="discovery",
        kind="foreign_network_namespace",
        message=f"{kind.rule.engine} (process {root.pid}) listens on port {port} of another network "
        "namespace, at no address that leads there from here",
        remedy="let the engine listen on its container's address (vLLM: --host 0.0.0.0), run gpuidle with "
        "the host's network beside an engine that has it too, or name the address under which the engine is "
        "reached with --engine-url",
    )


def forbidden(kind: EngineKind, root: Process, what: str) -> Problem:
    """Return the Problem of a process of another user, `what` being the part that may not be read."""
    return Problem(
        source="discovery",
        kind="permission",
        message=f"{what} of {kind.rule.engine} (process {root.pid}) may not be read: it runs as another user",
        remedy="run gpuidle as the engine's user or with CAP_SYS_PTRACE, or name the endpoint with "
        "--engine-url",
    )
