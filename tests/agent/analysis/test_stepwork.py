"""What counters say of each step, where samples and steps do not end together."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.agent.analysis.builders import LLAMA_8B, engine

from gpuidle.agent.analysis.steppricing import Stream, steps_of
from gpuidle.agent.analysis.stepwork import Steps, unheld_ns
from gpuidle.agent.model import RATIO_STEP, CounterSeries, StepSeries, column
from gpuidle.agent.physics.shapes import shape_from_config

Ints = NDArray[np.int64]
MS = 10**6


def steps(start: Ints, end: Ints) -> Steps:
    rows = [column(np.full(len(start), value), "i8") for value in (0, 8, 800, 8)]
    series = StepSeries(
        engine_id="e",
        source="plugin",
        exact=True,
        lost=0,
        start_ns=column(start, "i8"),
        end_ns=column(end, "i8"),
        prefill_tokens=rows[0],
        decode_tokens=rows[1],
        kv_tokens=rows[2],
        sequences=rows[3],
    )
    shape = shape_from_config(json.loads(LLAMA_8B))
    found = steps_of(Stream([series], engine(0.0), shape), 0, int(end[-1]) + 1)
    assert found is not None
    return found


def test_of_several_prompts_in_a_step_the_longer_ones_attend_to_more() -> None:
    shape = shape_from_config(json.loads(LLAMA_8B))
    prompts = (500, 1500, 2500)
    end = np.array([20, 40]) * MS

    def flops(prefill: list[int], sequences: list[int], spread: float) -> NDArray[np.float64]:
        zero = column(np.zeros(2), "i8")
        series = StepSeries(
            engine_id="e",
            source="plugin",
            exact=True,
            lost=0,
            start_ns=column(end - 20 * MS, "i8"),
            end_ns=column(end, "i8"),
            prefill_tokens=column(prefill, "i8"),
            decode_tokens=zero,
            kv_tokens=zero,
            sequences=column(sequences, "i8"),
        )
        found = steps_of(Stream([series], engine(0.0), shape, spread=spread), 0, 40 * MS)
        assert found is not None
        return np.asarray(found.work.total_flops)

    apart = [float(flops([size, size], [1, 1], 0.0)[0]) for size in prompts]
    mean = sum(prompts) / 3
    # Of three that were drawn from so wide a range, as these are.
    spread = sum((size - mean) ** 2 for size in prompts) / 2 / mean**2
    together = flops([sum(prompts), 1500], [3, 1], spread)
    uneven = apart[0] + apart[2] - 2 * apart[1]  # only attention is not linear
    assert uneven > 0
    assert together[0] == pytest.approx(sum(apart), rel=1e-4)
    assert together[1] == pytest.approx(apart[1])
    assert flops([sum(prompts), 1500], [3, 1], 0.0)[0] < sum(apart) - 0.9 * uneven


def counters(active_ns: NDArray[np.float64], width_ns: int) -> CounterSeries:
    """Return samples from 0 on that were active so long each, without a warp on the SMs."""
    count = len(active_ns)
    return CounterSeries(
        hw_id="GPU-0",
        rung="cupti_pm",
        end_ns=column(np.arange(1, count + 1) * width_ns, "i8"),
        width_ns=column(np.full(count, width_ns), "i8"),
        gr_active=column(np.rint(active_ns / width_ns / RATIO_STEP), "u2"),
        sm_active=column(np.zeros(count), "u2"),
    )


def covered(start: Ints, end: Ints, count: int, width_ns: int) -> NDArray[np.float64]:
    """Return how much of each sample the steps take."""
    edges = np.arange(count + 1) * width_ns
    within = np.minimum(end[:, None], edges[None, 1:]) - np.maximum(start[:, None], edges[None, :-1])
    total: NDArray[np.float64] = np.maximum(0, within).sum(axis=0).astype(np.float64)
    return total


@pytest.mark.parametrize("gap_ms", [0.1, 0.5, 0.9, 3.7])
def test_a_step_loses_nothing_to_the_gap_after_it(gap_ms: float) -> None:
    start = 10 * MS + np.arange(40) * round((7.3 + gap_ms) * MS)
    end = start + round(7.3 * MS)
    found = unheld_ns(steps(start, end), [counters(covered(start, end, 500, MS), MS)])
    assert found is not None
    # The first and the last share a sample with what may have been another's.
    assert found[1:-1] == pytest.approx(7.3 * MS, rel=0.001)
    assert found[[0, -1]] == pytest.approx(7.3 * MS, rel=0.07)


def test_clocks_that_differ_are_brought_together_first() -> None:
    start = 10 * MS + np.arange(40) * 8 * MS
    end = start + 7 * MS + 400_000
    late = covered(start + 300_000, end + 300_000, 500, MS)
    found = unheld_ns(steps(start, end), [counters(late, MS)], lag_ns=300_000.0)
    assert found is not None
    assert found[1:-1] == pytest.approx(7.4 * MS, rel=0.001)


def test_work_between_steps_is_not_theirs() -> None:
    start = 10 * MS + np.arange(10) * 28 * MS
    end = start + 8 * MS
    elsewhere = covered(start, end, 400, MS) + covered(start + 12 * MS, start + 22 * MS, 400, MS)
    found = unheld_ns(steps(start, end), [counters(elsewhere, MS)])
    assert found == pytest.approx(8 * MS, rel=0.001)


def test_without_gaps_a_sample_is_shared_by_how_far_each_reaches_into_it() -> None:
    end = np.array([2_500_000, 6_250_000, 9_000_000, 12_000_000])
    start = np.append(0, end[:-1])
    active = np.array([1.0, 1.0, 0.4, 1.0, 1.0, 1.0, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0]) * MS
    found = unheld_ns(steps(start, end), [counters(active, MS)])
    assert found == pytest.approx([2.2 * MS, 3.4 * MS, 2.6 * MS, 3 * MS], rel=1e-4)


def test_what_began_before_the_counters_did_is_not_known() -> None:
    start = np.arange(10) * 8 * MS
    end = start + 7 * MS
    samples = counters(covered(start, end, 100, MS), MS)
    later = CounterSeries(
        hw_id="GPU-0",
        rung="cupti_pm",
        end_ns=column(samples.end_ns[10:], "i8"),
        width_ns=column(samples.width_ns[10:], "i8"),
        gr_active=column(np.asarray(samples.gr_active)[10:], "u2"),
        sm_active=column(np.asarray(samples.sm_active)[10:], "u2"),
    )
    found = unheld_ns(steps(start, end), [later])
    assert found is not None
    assert np.isnan(found[:2]).all()
    assert found[2:-1] == pytest.approx(7 * MS, rel=0.001)


@pytest.mark.parametrize("width_ms", [4, 10])
def test_samples_that_are_not_shorter_than_steps_tell_nothing(width_ms: int) -> None:
    start = np.arange(20) * 8 * MS
    end = start + 7 * MS
    width = width_ms * MS
    assert unheld_ns(steps(start, end), [counters(covered(start, end, 40, width), width)]) is None
