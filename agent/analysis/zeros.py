"""Runs of samples in which the tensor counter stands at exactly 0."""

from __future__ import annotations

import msgspec
import numpy as np

from gpuidle.agent.model import CounterSeries, Rung


class ZeroRun(msgspec.Struct):
    """Samples of one rung, one after the other, all 0; times in ns of CLOCK_MONOTONIC."""

    rung: Rung
    start_ns: int
    end_ns: int
    lived: bool
    """Whether the counter had shown something before."""
    over: bool = False
    """Whether it has shown something since."""
    dead: bool = False
    """Whether it was found to be dead."""


class Zeros:
    """The runs of one device's tensor counter that may still matter."""

    def __init__(self) -> None:
        self.runs: list[ZeroRun] = []
        self._lived: set[Rung] = set()

    def add(self, series: CounterSeries) -> None:
        """Take the next samples."""
        told = series.tensor_active
        if told is None:
            return
        run = next((each for each in self.runs if each.rung == series.rung and not each.over), None)
        if run is None and told[-1]:
            self._lived.add(series.rung)
            return
        alive = np.flatnonzero(told)
        end_ns = int(series.end_ns[-1])
        if not len(alive):
            if run is None:
                start_ns = int(series.end_ns[0] - series.width_ns[0])
                self.runs.append(ZeroRun(series.rung, start_ns, end_ns, series.rung in self._lived))
            else:
                run.end_ns = end_ns
            return
        if run is not None:
            run.end_ns, run.over = max(run.end_ns, int((series.end_ns - series.width_ns)[alive[0]])), True
        self._lived.add(series.rung)
        if alive[-1] + 1 < len(told):
            self.runs.append(ZeroRun(series.rung, int(series.end_ns[alive[-1]]), end_ns, lived=True))

    def prune(self, until_ns: int) -> None:
        """Let go of the runs that ended before `until_ns`."""
        if self.runs and any(run.over and run.end_ns <= until_ns for run in self.runs):
            self.runs = [run for run in self.runs if not run.over or run.end_ns > until_ns]
