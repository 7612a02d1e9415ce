"""What a scenario refuses, and that its users come when it says."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.collectors.simulator.nodes import SMALL, asked, node, ran, requests_of

from gpuidle.collectors.simulator.node import simulate
from gpuidle.collectors.simulator.scenario import (
    SECOND_NS,
    Burst,
    Cycle,
    GpuSpec,
    Listed,
    Poisson,
    Request,
    Scenario,
    ScenarioError,
    Sizes,
    demo,
)

MIX = (Sizes((10, 20), (1, 4)),)


@pytest.mark.parametrize(("prompt", "output", "hit"), [(0, 1, 0), (1, 0, 0), (10, 1, 10), (10, 1, -1)])
def test_a_request_that_cannot_be_is_refused(prompt: int, output: int, hit: int) -> None:
    with pytest.raises(ScenarioError):
        Request(0, prompt, output, hit)


def test_two_engines_on_one_gpu_are_refused() -> None:
    with pytest.raises(ScenarioError, match="two engines hold one GPU"):
        node(SMALL, replace(SMALL, name="other"))


def test_an_engine_on_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ScenarioError, match="not there"):
        node(replace(SMALL, gpus=(0, 1)))


def test_an_engine_on_cards_that_differ_is_refused() -> None:
    with pytest.raises(ScenarioError, match="are alike"):
        Scenario(
            seed=0,
            gpus=(GpuSpec(), GpuSpec(name="NVIDIA H200", memory_total_bytes=143_771 << 20)),
            engines=(replace(SMALL, gpus=(0, 1)),),
        )


def test_listed_requests_stand_in_order() -> None:
    with pytest.raises(ScenarioError, match="order of arrival"):
        Listed((Request(5, 1, 1), Request(4, 1, 1)))


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (Poisson(1.0, MIX),),
        (Poisson(1.0, MIX, stop_ns=11 * SECOND_NS),),
        (Burst(11 * SECOND_NS, 1, MIX),),
    ],
)
def test_a_cycle_needs_parts_that_end_within_it(parts: tuple[Poisson | Burst, ...]) -> None:
    with pytest.raises(ScenarioError):
        Cycle(period_ns=10 * SECOND_NS, parts=parts)


def test_a_poisson_stream_has_its_rate_and_its_limits() -> None:
    stream = Poisson(50.0, MIX, start_ns=10 * SECOND_NS, stop_ns=110 * SECOND_NS)
    requests = requests_of(replace(SMALL, arrivals=(stream,)), 1000 * SECOND_NS)
    assert 4700 < len(requests) < 5300
    times = [request.arrival_ns for request in requests]
    assert times == sorted(times)
    assert times[0] >= 10 * SECOND_NS
    assert times[-1] < 110 * SECOND_NS
    assert {request.prompt_tokens for request in requests} == set(range(10, 21))


def test_a_mix_is_drawn_by_weight() -> None:
    mix = (Sizes((10, 10), (1, 1), weight=3.0), Sizes((20, 20), (1, 1), prefix_hit_ratio=0.5))
    requests = requests_of(replace(SMALL, arrivals=(Burst(0, 4000, mix),)), 0)
    short = sum(request.prompt_tokens == 10 for request in requests)
    assert 2850 < short < 3150
    assert {request.prefix_hit_tokens for request in requests} == {0, 10}


def test_a_cycle_comes_again_and_again_and_is_merged_with_the_rest() -> None:
    engine = replace(
        SMALL,
        arrivals=(
            Cycle(10 * SECOND_NS, (Burst(SECOND_NS, 2, MIX),)),
            Listed((Request(12 * SECOND_NS, 5, 1),)),
        ),
    )
    times = [request.arrival_ns // SECOND_NS for request in requests_of(engine, 32 * SECOND_NS)]
    assert times == [1, 1, 11, 11, 12, 21, 21, 31, 31]


def test_the_last_tick_ends_with_the_scenario() -> None:
    snapshots, _ = ran(node(asked(), seconds=2.5))
    times = [snapshot.monotonic_ns - snapshots[0].monotonic_ns for snapshot in snapshots]
    assert times == [0, SECOND_NS, 2 * SECOND_NS, 2 * SECOND_NS + SECOND_NS // 2]
    assert [snapshot.sequence for snapshot in snapshots] == [0, 1, 2, 3]


def test_a_tick_takes_time() -> None:
    with pytest.raises(ScenarioError, match="a tick takes time"):
        next(simulate(node(SMALL), tick_ns=0))


@pytest.mark.parametrize("seed", range(3))
def test_the_demo_shows_every_phase_in_its_part_of_the_cycle(seed: int) -> None:
    _, truths = ran(replace(demo(seed), duration_ns=80 * SECOND_NS))
    for lap in (0, 40):
        for first, last, phase, least in (
            (0, 9, "prefill", 0.6),
            (11, 18, "decode", 0.95),
            (20, 30, "mixed", 0.3),
            (35, 40, "idle", 0.999),
        ):
            part = truths[lap + first + 1 : lap + last + 1]
            for gpu in (0, 1):
                spent = sum(truth.gpus[gpu].window.phases_ns.get(phase, 0) for truth in part)  # type: ignore[call-overload]
                assert spent / SECOND_NS >= least * len(part)


@pytest.mark.parametrize(
    "change",
    [{"gpus": ()}, {"max_batched_tokens": 0}, {"compute_efficiency": 1.2}, {"host_gap_ns": -1}],
)
def test_an_engine_needs_sane_limits(change: dict[str, Any]) -> None:
    with pytest.raises(ScenarioError, match="small"):
        replace(SMALL, **change)
