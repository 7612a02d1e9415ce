from __future__ import annotations

import random

import pytest
from tests.agent.analysis.test_phase import decodes, sums

from gpuidle.agent.analysis.pace import Batch, DecodePace
from gpuidle.agent.analysis.rates import Sums

S = 10**9


def batch(rows: float, **known: float) -> Batch:
    return Batch(rows=rows, usage=0.0, **known)


def quiet(pace: DecodePace, steps: int, rows: int) -> None:
    pace.learn(decodes(steps, rows), decodes(steps, rows), 1e9, batch(rows))


def loaded(rng: random.Random, step_s: float, token_s: float, rows: int, free: int) -> Sums:
    prompts = [round(rng.expovariate(1 / 1000)) + 1 for _ in range(rng.randint(1, 6))]
    steps = round((1 - sum(max(0, p - free) * token_s for p in prompts)) / step_s)
    return sums(
        prefill_tokens=sum(prompts),
        first_tokens=len(prompts),
        generated_tokens=rows * steps,
        counted_steps=steps,
        running=(rows, rows),
        prompt_steps=tuple((float(p), 1.0) for p in prompts),
    )


def test_quiet_windows_tell_the_pace_by_batch() -> None:
    pace = DecodePace()
    assert pace.told(batch(4)).step_ns is None
    for _ in range(20):
        quiet(pace, 100, 4)
        quiet(pace, 50, 128)
    assert pace.told(batch(4)).step_ns == pytest.approx(1e7, rel=0.01)
    assert pace.told(batch(128)).step_ns == pytest.approx(2e7, rel=0.01)
    assert 1e7 < (pace.told(batch(64)).step_ns or 0.0) < 2e7


def test_a_batch_that_was_never_seen_is_less_sure() -> None:
    pace, rng = DecodePace(), random.Random(2)
    for _ in range(20):
        quiet(pace, 100 + rng.randint(-8, 8), rng.randint(3, 5))
    assert pace.told(batch(4)).spread < 0.03
    assert pace.told(batch(40)).step_ns is None or pace.told(batch(40)).spread > 0.1


def test_windows_with_prompts_tell_the_pace_and_the_time_of_a_token() -> None:
    pace, rng = DecodePace(), random.Random(5)
    for _ in range(120):
        window = loaded(rng, 9e-3, 36e-6, 12, 250)
        pace.learn(window, window, 1e9, batch(12, bytes_moved=20e9, free_tokens=220.0))
    told = pace.told(batch(12, bytes_moved=20e9, free_tokens=220.0))
    assert told.step_ns == pytest.approx(9e6, rel=0.02)
    assert told.token_ns == pytest.approx(36e3, rel=0.03)
    # Twice the bytes take twice the time.
    assert pace.told(batch(12, bytes_moved=40e9, free_tokens=440.0)).step_ns == pytest.approx(18e6, rel=0.02)


def test_nothing_is_told_of_windows_that_may_hold_uncounted_steps() -> None:
    pace = DecodePace()
    for _ in range(20):
        pace.learn(sums(counted_steps=50, generated_tokens=50, running=(0, 1)), None, None, batch(1))
    assert pace.told(batch(1)).step_ns is None


def test_one_window_with_prompts_is_not_enough() -> None:
    pace = DecodePace()
    window = loaded(random.Random(1), 9e-3, 36e-6, 12, 250)
    pace.learn(window, window, 1e9, batch(12))
    told = pace.told(batch(12))
    assert told.step_ns is None or told.spread > 0.05
