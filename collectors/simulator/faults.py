"""What is wrong with what a reader of a simulated node sees: counters that lie, steps that are lost.

The node itself and its truth are as without (restarts are the engine's: see `engine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import CounterSeries, column
from gpuidle.collectors.simulator.batch import Step
from gpuidle.collectors.simulator.options import (
    BadCounter,
    CounterClock,
    Fault,
    LostSteps,
    MissingSamples,
)

_COLUMNS = (
    "gr_active",
    "sm_active",
    "tensor_active",
    "dram_read_bytes_per_s",
    "dram_write_bytes_per_s",
    "sm_clock_hz",
)


class CounterFaults:
    """What becomes of the fast counters of one GPU."""

    def __init__(self, faults: Sequence[Fault], gpu: int, seed: int) -> None:
        self._bad = [f for f in faults if isinstance(f, BadCounter) and f.gpu in (None, gpu)]
        self._missing = [f for f in faults if isinstance(f, MissingSamples) and f.gpu in (None, gpu)]
        self._clocks = [f for f in faults if isinstance(f, CounterClock) and f.gpu in (None, gpu)]
        self._rng = np.random.default_rng((seed & 0xFFFFFFFF, gpu, 0xFA017))
        self._last: dict[str, float] = {}

    def shown(self, series: CounterSeries, base_ns: int) -> CounterSeries | None:
        """Return the samples as they are read; None: none is left. `base_ns` is the simulation's start."""
        if not (self._bad or self._missing or self._clocks):
            return series
        true_ns = series.end_ns - base_ns
        for fault in self._bad:
            held = _holds(true_ns, fault.start_ns, fault.stop_ns)
            lies: dict[str, Any] = {name: self._lie(fault, series, name, held) for name in fault.columns}
            series = replace(series, **lies)
        kept = np.ones(len(true_ns), dtype=np.bool_)
        for gap in self._missing:
            lost = self._rng.random(len(true_ns)) < gap.share
            kept &= ~(lost & _holds(true_ns, gap.start_ns, gap.stop_ns))
        if not kept.any():
            return None
        off_ns = np.zeros(len(true_ns), dtype=np.int64)
        for clock in self._clocks:
            off_ns = off_ns + clock.lag_ns + np.rint(true_ns * (clock.drift_ppm / 1e6)).astype(np.int64)
        columns: dict[str, Any] = {
            name: column(values[kept], values.dtype.str[1:])
            for name in _COLUMNS
            if (values := getattr(series, name)) is not None
        }
        return replace(
            series,
            end_ns=column((series.end_ns + off_ns)[kept], "i8"),
            width_ns=column(series.width_ns[kept], "i8"),
            **columns,
        )

    def _lie(
        self, fault: BadCounter, series: CounterSeries, name: str, held: NDArray[np.bool_]
    ) -> NDArray[np.generic] | None:
        values: NDArray[np.generic] | None = getattr(series, name)
        if values is None:
            return None
        first = int(np.argmax(held))
        if held.any():
            before = float(values[first - 1]) if first else self._last.get(name, float(values[0]))
            stuck = 0.0 if fault.kind == "dead" else before
            self._last[name] = before if held[-1] else float(values[-1])
        else:
            stuck = self._last[name] = float(values[-1])
        told: NDArray[np.generic] = column(np.where(held, stuck, values), values.dtype.str[1:])
        return told


class StepFaults:
    """What becomes of the stream of steps of one engine."""

    def __init__(self, faults: Sequence[LostSteps], seed: str) -> None:
        self._faults = faults
        self._rng = Random(f"{seed}/lost")  # noqa: S311 - a simulation

    def kept(self, steps: Sequence[Step]) -> tuple[list[Step], int]:
        """Return the steps that are seen, and how many the reader knows to be lost."""
        seen, told = [], 0
        for step in steps:
            lost = [
                fault
                for fault in self._faults
                if fault.start_ns <= step.end_ns
                and (fault.stop_ns is None or step.end_ns < fault.stop_ns)
                and self._rng.random() < fault.share
            ]
            if not lost:
                seen.append(step)
            elif lost[0].told:
                told += 1
        return seen, told


def _holds(at_ns: NDArray[np.int64], start_ns: int, stop_ns: int | None) -> NDArray[np.bool_]:
    held: NDArray[np.bool_] = at_ns > start_ns
    return held if stop_ns is None else held & (at_ns <= stop_ns)
