from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent.analysis.builders import counters, engine
from tests.agent.analysis.test_phase import sums

from gpuidle.agent.analysis.prompts import give_back, prefill_steps
from gpuidle.agent.analysis.rates import sums_between
from gpuidle.agent.analysis.stepsizes import beyond, decode_rows, decode_sizes, ended_prompts, most_rows

LIMITS = (1, *(2**power for power in range(3, 15)))
T = 10**9


def histogram(*sizes: int) -> tuple[tuple[int, int], ...]:
    return tuple((limit, sum(size <= limit for size in sizes)) for limit in LIMITS)


def window(rows: int, decodes: int, prompts: tuple[int, ...], **values: Any) -> Any:
    """Return a window of steps of decodes and a step for each prompt, all beside `rows` sequences."""
    sizes = [rows] * decodes + [prompt + rows for prompt in prompts]
    return sums(
        prefill_tokens=sum(prompts),
        first_tokens=len(prompts),
        generated_tokens=rows * len(sizes) + len(prompts),
        counted_steps=len(sizes),
        steps_by_tokens=histogram(*sizes),
        running=(rows, rows),
        **values,
    )


def test_steps_larger_than_any_decode_ended_a_prompt() -> None:
    ended = ended_prompts(window(12, 70, (400, 900, 3000)), None)
    assert ended is not None
    assert sum(steps for _, steps in ended.sizes) == 3
    assert sum(tokens * steps for tokens, steps in ended.sizes) == pytest.approx(4300 + 3 * 13)
    assert ended.chunks == 0


def test_a_prompt_larger_than_a_step_had_chunks_before_it() -> None:
    ended = ended_prompts(window(12, 70, (400, 3000)), 2036.0)
    assert ended is not None
    assert ended.chunks == pytest.approx(1.0, abs=0.05)
    assert ended.first == ended.chunks


def test_a_step_that_may_be_a_larger_batch_is_not_counted_for_certain() -> None:
    # Seven sequences became nine within the window: nine tokens are decodes or a very short prompt.
    sizes = [7] * 40 + [9] * 10 + [300, 500]
    told = ended_prompts(
        sums(
            prefill_tokens=780,
            first_tokens=2,
            generated_tokens=390,
            counted_steps=52,
            steps_by_tokens=histogram(*sizes),
            running=(7, 9),
        ),
        None,
    )
    assert told is not None
    assert sum(steps for _, steps in told.sizes) == 2
    assert told.perhaps == 0


def test_accepted_drafts_make_decodes_larger() -> None:
    plain = window(16, 50, (900,))
    assert most_rows(plain) == 17
    speculating = window(16, 50, (900,), drafts=800, draft_tokens=2400)
    assert most_rows(speculating) == 17 * 4


def test_without_a_histogram_nothing_is_told() -> None:
    assert ended_prompts(sums(first_tokens=1, prefill_tokens=100, counted_steps=5), None) is None
    unknown = window(4, 10, (300,), drafts=None)
    assert ended_prompts(unknown, None) is not None


def test_a_histogram_that_contradicts_the_requests_is_not_believed() -> None:
    broken = sums(
        prefill_tokens=600, first_tokens=1, generated_tokens=40, counted_steps=12,
        steps_by_tokens=histogram(*[4] * 10, 300, 300), running=(4, 4),
    )  # fmt: skip
    assert ended_prompts(broken, None) is None


def test_told_steps_are_the_count() -> None:
    given_back = give_back([window(12, 70, (400, 900, 3000))], 8192)[0][-1]
    steps = prefill_steps(given_back, 8192, float(T), 9e6)
    assert steps is not None
    assert (steps.low, steps.estimate, steps.high) == (3, 3, 3)


def test_chunks_are_seen_by_their_rows_before_the_prompt_ends() -> None:
    tick = T // 10

    def tenth(number: int, **values: Any) -> Any:
        return sums(start_ns=number * tick, end_ns=(number + 1) * tick, running=(2, 2), **values)

    quiet = tenth(0, generated_tokens=6, counted_steps=3, steps_by_tokens=histogram(2, 2, 2))
    part = tenth(1, generated_tokens=5, counted_steps=3, steps_by_tokens=histogram(2, 2, 1))
    whole = tenth(2, generated_tokens=1, counted_steps=1, steps_by_tokens=histogram(1))
    last = tenth(
        3, generated_tokens=2, counted_steps=1, first_tokens=1, prefill_tokens=700,
        steps_by_tokens=histogram(702),
    )  # fmt: skip
    windows: list[Any] = []
    for window in (quiet, part, whole):
        windows, _ = give_back([*windows, window], 256)
    assert [each.chunk_steps for each in windows] == [0, 1, 1]
    windows, _ = give_back([*windows, last], 256)
    # Two chunks before the last one: they are where the rows tell, and go no further back.
    assert [each.chunk_steps for each in windows] == [0, 1, 1, 0]
    assert sum(each.prefill_tokens or 0 for each in windows) == 700
    assert windows[0].prefill_tokens == 0


def test_chunks_that_lie_before_a_short_window_go_to_the_steps_there() -> None:
    tick = T // 10
    before = window(12, 3, (), start_ns=0, end_ns=tick)
    last = window(12, 1, (1900,), start_ns=tick, end_ns=2 * tick)
    moved, _ = give_back([*give_back([before], 256)[0], last], 256, 9e6, 120e3)
    # 244 tokens fit a step: seven chunks before the last; 30 ms each, so two or three fit the window.
    assert moved[0].chunk_steps == 3
    assert sum(w.prefill_tokens or 0 for w in moved) == 1900
    assert sum(steps for _, steps in moved[0].prompt_steps or ()) == 3


def test_rows_of_decodes_are_told_by_tokens() -> None:
    assert decode_rows(window(12, 70, ())) == 12
    # The gauge at the edges says one, the tokens say five.
    assert decode_rows(sums(generated_tokens=500, counted_steps=100, running=(1, 1))) == 5
    assert decode_rows(sums(running=(0, 0))) == 1
    # Prompts that ended late run at its end, but had no rows for most of the window.
    late = msgspec.structs.replace(window(4, 70, (400, 900)), running=(4, 12), prompt_steps=((650.0, 2.0),))
    assert decode_rows(late) > 4
    assert decode_rows(late, by_tokens=True) == pytest.approx(4)


def test_steps_of_decodes_by_their_rows() -> None:
    assert decode_sizes(sums(running=(3, 3)), 3.0) == ((3.0, 1.0),)
    found = decode_sizes(window(5, 70, (1000,)), 5.0)
    assert sum(share for _, share in found) == pytest.approx(1)
    assert sum(rows * share for rows, share in found) == pytest.approx(5)
    # All of them have 2 to 8 rows, as the histogram says.
    assert min(rows for rows, _ in found) == 2
    assert max(rows for rows, _ in found) == 8


def test_tokens_beyond_what_a_step_takes_along() -> None:
    assert beyond(((100.0, 2.0), (1000.0, 3.0)), 250.0) == 2250


def test_histograms_of_cores_are_added_and_resets_begin_anew() -> None:
    first = engine(0, counters(0, steps_by_tokens=((1, 5), (8, 9))))
    after = engine(1, counters(1, steps_by_tokens=((1, 7), (8, 19))))
    fallen = engine(2, counters(2, counted_steps=0, steps_by_tokens=((1, 1), (8, 2))))
    told, _ = sums_between(first, after)
    assert told is not None
    assert told.steps_by_tokens == ((1, 2), (8, 10))
    down, _ = sums_between(after, fallen)
    assert down is not None
    assert down.steps_by_tokens is None


@settings(max_examples=40)
@given(
    st.integers(1, 300),
    st.integers(0, 60),
    st.lists(st.integers(1, 30_000), max_size=8),
    st.none() | st.integers(1, 9000),
)
def test_what_is_told_stays_within_the_window(
    rows: int, decodes: int, prompts: list[int], room: int | None
) -> None:
    seen = window(rows, decodes, tuple(prompts))
    ended = ended_prompts(seen, room)
    if ended is None:
        return
    steps = sum(count for _, count in ended.sizes)
    assert 0 <= steps <= len(prompts)
    assert all(tokens >= 0 for tokens, _ in ended.sizes)
    assert 0 <= ended.first <= ended.chunks + 1e-9
    for a, b in itertools.pairwise(give_back([seen, seen], room)[0]):
        assert (a.prefill_tokens or 0) + (b.prefill_tokens or 0) == 2 * sum(prompts)
