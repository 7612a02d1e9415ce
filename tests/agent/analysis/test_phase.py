from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuidle.agent.analysis.phase import DecodePace, prefill_steps, shares_from_steps, shares_from_sums
from gpuidle.agent.analysis.rates import Sums
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


def test_chunks_without_output_do_not_make_one_giant_step() -> None:
    # A 1,901-token sample from a 256-token budget: eight steps, of which the engine counted one.
    window = sums(prefill_tokens=1900, generated_tokens=2, first_tokens=1, counted_steps=2)
    steps = prefill_steps(window, 256)
    assert steps is not None
    assert steps.low == 1
    assert steps.high == 2
    shares = shares_from_sums(window, T, 0.9 * T, pace_ns=5e6, max_batched_tokens=256)
    assert shares.prefill_ns > 0.88 * T
    assert shares.idle_ns == 0.1 * T


def test_decodes_alone_are_decode() -> None:
    window = sums(generated_tokens=400, counted_steps=100, running=(4, 4))
    shares = shares_from_sums(window, T, 0.95 * T, pace_ns=None, max_batched_tokens=256)
    assert shares.decode_ns == 0.95 * T
    assert (shares.prefill_low_ns, shares.prefill_high_ns) == (0, 0)


def test_prompts_among_running_decodes_are_mixed() -> None:
    # 40 steps of which 8 carry a 256-token chunk; a decode-only step takes 15 ms.
    window = sums(
        prefill_tokens=8 * 240, generated_tokens=610, first_tokens=2, counted_steps=40, running=(15, 16)
    )
    shares = shares_from_sums(window, T, float(T), pace_ns=15e6, max_batched_tokens=256)
    assert shares.mixed_ns == round(T - 32 * 15e6)
    assert shares.prefill_low_ns <= shares.mixed_ns <= shares.prefill_high_ns
    assert shares.prefill_ns == 0


def test_running_zero_with_a_busy_gpu_is_unknown_and_never_idle() -> None:
    shares = shares_from_sums(sums(), T, 1.0 * T, pace_ns=None, max_batched_tokens=256)
    assert shares.unknown_ns == T
    assert shares.idle_ns == 0


def test_rest_is_idle() -> None:
    assert shares_from_sums(sums(), T, None, None, None).idle_ns == T


def test_unknown_steps_make_unknown_shares_not_invented_ones() -> None:
    window = sums(
        prefill_tokens=900, generated_tokens=500, first_tokens=3, counted_steps=None, running=(5, 5)
    )
    shares = shares_from_sums(window, T, 0.8 * T, pace_ns=5e6, max_batched_tokens=256)
    assert shares.unknown_ns == 0.8 * T
    assert shares.prefill_high_ns == 0.8 * T


def test_the_pace_of_decode_is_learned_by_batch() -> None:
    pace = DecodePace()
    assert pace.step_ns(sums(running=(4, 4))) is None
    pace.learn(sums(generated_tokens=400, counted_steps=100, running=(4, 4)), 1e9)
    pace.learn(sums(generated_tokens=6400, counted_steps=50, running=(128, 128)), 1e9)
    assert pace.step_ns(sums(running=(5, 4))) == 1e7
    assert pace.step_ns(sums(running=(100, 120))) == 2e7


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
    shares = shares_from_sums(window, T, busy, pace, budget)
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
