from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent.analysis.builders import counters, engine
from tests.agent.analysis.test_phase import sums

from gpuidle.agent.analysis.prompts import give_back, prefill_steps
from gpuidle.agent.analysis.rates import Sums, sums_between
from gpuidle.agent.model import EngineReading

T = 10**9


def between(before: EngineReading, after: EngineReading) -> Sums:
    found, problems = sums_between(before, after)
    assert found is not None
    assert not problems
    return found


def test_a_late_prompt_is_given_back_to_the_seconds_in_which_it_was_computed() -> None:
    readings = [engine(t, counters(t)) for t in (0, 1, 2, 3)]
    readings.append(
        engine(
            4,
            counters(
                4,
                computed_prompt_tokens=3000,
                prompt_tokens=3000,
                generated_tokens=1,
                first_tokens=1,
                time_to_first_token_s=3.0,
            ),
        )
    )
    windows = [between(a, b) for a, b in itertools.pairwise(readings)]
    moved = give_back(windows, None)[0]
    tokens = [w.prefill_tokens or 0 for w in moved]
    assert sum(tokens) == 3000
    assert tokens == [500, 1000, 1000, 500]
    assert not any(w.at_rest for w in moved)


def test_with_a_queue_nothing_is_moved() -> None:
    readings = [engine(t, counters(t, requests_waiting=2)) for t in (0, 1, 2)]
    last = counters(
        3, computed_prompt_tokens=9, first_tokens=1, time_to_first_token_s=2.0, generated_tokens=1
    )
    windows = [between(a, b) for a, b in zip(readings, [*readings[1:], engine(3, last)], strict=True)]
    assert [w.prefill_tokens for w in give_back(windows, None)[0]] == [0, 0, 9]


def test_chunks_beside_decodes_go_as_many_steps_back() -> None:
    windows = [
        sums(start_ns=i * T, end_ns=(i + 1) * T, generated_tokens=20, counted_steps=4, running=(5, 5))
        for i in range(3)
    ]
    last = sums(
        start_ns=3 * T,
        end_ns=4 * T,
        generated_tokens=21,
        counted_steps=4,
        running=(5, 6),
        first_tokens=1,
        prefill_tokens=2008,
    )
    moved, _ = give_back([*windows, last], 256)
    # Eight chunks of 251 tokens: two in the last window, the other six in the steps before it.
    assert [w.chunk_steps for w in moved] == [0, 2, 4, 0]
    assert sum(w.prefill_tokens or 0 for w in moved) == 2008


def test_chunks_that_ran_alone_fill_the_silent_windows_and_tell_their_pace() -> None:
    rest = sums(start_ns=0, end_ns=T)
    begun = sums(start_ns=T, end_ns=2 * T, running=(0, 1))
    silent = [sums(start_ns=i * T, end_ns=(i + 1) * T, running=(1, 1)) for i in (2, 3)]
    last = sums(
        start_ns=4 * T,
        end_ns=5 * T,
        generated_tokens=1,
        counted_steps=1,
        running=(1, 0),
        first_tokens=1,
        prefill_tokens=1000,
    )
    moved, token_ns = give_back([rest, begun, *silent, last], 256)
    # Three chunks between the two that ended somewhere in the first and the last second: a second each.
    assert token_ns == 4 * T / 1000
    assert [w.chunk_ns / T for w in moved] == [0.5, 1.0, 1.0, 1.0, 0]
    assert sum(w.prefill_tokens or 0 for w in moved) == 1000


def test_requests_that_come_while_a_long_step_runs_share_the_next_one() -> None:
    alone = prefill_steps(
        sums(prefill_tokens=500, first_tokens=1, generated_tokens=400, counted_steps=80, running=(4, 4)),
        8192, float(T), 12e6,
    )  # fmt: skip
    assert alone is not None
    assert 0.9 < alone.estimate <= 1.0
    crowd = prefill_steps(
        sums(prefill_tokens=20_000, first_tokens=20, generated_tokens=400, counted_steps=30, running=(9, 9)),
        8192, float(T), 10e6,
    )  # fmt: skip
    assert crowd is not None
    assert 5 < crowd.estimate < 18


WINDOW = st.builds(
    sums,
    prefill_tokens=st.none() | st.integers(0, 5000),
    generated_tokens=st.none() | st.integers(0, 5000),
    first_tokens=st.none() | st.integers(0, 50),
    counted_steps=st.none() | st.integers(0, 500),
    time_to_first_token_s=st.none() | st.floats(0, 100),
    running=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    waiting=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    reset=st.booleans(),
)


@settings(max_examples=60)
@given(st.lists(WINDOW, min_size=1, max_size=6), st.none() | st.integers(1, 20_000))
def test_giving_back_loses_no_token(windows: list[Sums], budget: int | None) -> None:
    moved, token_ns = give_back(windows, budget)

    def known(rows: list[Sums]) -> int:
        return sum(w.prefill_tokens or 0 for w in rows)

    assert len(moved) == len(windows)
    lost = any(w.prefill_tokens is None for w in windows[:-1])
    assert known(moved) == known(windows) or (lost and known(moved) < known(windows))
    assert all(0 <= w.chunk_steps <= (w.counted_steps or 0) and w.chunk_ns >= 0 for w in moved)
    assert token_ns is None or token_ns >= 0


def test_no_more_chunks_stay_in_a_window_than_it_has_steps() -> None:
    # A step of 256 tokens lasts as long as a window: four chunks before the last step lie in four others.
    tenth = T // 10
    busy = {"running": (3, 3), "waiting": (2, 2), "steps_by_tokens": ((256, 1), (2048, 1))}
    windows = [
        sums(start_ns=i * tenth, end_ns=(i + 1) * tenth, generated_tokens=2, counted_steps=1, **busy)
        for i in range(6)
    ]
    silent = sums(start_ns=6 * tenth, end_ns=7 * tenth, running=(3, 3), waiting=(2, 2))
    last = sums(
        start_ns=7 * tenth,
        end_ns=8 * tenth,
        generated_tokens=3,
        counted_steps=1,
        first_tokens=1,
        prefill_tokens=1260,
        running=(3, 3),
        waiting=(2, 1),
        steps_by_tokens=((256, 0), (2048, 1)),
    )
    moved = give_back([*windows, silent, last], 256, 10e6)[0]
    assert sum(w.prefill_tokens or 0 for w in moved) == 1260
    assert sum(n for _, n in moved[-1].prompt_steps or ()) == 1
    assert moved[-2].chunk_ns == tenth
    assert all(w.chunk_steps <= 1 for w in moved)
    assert 3.5 <= sum(w.chunk_steps for w in moved) <= 4.5
    assert [w.chunk_steps > 0.4 for w in moved[2:6]] == [True] * 4


def test_the_time_to_first_token_tells_where_chunks_that_ran_alone_began() -> None:
    # Four chunks took 2 s: the first was through in the second second, and the last one ended in the third.
    rest = sums(start_ns=0, end_ns=T)
    begun = sums(start_ns=T, end_ns=2 * T, running=(0, 1))
    last = sums(
        start_ns=2 * T,
        end_ns=3 * T,
        generated_tokens=2,
        counted_steps=2,
        running=(1, 0),
        first_tokens=1,
        prefill_tokens=1000,
        time_to_first_token_s=2.0,
    )
    moved, token_ns = give_back([rest, begun, last], 256, 0.1 * T)
    # It ended between 2.5 s (the first chunk at 1 s) and 2.9 s (a decode followed): at 2.7 s.
    assert [round(w.chunk_ns / T, 2) for w in moved] == [0.3, 1.0, 0.7]
    assert sum(w.prefill_tokens or 0 for w in moved) == 1000
    assert token_ns == 2 * T / 1000
