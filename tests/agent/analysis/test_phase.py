from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuidle.agent.analysis.phase import Clues, shares_from_sums
from gpuidle.agent.analysis.prompts import give_back, prefill_steps
from gpuidle.agent.analysis.rates import Sums
from gpuidle.agent.analysis.stepshares import shares_from_steps
from gpuidle.agent.model import PHASES, StepSeries, column

T = 10**9


def sums(**values: Any) -> Sums:
    known: dict[str, Any] = {
        "start_ns": 0,
        "end_ns": T,
        "prefill_tokens": 0,
        "prefill_exact": True,
        "generated_tokens": 0,
        "first_tokens": 0,
        "time_to_first_token_s": 0.0,
        "counted_steps": 0,
        "running": (0, 0),
        "waiting": (0, 0),
    }
    known.update(values)
    return Sums(**known)


def clues(busy: float | None, pace: float | None, budget: int | None) -> Clues:
    return Clues(window_ns=T, busy_ns=busy, pace_ns=pace, max_batched_tokens=budget)


def test_chunks_without_output_do_not_make_one_giant_step() -> None:
    # A 1,901-token sample from a 256-token budget: eight steps, of which the engine counted one.
    window = sums(prefill_tokens=1900, generated_tokens=2, first_tokens=1, counted_steps=2)
    steps = prefill_steps(window, 256, None, 5e6)
    assert steps is not None
    assert steps.low == 1
    assert steps.high == 2
    shares = shares_from_sums(window, clues(0.9 * T, 5e6, 256))
    assert shares.prefill_ns > 0.88 * T
    assert shares.idle_ns == 0.1 * T


def test_decodes_alone_are_decode() -> None:
    window = sums(generated_tokens=400, counted_steps=100, running=(4, 4))
    shares = shares_from_sums(window, clues(0.95 * T, None, 256))
    assert shares.decode_ns == 0.95 * T
    assert (shares.prefill_low_ns, shares.prefill_high_ns) == (0, 0)


def test_prompts_among_running_decodes_are_mixed() -> None:
    # 40 steps of which 8 carry a 256-token chunk; a decode-only step takes 15 ms.
    window = sums(
        prefill_tokens=8 * 240, generated_tokens=610, first_tokens=2, counted_steps=40, running=(15, 16)
    )
    shares = shares_from_sums(window, clues(float(T), 15e6, 256))
    assert shares.mixed_ns == round(T - 32 * 15e6)
    assert shares.prefill_low_ns <= shares.mixed_ns <= shares.prefill_high_ns
    assert shares.prefill_ns == 0


def test_a_silent_window_before_a_first_token_is_the_prefill_though_nothing_runs() -> None:
    later = sums(prefill_tokens=4000, first_tokens=1, generated_tokens=1, counted_steps=1)
    window = msgspec.structs.replace(clues(1.0 * T, None, 8192), following=later)
    shares = shares_from_sums(sums(), window)
    assert shares.prefill_ns == T
    assert shares.evidence == "estimated"


def test_a_slow_decode_window_before_a_first_token_had_a_prompt_in_it() -> None:
    later = sums(prefill_tokens=900, first_tokens=1, generated_tokens=9, counted_steps=1, running=(4, 5))
    window = msgspec.structs.replace(clues(1.0 * T, 1e7, 8192), following=later)
    shares = shares_from_sums(decodes(60, 4), window)
    assert shares.mixed_ns == pytest.approx(0.395 * T)
    assert shares.decode_ns == T - shares.mixed_ns


def test_running_zero_with_a_busy_gpu_is_unknown_and_never_idle() -> None:
    shares = shares_from_sums(sums(), clues(1.0 * T, None, 256))
    assert shares.unknown_ns == T
    assert shares.idle_ns == 0


def test_rest_is_idle() -> None:
    assert shares_from_sums(sums(), clues(None, None, None)).idle_ns == T


def test_unknown_steps_make_unknown_shares_not_invented_ones() -> None:
    window = sums(
        prefill_tokens=900, generated_tokens=500, first_tokens=3, counted_steps=None, running=(5, 5)
    )
    shares = shares_from_sums(window, clues(0.8 * T, 5e6, 256))
    assert shares.unknown_ns == 0.8 * T
    assert shares.prefill_high_ns == 0.8 * T


def decodes(steps: int, running: int, **values: Any) -> Sums:
    return sums(generated_tokens=steps * running, counted_steps=steps, running=(running, running), **values)


OPTIONAL = st.none() | st.integers(0, 5000)


@given(
    st.builds(
        sums,
        prefill_tokens=OPTIONAL,
        generated_tokens=OPTIONAL,
        first_tokens=OPTIONAL,
        counted_steps=OPTIONAL,
        time_to_first_token_s=st.none() | st.floats(0, 100),
        running=st.tuples(OPTIONAL, OPTIONAL),
        waiting=st.tuples(OPTIONAL, OPTIONAL),
        reset=st.booleans(),
    ),
    st.none() | st.floats(-1e9, 3e9),
    st.none() | st.floats(1e3, 1e9),
    st.none() | st.integers(1, 20_000),
)
def test_shares_sum_to_the_window_and_lie_in_their_bounds(
    window: Sums, busy: float | None, pace: float | None, budget: int | None
) -> None:
    shares = shares_from_sums(window, clues(busy, pace, budget))
    assert sum(shares.of(phase) for phase in PHASES) == T
    assert min(shares.of(phase) for phase in PHASES) >= 0
    containing = shares.prefill_ns + shares.mixed_ns
    assert shares.prefill_low_ns <= containing <= shares.prefill_high_ns


def series(rows: list[tuple[int, int, int, int]]) -> StepSeries:
    start, end, prefill, decode = (column(c, "i8") for c in zip(*rows, strict=True))
    return StepSeries("e", "simulator", True, 0, start, end, prefill, decode)


def test_steps_give_phases_by_definition_and_gaps_their_cause() -> None:
    ms = 10**6
    rows = [
        (0, 100 * ms, 256, 0),
        (100 * ms, 200 * ms, 100, 4),
        (205 * ms, 300 * ms, 0, 5),
        (310 * ms, 400 * ms, 0, 5),
        (900 * ms, 1000 * ms, 50, 0),
    ]
    window = shares_from_steps([series(rows)], 0, T)
    assert window is not None
    assert window.shares.prefill_ns == 200 * ms
    assert window.shares.mixed_ns == 100 * ms
    assert window.shares.decode_ns == 185 * ms
    assert window.gap_with_requests_ns == 15 * ms
    assert window.gap_without_requests_ns == 500 * ms
    assert window.steps == {"prefill": 2, "mixed": 1, "decode": 2}


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(1, 5000), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
    )
)
def test_any_disjoint_steps_sum_to_the_window(gaps: list[tuple[int, int, int, int]]) -> None:
    at, rows = 0, []
    for gap, length, prefill, decode in gaps:
        rows.append((at + gap, at + gap + length, prefill, decode))
        at += gap + length
    window = shares_from_steps([series(rows)], 1000, 20_000)
    assert window is not None
    assert sum(window.shares.of(phase) for phase in PHASES) == 19_000
    assert window.gap_with_requests_ns + window.gap_without_requests_ns == window.shares.idle_ns
    assert np.all([count > 0 for count in window.steps.values()])


def begun(**values: Any) -> Sums:
    """Return a window that begins at rest: a prompt of 0.3 s, and eight decodes of a request that goes on."""
    known: dict[str, Any] = {
        "prefill_tokens": 40,
        "generated_tokens": 9,
        "first_tokens": 1,
        "counted_steps": 9,
    }
    return sums(**known, time_to_first_token_s=0.3, running=(0, 1), **values)


def test_requests_that_still_run_kept_the_window_busy_from_their_first_token_on() -> None:
    shares = shares_from_sums(begun(), clues(None, 0.05 * T, 256))
    assert shares.prefill_ns == 0.3 * T
    assert shares.decode_ns == pytest.approx(8.5 * 0.05 * T)  # the step under way at the end is cut anywhere
    assert shares.idle_ns == T - shares.prefill_ns - shares.decode_ns


def test_a_prompt_that_began_before_the_window_and_ended_in_it_fills_half() -> None:
    window = sums(
        prefill_tokens=900,
        generated_tokens=2,
        first_tokens=1,
        counted_steps=2,
        time_to_first_token_s=2.5,
        running=(1, 0),
    )
    shares = shares_from_sums(window, clues(None, 0.1 * T, None))
    assert shares.prefill_ns == 0.5 * T
    assert shares.decode_ns == 0.1 * T


def test_decodes_that_end_a_burst_last_as_long_as_their_rows_waited() -> None:
    burst = sums(generated_tokens=12, counted_steps=4, running=(3, 0))
    by_pace = shares_from_sums(burst, clues(None, 0.2 * T, 256))
    assert by_pace.decode_ns == pytest.approx(3.5 * 0.2 * T)  # the edge cuts the first of them
    told = msgspec.structs.replace(burst, inter_token_s=12 * 0.1)
    for pace in (0.2 * T, None):
        shares = shares_from_sums(told, clues(None, pace, 256))
        assert shares.decode_ns == pytest.approx(3.5 * 0.1 * T)
        assert shares.idle_ns == T - shares.decode_ns


def test_decodes_after_the_first_prompt_need_no_pace_that_was_learned() -> None:
    shares = shares_from_sums(begun(inter_token_s=8 * 0.05), clues(None, None, 256))
    assert shares.prefill_ns == 0.3 * T
    assert shares.decode_ns == pytest.approx(8.5 * 0.05 * T)
    assert shares.unknown_ns == 0


def test_nothing_ran_before_chunks_that_began_at_rest() -> None:
    window = sums(prefill_tokens=250, chunk_ns=0.3 * T)
    shares = shares_from_sums(window, clues(None, None, 256))
    assert (shares.prefill_ns, shares.idle_ns, shares.unknown_ns) == (0.3 * T, 0.7 * T, 0)
    assert shares.prefill_high_ns == T  # when they began is a guess


def test_a_prompt_that_was_through_before_the_window_is_not_told_twice() -> None:
    tenth = T // 10
    rest = sums(end_ns=tenth)
    last = sums(
        start_ns=tenth,
        end_ns=2 * tenth,
        prefill_tokens=500,
        generated_tokens=12,
        first_tokens=1,
        counted_steps=12,
        time_to_first_token_s=0.09,
        running=(0, 1),
    )
    before, booked = give_back([rest, last], 2048, 0.08 * tenth)[0]
    given = Clues(window_ns=tenth, pace_ns=0.08 * tenth, max_batched_tokens=2048)
    shares = [shares_from_sums(window, given) for window in (before, booked)]
    assert sum(each.prefill_ns for each in shares) == pytest.approx(0.09 * T, rel=0.02)


def test_the_step_under_way_is_as_large_as_those_that_follow() -> None:
    tenth = T // 10
    first = sums(
        end_ns=tenth,
        prefill_tokens=30,
        generated_tokens=1,
        first_tokens=1,
        counted_steps=1,
        time_to_first_token_s=0.01,
        running=(0, 1),
    )
    following = sums(
        start_ns=tenth,
        end_ns=2 * tenth,
        prefill_tokens=600,
        generated_tokens=40,
        first_tokens=9,
        counted_steps=3,
        running=(1, 10),
        prompt_steps=((300.0, 2.0),),
    )
    known = Clues(window_ns=tenth, pace_ns=0.05 * tenth, max_batched_tokens=512, following=following)
    small = shares_from_sums(first, known)
    large = shares_from_sums(first, msgspec.structs.replace(known, prompt_token_ns=0.002 * tenth))
    # Half a step at least; two of 0.6 and a decode of 0.05 leave 0.25 of theirs to this window.
    assert small.mixed_ns == pytest.approx(0.1 * tenth / 4, rel=0.01)
    assert large.mixed_ns == pytest.approx((0.3 + 0.25) / 2 * tenth, rel=0.01)


def test_a_synchronous_engine_waits_for_the_host_between_its_steps() -> None:
    decodes_only = sums(generated_tokens=400, counted_steps=100, running=(4, 4))
    unmeasured = msgspec.structs.replace(clues(None, 0.01 * T, 256), gap_ratio=0.25)
    shares = shares_from_sums(decodes_only, unmeasured)
    assert (shares.decode_ns, shares.idle_ns) == (0.75 * T, 0.25 * T)
    assert shares.evidence == "estimated"
    # A step with a prompt waits no longer than another, though it takes ten times as long.
    prompts = sums(
        prefill_tokens=500, generated_tokens=210, first_tokens=5, counted_steps=55, running=(4, 4),
        prompt_steps=((104.0, 5.0),),
    )  # fmt: skip
    joined = shares_from_sums(prompts, clues(None, 0.01 * T, 256))
    shares = shares_from_sums(prompts, unmeasured)
    assert joined.mixed_ns - shares.mixed_ns == pytest.approx(5 * 0.25 * 0.01 * T)
    assert joined.decode_ns - shares.decode_ns == pytest.approx(0.25 * joined.decode_ns)
    # The steps of a burst are counted by the pace that their own rows tell.
    burst = begun(inter_token_s=8 * 0.05)
    slow = msgspec.structs.replace(unmeasured, pace_ns=0.1 * T)
    gap = (
        shares_from_sums(burst, clues(None, 0.1 * T, 256)).prefill_ns
        - shares_from_sums(burst, slow).prefill_ns
    )
    assert gap == pytest.approx(0.25 * 0.05 * T, rel=0.01)
    # A counter knows better.
    measured = msgspec.structs.replace(unmeasured, busy_ns=0.9 * T)
    assert shares_from_sums(decodes_only, measured).decode_ns == 0.9 * T


def test_where_the_pace_strays_a_window_is_read_by_its_own_prompt_tokens() -> None:
    tenth = T // 10
    window = sums(
        end_ns=tenth,
        prefill_tokens=200,
        generated_tokens=30,
        first_tokens=1,
        counted_steps=10,
        running=(3, 3),
        prompt_steps=((200.0, 1.0),),
    )
    pace = Clues(window_ns=tenth, busy_ns=tenth, pace_ns=0.06 * tenth, pace_spread=0.001)
    tokens = msgspec.structs.replace(pace, prompt_token_steps=0.05, prompt_token_spread=0.3)
    by_pace, sure = shares_from_sums(window, pace), shares_from_sums(window, tokens)
    strays = shares_from_sums(window, msgspec.structs.replace(tokens, pace_spread=0.2))
    # 9 of the 10 steps were decodes, and the prompt's took 10 more of them; by the pace 0.46 had the prompt.
    assert by_pace.mixed_ns == pytest.approx(0.46 * tenth, rel=0.01)
    assert sure.mixed_ns == pytest.approx(by_pace.mixed_ns, rel=0.01)
    assert by_pace.mixed_ns < strays.mixed_ns < (1 + 10) / (10 + 10) * tenth
