from __future__ import annotations

import msgspec
import pytest

from gpuidle.agent.analysis.activity import Activity, activity, without_lone_rest
from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import GpuFrame, GpuProcess, GpuReading, Node, Snapshot

SECOND = 10**9


def reading(busy: float | None, at_ns: int = SECOND) -> GpuReading:
    return GpuReading(
        hw_id="GPU-0",
        index=0,
        name="NVIDIA H100 80GB HBM3",
        read_ns=at_ns,
        busy_ratio=busy,
        processes=(GpuProcess(pid=7),),
    )


def test_without_samples_the_drivers_share_stands_for_the_window() -> None:
    seen = activity((), reading(0.4), 0, SECOND, SECOND)
    assert (seen.rung, seen.active_ns, seen.active_measured) == ("nvml", 0.4 * SECOND, False)
    assert activity((), reading(None), 0, SECOND, SECOND).active_ns is None


@pytest.mark.parametrize(
    ("active_ns", "before", "kept"),
    [
        (0.0, 0.0, True),
        (0.03 * SECOND, 0.02, True),
        (0.0, 0.9, False),
        (0.0, None, False),
        (0.5 * SECOND, 0.9, True),
    ],
)
def test_a_rest_is_believed_if_the_reading_before_was_one_too(
    active_ns: float, before: float | None, kept: bool
) -> None:
    seen = Activity(rung="nvml", observed_ns=SECOND, active_ns=active_ns)
    assert without_lone_rest(seen, before).active_ns == (active_ns if kept else None)


def test_a_measured_rest_needs_no_witness() -> None:
    seen = Activity(rung="cupti_pm", observed_ns=SECOND, active_ns=0.0, active_measured=True)
    assert without_lone_rest(seen, 0.9) is seen


def frames(busy: list[float]) -> list[GpuFrame]:
    analyzer, found = Analyzer(), []
    for number, share in enumerate([*busy, *busy[-1:] * 3]):
        at_ns = (number + 1) * SECOND
        snapshot = Snapshot(
            sequence=number,
            monotonic_ns=at_ns,
            boottime_ns=at_ns,
            wall_ns=at_ns,
            node=Node(hostname="here"),
            gpus=(reading(share, at_ns),),
        )
        gpu = analyzer.feed(snapshot).gpus[0]
        if gpu.window_ns:
            found.append(msgspec.structs.replace(gpu))
    return found


def test_from_nvml_alone_the_edge_of_a_load_is_not_called_idle() -> None:
    shares = [gpu.phases for gpu in frames([0.9, 0.9, 0.0, 0.0, 0.0])][:4]
    assert [each.idle_ns for each in shares] == [0.1 * SECOND, 0, SECOND, SECOND]
    assert shares[1].unknown_ns == SECOND
    assert shares[1].evidence == "unknown"
