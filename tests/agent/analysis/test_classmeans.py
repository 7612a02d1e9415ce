from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuidle.agent.analysis.classmeans import ClassMean, class_means

MS = 10**6
Floats = NDArray[np.float64]


class Load:
    """Decode steps of 9 ms at 0.1, and prefills of 20 to 200 ms at 0.5 that read the weights once."""

    def __init__(self, count: int = 400, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.contains = rng.random(count) < 0.2
        length = np.where(self.contains, rng.integers(20, 200, count), 9).astype(np.int64) * MS
        self.end = np.cumsum(length + MS // 4)
        self.start = self.end - length
        self.tensor = np.where(self.contains, 0.5, 0.1)
        self.dram = np.where(self.contains, 5 * MS / length, 0.55)

    def truth(self, rates: Floats) -> tuple[float, float]:
        length = (self.end - self.start).astype(float)
        both = [
            float((rates * length)[which].sum() / length[which].sum())
            for which in (~self.contains, self.contains)
        ]
        return both[0], both[1]

    def sampled(self, rates: Floats, width_ns: int) -> tuple[NDArray[np.int64], Floats]:
        edges = np.arange(0, int(self.end[-1]), width_ns)
        knots = np.stack([self.start, self.end], axis=1).ravel()
        amounts = np.stack([np.zeros(len(rates)), rates * (self.end - self.start)], axis=1).ravel()
        return edges[1:], np.diff(np.interp(edges, knots, np.cumsum(amounts))) / width_ns

    def means(self, rates: Floats, width_ns: int, noise: float) -> tuple[ClassMean | None, ClassMean | None]:
        ends, values = self.sampled(rates, width_ns)
        _, active = self.sampled(np.ones(len(rates)), width_ns)
        values = values * np.random.default_rng(2).normal(1, noise, len(values))
        widths = np.full(len(ends), width_ns)
        return class_means(self.start, self.end, self.contains, ends, widths, active, values)


@pytest.mark.parametrize("width_ms", [1, 10, 100, 250])
def test_means_are_those_of_all_steps_at_any_rate(width_ms: int) -> None:
    load = Load()
    for rates in (load.tensor, load.dram):
        for found, real in zip(load.means(rates, width_ms * MS, 0.02), load.truth(rates), strict=True):
            assert found is not None
            assert abs(found.mean - real) < max(0.03 * real, 4 * found.error)
            assert found.error < 0.10 * real


def test_the_error_covers_the_truth_as_often_as_it_says() -> None:
    inside = []
    for seed in range(40):
        load = Load(120, seed)
        for found, real in zip(load.means(load.tensor, 100 * MS, 0.05), load.truth(load.tensor), strict=True):
            assert found is not None
            inside.append(abs(found.mean - real) <= 2 * found.error)
    assert np.mean(inside) > 0.85


def test_samples_with_work_of_no_known_step_are_left_out() -> None:
    load = Load()
    ends, values = load.sampled(load.tensor, 100 * MS)
    _, active = load.sampled(np.ones(len(load.tensor)), 100 * MS)
    widths = np.full(len(ends), 100 * MS)
    active[::3] = 0.3
    values[::3] = 0.9
    decode, contains = class_means(load.start, load.end, load.contains, ends, widths, active, values)
    assert decode is not None
    assert contains is not None
    assert decode.mean == pytest.approx(0.1, abs=1e-6)
    assert contains.mean == pytest.approx(0.5, abs=1e-6)


def test_a_class_that_hardly_occurs_has_no_mean() -> None:
    load = Load()
    load.contains[:] = False
    load.contains[:2] = True
    decode, contains = load.means(load.tensor, 100 * MS, 0.0)
    assert contains is None
    assert decode is not None
    few = Load(3)
    assert few.means(few.tensor, 100 * MS, 0.0) == (None, None)
