from __future__ import annotations

import random

import msgspec
import pytest
from tests.agent.analysis.builders import SECOND, counters, engine

from gpuidle.agent.analysis.rates import PromptSizes, sums_between
from gpuidle.agent.model import EngineReading


def between(before: EngineReading, after: EngineReading):  # type: ignore[no-untyped-def]
    sums, problems = sums_between(before, after)
    assert not problems
    assert sums is not None
    return sums


def test_prefill_is_what_was_computed_and_decode_what_no_prefill_made() -> None:
    before = engine(1, counters(1))
    after = engine(
        2,
        counters(2, prompt_tokens=1000, computed_prompt_tokens=600, generated_tokens=50, first_tokens=2),
    )
    sums = between(before, after)
    assert (sums.prefill_tokens, sums.decode_tokens, sums.first_tokens) == (600, 48, 2)
    assert sums.window_ns == SECOND


def test_a_counter_that_falls_is_a_restart_and_counts_from_zero() -> None:
    before = engine(1, counters(1, generated_tokens=90_000, prompt_tokens=5, computed_prompt_tokens=5))
    after = engine(2, counters(2, generated_tokens=7, first_tokens=1, computed_prompt_tokens=3))
    sums = between(before, after)
    assert sums.reset
    assert (sums.generated_tokens, sums.prefill_tokens, sums.decode_tokens) == (7, 3, 6)
    assert not sums.at_rest


def test_another_root_process_is_a_restart_even_if_its_counters_are_higher() -> None:
    before = engine(1, counters(1, generated_tokens=10))
    after = engine(2, counters(2, generated_tokens=500), root_pid=99, root_start_ns=SECOND)
    assert between(before, after).generated_tokens == 500


def test_the_same_pid_with_another_start_is_another_process() -> None:
    before = engine(1, counters(1, generated_tokens=10))
    after = engine(2, counters(2, generated_tokens=500), root_start_ns=2)
    assert between(before, after).reset


def test_an_impossible_jump_is_refused_and_named() -> None:
    before = engine(1, counters(1))
    sums, problems = sums_between(before, engine(2, counters(2, generated_tokens=10**15)))
    assert sums is None
    assert problems[0].kind == "bad_reading"
    assert "generated_tokens" in problems[0].message


def test_what_the_engine_does_not_tell_stays_unknown() -> None:
    before = engine(1, counters(1, first_tokens=None))
    after = counters(2, generated_tokens=5, first_tokens=None, computed_prompt_tokens=9)
    sums = between(before, engine(2, after))
    assert sums.decode_tokens is None
    assert sums.generated_tokens == 5


def test_without_a_prompt_token_there_was_no_first_token() -> None:
    before = engine(1, counters(1, first_tokens=None))
    sums = between(before, engine(2, counters(2, generated_tokens=5, first_tokens=None)))
    assert (sums.first_tokens, sums.decode_tokens) == (0, 5)


def test_several_front_ends_make_steps_unknown() -> None:
    before = engine(1, counters(1))
    after = engine(2, counters(2, counted_steps=500, generated_tokens=300), steps_reliable=False)
    assert between(before, after).counted_steps is None


def test_cores_are_summed() -> None:
    rows = [counters(1), msgspec.structs.replace(counters(1), rank="1")]
    later = [
        counters(2, generated_tokens=5),
        msgspec.structs.replace(counters(2, generated_tokens=6, requests_running=3), rank="1"),
    ]
    sums = between(engine(1, *rows), engine(2, *later))
    assert sums.generated_tokens == 11
    assert sums.running == (0, 3)


def test_how_far_prompts_spread_follows_from_their_sums() -> None:
    draw = random.Random(1)
    sizes = PromptSizes()
    assert sizes.mean() is None
    for _ in range(400):
        prompts = [round(draw.expovariate(1 / 800)) + 1 for _ in range(draw.randint(1, 6))]
        row = counters(2, computed_prompt_tokens=sum(prompts), first_tokens=len(prompts))
        window = between(engine(1, counters(1)), engine(2, row))
        assert window.whole_prompt_tokens == sum(prompts) / len(prompts)
        sizes.learn(window)
    assert sizes.mean() == pytest.approx(800, rel=0.2)
    assert sizes.spread() == pytest.approx(1.0, abs=0.35)


def test_prompts_of_one_size_do_not_spread() -> None:
    sizes = PromptSizes()
    for count in range(1, 30):
        row = counters(2, computed_prompt_tokens=500 * count, first_tokens=count)
        sizes.learn(between(engine(1, counters(1)), engine(2, row)))
    assert sizes.spread() == pytest.approx(0.0, abs=1e-6)
