"""Checks of the dcgm-exporter that may run on the node."""

from __future__ import annotations

from gpuidle.agent.model import Check
from gpuidle.collectors.checks.observe import RUNGS_S, Seen, measured
from gpuidle.collectors.counters.dcgm_find import NONE
from gpuidle.collectors.counters.dcgm_page import COLUMNS
from gpuidle.collectors.counters.dcgm_status import INTERVAL_REMEDY, PROFILING_REMEDY, page_problems

_SLOW_NS = 2_000_000_000
_WORDS = {
    "gr_active": "GR_ENGINE_ACTIVE",
    "sm_active": "SM_ACTIVE",
    "tensor_active": "PIPE_TENSOR_ACTIVE",
    "dram_active": "DRAM_ACTIVE",
}


def dcgm_checks(seen: Seen) -> tuple[Check, ...]:
    """Return where the exporter is, which counters it has, and how often."""
    standing = seen.dcgm
    if standing.page is None:
        absent = standing.failure in (None, NONE.message)
        if not measured(seen.devices) and absent:
            return ()
        # Another rung may serve every GPU: then none is missed, and `gpu.counters` says so.
        return (
            Check(
                id="dcgm.exporter",
                status="ok" if absent else "limited" if not standing.url else "broken",
                found=standing.failure or "not asked yet",
                remedy="" if absent else standing.remedy,
            ),
        )
    if not standing.page.recognised:
        return (
            Check(
                id="dcgm.exporter",
                status="broken",
                found=f"what answers at {standing.url} is no dcgm-exporter, or it has no counters",
                remedy="name the exporter with --dcgm-url",
            ),
        )
    return (
        Check(id="dcgm.exporter", status="ok", found=f"answers at {standing.url}"),
        _profiling(seen),
        _interval(seen),
        *(
            Check(id="dcgm.values", status="limited", found=problem.message, remedy=problem.remedy)
            for problem in page_problems(standing)
        ),
    )


def _profiling(seen: Seen) -> Check:
    page = seen.dcgm.page
    there = {name for row in (page.devices.values() if page else ()) for name in row.ratios}
    absent = [_WORDS[name] for name in COLUMNS if name not in there]
    if not there:
        return Check(
            id="dcgm.profiling", status="limited", found="no profiling counters", remedy=PROFILING_REMEDY
        )
    shown = ", ".join(_WORDS[name] for name in COLUMNS if name in there)
    if absent:
        return Check(
            id="dcgm.profiling",
            status="limited",
            found=f"{shown}; without {', '.join(absent)}",
            remedy=f"add DCGM_FI_PROF_{absent[0]} to the exporter's list of counters",
        )
    return Check(id="dcgm.profiling", status="ok", found=shown)


def _interval(seen: Seen) -> Check:
    interval_ns = seen.dcgm.interval_ns
    lag = "" if seen.dcgm_lag_ns is None else f", {seen.dcgm_lag_ns / 1e9:.1f} s late"
    if interval_ns is None:
        return Check(
            id="dcgm.interval",
            status="limited",
            found=f"longer than {RUNGS_S / 3:.1f} s (its default is 30 s): windows of a second are not seen",
            remedy=INTERVAL_REMEDY,
        )
    slow = interval_ns + (seen.dcgm_lag_ns or 0) > _SLOW_NS
    late = ": too late for most windows of a second" if slow else ""
    return Check(
        id="dcgm.interval",
        status="limited" if slow else "ok",
        found=f"a value every {interval_ns / 1e9:g} s{lag}{late}",
        remedy=INTERVAL_REMEDY if slow else "",
    )
