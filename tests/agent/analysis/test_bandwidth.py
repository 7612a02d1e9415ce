"""What DRAM reaches: measured where someone measured it, else assumed and said to be."""

from __future__ import annotations

import pytest
from tests.agent.analysis.builders import gpu

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.bandwidth import USUAL_RATIO, reachable
from gpuidle.agent.analysis.enginewindow import device_peaks
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    SECOND_NS,
    ClosedLoop,
    EngineSpec,
    GpuSpec,
    Scenario,
    Sizes,
)

SHEET = 3352e9


@pytest.mark.parametrize(
    ("copied", "reached", "measured"),
    [
        (None, USUAL_RATIO, False),
        (0.89, 0.89, True),
        (0.97, 0.97, True),
        (0.4, USUAL_RATIO, False),  # someone else was copying as well
        (1.3, USUAL_RATIO, False),  # the sheet is of another device
    ],
)
def test_a_copy_on_the_device_is_believed_within_reason(
    copied: float | None, reached: float, measured: bool
) -> None:
    card = gpu(0.0, copy_bytes_per_s=None if copied is None else copied * SHEET)
    peaks = device_peaks(card)
    assert peaks is not None
    assert peaks.memory_bytes_per_s == pytest.approx(SHEET, rel=0.001)
    found = reachable(card, peaks)
    assert found.bytes_per_s == pytest.approx(reached * SHEET, rel=0.001)
    assert found.measured is measured


def booked(reachable_ratio: float, copied: float | None) -> tuple[float, float, set[str]]:
    """Return the memory-bound seconds of a decoding node: ours and the truth, and what is an estimate."""
    engine = EngineSpec(
        name="8b",
        config=LLAMA_3_8B,
        gpus=(0,),
        kv_blocks=24_000,
        memory_efficiency=0.7,
        arrivals=(ClosedLoop(users=24, mix=(Sizes(prompt=(50, 200), output=(200, 400)),)),),
    )
    card = GpuSpec(reachable_bandwidth_ratio=reachable_ratio, copied_bandwidth_ratio=copied)
    node = Scenario(seed=5, gpus=(card,), engines=(engine,), duration_ns=12 * SECOND_NS)
    analyzer = Analyzer()
    ours, theirs = 0, []
    estimated: set[str] = set()
    settled = 0
    for snapshot, truth in simulate(node, visible=Visible(counters=Sampling("cupti_pm", 1000.0))):
        if truth.window_ns:
            theirs.append(truth.gpus[0].window.causes_ns.get("memory_bound", 0))
        found = analyzer.feed(snapshot).gpus[0]
        if found.window_ns:
            ours += found.causes_ns["memory_bound"]
            settled += 1
            estimated |= set(found.estimated_causes)
    return ours / settled / 1e9, sum(theirs[:settled]) / settled / 1e9, estimated


def test_memory_bound_time_is_counted_at_the_rate_that_was_measured() -> None:
    ours, truth, _ = booked(0.90, 0.902)
    assert truth > 0.4
    assert ours == pytest.approx(truth, abs=0.006)
    assumed, _, by_others = booked(0.90, None)
    assert 0.012 < truth - assumed < 0.03
    assert {"memory_bound", "latency"} <= by_others
