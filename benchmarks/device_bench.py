"""What the sections of `device_check` stand on: rows, the device, PM sampling while a load runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from benchmarks.device_loads import Ran
from benchmarks.device_session import Rights, Tried, try_session

from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuReading
from gpuidle.collectors.counters.cupti.columns import join
from gpuidle.collectors.counters.cupti.rung import CuptiPmRung, PmOptions
from gpuidle.collectors.counters.nvml import NvmlCollector

READY_S = 20.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    what: str
    got: float | str
    want: float | str = ""
    unit: str = ""
    within: float | None = None
    """Relative tolerance: beyond it the row is off."""

    @property
    def verdict(self) -> str:
        """`ok`, `OFF`, or nothing where there is no bar."""
        if self.within is None or not isinstance(self.got, float) or not isinstance(self.want, float):
            return ""
        return "ok" if abs(self.got - self.want) <= self.within * abs(self.want) else "OFF"


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """Where a section runs."""

    out: Path
    rehearse: bool
    hw_id: str
    library: str
    scale: float = 1.0
    """Of the durations: a rehearsal takes less."""

    def play(self, **settings: float) -> None:
        """In a rehearsal, have the double of CUPTI show these levels."""
        if self.rehearse:
            from tests.doubles.cupti import Scenario

            levels = {f"high.{key}": value for key, value in settings.items()}
            Scenario(settings={"wave_duty": 1, **levels}).write(Path(os.environ["GPUIDLE_CUPTI_SCENARIO"]))
            time.sleep(0.3)  # the double looks at its scenario at every second decode

    def sample(self, *, rights: Rights = "own", own_context: bool = False) -> Tried:
        """Try a session of a second."""
        return try_session(
            self.library,
            self.hw_id,
            rights=rights,
            own_context=own_context,
            seconds=max(0.3, self.scale),
        )

    def device(self) -> GpuReading:
        """Read the GPU through the product's own collector, which leaves out a GPU that is slow to answer."""
        collector = NvmlCollector()
        deadline = time.monotonic() + READY_S
        try:
            while True:
                reading = collector.read(time.monotonic_ns())
                for gpu in reading.gpus or ():
                    if gpu.hw_id == self.hw_id:
                        return gpu
                if time.monotonic() > deadline:
                    raise TimeoutError(f"NVML does not show {self.hw_id}: {reading.problems}")
                time.sleep(0.2)
        finally:
            collector.close()


class Pm:
    """PM sampling by the product's own rung, for as long as the block lasts."""

    def __init__(self, bench: Bench, rate_hz: int = 1000) -> None:
        self._rung = CuptiPmRung(PmOptions(rate_hz=rate_hz, library=bench.library, memory_limit_bytes=2**28))
        # The check itself fills the memory: whether sampling finds room is what it asks.
        self._device = msgspec.structs.replace(bench.device(), memory_used_bytes=None)
        self.problems: list[str] = []

    def __enter__(self) -> Pm:  # noqa: PYI034  # typing.Self is of Python 3.11
        """Wait for the first samples."""
        deadline = time.monotonic() + READY_S
        while not self.read():
            if time.monotonic() > deadline:
                self._rung.close()
                raise TimeoutError(f"no samples in {READY_S:.0f} s: {self._said}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        """End the session."""
        self._rung.close()

    def read(self) -> CounterSeries | None:
        """Return what was sampled since the last call."""
        reading = self._rung.read(time.monotonic_ns(), [self._device])
        self._said = "; ".join(f"{row.state} {row.message}" for row in reading.status)
        self.problems += [f"{problem.kind}: {problem.message}" for problem in reading.problems]
        return reading.series[0] if reading.series else None

    def during(self, load: Callable[[], Ran]) -> tuple[Ran, CounterSeries]:
        """Run a load and return the samples that lie inside it, less its first quarter."""
        ran = load()
        parts: list[CounterSeries] = []
        deadline = time.monotonic() + READY_S
        while not parts or parts[-1].end_ns[-1] < ran.end_ns:
            if (part := self.read()) is not None:
                parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError(f"samples stopped: {self._said}")
            time.sleep(0.05)
        return ran, inside(join(parts), ran.start_ns + (ran.end_ns - ran.start_ns) // 4, ran.end_ns)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the child so far."""
        return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in self._rung.pids().values()) / 1e9


def inside(series: CounterSeries, start_ns: int, end_ns: int) -> CounterSeries:
    """Return the samples within [start_ns, end_ns]."""
    rows = (series.end_ns - series.width_ns >= start_ns) & (series.end_ns <= end_ns)
    values: dict[str, Any] = {field.name: getattr(series, field.name) for field in fields(series)}
    kept: dict[str, Any] = {
        name: value[rows] for name, value in values.items() if isinstance(value, np.ndarray)
    }
    return replace(series, **kept)


def mean(series: CounterSeries, name: str) -> float:
    """Return the mean of a column over time: a ratio, or a rate."""
    column = getattr(series, name)
    if column is None or not len(series):
        return float("nan")
    step = RATIO_STEP if column.dtype == np.uint16 else 1.0
    return float(np.average(column, weights=series.width_ns)) * step
