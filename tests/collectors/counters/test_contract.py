"""One contract for every rung: the same GPU, the same truth, a stated tolerance each.

A rung may say less than another, later and coarser; what it says must be true. `TOLERANCES` states how far
in time a sample may be from where it says it was, and how much of the time it must cover. On hardware
(`-m gpu`) the truth is a load that this test makes itself, with the driver's own memset.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from tests.collectors.counters.ladder_process import LadderProcess, Series, Tick, ladder_process
from tests.doubles.dcgm_exporter import DcgmExporter, DcgmScenario, Device, Level
from tests.doubles.nvml import GpmMetric, Gpu, Scenario

from gpuidle.agent.model import RATIO_STEP, CounterSeries

SECOND = 10**9
UUID = "GPU-00000000-0000-4000-8000-000000000000"
BANDWIDTH = 3352e9
"""Of the sheet of the GPU that both doubles are."""
EXPORTER_NS = 500_000_000


@dataclass(frozen=True)
class Tolerance:
    """What a rung is allowed."""

    shift_ns: int
    """How far its samples may be from where they say they were."""
    absolute: float
    """Of a ratio, besides."""
    columns: frozenset[str]
    """What it must tell; it tells nothing else."""
    coverage: float
    """Share of the time from its first sample to its last that its samples must cover."""


ALL = frozenset({"gr_active", "sm_active", "tensor_active", "dram_bytes_per_s"})
TOLERANCES: Mapping[str, Tolerance] = {
    # The driver refreshes every 100 ms.
    "nvml_gpm": Tolerance(150_000_000, 2 * RATIO_STEP, ALL, 0.8),
    # Pages are seen when they are polled, and the lag is estimated.
    "dcgm": Tolerance(EXPORTER_NS, 2 * RATIO_STEP, ALL, 0.8),
    # The busy share is of up to a second before the reading, in whole percents.
    "nvml": Tolerance(SECOND, 0.01, frozenset({"gr_active"}), 0.8),
}


@dataclass(frozen=True)
class Sample:
    """One value of one column, as a ratio (bytes: of the sheet's bandwidth)."""

    begin_ns: int
    end_ns: int
    value: float


Truth = Sequence[tuple[int, Mapping[str, float]]]
"""(from when, ratios by column), in order; the first holds for ever before."""

TENSOR_ONLY_A_BIT = {"gr_active": 1.0, "sm_active": 0.82, "tensor_active": 0.0312, "dram_bytes_per_s": 0.71}
NEARLY_IDLE = {"gr_active": 0.2, "sm_active": 0.11, "tensor_active": 0.002, "dram_bytes_per_s": 0.05}


def mean(truth: Truth, column: str, begin_ns: int, end_ns: int) -> float:
    total = 0.0
    for (from_ns, values), until in zip(truth, [*(row[0] for row in truth[1:]), end_ns], strict=True):
        total += values[column] * max(0, min(end_ns, until) - max(begin_ns, from_ns))
    return total / (end_ns - begin_ns)


def bounds(truth: Truth, column: str, sample: Sample, shift_ns: int) -> tuple[float, float]:
    """Return the least and the greatest mean of a window that began and ended within the shift."""
    shifts = (-shift_ns, -shift_ns // 2, 0, shift_ns // 2, shift_ns)
    means = [
        mean(truth, column, begin, end)
        for begin in (sample.begin_ns + shift for shift in shifts)
        for end in (sample.end_ns + shift for shift in shifts)
        if end - begin >= (sample.end_ns - sample.begin_ns) // 4
    ]
    return min(means), max(means)


def samples(ticks: Sequence[Tick], rung: str, column: str) -> list[Sample]:
    if rung == "nvml":
        gpus = [tick.gpus[0] for tick in ticks if tick.gpus and column == "gr_active"]
        return [
            Sample(before.read_ns, gpu.read_ns, gpu.busy_ratio)
            for before, gpu in pairwise(gpus)
            if gpu.busy_ratio is not None
        ]
    scale = 1 / BANDWIDTH if column == "dram_bytes_per_s" else RATIO_STEP
    return [
        Sample(end - width, end, value * scale)
        for series in of_rung(ticks, rung)
        for end, width, value in zip(
            series.end_ns, series.width_ns, getattr(series, column) or (), strict=False
        )
    ]


def of_rung(ticks: Sequence[Tick], rung: str) -> list[Series]:
    return [series for tick in ticks for series in tick.raw if (series.rung, series.hw_id) == (rung, UUID)]


@dataclass(frozen=True)
class Watched:
    """A node watched by all rungs at once, and what was true."""

    ticks: list[Tick]
    truth: Truth


@pytest.fixture(scope="module")
def watched(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("contract")
    scenario(((0, TENSOR_ONLY_A_BIT),), 0).write(folder / "scenario")
    exporter = DcgmExporter(pages(((0, TENSOR_ONLY_A_BIT),)))
    with exporter.serving() as url, ladder_process(nvml_library, folder, "gpm", url) as node:
        node.until(
            lambda tick: {"nvml_gpm", "dcgm"} <= {row.rung for row in tick.status if row.state == "serving"}
        )
        change_ns = time.monotonic_ns() + 4 * SECOND
        truth: Truth = ((0, TENSOR_ONLY_A_BIT), (change_ns, NEARLY_IDLE))
        scenario(truth, 0).write(folder / "scenario")
        exporter.scenario = pages(truth)
        until(node, change_ns, 0.4)
        scenario(truth, 1).write(folder / "scenario")
        until(node, change_ns + 4 * SECOND, 0.4)
        yield Watched(node.ticks, truth)


def pages(truth: Truth) -> DcgmScenario:
    """Return the exporter of the same GPU."""
    levels = tuple(
        Level(
            from_ns / 1e9,
            gr=values["gr_active"],
            sm=values["sm_active"],
            tensor=values["tensor_active"],
            dram=values["dram_bytes_per_s"],
        )
        for from_ns, values in truth
    )
    return DcgmScenario((Device(UUID, levels),), interval_s=EXPORTER_NS / 1e9)


def until(node: LadderProcess, end_ns: int, pause_s: float) -> None:
    while time.monotonic_ns() < end_ns:
        node.run(1, pause_s)


def scenario(truth: Truth, now: int) -> Scenario:
    """Return NVML's node: GPM knows the whole story, the busy share only what is now."""
    ids = {"gr_active": 1, "sm_active": 2, "tensor_active": 5, "dram_bytes_per_s": 10}
    gpm = tuple(
        GpmMetric(id_, tuple((from_ns, 100 * values[column]) for from_ns, values in truth))
        for column, id_ in ids.items()
    )
    busy = round(100 * truth[now][1]["gr_active"])
    gpu = Gpu(
        gpm=gpm,
        utilization_gpu_percent=busy,
        power_mw=300_000,
        energy_mj=5_000_000_000,
        energy_growth_mj_per_s=300_000,
    )
    return Scenario(gpus=(gpu,))


@pytest.mark.parametrize("rung", TOLERANCES)
def test_every_sample_is_true_of_its_time(watched: Watched, rung: str) -> None:
    tolerance = TOLERANCES[rung]
    for column in tolerance.columns:
        found = samples(watched.ticks, rung, column)
        assert len(found) >= 6, column
        for sample in found:
            low, high = bounds(watched.truth, column, sample, tolerance.shift_ns)
            assert low - tolerance.absolute <= sample.value <= high + tolerance.absolute, (column, sample)


@pytest.mark.parametrize("rung", TOLERANCES)
def test_both_levels_are_seen_as_they_are(watched: Watched, rung: str) -> None:
    tolerance = TOLERANCES[rung]
    change_ns = watched.truth[1][0]
    for column in tolerance.columns:
        found = samples(watched.ticks, rung, column)
        sides = (
            [sample.value for sample in found if sample.end_ns < change_ns - tolerance.shift_ns],
            [sample.value for sample in found if sample.begin_ns > change_ns + tolerance.shift_ns],
        )
        for values, (_, truth) in zip(sides, watched.truth, strict=True):
            assert values, column
            assert all(value == pytest.approx(truth[column], abs=tolerance.absolute) for value in values)


@pytest.mark.parametrize("rung", ["nvml_gpm", "dcgm"])
def test_the_integral_is_the_truths(watched: Watched, rung: str) -> None:
    tolerance = TOLERANCES[rung]
    for column in tolerance.columns:
        found = samples(watched.ticks, rung, column)
        told = sum(sample.value * (sample.end_ns - sample.begin_ns) for sample in found)
        true = sum(mean(watched.truth, column, s.begin_ns, s.end_ns) * (s.end_ns - s.begin_ns) for s in found)
        step = abs(watched.truth[0][1][column] - watched.truth[1][1][column])
        assert abs(told - true) <= step * 2 * tolerance.shift_ns + tolerance.absolute * 12 * SECOND, column


@pytest.mark.parametrize("rung", ["nvml_gpm", "dcgm"])
def test_samples_are_in_order_do_not_overlap_and_cover_the_time(watched: Watched, rung: str) -> None:
    assert_sound(watched.ticks, rung)


@pytest.mark.parametrize("rung", ["nvml_gpm", "dcgm"])
def test_what_a_rung_cannot_tell_is_absent(watched: Watched, rung: str) -> None:
    for series in of_rung(watched.ticks, rung):
        present = {name for name in ALL if getattr(series, name) is not None}
        assert present == TOLERANCES[rung].columns
        assert all(len(getattr(series, name)) == len(series.end_ns) for name in present)


def test_the_best_of_them_is_handed_on(watched: Watched) -> None:
    last = watched.ticks[-8:]
    assert {series.rung for tick in last for series in tick.counters} == {"nvml_gpm"}


def assert_sound(ticks: Sequence[Tick], rung: str) -> None:
    rows = sorted(
        (end - width, end)
        for series in of_rung(ticks, rung)
        for end, width in zip(series.end_ns, series.width_ns, strict=True)
    )
    assert rows
    assert all(end > begin for begin, end in rows)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(rows))
    covered = sum(end - begin for begin, end in rows)
    assert covered >= TOLERANCES[rung].coverage * (rows[-1][1] - rows[0][0])


# --- on hardware


LOAD = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        sys.exit(f"{name}: {code}")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
size = 2 * 2**30
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
call("cuMemsetD32_v2", memory, ctypes.c_uint(1), ctypes.c_size_t(size // 4))
call("cuCtxSynchronize")
print(time.monotonic_ns(), flush=True)
end, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    for _ in range(16):
        call("cuMemsetD32_v2", memory, ctypes.c_uint(count), ctypes.c_size_t(size // 4))
        count += 1
    call("cuCtxSynchronize")
print(time.monotonic_ns(), count * size, flush=True)
"""
"""Fills 2 GiB again and again: the GPU is active all the time, and each fill writes its bytes once."""


@pytest.fixture
def hardware() -> None:
    """The first GPU of this machine, or a skip."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        pytest.skip(f"no NVIDIA driver here: {error}")


@pytest.mark.gpu
@pytest.mark.usefixtures("hardware")
def test_the_contract_holds_on_hardware() -> None:
    """A memset load: active throughout, no tensor work, and as many bytes written as were filled."""
    from gpuidle.collectors.counters.gpm import GpmRung
    from gpuidle.collectors.counters.nvml import NvmlCollector

    gpus, rung = NvmlCollector(), GpmRung()
    try:
        first = gpus.read(time.monotonic_ns())
        assert first.gpus, first.problems
        target = first.gpus[0]
        status = rung.read(time.monotonic_ns(), [target])
        time.sleep(0.5)
        status = rung.read(time.monotonic_ns(), [target])
        if status.status[0].state == "unsupported":
            pytest.skip(status.status[0].message)
        with subprocess.Popen([sys.executable, "-c", LOAD, "5"], stdout=subprocess.PIPE, text=True) as load:
            assert load.stdout is not None
            begin_ns = int(load.stdout.readline())
            found: list[CounterSeries] = []
            busy: list[float | None] = []
            while load.poll() is None:
                time.sleep(0.5)
                reading = gpus.read(time.monotonic_ns())
                busy += [gpu.busy_ratio for gpu in reading.gpus or () if gpu.hw_id == target.hw_id]
                found += rung.read(time.monotonic_ns(), [target]).series
            end_ns, filled = (int(word) for word in load.stdout.readline().split())
    finally:
        rung.close()
        gpus.close()
    inside = [
        (series, index)
        for series in found
        for index in range(len(series))
        if series.end_ns[index] - series.width_ns[index] > begin_ns + 200_000_000
        and series.end_ns[index] < end_ns - 200_000_000
    ]
    assert len(inside) >= 10
    for series, index in inside:
        assert series.gr_active is not None
        assert series.tensor_active is not None
        assert series.gr_active[index] * RATIO_STEP > 0.9
        assert series.tensor_active[index] * RATIO_STEP < 0.01
    assert max(share for share in busy if share is not None) > 0.9
    rates = [float(s.dram_bytes_per_s[i]) for s, i in inside if s.dram_bytes_per_s is not None]
    if rates:
        filled_per_s = filled / ((end_ns - begin_ns) / 1e9)
        assert sum(rates) / len(rates) == pytest.approx(filled_per_s, rel=0.15)
