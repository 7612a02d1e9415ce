"""The contract of the ladder's rungs, kept by PM sampling: same truth and checks, its own tolerance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from tests.collectors.counters.cupti.conftest import Node
from tests.collectors.counters.test_contract import (
    ALL,
    BANDWIDTH,
    NEARLY_IDLE,
    SECOND,
    TENSOR_ONLY_A_BIT,
    Sample,
    Tolerance,
    Truth,
    bounds,
)
from tests.doubles.cupti import Scenario

from gpuidle.agent.model import RATIO_STEP, CounterSeries

TOLERANCE = Tolerance(1_000_000, 2 * RATIO_STEP, ALL, 0.98)
"""The clock fit may be off by a millisecond on a busy machine; on a quiet one it is some microseconds."""
PERIOD_NS = 3 * SECOND


def levels(prefix: str, values: dict[str, float]) -> dict[str, object]:
    traffic = values["dram_bytes_per_s"] * BANDWIDTH
    return {
        f"{prefix}.gr": 100 * values["gr_active"],
        f"{prefix}.sm": 100 * values["sm_active"],
        f"{prefix}.tensor": 100 * values["tensor_active"],
        f"{prefix}.read": 0.75 * traffic,
        f"{prefix}.write": 0.25 * traffic,
    }


def values(series: CounterSeries, column: str) -> np.ndarray:
    if column == "dram_bytes_per_s":
        assert series.dram_read_bytes_per_s is not None
        assert series.dram_write_bytes_per_s is not None
        return (series.dram_read_bytes_per_s + series.dram_write_bytes_per_s) / BANDWIDTH
    found: np.ndarray = getattr(series, column) * RATIO_STEP
    return found


def samples(found: Sequence[CounterSeries], column: str) -> list[Sample]:
    return [
        Sample(int(end - width), int(end), float(value))
        for series in found
        for end, width, value in zip(series.end_ns, series.width_ns, values(series, column), strict=True)
    ]


def test_pm_sampling_keeps_the_contract(node: Node) -> None:
    settings = {"wave_period_ns": PERIOD_NS, "wave_duty": 0.5, "clock_offset_ns": 10**18}
    node.play(Scenario(settings=settings | levels("high", TENSOR_ONLY_A_BIT) | levels("low", NEARLY_IDLE)))
    node.start(node.options(rate_hz=200))
    node.until(lambda: node.samples() > 0)
    begin = int(node.series[0].end_ns[0] - node.series[0].width_ns[0])
    node.until(lambda: int(node.series[-1].end_ns[-1]) - begin > PERIOD_NS)
    first = begin // PERIOD_NS * PERIOD_NS
    truth: Truth = [
        (first + half * PERIOD_NS // 2, NEARLY_IDLE if half % 2 else TENSOR_ONLY_A_BIT) for half in range(20)
    ]
    for column in sorted(TOLERANCE.columns):
        found = samples(node.series, column)
        for sample in found[:: max(1, len(found) // 200)]:
            low, high = bounds(truth, column, sample, TOLERANCE.shift_ns)
            assert low - TOLERANCE.absolute <= sample.value <= high + TOLERANCE.absolute, (column, sample)
        seen = np.array([sample.value for sample in found])
        for level in (TENSOR_ONLY_A_BIT, NEARLY_IDLE):
            assert np.isclose(seen, level[column], atol=TOLERANCE.absolute).sum() > len(seen) / 4
    rows = samples(node.series, "gr_active")
    assert all(after.begin_ns >= before.end_ns for before, after in pairwise(rows))
    covered = sum(sample.end_ns - sample.begin_ns for sample in rows)
    assert covered >= TOLERANCE.coverage * (rows[-1].end_ns - rows[0].begin_ns)
    assert node.series[0].sm_clock_hz is not None
    assert node.series[0].dram_bytes_per_s is None


@pytest.mark.gpu
def test_pm_sampling_keeps_the_contract_on_hardware() -> None:
    """`benchmarks/device_check.py` asks more; this asks whether samples come and lie in their time."""
    from gpuidle.collectors.counters.cupti.rung import CuptiPmRung
    from gpuidle.collectors.counters.nvml import NvmlCollector

    gpus, rung = NvmlCollector(), CuptiPmRung()
    try:
        listed = gpus.read(time.monotonic_ns()).gpus
        if not listed:
            pytest.skip("no NVIDIA GPU here")
        found: list[CounterSeries] = []
        begin = time.monotonic_ns()
        while time.monotonic_ns() - begin < 10 * SECOND:
            time.sleep(0.5)
            reading = rung.read(time.monotonic_ns(), listed[:1])
            found += reading.series
        if not found and reading.status[0].state in ("refused", "unsupported", "busy"):
            pytest.skip(reading.status[0].message)
        end = time.monotonic_ns()
    finally:
        rung.close()
        gpus.close()
    rows = samples(found, "gr_active")
    assert rows
    assert all(after.begin_ns >= before.end_ns for before, after in pairwise(rows))
    assert begin <= rows[0].begin_ns < rows[-1].end_ns <= end
    assert np.median([sample.end_ns - sample.begin_ns for sample in rows]) == pytest.approx(1e6, rel=0.1)
