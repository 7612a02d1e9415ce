from __future__ import annotations

import random

import msgspec
import pytest
from tests.agent.analysis.builders import SECOND, counters, engine

from gpuidle.agent.analysis.rates import PromptSizes, sums_between
from gpuidle.agent.model import EngineCounters, EngineReading, Parallelism


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


def ranked(t: int, rank: str, **values: int) -> EngineCounters:
    return msgspec.structs.replace(counters(t, **values), rank=rank)


def test_a_core_that_goes_or_comes_moves_no_others_tokens() -> None:
    before = engine(1, *(ranked(1, str(rank), generated_tokens=10**6) for rank in range(8)))
    fewer = engine(2, *(ranked(2, str(rank), generated_tokens=10**6 + 50) for rank in range(7)))
    sums = between(before, fewer)
    assert (sums.generated_tokens, sums.cores, sums.reset) == (350, 7, False)
    all_again = engine(3, *(ranked(3, str(rank), generated_tokens=10**6 + 60) for rank in range(8)))
    back = between(fewer, all_again)
    assert (back.generated_tokens, back.cores) == (70, 7)


def test_only_the_core_that_began_anew_counts_from_zero() -> None:
    before = engine(1, ranked(1, "0", generated_tokens=10**6), ranked(1, "1", generated_tokens=10**6))
    after = engine(2, ranked(2, "0", generated_tokens=10**6 + 50), ranked(2, "1", generated_tokens=7))
    sums = between(before, after)
    assert (sums.generated_tokens, sums.reset) == (57, True)


def test_cached_prompt_tokens_are_left_out_by_the_ratio_of_hits() -> None:
    before, after = engine(1, counters(1)), engine(2, counters(2, prompt_tokens=1000))
    plain = msgspec.structs.replace(after.counters[0], computed_prompt_tokens=None)  # type: ignore[index]
    old = engine(2, msgspec.structs.replace(plain, prefix_query_tokens=None, prefix_hit_tokens=None))
    assert sums_between(before, old, 0.9)[0].prefill_tokens == 100  # type: ignore[union-attr]
    assert sums_between(before, old, None)[0].prefill_tokens == 1000  # type: ignore[union-attr]
    # Asked twice, as the request had to wait: the cache's own sums would leave nothing.
    start = msgspec.structs.replace(counters(1), prefix_query_tokens=0, prefix_hit_tokens=0)
    told = msgspec.structs.replace(plain, prefix_query_tokens=2000, prefix_hit_tokens=1200)
    sums = between(engine(1, start), engine(2, told))
    assert (sums.prefill_tokens, sums.prefill_exact) == (400, False)


def test_a_running_request_without_a_token_is_still_being_prefilled() -> None:
    running = {"requests_running": 3}
    before = engine(0, counters(0, **running))

    def after(at_s: float = 0.1, pipeline: int = 1, **values: int) -> EngineReading:
        row = counters(at_s, counted_steps=10, **{**running, **values})
        return engine(at_s, row, parallelism=Parallelism(pipeline=pipeline))

    # Two of three sequences gave a token in each of ten steps.
    assert between(before, after(generated_tokens=20)).silent_rows == 10
    assert between(before, after(generated_tokens=30)).silent_rows == 0
    # Where requests come, go or end their prompts, it is not told; in a long window another may have come.
    assert between(before, after(generated_tokens=20, requests_running=4)).silent_rows is None
    assert between(before, after(generated_tokens=20, first_tokens=1)).silent_rows is None
    assert between(before, after(1.0, generated_tokens=20)).silent_rows is None
    # A step of a pipeline is of a part of the requests.
    assert between(before, after(pipeline=2, generated_tokens=15)).silent_rows is None


def test_drafts_that_are_accepted_are_no_rows() -> None:
    drafting = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "requests_running": 2}
    before = engine(0, counters(0, **drafting))
    told = {"drafts": 20, "draft_tokens": 60, "accepted_tokens": 25, "generated_tokens": 45}
    window = between(before, engine(0.1, counters(0.1, counted_steps=10, **{**drafting, **told})))
    assert (window.decode_rows, window.silent_rows) == (20, 0)
    untold = msgspec.structs.replace(window, accepted_tokens=None)
    assert (untold.decode_rows, untold.silent_rows) == (None, None)


def test_the_time_between_tokens_is_that_of_a_step() -> None:
    before = engine(0, counters(0, inter_token_latency_s=1.0, requests_running=2))
    after = engine(
        1, counters(1, generated_tokens=20, counted_steps=10, inter_token_latency_s=1.5, requests_running=2)
    )
    assert between(before, after).decode_row_ns == pytest.approx(0.025e9)
    # A reading that did not ask for it tells nothing of two windows, and neither of them is slow or fast.
    unasked = engine(1, counters(1, generated_tokens=20, counted_steps=10))
    assert between(before, unasked).decode_row_ns is None
    assert (
        between(unasked, engine(2, counters(2, generated_tokens=40, inter_token_latency_s=2.0))).decode_row_ns
        is None
    )
