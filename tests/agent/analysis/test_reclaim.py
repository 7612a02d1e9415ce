from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.agent.analysis.builders import H100, LLAMA_8B, engine
from tests.agent.analysis.test_phase import sums

from gpuidle.agent.analysis.reclaim import reclaimable_ns
from gpuidle.agent.model import EngineLimits
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.agent.physics.shapes import shape_from_config

T = 10**9
SHAPE = shape_from_config(json.loads(LLAMA_8B))
PEAKS = find_peaks(H100, 85_520_809_984)


def reclaim(running: int, usage: float, *, stalled: int = T, seats: int | None = None) -> int | None:
    assert PEAKS is not None
    window = sums(
        generated_tokens=60 * running,
        counted_steps=60,
        running=(running, running),
        kv_usage_ratio=(usage, usage),
    )
    limits = EngineLimits(kv_capacity_tokens=400_000, max_sequences=seats)
    return reclaimable_ns({}, SHAPE, PEAKS, engine(1, limits=limits), window, T, float(T), stalled)


def test_a_saturated_cache_leaves_nearly_nothing_to_reclaim() -> None:
    full = reclaim(128, 0.99)
    assert full is not None
    assert full < 0.01 * T


def test_a_small_batch_with_an_empty_cache_can_have_much_back() -> None:
    small = reclaim(4, 0.01)
    assert small is not None
    assert small > 0.05 * T


def test_the_engines_own_limit_of_sequences_is_a_setting_that_can_be_raised() -> None:
    limited = reclaim(16, 0.01, seats=16)
    assert limited == reclaim(16, 0.01)
    assert limited is not None
    assert limited > 0.1 * T


def test_an_unknown_cache_says_nothing() -> None:
    assert reclaim(16, 0.0) is None


@settings(max_examples=25)
@given(st.integers(1, 300), st.floats(0.001, 1.0), st.integers(0, T))
def test_it_is_never_more_than_was_stalled(running: int, usage: float, stalled: int) -> None:
    found = reclaim(running, usage, stalled=stalled)
    assert found is not None
    assert 0 <= found <= stalled


def test_more_room_never_means_less() -> None:
    found = [reclaim(8, usage) or 0 for usage in (0.9, 0.5, 0.2, 0.05)]
    assert found == sorted(found)
    assert found[-1] > found[0] == pytest.approx(found[0])
