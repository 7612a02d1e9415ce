"""Phases from counters alone, at 1 kHz, 100 Hz and 10 Hz, against the simulator's steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from benchmarks.nodes import steady_node, trace_node
from numpy.typing import NDArray

from gpuidle.agent.analysis.fastphase import Levels
from gpuidle.agent.model import RATIO_STEP, CounterSeries, StepSeries
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import Scenario

NOISE = 0.05


class Score(NamedTuple):
    """Shares of busy time of one run."""

    decode_recall: float
    containing_recall: float
    coverage: float
    wrong: float
    tensor_error: tuple[float, float]
    """Relative and absolute error of the class means, decode and prefill-containing, the worse."""


def nodes(seconds: int, seed: int) -> list[Scenario]:
    found = [
        trace_node(trace, load, engine, seconds=seconds, start_s=300 * seed)
        for engine in ("8B", "70B TP4", "MoE TP2")
        for trace in ("code", "conv")
        for load in (1.0, 2.0)
    ]
    steady = steady_node(
        "8B", per_second=4.0, prompt=(50, 2000), output=(50, 300), seconds=seconds, seed=seed
    )
    return [node for node in found if node is not None] or [steady]


def score(scenario: Scenario, hz: float, *, warm_up: int = 5) -> Score:
    """Label every sample of GPU 0; samples count by their busy time, right if most of it is of that class."""
    peaks = find_peaks(scenario.gpus[0].name, scenario.gpus[0].memory_total_bytes)
    assert peaks is not None
    levels = Levels()
    truth: list[NDArray[np.float64]] = []
    label: list[NDArray[np.int8]] = []
    visible = Visible(counters=Sampling("cupti_pm", hz, noise=NOISE), engine_counters=False)
    steps: list[StepSeries] = []
    counters: list[CounterSeries] = []
    for snapshot, _ in simulate(scenario, visible=visible):
        steps += [s for s in snapshot.steps if len(s)]
        counters += [s for s in snapshot.counters if s.hw_id.endswith("000000000000")]
    start = np.concatenate([s.start_ns for s in steps])
    end = np.concatenate([s.end_ns for s in steps])
    contains = np.concatenate([s.prefill_tokens for s in steps if s.prefill_tokens is not None]) > 0
    knots = np.stack([start, end], axis=1).ravel()
    values = []
    for s in counters[1:]:
        assert s.tensor_active is not None
        assert s.gr_active is not None
        assert s.dram_read_bytes_per_s is not None
        assert s.dram_write_bytes_per_s is not None
        tensor = s.tensor_active.astype(np.float64) * RATIO_STEP
        active = s.gr_active.astype(np.float64) * RATIO_STEP
        dram = (s.dram_read_bytes_per_s + s.dram_write_bytes_per_s) / peaks.memory_bytes_per_s
        label.append(levels.classify(tensor, dram, active, s.width_ns))
        edges = np.append(s.end_ns - s.width_ns, s.end_ns[-1])
        parts = []
        for which in (contains, ~contains):
            amounts = np.stack([np.zeros(len(end)), np.where(which, end - start, 0)], axis=1).ravel()
            parts.append(np.diff(np.interp(edges, knots, np.cumsum(amounts))))
        truth.append(np.stack(parts))
        values.append(np.stack([tensor, dram]) * s.width_ns)
    skip = warm_up
    real = np.concatenate(truth[skip:], axis=1)
    said = np.concatenate(label[skip:])
    seen = np.concatenate(values[skip:], axis=1)
    busy = real.sum(axis=0)
    containing = real[0] > real[1]
    known = said != 0
    right = (said == 1) == containing

    def share(of: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
        whole = float(busy[among].sum())
        return float(busy[of & among].sum()) / whole if whole else 1.0

    # With known boundaries: least squares of the samples on the time of each class in them.
    errors = [_class_error(real, seen, which, row) for which in (0, 1) for row in (0, 1)]
    return Score(
        share(right, known & ~containing),
        share(right, known & containing),
        share(known, busy > 0),
        1 - share(right, known),
        max(errors, key=lambda e: min(e[0] / 0.10, e[1] / 0.005)),
    )


def _class_error(real: NDArray[Any], seen: NDArray[Any], which: int, row: int) -> tuple[float, float]:
    """Compare the class mean by regression with the one of the samples that hold that class alone."""
    if real[which].sum() < 1e8:
        return 0.0, 0.0
    solved = np.linalg.lstsq(real.T, seen[row], rcond=None)[0]
    alone = (real[which] > 0) & (real[1 - which] == 0)
    if real[which][alone].sum() < 1e8:
        return 0.0, 0.0
    mean = float(seen[row][alone].sum() / real[which][alone].sum())
    return abs(float(solved[which]) / mean - 1), abs(float(solved[which]) - mean)


def report(seconds: int = 40, seeds: tuple[int, ...] = (2, 4)) -> None:
    for hz in (1000.0, 100.0, 10.0):
        scores = [score(node, hz) for seed in seeds for node in nodes(seconds, seed)]
        worst = [
            min(s.decode_recall for s in scores),
            min(s.containing_recall for s in scores),
            min(s.coverage for s in scores),
            max(s.wrong for s in scores),
        ]
        middle = [float(np.median([s[i] for s in scores])) for i in range(4)]
        names = ("decode recall", "prefill-containing recall", "coverage", "wrong labels")
        text = ", ".join(f"{n} {m:.3f} ({w:.3f})" for n, m, w in zip(names, middle, worst, strict=True))
        means = max((s.tensor_error for s in scores), key=lambda e: min(e[0] / 0.10, e[1] / 0.005))
        print(f"counters alone {hz:g} Hz: {text}; median of {len(scores)} runs, worst in brackets")
        print(f"  class means with known boundaries, worst: {means[0]:.3f} relative, {means[1]:.4f} absolute")


if __name__ == "__main__":
    report()
