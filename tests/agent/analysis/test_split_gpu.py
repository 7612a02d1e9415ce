"""A GPU that is split into MIG instances: they carry the ledger, and it is no idle GPU."""

from __future__ import annotations

import numpy as np
import pytest
from tests.agent.analysis.builders import engine, gpu, snapshot

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import CounterSeries, Frame, GpuProcess, GpuReading, column, rate_column

SECOND = 10**9
H100 = "NVIDIA H100 80GB HBM3"


def series(hw_id: str, at_s: int, **columns: object) -> CounterSeries:
    ratio = column([25_000], "u2")
    return CounterSeries(
        hw_id=hw_id,
        rung="nvml_gpm",
        end_ns=column([at_s * SECOND], "i8"),
        width_ns=column([SECOND], "i8"),
        gr_active=ratio,
        tensor_active=ratio,
        **columns,  # type: ignore[arg-type]
    )


def node(at_s: int) -> tuple[GpuReading, ...]:
    whole = gpu(at_s, None, processes=None, power_watts=300.0)
    part = gpu(
        at_s,
        None,
        hw_id="MIG-1",
        name=f"{H100} MIG 1g.10gb",
        parent_hw_id="GPU-0",
        memory_total_bytes=10_468_982_784,
        processes=(GpuProcess(pid=12),),
    )
    return whole, part


def frames() -> list[Frame]:
    analyzer = Analyzer()
    return [
        analyzer.feed(
            snapshot(at_s, gpus=node(at_s), engines=(engine(at_s),), counters=(series("MIG-1", at_s),))
        )
        for at_s in range(100, 110)
    ]


def test_the_split_gpu_has_no_ledger_and_its_instance_has_all_of_it() -> None:
    whole, part = frames()[-1].gpus
    assert (whole.hw_id, whole.power_watts) == ("GPU-0", 300)
    assert whole.window_ns == sum(whole.causes_total_ns.values()) == 0
    assert (whole.idle, whole.busy, whole.engine_ids) == ({}, None, ())
    assert part.window_ns == SECOND
    assert sum(part.causes_ns.values()) == SECOND
    assert (part.rung, part.parent_hw_id, part.engine_ids) == ("nvml_gpm", "GPU-0", ("vllm-tiny-1",))


def test_an_instance_has_its_share_of_the_peaks() -> None:
    whole, part = frames()[-1].gpus
    assert whole.peak is not None
    assert part.peak is not None
    assert part.peak.flops_per_s == pytest.approx(whole.peak.flops_per_s * 16 / 132)
    assert part.peak.memory_bytes_per_s == pytest.approx(whole.peak.memory_bytes_per_s / 8)


def test_dram_traffic_that_is_not_told_apart_is_traffic() -> None:
    analyzer = Analyzer()
    found: Frame | None = None
    for at_s in range(100, 106):
        both = series("GPU-0", at_s, dram_bytes_per_s=rate_column([1.676e12]))
        found = analyzer.feed(
            snapshot(at_s, gpus=(gpu(at_s, 0.5),), engines=(engine(at_s),), counters=(both,))
        )
    assert found is not None
    (whole,) = found.gpus
    assert whole.dram_bandwidth is not None
    assert whole.dram_bandwidth.value == pytest.approx(0.5, rel=1e-3)


def test_where_the_rung_tells_no_clock_the_drivers_stands_for_it() -> None:
    analyzer = Analyzer()
    for at_s in range(100, 106):
        slow = gpu(at_s, 0.5, sm_clock_hz=990_000_000)
        frame = analyzer.feed(
            snapshot(at_s, gpus=(slow,), engines=(engine(at_s),), counters=(series("GPU-0", at_s),))
        )
    (whole,) = frame.gpus
    assert whole.peak is not None
    assert whole.peak.sheet_clock_hz is not None
    assert whole.tensor_active is not None
    # Half of the time busy, at a clock below the sheet's: fewer cycles of the sheet's clock.
    assert whole.tensor_active.value == pytest.approx(0.5 * 990e6 / whole.peak.sheet_clock_hz, rel=1e-3)
    assert np.isclose(whole.busy.value if whole.busy else 0.0, 0.5)
