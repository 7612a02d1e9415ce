from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuidle.agent.analysis.integers import clip_to, split

WEIGHTS = st.lists(st.floats(0, 1e12), min_size=1, max_size=20)


@given(st.integers(0, 10**18), WEIGHTS)
def test_parts_sum_exactly_and_none_is_negative(total: int, weights: list[float]) -> None:
    parts = split(total, weights)
    assert sum(parts) == total
    assert min(parts) >= 0


def test_a_split_is_proportional() -> None:
    assert split(10, [1, 1, 2]) == [3, 2, 5] or split(10, [1, 1, 2]) == [2, 3, 5]
    assert split(7, [0.0, 0.0]) == [0, 7]


@given(st.integers(0, 10**12), st.dictionaries(st.sampled_from("abc"), st.floats(-1e13, 1e13)))
def test_clipping_keeps_the_total(total: int, wanted: dict[str, float]) -> None:
    parts = clip_to(total, wanted, "rest")
    assert sum(parts.values()) == total
    assert min(parts.values()) >= 0


def test_earlier_terms_come_first() -> None:
    assert clip_to(10, {"a": 7, "b": 7}, "rest") == {"a": 7, "b": 3, "rest": 0}
