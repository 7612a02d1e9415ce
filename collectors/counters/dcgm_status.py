"""What stands between a device and its counters on a dcgm-exporter's page, in words for people."""

from __future__ import annotations

from dataclasses import dataclass

from gpuidle.agent.model import Problem
from gpuidle.collectors.counters.dcgm_page import DcgmPage, DeviceRow
from gpuidle.collectors.counters.rung import RungState, RungStatus

PROFILING_REMEDY = (
    "give dcgm-exporter the capability SYS_ADMIN and a list of counters with DCGM_FI_PROF_* "
    "(etc/dcp-metrics-included.csv, or the profiling preset since 4.9); GeForce cards have none"
)
HOLDER_REMEDY = (
    "end the other profiler (Nsight, CUPTI, another DCGM), or `dcgmi profile --resume` after a pause: the "
    "counters then come back by themselves"
)
INTERVAL_REMEDY = "start dcgm-exporter with -c 1000 (DCGM_EXPORTER_INTERVAL=1000): one value a second"


@dataclass(frozen=True)
class Standing:
    """How the exporter did at the last poll."""

    url: str = ""
    page: DcgmPage | None = None
    interval_ns: int | None = None
    failure: str | None = None
    remedy: str = ""
    served: bool = False
    """Whether it ever answered."""


def status_of(
    hw_id: str, standing: Standing, row: DeviceRow | None, *, stale_s: float | None, counted: bool
) -> RungStatus:
    """Return how the rung stands with one device.

    `row` is the device's own of the last page, `stale_s` for how long the page has stood still if that is too
    long, `counted` whether the device ever had counters there.
    """
    state, message, remedy = _judge(standing, row, stale_s, counted=counted)
    return RungStatus(rung="dcgm", hw_id=hw_id, state=state, message=message, remedy=remedy)


def _judge(
    standing: Standing, row: DeviceRow | None, stale_s: float | None, *, counted: bool
) -> tuple[RungState, str, str]:
    if standing.failure is not None:
        state: RungState = "lost" if standing.served else "failed" if standing.url else "refused"
        return state, standing.failure, standing.remedy
    page = standing.page
    if page is None:
        return "starting", "", ""
    if not page.recognised:
        return (
            "failed",
            f"what answers at {standing.url} is no dcgm-exporter, or it has no counters at all",
            "name the exporter with --dcgm-url",
        )
    if stale_s is not None:
        return (
            "lost",
            f"the page of dcgm-exporter has not changed for {stale_s:.0f} s",
            "restart dcgm-exporter; see its log and `dmesg` for Xid lines",
        )
    if row is None:
        return (
            "failed",
            f"dcgm-exporter at {standing.url} does not list this device",
            "see that it may use all GPUs and lists MIG instances, or name this node's own with --dcgm-url",
        )
    if not row.ratios:
        if counted:
            return (
                "busy",
                "dcgm-exporter has lost the profiling counters: another profiler holds them",
                HOLDER_REMEDY,
            )
        return "refused", "dcgm-exporter shows no profiling counters of this device", PROFILING_REMEDY
    if standing.interval_ns is None:
        return "starting", "", ""
    return "serving", "", ""


def page_problems(standing: Standing) -> tuple[Problem, ...]:
    """Return what on the page was left out because it cannot be."""
    page = standing.page
    if page is None:
        return ()
    problems: list[Problem] = []
    if page.bad:
        more = f" and {len(page.bad) - 1} more" if len(page.bad) > 1 else ""
        problems.append(
            Problem(
                source="dcgm",
                kind="bad_reading",
                message=f"{page.bad[0]}: left out{more}",
                remedy="DCGM writes such numbers where it has none; see its log and `dmesg` for Xid lines",
            )
        )
    if page.unreadable:
        problems.append(
            Problem(
                source="dcgm",
                kind="bad_reading",
                message=f"{page.unreadable} lines of the exporter have no number (N/A): left out",
                remedy="DCGM has no value there; see its log",
            )
        )
    return tuple(problems)
