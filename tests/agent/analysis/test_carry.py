from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent.analysis.builders import H100, LLAMA_8B, engine, gpu
from tests.agent.analysis.test_phase import sums

from gpuidle.agent.analysis.carry import counter_is_dead, pay, pay_exact
from gpuidle.agent.analysis.enginewindow import EngineWindow
from gpuidle.agent.analysis.phase import Clues
from gpuidle.agent.analysis.tracks import GpuTrack, Settled
from gpuidle.agent.analysis.windowwork import window_work
from gpuidle.agent.model import Shares
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.agent.physics.shapes import shape_from_config

T = 10**9
SHAPE = shape_from_config(json.loads(LLAMA_8B))
PEAKS = find_peaks(H100, 85_520_809_984)
assert PEAKS is not None


def track() -> GpuTrack:
    return GpuTrack(reading=gpu(1), last_seen_ns=0)


def window(
    prompt: int,
    decodes: int = 0,
    *,
    containing: int = T,
    following: int = 0,
    prompts: int = 1,
    steps: tuple[tuple[float, float], ...] | None = None,
) -> EngineWindow:
    """A second in which prompts of so many tokens ended, before one in which `following` tokens do.

    Those are of so many `prompts`, in `steps` of (tokens, steps).
    """
    told = engine(1)
    here = sums(
        prefill_tokens=prompt,
        first_tokens=int(prompt > 0),
        generated_tokens=decodes + int(prompt > 0),
        counted_steps=20,
        running=(1, 1),
    )
    after = sums(
        start_ns=T,
        end_ns=2 * T,
        prefill_tokens=following,
        first_tokens=prompts * int(following > 0),
        generated_tokens=1,
        prompt_steps=steps,
    )
    return EngineWindow(
        reading=told,
        sums=here,
        steps=None,
        work=window_work(SHAPE, here, told, 1000.0),
        shape=SHAPE,
        priced=None,
        decode=None,
        lent=window_work(SHAPE, after, told, 1000.0) if following else None,
        gap_ns=None,
        clues=Clues(window_ns=T, following=after if following else None),
        shares=Shares(window_ns=T, mixed_ns=containing, decode_ns=T - containing),
    )


def useful_of(of: EngineWindow) -> float:
    assert PEAKS is not None
    assert of.work is not None
    seconds = of.work.useful_s(PEAKS)
    assert seconds is not None
    return seconds * 1e9


def paid(on: GpuTrack, of: EngineWindow, tensor: float | None) -> float:
    assert PEAKS is not None
    return pay(on, of, useful_of(of), tensor, float(T), PEAKS, None).useful_ns


def test_what_a_window_had_no_room_for_is_paid_by_the_next() -> None:
    card, big = track(), window(40_000)
    first = paid(card, big, 0.3 * T)
    assert first == pytest.approx(0.3 * T)
    second = paid(card, window(1), 0.9 * T)
    assert first + second == pytest.approx(useful_of(big) + useful_of(window(1)), rel=0.01)


def test_a_window_pays_in_advance_for_a_prompt_that_ends_in_the_next() -> None:
    card = track()
    first = paid(card, window(0, following=20_000), 0.2 * T)
    assert first == pytest.approx(0.2 * T)
    ending = window(20_000)
    assert first + paid(card, ending, 0.9 * T) == pytest.approx(useful_of(ending), rel=0.01)


@pytest.mark.parametrize(
    ("steps", "part"),
    [(None, 0.25), (((5_000.0, 4.0),), 0.25), (((10_000.0, 2.0),), 0.5), (((20_000.0, 1.0),), 1.0)],
)
def test_an_edge_cuts_one_step_whatever_prompts_are_in_it(
    steps: tuple[tuple[float, float], ...] | None, part: float
) -> None:
    here = window(1_000, following=20_000, prompts=4, steps=steps)
    ahead = paid(track(), here, 0.9 * T) - useful_of(here)
    assert ahead == pytest.approx(part * useful_of(window(20_000)), rel=0.02)


def test_what_is_owed_is_not_paid_by_a_window_of_decodes() -> None:
    card = track()
    paid(card, window(40_000), 0.1 * T)
    quiet = window(0, decodes=500, containing=0)
    assert paid(card, quiet, 0.5 * T) == pytest.approx(useful_of(quiet))
    assert card.useful_debt_ns > 0


def test_the_rows_that_fill_up_tiles_are_not_taken_for_prompts() -> None:
    card = track()
    card.decode_pipe_ratio = 0.2
    card.useful_debt_ns = 0.5 * T
    half = window(1, decodes=500, containing=T // 2)
    assert paid(card, half, 0.2 * T) == pytest.approx(0.1 * T + useful_of(half), rel=0.1)


def test_without_a_counter_no_window_does_the_work_of_many() -> None:
    card = track()
    for _ in range(5):
        paid(card, window(10_000), None)
    usual = useful_of(window(10_000))
    assert paid(card, window(40_000), None) <= 1.3 * usual
    assert card.useful_debt_ns > 2 * usual


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 50_000), st.floats(0.0, 1.0)), min_size=1, max_size=12))
def test_nothing_is_paid_twice(windows: list[tuple[int, float]]) -> None:
    card, total, booked = track(), 0.0, 0.0
    for prompt, room in windows:
        each = window(prompt, 10)
        booked += useful_of(each)
        found = paid(card, each, room * T)
        assert found >= 0
        total += found
    # Debts are dropped only beyond the most that is kept.
    assert total <= booked + 1
    assert total >= booked - card.useful_debt_ns - 1 or card.useful_debt_ns == 4e9


def test_exact_steps_owe_what_the_counters_noise_left() -> None:
    card = track()
    assert pay_exact(card, 110.0, 100.0) == 100.0
    assert pay_exact(card, 90.0, 100.0) == 100.0
    assert card.useful_debt_ns == 0.0


def test_a_counter_is_dead_only_if_it_saw_little_of_a_minutes_work() -> None:
    card = track()
    assert counter_is_dead(card, 0.5 * T, 0.0)
    row = Settled(
        end_ns=T,
        observed_ns=T,
        active_ns=float(T),
        tensor_cycles_ns=0.4 * T,
        sm_ns=None,
        dram_bytes=None,
        useful_ns=(0.0, 0.0, 0.0),
        bound_ns=None,
    )
    card.trailing.extend([row, row])
    assert not counter_is_dead(card, 0.9 * T, 0.05 * T)
