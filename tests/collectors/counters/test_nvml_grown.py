"""NvmlCollector through the real pynvml: hanging GPUs, MIG, events, time shares, and every return code."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectors.counters.nvml_process import CollectorProcess, collector_process
from tests.doubles.nvml import (
    EVENT_TYPES,
    Event,
    Fault,
    Gpu,
    MigInstance,
    Process,
    ProcessUtilization,
    Scenario,
)
from tests.doubles.nvml.library import header, return_codes

from gpuidle.agent.model import GpuProcess, GpuReading, Reading
from gpuidle.collectors.counters.nvml_processes import FUTURE_US, newest_shares

UUIDS = [f"GPU-00000000-0000-4000-8000-{index:012x}" for index in range(4)]
FOR_EVER_MS = 3_600_000


@pytest.fixture(scope="module")
def process(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    with collector_process(nvml_library, tmp_path_factory.mktemp("nvml")) as started:
        yield started


@pytest.fixture
def node(process: CollectorProcess) -> CollectorProcess:
    """A new collector in the process, on two idle GPUs."""
    process.write(Scenario())
    process.close()
    process.renew()
    return process


def by_id(reading: Reading) -> dict[str, GpuReading]:
    assert reading.gpus is not None
    return {gpu.hw_id: gpu for gpu in reading.gpus}


def kinds(reading: Reading) -> list[tuple[str, str]]:
    return [(problem.kind, problem.subject) for problem in reading.problems]


# --- calls that do not return


def test_a_gpu_that_hangs_costs_its_own_reading_and_comes_back(node: CollectorProcess) -> None:
    four = (Gpu(),) * 4
    node.write(Scenario(gpus=four))
    assert len(by_id(node.read(1))) == 4
    threads = node.threads()
    node.write(Scenario(gpus=four, faults=(Fault("nvmlDeviceGetPowerUsage", gpu=2, delay_ms=FOR_EVER_MS),)))
    for seconds in range(2, 8):
        reading = node.read(seconds)
        assert sorted(by_id(reading)) == [UUIDS[0], UUIDS[1], UUIDS[3]]
        assert kinds(reading) == [("gpu_hanging", UUIDS[2])]
    assert node.threads() == threads  # the hanging one is not doubled
    node.write(Scenario(gpus=four))  # the call returns
    for seconds in range(8, 108):
        reading = node.read(seconds)
        if reading.problems == ():
            break
        time.sleep(0.1)
    assert len(by_id(reading)) == 4
    assert node.threads() == threads


def test_a_gpu_that_hangs_from_the_start_is_named_by_its_place(node: CollectorProcess) -> None:
    node.write(Scenario(faults=(Fault("nvmlDeviceGetHandleByIndex*", gpu=1, delay_ms=FOR_EVER_MS),)))
    reading = node.read(1)
    assert (list(by_id(reading)), kinds(reading)) == ([UUIDS[0]], [("gpu_hanging", "gpu1")])
    node.write(Scenario())


def test_a_driver_that_hangs_as_a_whole_leaves_nothing_and_what_it_says_late_is_taken(
    node: CollectorProcess,
) -> None:
    node.write(Scenario(faults=(Fault("nvmlInit*", delay_ms=FOR_EVER_MS),)))
    for seconds in (1, 2):
        reading = node.read(seconds)
        assert (reading.gpus, kinds(reading)) == (None, [("driver_hanging", "")])
    node.write(Scenario())
    for seconds in range(3, 13):
        reading = node.read(seconds)
        if reading.gpus is not None:
            break
    assert (list(by_id(reading)), reading.problems) == (UUIDS[:2], ())


def test_all_gpus_hanging_is_no_node_without_gpus(node: CollectorProcess) -> None:
    node.read(1)
    node.write(Scenario(faults=(Fault("nvmlDeviceGetTotalEnergyConsumption", delay_ms=FOR_EVER_MS),)))
    reading = node.read(2)
    assert reading.gpus is None
    assert kinds(reading) == [("gpu_hanging", UUIDS[0]), ("gpu_hanging", UUIDS[1])]
    node.write(Scenario())


# --- MIG


MIG = (
    MigInstance("MIG-a", 9, memory_used_bytes=2**30, processes=(Process(7, 2**30),)),
    MigInstance("MIG-b", 11, name="NVIDIA H100 80GB HBM3 MIG 3g.40gb", memory_total_bytes=40 * 2**30),
)


def test_instances_are_devices_of_their_own_and_the_split_gpu_has_no_processes(
    node: CollectorProcess,
) -> None:
    node.write(Scenario(gpus=(Gpu(mig_mode=1, instances=MIG, power_mw=300_000), Gpu(mig_mode=0))))
    reading = node.read(1)
    assert reading.problems == ()
    gpus = by_id(reading)
    assert list(gpus) == [UUIDS[0], "MIG-a", "MIG-b", UUIDS[1]]
    whole, first, second = gpus[UUIDS[0]], gpus["MIG-a"], gpus["MIG-b"]
    assert (whole.parent_hw_id, whole.power_watts, whole.busy_ratio, whole.processes) == (
        None,
        300,
        None,
        None,
    )
    assert (first.parent_hw_id, first.instance_id, first.index) == (UUIDS[0], 9, 0)
    assert first.processes == (GpuProcess(pid=7, used_memory_bytes=2**30),)
    assert (first.memory_used_bytes, second.memory_total_bytes) == (2**30, 40 * 2**30)
    assert (first.power_watts, first.energy_joules, first.busy_ratio, first.temperature_celsius) == (
        None,
    ) * 4
    assert (second.name, second.processes) == ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", ())
    assert first.sm_clock_hz == whole.sm_clock_hz
    assert gpus[UUIDS[1]].parent_hw_id is None


def test_instances_come_and_go_without_a_word(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(mig_mode=1, instances=MIG),)))
    node.read(1)
    node.write(Scenario(gpus=(Gpu(mig_mode=1, instances=(MigInstance("MIG-c", 9),)),)))
    reading = node.read(2)
    assert (list(by_id(reading)), reading.problems) == ([UUIDS[0], "MIG-c"], ())
    node.write(Scenario(gpus=(Gpu(mig_mode=1),)))
    assert list(by_id(node.read(3))) == [UUIDS[0]]


def test_an_instance_that_cannot_be_read_says_so(node: CollectorProcess) -> None:
    split = Gpu(mig_mode=1, instances=MIG)
    node.write(Scenario(gpus=(split,), faults=(Fault("nvmlDeviceGetGpuInstanceId", "NO_PERMISSION"),)))
    reading = node.read(1)
    assert list(by_id(reading)) == [UUIDS[0]]
    assert kinds(reading) == [("field_error", UUIDS[0])] * 2


# --- events


def test_two_equal_xids_are_two_and_are_not_told_again(node: CollectorProcess) -> None:
    gpu = Gpu(event_types=EVENT_TYPES, events=(Event(0, data=13),))
    node.write(Scenario(gpus=(gpu, Gpu())))
    reading = node.read(1)
    zeros = {"ecc_single_bit": 0, "ecc_double_bit": 0, "ecc_single_bit_storm": 0}
    assert by_id(reading)[UUIDS[0]].error_counts == zeros  # what was before is not counted
    assert by_id(reading)[UUIDS[1]].error_counts is None  # it tells no events: not 0
    now = time.monotonic_ns()
    events = (
        *gpu.events,
        Event(now, data=79),
        Event(now, data=79),
        Event(now, type=2),
        Event(now, type=0x100),
    )
    node.write(Scenario(gpus=(replace(gpu, events=events), Gpu())))
    reading = node.read(2)
    assert by_id(reading)[UUIDS[0]].error_counts == {**zeros, "ecc_double_bit": 1, "xid_79": 2}
    assert [p.message for p in reading.problems] == [
        "the driver reported ecc double bit (1 since gpuidle watches)",
        "the driver reported Xid 79 (2 since gpuidle watches)",
    ]
    reading = node.read(100)
    assert by_id(reading)[UUIDS[0]].error_counts == {**zeros, "ecc_double_bit": 1, "xid_79": 2}
    assert reading.problems == ()


def test_counts_survive_a_new_session_of_nvml(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(event_types=8),)))
    node.read(1)
    event = Event(time.monotonic_ns(), data=31)
    node.write(Scenario(gpus=(Gpu(event_types=8, events=(event,)),)))
    assert by_id(node.read(2))[UUIDS[0]].error_counts == {"xid_31": 1}
    node.write(Scenario(gpus=(Gpu(event_types=8, events=(event,)),), faults=(Fault("*", "UNKNOWN"),)))
    assert node.read(3).gpus is None
    again = Event(time.monotonic_ns(), data=31)
    node.write(Scenario(gpus=(Gpu(event_types=8, events=(event,)),)))
    assert by_id(node.read(5))[UUIDS[0]].error_counts == {"xid_31": 1}
    node.write(Scenario(gpus=(Gpu(event_types=8, events=(event, again)),)))
    assert by_id(node.read(6))[UUIDS[0]].error_counts == {"xid_31": 2}


def test_events_that_fail_cost_nothing_else(node: CollectorProcess) -> None:
    for function in ("nvmlDeviceRegisterEvents", "nvmlEventSetCreate", "nvmlEventSetWait*"):
        node.renew()
        node.write(Scenario(gpus=(Gpu(event_types=8),), faults=(Fault(function, "INSUFFICIENT_RESOURCES"),)))
        reading = node.read(1)
        assert kinds(reading) == [("field_error", UUIDS[0])]
        assert by_id(reading)[UUIDS[0]].power_watts == 72


# --- time shares of processes


def with_samples(*samples: ProcessUtilization) -> Scenario:
    held = tuple(Process(pid, pid) for pid in (7, 8))
    return Scenario(gpus=(Gpu(processes=held, utilization_samples=samples),))


def shares(reading: Reading) -> dict[int, tuple[float | None, bool]]:
    processes = by_id(reading)[UUIDS[0]].processes
    assert processes is not None
    return {process.pid: (process.sm_busy_ratio, process.sm_busy_stale) for process in processes}


def test_shares_of_time_are_of_each_process_and_old_ones_are_marked(node: CollectorProcess) -> None:
    node.write(with_samples(ProcessUtilization(7, sm=93), ProcessUtilization(8, sm=4, age_ms=10_000)))
    reading = node.read(1)
    assert (shares(reading), reading.problems) == ({7: (0.93, False), 8: (0.04, True)}, ())


def test_no_sample_is_no_error_and_no_zero(node: CollectorProcess) -> None:
    node.write(with_samples())  # the driver answers NotFound
    reading = node.read(1)
    assert (shares(reading), reading.problems) == ({7: (None, False), 8: (None, False)}, ())


@pytest.mark.parametrize("percent", [2_147_483_632, 2**32 - 1, 200_000, 101])
def test_a_share_that_cannot_be_is_absent(node: CollectorProcess, percent: int) -> None:
    node.write(with_samples(ProcessUtilization(7, sm=percent), ProcessUtilization(8, sm=50)))
    reading = node.read(1)
    assert shares(reading) == {7: (None, False), 8: (0.5, False)}
    assert kinds(reading) == [("bad_reading", UUIDS[0])]


def test_a_buffer_of_garbage_samples_is_dropped_by_its_times(node: CollectorProcess) -> None:
    future = time.time_ns() // 1000 + 3600 * 10**6
    garbage = tuple(
        ProcessUtilization(7 + n % 2, sm=1 + n, garbage_timestamp_us=at)
        for n in range(50)
        for at in (0, future)
    )
    node.write(with_samples(*garbage, ProcessUtilization(8, sm=50)))
    reading = node.read(1)
    assert shares(reading) == {7: (None, False), 8: (0.5, False)}
    assert kinds(reading) == [("garbage_samples", UUIDS[0])]


def test_a_sample_of_a_process_that_is_gone_is_left_out(node: CollectorProcess) -> None:
    node.write(with_samples(ProcessUtilization(4_000_000_000, sm=9), ProcessUtilization(9, sm=9)))
    reading = node.read(1)
    assert (shares(reading), reading.problems) == ({7: (None, False), 8: (None, False)}, ())


@given(
    samples=st.lists(st.tuples(st.sampled_from([7, 8, 9]), st.integers(0, 2**32 - 1), st.integers(0, 2**63))),
    seen_us=st.integers(0, 10**6),
)
def test_a_share_is_the_newest_of_its_process_and_of_a_time_that_was_asked_for(
    samples: list[tuple[int, int, int]], seen_us: int
) -> None:
    now_us = 5 * 10**6
    newest, garbage = newest_shares(samples, seen_us, now_us, frozenset({7, 8}))
    possible = [row for row in samples if seen_us < row[2] <= now_us + FUTURE_US]
    assert garbage == len(samples) - len(possible)
    for pid in (7, 8):
        mine = [row[2] for row in possible if row[0] == pid]
        assert (newest[pid].timestamp_us if pid in newest else None) == (max(mine) if mine else None)


# --- every return code


CODES = sorted(code for name, code in return_codes(header().read_text(encoding="utf-8")).items() if code)
READS = (
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperature*",
    "nvmlDeviceGetMemoryInfo*",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocks*",
    "nvmlDeviceGetComputeRunningProcesses*",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlEventSetWait*",
    "nvmlDeviceGetHandleByIndex*",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetCount*",
    "nvmlInit*",
    "nvmlDevice*",
    "*",
)
FULL = Scenario(
    gpus=(
        Gpu(
            processes=(Process(7, 70),),
            utilization_samples=(ProcessUtilization(7, sm=50),),
            event_types=8,
            utilization_gpu_percent=50,
        ),
        Gpu(mig_mode=1, instances=MIG),
    )
)


def values(reading: Reading) -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {}
    for gpu in reading.gpus or ():
        for name in GpuReading.__struct_fields__:
            found[gpu.hw_id, name] = getattr(gpu, name)
        for process in gpu.processes or ():
            for name in ("used_memory_bytes", "sm_busy_ratio"):
                found[f"{gpu.hw_id}/{process.pid}", name] = getattr(process, name)
    return found


def test_no_return_code_of_any_function_makes_a_number(node: CollectorProcess) -> None:
    """Whatever fails with whatever code: a value is the true one or absent, and the collector goes on."""
    node.write(FULL)
    truth = values(node.read(1))
    moment = 1.0

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(function=st.sampled_from(READS), code=st.sampled_from([*CODES, 77, 4_000]), whole=st.booleans())
    def holds(function: str, code: int, whole: bool) -> None:
        nonlocal moment
        node.write(replace(FULL, faults=(Fault(function, code, gpu=None if whole else 0),)))
        moment += 100  # past every back-off
        reading = node.read(moment)
        for (hw_id, name), value in values(reading).items():
            same = value == truth.get((hw_id, name))
            gone = value is None or (name == "name" and value in {"unknown GPU", "NVIDIA H100 80GB HBM3 MIG"})
            assert same or gone or name in {"read_ns", "processes", "energy_joules"}, (hw_id, name, value)
            assert not isinstance(value, float) or math.isfinite(value)
        if reading.gpus is None:
            assert reading.problems

    holds()
    node.write(FULL)
    assert len(by_id(node.read(moment + 100))) == 4


NARROW_BLANKS = [0x7FFFFFF0, 0x7FFFFFF2, 2**31 - 1, 2**32 - 16, 2**32 - 1]
WIDE_BLANKS = [2**63 - 14, 2**63 + 2, 2**64 - 16, 2**64 - 1]
FIELDS = {
    "utilization_gpu_percent": ("busy_ratio", NARROW_BLANKS),
    "utilization_memory_percent": ("memory_busy_ratio", NARROW_BLANKS),
    "power_mw": ("power_watts", NARROW_BLANKS),
    "power_limit_mw": ("power_limit_watts", NARROW_BLANKS),
    "temperature_celsius": ("temperature_celsius", NARROW_BLANKS),
    "clock_sm_mhz": ("sm_clock_hz", NARROW_BLANKS),
    "max_clock_memory_mhz": ("memory_clock_max_hz", NARROW_BLANKS),
    "energy_mj": ("energy_joules", WIDE_BLANKS),
    "memory_used_bytes": ("memory_used_bytes", WIDE_BLANKS),
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    blanks=st.fixed_dictionaries({}, optional={name: st.sampled_from(b) for name, (_, b) in FIELDS.items()})
)
def test_no_blank_of_a_driver_leaves_as_a_number(process: CollectorProcess, blanks: dict[str, int]) -> None:
    read = []
    for gpu in (Gpu(), replace(Gpu(), **blanks)):  # type: ignore[arg-type]
        process.write(Scenario(gpus=(gpu,)))
        process.close()
        process.renew()
        read.append(by_id(process.read(1))[UUIDS[0]])
    truth, found = read
    absent = {FIELDS[name][0] for name in blanks}
    for name in GpuReading.__struct_fields__:
        assert getattr(found, name) == (None if name in absent else getattr(truth, name)), name
