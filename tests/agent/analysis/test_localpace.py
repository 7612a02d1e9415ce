from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.agent.analysis.test_phase import sums

from gpuidle.agent.analysis.localpace import Here, LocalPace, Near, near, quiet
from gpuidle.agent.analysis.pace import Told

TENTH = 10**8
KNOWN = Told(step_ns=10e6, spread=0.05, token_ns=None)


def window(index: int, pace_ms: float, rows: float = 8.0, told_ms: float | None = 10.0) -> Near:
    """Return a tenth of a second that was full of steps of so many ms."""
    steps = round(100 / pace_ms)
    return Near((index + 1) * TENTH, steps, steps * pace_ms * 1e6, rows, told_ms and told_ms * 1e6)


def learned(paces: list[float], **values: Any) -> LocalPace:
    local = LocalPace()
    for i, pace in enumerate(paces):
        local.learn(window(i, pace, **values))
    return local


def test_a_pace_that_strays_for_seconds_is_followed() -> None:
    slow = [20.0] * 15 + [5.0] * 15
    local = learned(slow * 4)
    here = local.told(KNOWN, 8.0, 121 * TENTH)
    assert here.step_ns is not None
    assert 5e6 <= here.step_ns < 6.5e6  # shrunk towards what is known, by how alike near windows were
    assert local.told(KNOWN, 8.0, 300 * TENTH).step_ns == 10e6  # those were long before


def test_a_steady_pace_is_left_as_it_is_known() -> None:
    noise = np.random.default_rng(7).normal(0, 0.1, 300)
    local = learned([10 * math.exp(value) for value in noise])
    here = local.told(KNOWN, 8.0, 301 * TENTH)
    assert here.step_ns == pytest.approx(10e6, rel=0.03)
    assert here.spread <= KNOWN.spread
    assert here.token_steps is None


def test_before_anything_is_known_the_windows_to_come_tell_the_pace() -> None:
    ahead = [window(i, 4.0, told_ms=None) for i in range(1, 8)]
    nothing = Told(step_ns=None, spread=0.0, token_ns=None)
    here = LocalPace().told(nothing, 8.0, TENTH, ahead=ahead)
    assert here.step_ns == pytest.approx(4e6)
    assert 0 < here.spread < 0.1
    assert LocalPace().told(nothing, 8.0, TENTH).step_ns is None


def test_other_batches_are_asked_only_where_there_is_none_alike() -> None:
    nothing = Told(step_ns=None, spread=0.0, token_ns=None)
    other, alike = window(1, 25.0, rows=64.0), window(2, 5.0, rows=8.0)
    alone = LocalPace().told(nothing, 8.0, TENTH, ahead=[other])
    both = LocalPace().told(nothing, 8.0, TENTH, ahead=[other, alike])
    assert alone.step_ns == pytest.approx(25e6)
    assert alone.spread > 0.9
    assert both.step_ns == pytest.approx(5e6)


def test_the_time_of_prompt_tokens_is_learned_in_steps_whatever_the_pace() -> None:
    local = LocalPace()
    for i in range(40):
        pace = 10.0 * (2.0 if i % 20 < 10 else 0.5)
        local.learn(window(i, pace))
        # Four steps and 200 prompt tokens of a hundredth of a step each: as long as six.
        span_ns = round(6 * pace * 1e6)
        prompts = sums(end_ns=span_ns, counted_steps=4, prefill_tokens=200, first_tokens=1, running=(8, 8))
        local.learn_prompts(prompts, Here(pace * 1e6, 0.05, None))
    here = local.told(KNOWN, 8.0, 41 * TENTH)
    assert here.token_steps == pytest.approx(0.01)


def test_quiet_windows_have_no_prompt_and_none_begins_in_them() -> None:
    decodes = sums(counted_steps=5, generated_tokens=40, running=(8, 8))
    prompts = sums(counted_steps=5, generated_tokens=40, first_tokens=1, prefill_tokens=9, running=(8, 8))
    assert quiet(decodes, decodes)
    assert not quiet(decodes, prompts)
    assert not quiet(prompts, decodes)
    assert not quiet(decodes, None)
    assert not quiet(sums(counted_steps=5, generated_tokens=40, running=(0, 8)), decodes)
    assert near(decodes, None).rows == 8.0
