"""Phases from counters alone, at 1 kHz, 100 Hz and 10 Hz, against the simulator's steps.

Thresholds were fixed on parts of the traces that begin at multiples of 150 s from 300 s to 3000 s (and at
loads of 1.4 and 1.7 as well). Those of the report were scored only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from benchmarks.nodes import steady_node, trace_node
from msgspec.structs import replace
from numpy.typing import NDArray

from gpuidle.agent.analysis.classmeans import class_means
from gpuidle.agent.analysis.fastphase import AHEAD_NS, BEFORE_NS, Levels
from gpuidle.agent.model import RATIO_STEP, CounterSeries, StepSeries
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import Scenario

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOISE = 0.05
WARM_UP_NS = 5_000_000_000
LEAST_NS = 1e9
"""A class that fills less than this of a run has no mean there."""
LEAST_RECALL_S = (1.0, 0.3)
"""What a class must fill of a run to have a recall there, in seconds."""
RATES_HZ = (1000.0, 100.0, 10.0)
TRUTH_HZ = 10_000.0
"""Rate of the noiseless counters that the means of classes are held against."""


class Run(NamedTuple):
    """One simulated GPU: its steps, and its counters as one row a sample."""

    start: Ints
    end: Ints
    contains: NDArray[np.bool_]
    sample_end: Ints
    width: Ints
    tensor: Floats
    dram: Floats
    """Of the peak."""
    active: Floats
    ticks: tuple[int, ...]
    """Samples of each snapshot."""


class Score(NamedTuple):
    """Busy seconds of one run: samples are of the class that fills most of them."""

    decode: float
    decode_right: float
    """Labelled so: an unknown counts as missed."""
    containing: float
    containing_right: float
    labelled: float


def nodes(seconds: int, start_s: int, *, gaps: bool = True) -> list[Scenario]:
    found = [
        trace_node(trace, load, engine, seconds=seconds, start_s=start_s)
        for engine in ("8B", "70B TP4", "MoE TP2")
        for trace in ("code", "conv")
        for load in (1.0, 2.0)
    ]
    steady = steady_node(
        "8B", per_second=4.0, prompt=(50, 2000), output=(50, 300), seconds=seconds, seed=start_s
    )
    scenarios = [node for node in found if node is not None] or [steady]
    return scenarios if gaps else [_without_gaps(scenario) for scenario in scenarios]


def _without_gaps(scenario: Scenario) -> Scenario:
    """Return the node with a scheduler that runs ahead: no sample shows where a step ends."""
    return replace(scenario, engines=tuple(replace(engine, host_gap_ns=0) for engine in scenario.engines))


def run(scenario: Scenario, hz: float, noise: float = NOISE) -> Run | None:
    """Simulate GPU 0 of the node; None where no step ran."""
    peaks = find_peaks(scenario.gpus[0].name, scenario.gpus[0].memory_total_bytes)
    assert peaks is not None
    visible = Visible(counters=Sampling("cupti_pm", hz, noise=noise), engine_counters=False)
    steps: list[StepSeries] = []
    counters: list[CounterSeries] = []
    for snapshot, _ in simulate(scenario, visible=visible):
        steps += [s for s in snapshot.steps if len(s)]
        counters += [s for s in snapshot.counters if s.hw_id.endswith("000000000000")]
    if not steps:
        return None

    def column(name: str) -> Floats:
        found: Floats = np.concatenate([getattr(s, name) for s in counters]).astype(np.float64)
        return found

    moved = column("dram_read_bytes_per_s") + column("dram_write_bytes_per_s")
    return Run(
        start=np.concatenate([s.start_ns for s in steps]),
        end=np.concatenate([s.end_ns for s in steps]),
        contains=np.concatenate([s.prefill_tokens for s in steps if s.prefill_tokens is not None]) > 0,
        sample_end=np.concatenate([s.end_ns for s in counters]),
        width=np.concatenate([s.width_ns for s in counters]),
        tensor=column("tensor_active") * RATIO_STEP,
        dram=moved / peaks.memory_bytes_per_s,
        active=column("gr_active") * RATIO_STEP,
        ticks=tuple(len(s) for s in counters),
    )


def labels(seen: Run) -> NDArray[np.int8]:
    """Label every sample as windows of one snapshot each settle: with what is known around them by then."""
    levels = Levels()
    begin, found = 0, []
    for count in seen.ticks:
        start_ns = int(seen.sample_end[begin] - seen.width[begin])
        begin += count
        end_ns = int(seen.sample_end[begin - 1])
        near = slice(*np.searchsorted(seen.sample_end, [start_ns - BEFORE_NS + 1, end_ns + AHEAD_NS + 1]))
        end = seen.sample_end[near]
        found.append(
            levels.classify(
                seen.tensor[near],
                seen.dram[near],
                seen.active[near],
                seen.width[near],
                (end > start_ns) & (end <= end_ns),
            )
        )
    return np.concatenate(found)


def score(seen: Run) -> Score | None:
    """Return how much of the run got which label; None: the GPU hardly worked."""
    said = labels(seen)
    knots = np.stack([seen.start, seen.end], axis=1).ravel()
    edges = np.append(seen.sample_end - seen.width, seen.sample_end[-1])

    def inside(which: NDArray[np.bool_]) -> Floats:
        amounts = np.where(which, seen.end - seen.start, 0)
        reached = np.cumsum(np.stack([np.zeros_like(amounts), amounts], axis=1).ravel())
        return np.diff(np.interp(edges, knots, reached))

    decode_ns, containing_ns = inside(~seen.contains), inside(seen.contains)
    busy = (decode_ns + containing_ns) * (seen.sample_end - seen.sample_end[0] > WARM_UP_NS)
    containing = containing_ns > decode_ns
    if busy.sum() < LEAST_NS:
        return None

    def seconds(of: NDArray[np.bool_]) -> float:
        return float(busy[of].sum()) / 1e9

    return Score(
        decode=seconds(~containing),
        decode_right=seconds(~containing & (said == -1)),
        containing=seconds(containing),
        containing_right=seconds(containing & (said == 1)),
        labelled=seconds(said != 0),
    )


def mean_errors(seen: Run, real: Run) -> list[tuple[float, float]]:
    """Return the relative and the absolute error of each class mean, with known boundaries.

    `real` is the same run with noiseless counters much faster than its steps.
    """
    edges = np.append(real.sample_end[0] - real.width[0], real.sample_end)
    found = []
    for name in ("tensor", "dram"):
        reached = np.append(0.0, np.cumsum(getattr(real, name) * real.width))
        of_step = np.interp(real.end, edges, reached) - np.interp(real.start, edges, reached)
        means = class_means(
            seen.start,
            seen.end,
            seen.contains,
            seen.sample_end,
            seen.width,
            seen.active,
            getattr(seen, name),
        )
        for which, mean in zip((~seen.contains, seen.contains), means, strict=True):
            whole = float((real.end - real.start)[which].sum())
            if whole >= LEAST_NS:
                truth = float(of_step[which].sum()) / whole
                told = np.nan if mean is None else mean.mean
                found.append((abs(told / truth - 1), abs(told - truth)))
    return found


def _print_labels(title: str, scores: list[Score]) -> None:
    decode, decode_right, containing, containing_right, labelled = np.array(scores).T
    print(f"{title}, {len(scores)} runs:")
    for name, truth, right in (
        ("decode", decode, decode_right),
        ("prefill-containing", containing, containing_right),
    ):
        pooled = right.sum() / truth.sum()
        text = f"  {name}: recall {pooled:.4f} of {truth.sum():.0f} s"
        for least in LEAST_RECALL_S:
            runs = np.flatnonzero(truth >= least)
            if not len(runs):
                continue
            worst = runs[np.argmin(right[runs] / truth[runs])]
            text += (
                f"; of {len(runs)} runs with {least:g} s median {np.median(right[runs] / truth[runs]):.3f},"
                f" worst {right[worst] / truth[worst]:.3f} of {truth[worst]:.1f} s"
            )
        print(text)
    coverage = labelled / (decode + containing)
    wrong = 1 - (decode_right + containing_right) / np.maximum(1e-9, labelled)
    print(
        f"  coverage median {np.median(coverage):.3f}, worst {coverage.min():.3f};"
        f" wrong labels median {np.median(wrong):.4f}, worst {wrong.max():.4f}"
    )


def _over_bar(error: tuple[float, float]) -> float:
    """Return an error in units of the bar, which asks for 10 % or 0.005; a missing mean is the worst."""
    return float(np.nan_to_num(min(error[0] / 0.10, error[1] / 0.005), nan=np.inf))


def report(seconds: int = 35, starts_s: tuple[int, ...] = (80, 380, 1730, 2480, 3240)) -> None:
    scores: dict[float, list[Score]] = {hz: [] for hz in RATES_HZ}
    errors: dict[float, list[tuple[float, float]]] = {hz: [] for hz in RATES_HZ}
    for start_s in starts_s:
        for node in nodes(seconds, start_s):
            real = run(node, TRUTH_HZ, noise=0.0)
            for hz in RATES_HZ:
                seen = run(node, hz)
                if seen is None or real is None:
                    continue
                one = score(seen)
                scores[hz] += [] if one is None else [one]
                errors[hz] += mean_errors(seen, real)
    for hz in RATES_HZ:
        _print_labels(f"counters alone {hz:g} Hz", scores[hz])
        worst = max(errors[hz], key=_over_bar)
        met = sum(_over_bar(error) <= 1 for error in errors[hz])
        print(
            f"  class means with known boundaries: {met} of {len(errors[hz])} within 10 % or 0.005;"
            f" worst {worst[0]:.3f} relative, {worst[1]:.4f} absolute"
        )
    for hz in RATES_HZ:
        found = [run(node, hz) for node in nodes(seconds, starts_s[0], gaps=False)]
        marks = [score(each) for each in found if each is not None]
        _print_labels(f"  no gaps between steps, {hz:g} Hz", [mark for mark in marks if mark is not None])


if __name__ == "__main__":
    report()
