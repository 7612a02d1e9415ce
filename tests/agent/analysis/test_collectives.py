from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuidle.agent.analysis.collectives import collectives_ns, line_ns


def test_messages_take_what_was_measured() -> None:
    assert collectives_ns(1.0, 2.0**15, 4) == pytest.approx(11_200)
    assert collectives_ns(160.0, 160 * 2.0**24, 4) == pytest.approx(160 * 99_000)
    # Beyond the largest its rate holds: 512 MiB over four GPUs at 233 GB/s.
    assert collectives_ns(1.0, 2.0**30, 4) == pytest.approx(2 * 2_300_000)


def test_a_single_gpu_talks_to_nobody() -> None:
    assert collectives_ns(100.0, 1e9, 1) == 0.0
    assert not np.any(collectives_ns(np.ones(3), np.ones(3), 1))


def test_a_group_that_was_not_measured_takes_no_less_than_the_next_smaller_one() -> None:
    assert collectives_ns(1.0, 1e6, 6) == collectives_ns(1.0, 1e6, 4)


def test_columns_are_as_their_rows() -> None:
    messages, payload = np.array([0.0, 1.0, 80.0]), np.array([0.0, 1e5, 4e8])
    rows = [collectives_ns(float(m), float(p), 2) for m, p in zip(messages, payload, strict=True)]
    assert np.asarray(collectives_ns(messages, payload, 2)).tolist() == pytest.approx(rows)


@given(st.floats(1.0, 1e10), st.floats(1.0, 4.0), st.sampled_from([2, 4, 8]))
def test_a_larger_message_takes_longer(size: float, times: float, ranks: int) -> None:
    assert collectives_ns(1.0, size, ranks) <= collectives_ns(1.0, size * times, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_line_meets_the_table_at_its_ends_and_is_straight_between_them(ranks: int) -> None:
    small, large = 2.0**15, 2.0**29
    ends = [float(line_ns(1.0, size, ranks)) for size in (small, large)]
    assert ends == pytest.approx([collectives_ns(1.0, size, ranks) for size in (small, large)])
    assert line_ns(1.0, (small + large) / 2, ranks) == pytest.approx(sum(ends) / 2)


def test_no_line_without_a_group() -> None:
    assert line_ns(100.0, 1e9, 1) == 0.0
