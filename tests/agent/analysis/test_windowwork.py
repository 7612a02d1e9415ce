"""Work of a window where an engine has several data-parallel cores: sums are of those that were read."""

from __future__ import annotations

import msgspec
import pytest
from tests.agent.analysis.builders import counters, engine

from gpuidle.agent.analysis.rates import Sums, sums_between
from gpuidle.agent.analysis.windowwork import mean_context_tokens, window_work
from gpuidle.agent.model import EngineLimits, EngineReading, Parallelism
from gpuidle.agent.physics.builtin import CONFIGS
from gpuidle.agent.physics.shapes import shape_from_config

MIXTRAL = shape_from_config(CONFIGS["mistralai/Mixtral-8x7B-v0.1"])
LIMITS = EngineLimits(max_batched_tokens=8192, kv_capacity_tokens=100_000)


def second(cores: int, **values: object) -> tuple[Sums, EngineReading]:
    def at(t: int) -> EngineReading:
        row = counters(
            t,
            prompt_tokens=5000 * t,
            computed_prompt_tokens=5000 * t,
            generated_tokens=500 * t,
            first_tokens=5 * t,
            counted_steps=10 * t,
            requests_running=10,
            kv_usage_ratio=0.1,
        )
        rows = [msgspec.structs.replace(row, rank=str(rank)) for rank in range(cores)]
        return engine(t, *rows, limits=LIMITS, **values)

    sums, _ = sums_between(at(1), at(2))
    assert sums is not None
    return sums, at(2)


def flops(cores: int, **values: object) -> float:
    done = window_work(MIXTRAL, *second(cores, **values), prompt_context=500.0)
    assert done is not None
    return done.flops


@pytest.mark.parametrize("expert", [False, True])
def test_a_gpu_does_the_work_of_one_core_however_many_are_read(expert: bool) -> None:
    alone = flops(1, parallelism=Parallelism())
    spread = Parallelism(data=8, expert=expert)
    assert flops(8, parallelism=spread) == pytest.approx(alone)
    # Behind an outer balancer only one of the eight cores is read: its tokens are one core's already.
    assert flops(1, parallelism=spread) == pytest.approx(alone)


def test_the_context_of_a_sequence_is_by_the_cache_of_its_core() -> None:
    for cores in (1, 8):
        assert mean_context_tokens(*second(cores)) == pytest.approx(100_000 * 0.1 / 10)
