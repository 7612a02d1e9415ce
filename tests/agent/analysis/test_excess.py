"""Memory-bound time of steps that differ, from sums."""

from __future__ import annotations

from random import Random

import pytest

from gpuidle.agent.analysis.excess import unused_ratio


def exact(steps: list[tuple[float, float]]) -> float:
    """Return the same of (DRAM, pipe) of each step."""
    return sum(max(0.0, memory - pipe) for memory, pipe in steps) / sum(memory for memory, _ in steps)


def test_steps_of_one_size_are_as_their_mean() -> None:
    for intensity in (0.0, 0.4, 1.0, 3.0):
        assert unused_ratio(((500.0, 12.0),), 20.0, intensity) == pytest.approx(max(0.0, 1 - intensity))


def test_without_sizes_the_mean_is_all_there_is() -> None:
    assert unused_ratio((), 8.0, 0.7) == pytest.approx(0.3)
    assert unused_ratio(((0.0, 3.0),), 0.0, 0.7) == pytest.approx(0.3)


def test_small_prompts_leave_the_pipe_unused_beside_large_ones() -> None:
    draw = Random("sizes")
    for _ in range(50):
        rows = draw.uniform(0, 60)
        sizes = tuple((draw.uniform(20, 4000), float(draw.randint(1, 9))) for _ in range(draw.randint(1, 6)))
        per_row = draw.uniform(0.0002, 0.005)
        steps = [(1.0, per_row * (tokens + rows)) for tokens, count in sizes for _ in range(int(count))]
        intensity = sum(pipe for _, pipe in steps) / len(steps)
        found = unused_ratio(sizes, rows, intensity)
        assert found == pytest.approx(exact(steps))
        assert found >= max(0.0, 1 - intensity) - 1e-12
