"""The ledger: where each nanosecond of a GPU's window went. Causes sum to the window by construction.

With T the window, per GPU and in this order, every term clipped at 0 (design: The ledger):

    g = time with work on the GPU          A = min(g, tensor-active time over its ceiling)
    c = live SM clock / sheet clock        u = useful FLOPs over the dense peak, in time, at max(1, c)
    E = max(A, min(u, g)); useful = min(u, E)
    throttled = min(E - useful, A * max(0, 1 - c))      padding = E - useful - throttled
    R = g - E; memory_bound = min(R, max(0, M - E)), M = DRAM bytes over reachable bandwidth
    communication = min(R - memory_bound, N); latency = what is left of R
    waiting_peer: of R and of I, what the counters of the group show as waiting (see `peers`)
    I = T - g, by what the engine and its processes say

With less evidence the terms fold and never guess: what the evidence cannot split is `unattributed`, and a
window (or the part of it) that nobody looked at is `unobserved`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gpuidle.agent.analysis.integers import clip_to
from gpuidle.agent.model import CAUSES

IdleBecause = Literal[
    "host_gap",
    "no_request",
    "waiting_peer",
    "unallocated",
    "starting",
    "suspended",
    "foreign",
    "unattributed",
    "unobserved",
]


_NOTHING: dict[str, int] = dict.fromkeys(CAUSES, 0)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one GPU in one window, in nanoseconds of that window; None is not known."""

    window_ns: int
    observed_ns: int
    """How much of the window anything looked at."""
    active_ns: float | None = None
    """g."""
    active_measured: bool = False
    tensor_ns: float | None = None
    """Tensor-active time over the pipe's ceiling, at the clock of the moment."""
    useful_ns: float | None = None
    """u. None: the model's shape or the device's peak is not known."""
    memory_ns: float | None = None
    """M."""
    memory_measured: bool = False
    """Whether counters tell the bytes; else the work model does."""
    bandwidth_measured: bool = False
    """Whether the reachable bandwidth is the device's own, by a copy; else it is what others reach."""
    memory_excess_ns: float | None = None
    """M - E summed over parts of the window that differ (steps, or decode and the rest), each clipped at 0;
    None: of the window as a whole."""
    padding_ns: float | None = None
    """Estimate of the padding where no counter shows the pipe."""
    split_rest: bool = False
    """Whether what is left of the active time may be called latency on the work model's word."""
    communication_ns: float | None = None
    """N, a lower bound."""
    clock_ratio: float = 1.0
    """c: live SM clock over sheet clock."""
    throttle: Literal["throttled_power", "throttled_thermal", "throttled_other"] = "throttled_other"
    idle_because: IdleBecause = "unattributed"
    host_gap_ns: float | None = None
    """Of the inactive time, what is known to be host gap (steps tell); the rest is `idle_because`."""
    waiting_idle_ns: float = 0.0
    """Of the inactive time, what another GPU of the group was waited for."""
    waiting_measured: bool = False
    """Whether counters of the whole group tell `waiting_idle_ns`; else steps and their sums bound it."""
    waiting_active_ns: float = 0.0
    """Of the active time, what was spent spinning for a peer: inferred, so an estimate."""
    host_gap_measured: bool = False
    """Whether exact steps tell `host_gap_ns`; else it is what steps usually take."""
    owner: Literal["engine", "foreign", "starting", "suspended", "unallocated"] = "engine"
    """Whose window it is; all but an engine's own work is booked whole under its name."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Causes of one window, summing to `window_ns`."""

    window_ns: int
    causes_ns: dict[str, int]
    estimated: tuple[str, ...]


def ledger(evidence: Evidence) -> Ledger:
    """Book one window."""
    observed_ns = min(evidence.window_ns, max(0, evidence.observed_ns))
    if evidence.owner != "engine":
        whole: dict[str, float] = {evidence.owner: observed_ns}
        wanted = _empty_gpu(evidence) if evidence.owner == "unallocated" else whole
        estimated: set[str] = set()
    elif evidence.active_ns is None:
        wanted, estimated = _without_counter(evidence, observed_ns)
    else:
        wanted, estimated = _with_counter(evidence, observed_ns, evidence.active_ns)
    parts = clip_to(observed_ns, wanted, "unattributed")
    parts["unobserved"] = parts.get("unobserved", 0) + evidence.window_ns - observed_ns
    causes: dict[str, int] = {**_NOTHING, **parts}
    return Ledger(
        window_ns=evidence.window_ns,
        causes_ns=causes,
        estimated=tuple([cause for cause in CAUSES if cause in estimated and causes[cause]]),
    )


def _empty_gpu(evidence: Evidence) -> dict[str, float]:
    # Work on a GPU without a process is somebody whom we cannot see (another container, a dead PID).
    active_ns = evidence.active_ns or 0.0
    return {"unattributed": active_ns, "unallocated": evidence.observed_ns - active_ns}


def _without_counter(evidence: Evidence, observed_ns: int) -> tuple[dict[str, float], set[str]]:
    """Book from tokens alone: only a window at rest is known whole."""
    if evidence.idle_because in ("no_request", "unobserved"):
        return {evidence.idle_because: observed_ns}, {"no_request"}
    useful = evidence.useful_ns
    if useful is None:
        return {}, set()
    memory = max(0.0, (evidence.memory_ns or 0.0) - useful)
    return {"useful": useful, "memory_bound": memory}, {"useful", "memory_bound"}


def _memory(evidence: Evidence, executed_ns: float, rest_ns: float) -> tuple[float | None, set[str]]:
    """Return the memory-bound time and which causes are estimates by it.

    What the work model adds to the counter's figure is the model's, and so is what that leaves of the rest.
    Both are estimates as well where the reachable bandwidth is assumed.
    """
    memory = None if evidence.memory_ns is None else min(rest_ns, max(0.0, evidence.memory_ns - executed_ns))
    counted = memory
    if evidence.memory_excess_ns is not None:
        memory = min(rest_ns, max(memory or 0.0, evidence.memory_excess_ns))
    if memory is not None and not evidence.memory_measured:
        return memory, {"memory_bound"}
    exact = memory is None or (memory == counted and evidence.bandwidth_measured)
    return memory, set() if exact else {"memory_bound", "latency"}


def _with_counter(
    evidence: Evidence, observed_ns: int, active_ns: float
) -> tuple[dict[str, float], set[str]]:
    active = min(float(observed_ns), max(0.0, active_ns))
    estimated: set[str] = set()
    tensor = None if evidence.tensor_ns is None else min(active, max(0.0, evidence.tensor_ns))
    useful_known = evidence.useful_ns is not None
    useful = min(active, max(0.0, evidence.useful_ns or 0.0))
    if tensor is not None and tensor >= 0.5 * useful:
        # Tokens are booked late: what the pipe did not do in this window it did in another.
        useful = min(useful, tensor)
    executed = useful if tensor is None else max(tensor, useful)
    wanted: dict[str, float] = {}
    if useful_known:
        wanted["useful"] = useful
        estimated.add("useful")  # the work model's figure, whatever counts the time
        if tensor is not None:
            throttled = min(executed - useful, tensor * max(0.0, 1 - evidence.clock_ratio))
            wanted[evidence.throttle] = throttled
            wanted["padding"] = executed - useful - throttled
            estimated |= {"padding", evidence.throttle}
    elif tensor is not None:
        # The pipe was busy, but whether with useful work nobody can say: the model's shape is unknown.
        wanted["unattributed"] = executed
    if tensor is None and useful_known and evidence.padding_ns is not None:
        padding = min(active - executed, max(0.0, evidence.padding_ns))
        wanted["padding"] = padding
        estimated.add("padding")
        executed += padding
    rest = active - executed
    memory, doubtful = _memory(evidence, executed, rest)
    estimated |= doubtful
    if memory is not None:
        wanted["memory_bound"] = memory
    spun = min(rest - (memory or 0.0), max(0.0, evidence.waiting_active_ns))
    rest -= spun
    if memory is not None and ((evidence.memory_measured and tensor is not None) or evidence.split_rest):
        communication = min(rest - memory, evidence.communication_ns or 0.0)
        wanted["communication"] = communication
        wanted["latency"] = rest - memory - communication
        if communication or evidence.split_rest:
            estimated |= {"communication", "latency"}
    else:
        # What is neither computing nor moving bytes by the work model may be communication, latency or the
        # model's own error: no evidence splits it.
        wanted["unattributed"] = wanted.get("unattributed", 0.0) + rest - (memory or 0.0)
    wanted["waiting_peer"] = spun
    if spun or not evidence.waiting_measured:
        estimated.add("waiting_peer")
    return wanted, estimated | _add_idle(wanted, evidence, observed_ns - active)


def _add_idle(wanted: dict[str, float], evidence: Evidence, inactive: float) -> set[str]:
    """Add the causes of the inactive time; return those that are estimates."""
    waited = min(inactive, max(0.0, evidence.waiting_idle_ns))
    host_gap = min(inactive - waited, evidence.host_gap_ns or 0.0)
    wanted["waiting_peer"] += waited
    wanted["host_gap"] = host_gap
    left = inactive - waited - host_gap
    wanted[evidence.idle_because] = wanted.get(evidence.idle_because, 0.0) + left
    told = evidence.host_gap_ns is None or evidence.host_gap_measured
    return set() if evidence.active_measured and told else {"host_gap", evidence.idle_because}
