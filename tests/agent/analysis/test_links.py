from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.links import LinkFit, at_most_unheld
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import GPM_10_HZ, Visible, simulate
from gpuidle.collectors.simulator.options import Straggler
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    SECOND_NS,
    ClosedLoop,
    EngineSpec,
    GpuSpec,
    Poisson,
    Scenario,
    Sizes,
)

SECONDS = 12
RING_NS = 9_700.0
"""Of a small message over four GPUs."""


def learned(
    usual_ms: list[float], factor: float, launch_ms: float, noise: float = 0.0, fit: LinkFit | None = None
) -> LinkFit:
    draw = Random("links")
    shown = [(launch_ms + factor * t) * (1 + draw.gauss(0, noise)) for t in usual_ms]
    fit = LinkFit() if fit is None else fit
    return fit.learn(np.array(usual_ms) * 1e6, np.array(shown) * 1e6, 20e6 * len(shown))


def test_steps_with_and_without_prompts_tell_launches_from_links() -> None:
    found = learned([1.8, 1.9] * 40 + [20.0, 60.0], 0.8, 0.5, noise=0.02).factor()
    assert found is not None
    assert found[0] == pytest.approx(0.8, rel=0.03)
    assert found[1] < 0.02


@pytest.mark.parametrize(
    ("usual", "factor", "launch", "noise"),
    [
        ([1.8] * 200, 0.8, 0.5, 0.02),  # decodes alone, all alike
        ([1.8, 1.9] * 100, 0.8, 0.5, 0.05),  # hardly different ones
        ([1.8, 60.0] * 2, 0.8, 0.5, 0.0),  # a few
        ([1.8, 60.0] * 50, 10.0, 0.5, 0.0),  # PCIe
        ([1.8, 60.0] * 50, 0.0, 0.5, 0.0),  # SMs are held while messages are on their way
        ([1.8, 60.0] * 50, 1.0, 0.5, 0.9),  # something else comes in between
        ([], 1.0, 0.5, 0.0),
    ],
)
def test_nothing_is_told_by_steps_that_do_not_tell_it(
    usual: list[float], factor: float, launch: float, noise: float
) -> None:
    assert learned(usual, factor, launch, noise).factor() is None


def test_launches_take_no_less_than_no_time() -> None:
    found = learned([5.0, 50.0] * 20, 1.0, -0.5).factor()
    assert found is not None
    assert 0.98 < found[0] < 1.0


def test_what_is_old_fades() -> None:
    fit = learned([2.0, 50.0] * 100, 1.3, 0.5)
    for _ in range(10):
        fit = learned([2.0, 50.0] * 10_000, 0.8, 0.5, fit=fit)
    found = fit.factor()
    assert found is not None
    assert found[0] == pytest.approx(0.8, rel=0.01)
    assert fit.count < 50_000


@pytest.mark.parametrize(
    ("talk", "active", "sm", "booked"),
    [
        (20.0, 90.0, 60.0, 20.0),
        (20.0, 90.0, 75.0, 15.0),
        (20.0, 90.0, 88.0, 20.0),  # SMs are held while messages are on their way
        (20.0, 90.0, 95.0, 20.0),
        (20.0, 90.0, None, 20.0),
        (20.0, None, 60.0, 20.0),
        (None, 90.0, 60.0, None),
    ],
)
def test_messages_take_no_longer_than_the_sms_were_free(
    talk: float | None, active: float | None, sm: float | None, booked: float | None
) -> None:
    assert at_most_unheld(talk, active, sm) == booked


def node(faster: float, tensor: int = 4, straggler: Straggler | None = None) -> Scenario:
    sizes = [2.0**power for power in range(10, 31)]
    links = tuple((size, (RING_NS + size * 1.5 / 340) / faster) for size in sizes)
    engine = EngineSpec(
        name="70b" if tensor > 1 else "8b",
        config=LLAMA_3_70B if tensor > 1 else LLAMA_3_8B,
        gpus=tuple(range(tensor)),
        kv_blocks=24_000,
        max_batched_tokens=8192,
        link_points=links if tensor > 1 else (),
        arrivals=(Poisson(per_second=2.0, mix=(Sizes(prompt=(50, 1500), output=(20, 300)),)),),
        straggler=straggler,
    )
    return Scenario(seed=7, gpus=(GpuSpec(),) * tensor, engines=(engine,), duration_ns=SECONDS * SECOND_NS)


PM_AND_STEPS = Visible(counters=Sampling("cupti_pm", 1000.0))


def analysed(scenario: Scenario, visible: Visible = PM_AND_STEPS) -> tuple[Analyzer, dict[str, float]]:
    """Return the analyzer and by how many points of the time its causes are off on GPU 0."""
    analyzer = Analyzer()
    ours: dict[str, int] = {}
    theirs: list[dict[str, int]] = []
    settled = 0
    for snapshot, now in simulate(scenario, visible=visible):
        if now.window_ns:
            theirs.append({str(cause): ns for cause, ns in now.gpus[0].window.causes_ns.items()})
        gpu = analyzer.feed(snapshot).gpus[0]
        if gpu.window_ns:
            settled += 1
            for cause, ns in gpu.causes_ns.items():
                ours[cause] = ours.get(cause, 0) + ns
    whole = settled * SECOND_NS
    truth = {cause: sum(window.get(cause, 0) for window in theirs[:settled]) for cause in ours}
    return analyzer, {cause: 100 * (ours[cause] - truth[cause]) / whole for cause in ours}


def factors(analyzer: Analyzer) -> list[tuple[float, float] | None]:
    return [track.links.factor() for track in analyzer._gpus.values()]


@pytest.mark.parametrize("faster", [0.6, 1.6])
def test_links_that_are_slower_or_faster_than_the_table_are_told_from_launches(faster: float) -> None:
    analyzer, errors = analysed(node(faster))
    for told in factors(analyzer):
        assert told is not None
        assert told[0] == pytest.approx(0.93 / faster, rel=0.1)
    assert abs(errors["communication"]) < 2.0
    assert abs(errors["latency"]) < 2.0


def test_sums_and_slow_counters_bound_the_messages_of_links_that_are_faster() -> None:
    plain = node(1.6)
    crowd = ClosedLoop(users=160, mix=(Sizes(prompt=(50, 1500), output=(20, 300)),))
    engine = msgspec.structs.replace(plain.engines[0], arrivals=(crowd,))
    scenario = msgspec.structs.replace(plain, engines=(engine,))
    _, errors = analysed(scenario, Visible(counters=GPM_10_HZ, steps=False))
    assert abs(errors["communication"]) < 2.0  # by the table 5.8
    assert abs(errors["latency"]) < 2.0


def test_one_gpu_learns_nothing_of_links() -> None:
    analyzer, errors = analysed(node(1.0, tensor=1))
    assert factors(analyzer) == [None]
    assert errors["communication"] == 0.0


def test_spinning_for_a_straggler_is_not_taken_for_links() -> None:
    analyzer, _ = analysed(node(1.0, straggler=Straggler(rank=2, slower=1.3)))
    waiting, late = factors(analyzer)[:2], factors(analyzer)[2]
    assert waiting == [None, None]
    assert late is not None
    assert late[0] == pytest.approx(0.93, rel=0.1)
