"""The lag between the counters' clock and the engine's: found, followed, removed, or honestly not told."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import islice

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.lag import LagTrack, estimate
from gpuidle.agent.model import CounterSeries, Frame, StepSeries, column
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import LLAMA_3_8B, EngineSpec, GpuSpec, Poisson, Scenario, Sizes

MS = 1_000_000
SECOND = 10**9
LOAD = Scenario(
    seed=7,
    gpus=(GpuSpec(),),
    engines=(
        EngineSpec(
            name="8b",
            config=LLAMA_3_8B,
            gpus=(0,),
            kv_blocks=24_000,
            max_batched_tokens=8192,
            arrivals=(Poisson(per_second=4.0, mix=(Sizes(prompt=(50, 2000), output=(50, 300)),)),),
        ),
    ),
)
PM = Visible(counters=Sampling("cupti_pm", 1000.0, noise=0.05))
SECONDS = 24


@lru_cache(maxsize=1)
def recorded() -> tuple[tuple[StepSeries, ...], tuple[CounterSeries, ...]]:
    """Steps and 1 kHz counters of a load that comes by chance."""
    steps, counters = [], []
    for snapshot, _ in islice(simulate(LOAD, visible=PM), SECONDS):
        steps += [each for each in snapshot.steps if len(each)]
        counters += list(snapshot.counters)
    return tuple(steps), tuple(counters)


def moved(counters: tuple[CounterSeries, ...], lag_ns: float, drift: float = 0.0) -> list[CounterSeries]:
    """Stamp the counters by a clock that is ahead by `lag_ns` and runs fast by `drift`."""
    begin = int(counters[0].end_ns[0])

    def stamped(each: CounterSeries) -> CounterSeries:
        end = each.end_ns + np.rint(lag_ns + drift * (each.end_ns - begin)).astype(np.int64)
        start = each.end_ns - each.width_ns
        width = end - start - np.rint(lag_ns + drift * (start - begin)).astype(np.int64)
        return replace(each, end_ns=column(end, "i8"), width_ns=column(width, "i8"))

    return [stamped(each) for each in counters]


@pytest.mark.parametrize("lag_ms", [-20.0, -12.6, -0.4, 0.0, 3.3, 7.5, 20.0])
def test_a_lag_is_found_to_a_part_of_a_sample(lag_ms: float) -> None:
    steps, counters = recorded()
    begin = int(counters[0].end_ns[0])
    for second in (4, 11):
        told = estimate(
            steps, moved(counters, lag_ms * MS), begin + second * SECOND, begin + SECONDS * SECOND
        )
        assert told is not None
        assert told.lag_ns == pytest.approx(lag_ms * MS, abs=0.15 * MS)
        assert abs(told.lag_ns - lag_ms * MS) <= told.error_ns <= MS


def test_steps_without_tokens_still_tell_by_their_gaps() -> None:
    steps, counters = recorded()
    bare = [replace(each, prefill_tokens=None, decode_tokens=None) for each in steps]
    begin = int(counters[0].end_ns[0])
    told = estimate(bare, moved(counters, 7.3 * MS), begin + 4 * SECOND, begin + SECONDS * SECOND)
    assert told is not None
    assert told.lag_ns == pytest.approx(7.3 * MS, abs=0.15 * MS)


def periodic(
    period_ns: int = 15 * MS, gap_ns: int = 2 * MS, seconds: int = 8
) -> tuple[list[StepSeries], list[CounterSeries]]:
    """Decode steps that repeat exactly, and what the counters show of them."""
    end = period_ns * np.arange(1, seconds * SECOND // period_ns)
    full = [column(np.full(len(end), value), "i8") for value in (0, 8, 8, 8, 8000)]
    steps = StepSeries(
        "e", "plugin", True, 0, column(end - period_ns + gap_ns, "i8"), column(end, "i8"), *full
    )
    samples = MS * np.arange(1, seconds * 1000)
    knots = np.stack([steps.start_ns, steps.end_ns], axis=1).ravel()
    sums = np.cumsum(np.stack([np.zeros(len(end)), end - steps.start_ns], axis=1).ravel())
    active = np.diff(np.interp(np.append(0, samples), knots, sums)) / MS
    noise = np.random.default_rng(0).normal(1.0, 0.02, len(active))
    series = CounterSeries(
        hw_id="GPU-0",
        rung="cupti_pm",
        end_ns=column(samples, "i8"),
        width_ns=column(np.full(len(samples), MS), "i8"),
        gr_active=column(np.rint(active / 2e-5), "u2"),
        tensor_active=column(np.rint(0.2 * active * noise / 2e-5), "u2"),
    )
    return [steps], [series]


@pytest.mark.parametrize("lag_ms", [0.0, 4.0])
def test_steps_that_repeat_exactly_tell_no_lag(lag_ms: float) -> None:
    steps, counters = periodic()
    assert estimate(steps, moved(tuple(counters), lag_ms * MS), SECOND, 7 * SECOND) is None


def test_counters_of_something_else_tell_no_lag() -> None:
    steps, counters = recorded()
    rng = np.random.default_rng(1)

    def shuffled(each: CounterSeries) -> CounterSeries:
        assert each.gr_active is not None
        assert each.tensor_active is not None
        order = rng.permutation(len(each))
        return replace(
            each, gr_active=column(each.gr_active[order], "u2"),
            tensor_active=column(each.tensor_active[order], "u2"),
        )  # fmt: skip

    begin = int(counters[0].end_ns[0])
    other = [shuffled(each) for each in counters]
    assert estimate(steps, other, begin + 4 * SECOND, begin + SECONDS * SECOND) is None


def test_slow_samples_and_too_few_of_them_tell_no_lag() -> None:
    steps, counters = recorded()
    begin = int(counters[0].end_ns[0])
    assert estimate(steps, counters, begin + 5 * SECOND, begin + 6 * SECOND) is not None
    assert estimate(steps, counters, begin + 5 * SECOND, begin + 5 * SECOND + SECOND // 5) is None
    # Half of the samples are missing.
    assert estimate(steps, counters[5:6], begin + 5 * SECOND, begin + 7 * SECOND) is None
    wide = [replace(each, width_ns=column(each.width_ns * 100, "i8")) for each in counters]
    assert estimate(steps, wide, begin, begin + SECONDS * SECOND) is None


def test_a_drift_is_followed_between_the_estimates() -> None:
    steps, counters = recorded()
    drift = 100e-6  # six milliseconds a minute
    seen = moved(counters, -9.0 * MS, drift)
    track = LagTrack()
    begin = int(counters[0].end_ns[0])
    told = {}
    for second in range(1, SECONDS - 4):
        track.learn(steps, seen, begin + second * SECOND)
        told[second] = track.at(begin + second * SECOND)
    assert told[1] is None  # one estimate alone is not believed
    assert track.clear
    for second, lag in told.items():
        if second > 8:
            assert lag is not None
            # The first estimates hold until a line can be drawn: 100 ppm are 0.1 ms a second.
            real = -9.0 * MS + drift * second * SECOND
            assert lag[0] == pytest.approx(real, abs=0.8 * MS)


def test_a_clock_that_was_set_is_believed_once_it_says_so_twice() -> None:
    steps, counters = recorded()
    begin = int(counters[0].end_ns[0])
    track = LagTrack()
    for second in (1, 4):
        track._due_ns = 0
        track.learn(steps, moved(counters, 5 * MS), begin + second * SECOND)
    assert track.clear
    for second, clear in ((7, False), (10, True)):
        track._due_ns = 0
        track.learn(steps, moved(counters, -15 * MS), begin + second * SECOND)
        assert track.clear == clear
    lag = track.at(begin + 10 * SECOND)
    assert lag is not None
    assert lag[0] == pytest.approx(-15 * MS, abs=0.2 * MS)


# --------------------------------------------------------------------------------------------------------
# Through the analyzer


def run(lag_ms: float, *, remove: bool = True) -> Frame:
    analyzer = Analyzer()
    for snapshot, _ in islice(simulate(LOAD, visible=PM), SECONDS):
        late = tuple(moved((each,), lag_ms * MS)[0] for each in snapshot.counters)
        frame = analyzer.feed(msgspec.structs.replace(snapshot, counters=late))
        if not remove:
            for gpu in analyzer._gpus.values():
                gpu.lag = LagTrack()
    return frame


def class_levels(lag_ms: float, corrected_ms: float) -> NDArray[np.float64]:
    """Return tensor activity in decode steps and in those with a prompt, counters moved and moved back."""
    steps, counters = recorded()
    seen = moved(counters, lag_ms * MS)
    end = np.concatenate([each.end_ns for each in seen])
    tensor = np.concatenate([each.tensor_active for each in seen if each.tensor_active is not None]) * 2e-5
    knots = np.append(end[0] - MS, end)
    sums = np.append(0.0, np.cumsum(tensor * MS))
    start = np.concatenate([each.start_ns for each in steps])[50:-50]
    stop = np.concatenate([each.end_ns for each in steps])[50:-50]
    prompt = np.concatenate([each.prefill_tokens for each in steps if each.prefill_tokens is not None])[
        50:-50
    ]
    moved_edges = np.stack([start, stop]) + corrected_ms * MS
    busy = np.diff(np.interp(moved_edges, knots, sums), axis=0)[0]
    return np.array([busy[which].sum() / (stop - start)[which].sum() for which in (prompt == 0, prompt > 0)])


def test_the_means_of_the_classes_are_right_again_once_the_lag_is_removed() -> None:
    steps, counters = recorded()
    begin = int(counters[0].end_ns[0])
    right = class_levels(0.0, 0.0)
    blurred = class_levels(20.0, 0.0)
    told = estimate(steps, moved(counters, 20.0 * MS), begin + 4 * SECOND, begin + SECONDS * SECOND)
    assert told is not None
    mended = class_levels(20.0, told.lag_ns / MS)
    assert np.abs(mended / right - 1).max() < 0.01
    assert np.abs(blurred / right - 1).max() > 0.2


def test_the_ledger_with_a_lag_is_that_without_one() -> None:
    def bound(frame: Frame) -> float:
        gpu = frame.gpus[0]
        assert gpu.counter_lag_s is not None
        assert sum(gpu.causes_total_ns.values()) == gpu.window_ns * (SECONDS - 3)
        return gpu.causes_total_ns["memory_bound"] / sum(gpu.causes_total_ns.values())

    right = bound(run(0.0))
    assert abs(bound(run(20.0)) - right) < 0.3 * abs(bound(run(20.0, remove=False)) - right)


def test_the_frame_says_what_was_taken_out_and_what_is_not_known() -> None:
    lag = run(20.0).gpus[0].counter_lag_s
    assert lag is not None
    assert lag.evidence == "estimated"
    assert lag.low <= 0.020 <= lag.high
    assert lag.value == pytest.approx(0.020, abs=2e-4)
    analyzer = Analyzer()
    for snapshot, _ in islice(simulate(LOAD, visible=PM), 5):
        early = analyzer.feed(snapshot).gpus[0].counter_lag_s
    assert early is not None
    assert (early.value, early.evidence) == (0.0, "unknown")
    assert early.low < -0.05 < 0.05 < early.high
    slow = Analyzer()
    for snapshot, _ in islice(simulate(LOAD, visible=Visible()), 8):
        frame = slow.feed(snapshot)
    assert frame.gpus[0].counter_lag_s is None
