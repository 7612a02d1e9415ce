from __future__ import annotations

import numpy as np
import pytest

from gpuidle.agent.physics.fit import ReachableFit


def steps(
    rng: np.random.Generator, count: int, *, compute: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps of a device that reaches 70 % of its bandwidth and 60 % of its peak, 300 us overhead a step."""
    large, small = rng.uniform(5e-3, 40e-3, count), rng.uniform(1e-4, 1e-3, count)
    memory, arithmetic = (small, large) if compute else (large, small)
    took = 300e-6 + (large / (0.6 if compute else 0.7))
    return memory, arithmetic, took * rng.normal(1, 0.01, count)


def test_fit_finds_what_made_the_steps_however_they_are_fed() -> None:
    rng = np.random.default_rng(3)
    fit = ReachableFit()
    for _ in range(20):
        fit = fit.observe(*steps(rng, 50, compute=False)).observe(*steps(rng, 20, compute=True))
    found = fit.result()
    assert found.bandwidth_share == pytest.approx(0.7, abs=0.02)
    assert found.peak_share == pytest.approx(0.6, abs=0.02)
    assert found.overhead_s == pytest.approx(300e-6, abs=150e-6)


def test_what_was_not_seen_stays_unknown() -> None:
    assert ReachableFit().result().bandwidth_share is None
    decode_only = ReachableFit().observe(*steps(np.random.default_rng(1), 200, compute=False)).result()
    assert decode_only.peak_share is None
    assert decode_only.bandwidth_share == pytest.approx(0.7, abs=0.03)


def test_steps_of_one_size_do_not_tell_the_overhead() -> None:
    found = ReachableFit().observe(np.full(100, 10e-3), np.full(100, 1e-4), np.full(100, 15e-3)).result()
    assert found.overhead_s is None
    assert found.bandwidth_share == pytest.approx(10 / 15)


def test_steps_near_the_ridge_are_left_out() -> None:
    assert ReachableFit().observe(1e-2, 1e-2, 2e-2).result().steps == 0


def test_old_steps_are_forgotten() -> None:
    rng = np.random.default_rng(5)
    memory, arithmetic, took = steps(rng, 3000, compute=False)
    fit = ReachableFit(memory=200).observe(memory, arithmetic, took).observe(memory, arithmetic, took * 2)
    assert fit.result().bandwidth_share == pytest.approx(0.35, abs=0.02)
