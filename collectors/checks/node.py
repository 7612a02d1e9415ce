"""Checks of the node as a whole: rights, namespaces, /proc, clocks, and whether there is work to measure."""

from __future__ import annotations

from gpuidle.agent.model import Check, Problem
from gpuidle.collectors.checks.observe import Seen

_PID_REMEDY = "run gpuidle with the host's PIDs (hostPID: true, docker run --pid=host)"


def node_checks(seen: Seen) -> tuple[Check, ...]:
    """Return what the node as a whole allows."""
    return (_work(seen), _rights(seen), _pid_namespace(seen), *_proc(seen), _clocks(seen))


def _work(seen: Seen) -> Check:
    gpus, engines = len(seen.devices), len(seen.engines.engines)
    if not gpus and not engines:
        lost = any(problem.kind in ("gpu_lost", "gpu_hanging") for problem in _driver_problems(seen))
        return Check(
            id="node.work",
            status="broken",
            found="GPUs, but none that answers, and no engine"
            if lost
            else "no GPU and no engine: there is nothing to measure",
            remedy="name an engine with --engine-url, or see a simulated node: gpuidle watch --demo",
        )
    instances = sum(device.parent_hw_id is not None for device in seen.devices)
    split = f", {_many(instances, 'MIG instance')}" if instances else ""
    found = f"{_many(gpus - instances, 'GPU')}{split}, {_many(engines, 'engine')}"
    if not engines:
        return Check(
            id="node.work",
            status="limited",
            found=f"{found}: GPUs are measured, tokens and phases are not",
            remedy="start an engine (vLLM is recognised), or name one with --engine-url",
        )
    if not gpus:
        return Check(
            id="node.work",
            status="limited",
            found=f"{found}: tokens and phases are measured, the hardware is not",
            remedy="see nvml.library",
        )
    return Check(id="node.work", status="ok", found=found)


def _rights(seen: Seen) -> Check:
    rights = seen.rights
    who = "root" if rights.uid == 0 else f"user {rights.uid}"
    held = "capabilities unknown" if rights.capabilities is None else _list(rights.capabilities)
    kept = [p for p in seen.engines.problems if p.kind == "permission"]
    if kept:
        return Check(
            id="node.rights",
            status="limited",
            found=f"{who}, {held}: processes of another user cannot be read",
            remedy=kept[0].remedy,
        )
    return Check(id="node.rights", status="ok", found=f"{who}, {held}")


def _pid_namespace(seen: Seen) -> Check:
    rights = seen.rights
    foreign = [p for p in seen.engines.problems if p.kind == "foreign_pid_namespace"]
    if foreign:
        return Check(
            id="node.pid-namespace", status="limited", found=foreign[0].message, remedy=foreign[0].remedy
        )
    if rights.pid_namespace is None:
        return Check(
            id="node.pid-namespace",
            status="limited",
            found="/proc does not tell in which PID namespace gpuidle runs",
            remedy="mount /proc whole, or name it with --proc",
        )
    if rights.contained:
        return Check(
            id="node.pid-namespace",
            status="ok" if not seen.devices else "limited",
            found="a PID namespace of its own: engines outside it are not seen",
            remedy=_PID_REMEDY if seen.devices else "",
        )
    found = "its own, with the host's /proc" if rights.outer_proc else "the host's"
    return Check(id="node.pid-namespace", status="ok", found=found)


def _proc(seen: Seen) -> tuple[Check, ...]:
    broken = [p for p in seen.engines.problems if p.kind == "no_proc"]
    if broken:
        return (Check(id="node.hidepid", status="broken", found=broken[0].message, remedy=broken[0].remedy),)
    hidden = [p for p in seen.engines.problems if p.kind == "hidden_process"]
    hides = seen.rights.hidepid not in (None, "0", "off") and not seen.rights.has("CAP_SYS_PTRACE")
    if hides or hidden:
        found = f"/proc is mounted with hidepid={seen.rights.hidepid}" if hides else hidden[0].message
        return (
            Check(
                id="node.hidepid",
                status="limited",
                found=f"{found}: processes of other users are not seen",
                remedy="run gpuidle in the group that the mount's gid= names, or with CAP_SYS_PTRACE",
            ),
        )
    if seen.rights.hidepid is None:
        return ()
    return (Check(id="node.hidepid", status="ok", found="/proc shows all processes"),)


def _clocks(seen: Seen) -> Check:
    slept = f"; suspended for {seen.suspended_s:.0f} s since boot" if seen.suspended_s >= 1 else ""
    if seen.clock_resolution_s > 1e-4:
        return Check(
            id="node.clock",
            status="limited",
            found=f"CLOCK_MONOTONIC moves in steps of {seen.clock_resolution_s * 1e3:.1f} ms{slept}",
            remedy="give the kernel a finer clock source (clocksource=tsc)",
        )
    return Check(
        id="node.clock",
        status="ok",
        found=f"CLOCK_MONOTONIC; the wall clock plays no part{slept}",
    )


def _driver_problems(seen: Seen) -> tuple[Problem, ...]:
    return () if seen.gpus is None else seen.gpus.problems


def _list(capabilities: frozenset[str]) -> str:
    return ", ".join(sorted(capabilities)) or "no capability"


def _many(count: int, one: str) -> str:
    return f"{count} {one if count == 1 else one + 's'}"
