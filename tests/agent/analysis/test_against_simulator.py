"""The analysis against the simulator's exact truth, with each kind of evidence."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

import pytest

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import PHASES, Frame
from gpuidle.collectors.simulator.node import CUPTI_100_HZ, Visible, simulate
from gpuidle.collectors.simulator.scenario import demo
from gpuidle.collectors.simulator.truth import Truth

SECONDS = 120
"""Three cycles of the demo: its last seconds are at rest, so that all of its work has settled."""
EVIDENCE = {
    "steps and GPM": Visible(),
    "steps and PM": Visible(counters=CUPTI_100_HZ),
    "token sums and GPM": Visible(steps=False),
    "token sums and NVML": Visible(steps=False, counters=None),
}


@lru_cache(maxsize=32)
def run(visible: Visible, seed: int) -> tuple[Frame, Truth]:
    analyzer = Analyzer()
    for snapshot, now in islice(simulate(demo(seed), visible=visible), SECONDS):
        frame, truth = analyzer.feed(snapshot), now
    return frame, truth


@pytest.mark.parametrize("evidence", EVIDENCE)
@pytest.mark.parametrize("seed", [1, 2])
def test_phases_come_close_and_tokens_are_exact(evidence: str, seed: int) -> None:
    frame, truth = run(EVIDENCE[evidence], seed)
    engine, exact = frame.engines[0], truth.engines[0].total
    assert engine.prefill_tokens_total == exact.prompt_tokens
    assert engine.decode_tokens_total == exact.decode_tokens
    assert engine.useful_flops_total == pytest.approx(exact.useful_flops, rel=0.03)
    for gpu, real in zip(frame.gpus, truth.gpus, strict=True):
        total, whole = sum(gpu.phases_total_ns.values()), sum(real.total.phases_ns.values())
        for phase in PHASES:
            ours = gpu.phases_total_ns[phase] / total
            theirs = real.total.phases_ns.get(phase, 0) / whole
            assert ours == pytest.approx(theirs, abs=0.04), phase


@pytest.mark.parametrize("evidence", EVIDENCE)
def test_the_ledger_comes_close_where_the_evidence_splits_it(evidence: str) -> None:
    frame, truth = run(EVIDENCE[evidence], 1)
    gpu, real = frame.gpus[0], truth.gpus[0]
    total, whole = sum(gpu.causes_total_ns.values()), sum(real.total.causes_ns.values())

    def ours(*causes: str) -> float:
        return sum(gpu.causes_total_ns[cause] for cause in causes) / total

    def theirs(*causes: str) -> float:
        return sum(value for cause, value in real.total.causes_ns.items() if cause in causes) / whole

    assert ours("useful") == pytest.approx(theirs("useful"), abs=0.02)
    assert ours("host_gap") == pytest.approx(theirs("host_gap"), abs=0.02)
    assert ours("no_request") <= theirs("no_request") + 0.02
    if EVIDENCE[evidence].counters is not None:
        stalled = ("memory_bound", "latency", "communication", "padding")
        assert ours(*stalled) == pytest.approx(theirs(*stalled), abs=0.03)
    if EVIDENCE[evidence].steps:
        assert ours("unattributed") <= 0.01
        assert ours("no_request") == pytest.approx(theirs("no_request"), abs=0.02)


def test_tokens_alone_give_shares_and_no_gpu() -> None:
    frame, _ = run(Visible(gpus=False, counters=None, steps=False), 1)
    assert frame.gpus == ()
    assert frame.engines[0].decode_tokens_total
    assert sum(frame.engines[0].phases.of(phase) for phase in PHASES) == frame.engines[0].phases.window_ns


def test_counters_alone_guess_no_phase_and_no_useful_work() -> None:
    frame, _ = run(Visible(engine_counters=False, steps=False), 1)
    gpu = frame.gpus[0]
    assert gpu.phases_total_ns["prefill"] == gpu.phases_total_ns["decode"] == 0
    assert gpu.causes_total_ns["useful"] == gpu.causes_total_ns["no_request"] == 0
    assert "flops" not in gpu.idle
    assert 0 < gpu.idle["tensor_pipe"].value < 1


def test_fast_counters_alone_label_decode_and_what_contains_a_prefill() -> None:
    frame, truth = run(Visible(engine_counters=False, steps=False, counters=CUPTI_100_HZ), 1)
    gpu, real = frame.gpus[0].phases_total_ns, truth.gpus[0].total.phases_ns
    total = sum(gpu.values())
    containing = (real.get("prefill", 0) + real.get("mixed", 0)) / total
    assert gpu["mixed"] / total == pytest.approx(containing, abs=0.03)
    assert gpu["decode"] / total == pytest.approx(real.get("decode", 0) / total, abs=0.03)
    assert gpu["prefill"] == 0
    assert gpu["unknown"] / total < 0.05
