"""NvmlCollector, through the real pynvml, on the double of the driver's library."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.collectors.counters.nvml_process import CollectorProcess, collector_process
from tests.doubles.nvml import Fault, Gpu, Process, Scenario

from gpuidle.agent.model import GpuProcess, GpuReading, Problem, Reading
from gpuidle.collectors.counters.nvml import PID_LIMIT, read_pid_max

PID_MAX = read_pid_max(Path("/proc"))
OF_SOME = {"parent_hw_id", "instance_id", "error_counts", "copy_bytes_per_s"}
"""Fields that a whole GPU without events or a calibration does not have."""
UUID_0, UUID_1 = (f"GPU-00000000-0000-4000-8000-{index:012x}" for index in (0, 1))


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


def only_gpu(reading: Reading) -> GpuReading:
    assert reading.gpus is not None
    (gpu,) = reading.gpus
    return gpu


def hw_ids(reading: Reading) -> list[str]:
    assert reading.gpus is not None
    return [gpu.hw_id for gpu in reading.gpus]


def kinds(reading: Reading) -> list[tuple[str, str]]:
    return [(problem.kind, problem.subject) for problem in reading.problems]


def the_problem(reading: Reading) -> Problem:
    (problem,) = reading.problems
    assert problem.source == "nvml"
    return problem


def absents(reading: Reading) -> set[str]:
    gpu = only_gpu(reading)
    return {name for name in GpuReading.__struct_fields__ if getattr(gpu, name) is None} - OF_SOME


def test_every_field_is_what_the_driver_says_in_our_units(node: CollectorProcess) -> None:
    gpu = Gpu(
        uuid="GPU-a",
        memory_total_bytes=80 * 2**30,
        memory_used_bytes=70 * 2**30,
        utilization_gpu_percent=100,
        utilization_memory_percent=43,
        power_mw=345_678,
        power_limit_mw=650_000,
        energy_mj=1_234_500,
        temperature_celsius=61,
        clock_sm_mhz=1755,
        max_clock_sm_mhz=1980,
        clock_memory_mhz=2619,
        max_clock_memory_mhz=2619,
        clock_event_reasons=0x4 | 0x20 | 0x80,
        processes=(Process(30, 3 * 2**30, "graphics"), Process(20, 2**30), Process(10, None, "mps")),
    )
    node.write(Scenario(gpus=(gpu,), driver_version="570.1"))
    reading = node.read(12.5)
    assert reading.problems == ()
    assert only_gpu(reading) == GpuReading(
        hw_id="GPU-a",
        index=0,
        name="NVIDIA H100 80GB HBM3",
        read_ns=12_500_000_000,
        driver_version="570.1",
        compute_capability="9.0",
        memory_total_bytes=80 * 2**30,
        memory_used_bytes=70 * 2**30,
        power_watts=345.678,
        power_limit_watts=650.0,
        energy_joules=1234.5,
        temperature_celsius=61.0,
        sm_clock_hz=1_755_000_000,
        sm_clock_max_hz=1_980_000_000,
        memory_clock_hz=2_619_000_000,
        memory_clock_max_hz=2_619_000_000,
        clock_events=("power_cap", "sw_thermal", "hw_power_brake"),
        busy_ratio=1.0,
        memory_busy_ratio=0.43,
        processes=(
            GpuProcess(pid=10),
            GpuProcess(pid=20, used_memory_bytes=2**30),
            GpuProcess(pid=30, used_memory_bytes=3 * 2**30),
        ),
    )


def test_a_node_without_gpus_is_not_a_node_without_nvml(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=()))
    assert node.read(1) == Reading(gpus=())


def test_a_process_in_two_lists_is_one_process(node: CollectorProcess) -> None:
    both = (Process(7, 70), Process(7, 70, "graphics"), Process(8, None), Process(8, 80, "graphics"))
    node.write(Scenario(gpus=(Gpu(processes=both),)))
    assert only_gpu(node.read(1)).processes == (
        GpuProcess(pid=7, used_memory_bytes=70),
        GpuProcess(pid=8, used_memory_bytes=80),
    )


def test_more_processes_than_there_is_room_for_at_first(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(processes=tuple(Process(pid) for pid in range(1, 200))),)))
    processes = only_gpu(node.read(1)).processes
    assert processes is not None
    assert [process.pid for process in processes] == list(range(1, 200))


def test_clock_event_bits_of_a_newer_driver_are_named_as_unknown(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(clock_event_reasons=0x200 | 0x4000),)))
    reading = node.read(1)
    assert only_gpu(reading).clock_events == ("board_limit",)
    assert the_problem(reading).kind == "unknown_clock_event"
    assert "0x4000" in the_problem(reading).message


def test_older_drivers_without_the_newest_functions_are_read_too(node: CollectorProcess) -> None:
    faults = tuple(
        Fault(function, "FUNCTION_NOT_FOUND")
        for function in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons")
    )
    gpu = Gpu(memory_used_bytes=5 * 2**20, memory_reserved_bytes=2**20, clock_event_reasons=1)
    node.write(Scenario(gpus=(gpu,), faults=faults))
    reading = node.read(1)
    assert reading.problems == ()
    assert only_gpu(reading).memory_used_bytes == 6 * 2**20
    assert only_gpu(reading).clock_events == ("gpu_idle",)


def test_facts_are_kept_for_a_minute(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(power_limit_mw=700_000, power_mw=1_000),)))
    assert only_gpu(node.read(1)).power_limit_watts == 700
    node.write(Scenario(gpus=(Gpu(power_limit_mw=500_000, power_mw=2_000),)))
    soon, later = only_gpu(node.read(60)), only_gpu(node.read(61))
    assert (soon.power_limit_watts, soon.power_watts) == (700, 2)
    assert (later.power_limit_watts, later.power_watts) == (500, 2)


def test_a_fact_that_could_not_be_read_is_asked_for_again_soon(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(),), faults=(Fault("nvmlDeviceGetName", "TIMEOUT"),)))
    for seconds in (1, 2):
        reading = node.read(seconds)
        assert only_gpu(reading).name == "unknown GPU"
        assert kinds(reading) == [("field_error", UUID_0)]
    node.write(Scenario(gpus=(Gpu(),)))
    reading = node.read(6)
    assert (only_gpu(reading).name, reading.problems) == ("NVIDIA H100 80GB HBM3", ())


# --- memory of all ones; and other numbers that cannot be


def test_memory_of_all_ones_is_absent(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(processes=(Process(7, 2**64 - 1),)),)))
    reading = node.read(1)
    assert only_gpu(reading).processes == (GpuProcess(pid=7),)
    assert reading.problems == ()  # it is the driver's word for "not known"


@pytest.mark.parametrize(
    ("gpu", "absent"),
    [
        (Gpu(utilization_gpu_percent=101), "busy_ratio"),
        (Gpu(utilization_gpu_percent=2**32 - 1), "busy_ratio"),
        (Gpu(utilization_memory_percent=0x7FFFFFF0), "memory_busy_ratio"),
        (Gpu(power_mw=2**32 - 1), "power_watts"),
        (Gpu(power_limit_mw=2**32 - 1), "power_limit_watts"),
        (Gpu(temperature_celsius=0x7FFFFFF2), "temperature_celsius"),
        (Gpu(energy_mj=2**63 + 2), "energy_joules"),
        (Gpu(clock_sm_mhz=2**32 - 1), "sm_clock_hz"),
        (Gpu(memory_used_bytes=2**64 - 1), "memory_used_bytes"),
    ],
)
def test_a_number_that_cannot_be_is_absent(node: CollectorProcess, gpu: Gpu, absent: str) -> None:
    node.write(Scenario(gpus=(gpu,)))
    reading = node.read(1)
    assert absents(reading) == {absent}
    assert kinds(reading) == [("bad_reading", UUID_0)]


def test_a_process_cannot_hold_more_than_its_gpu(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(processes=(Process(7, 0x7FFFFFF0 << 20),)),)))
    reading = node.read(1)
    assert only_gpu(reading).processes == (GpuProcess(pid=7),)
    assert kinds(reading) == [("bad_reading", UUID_0)]


# --- process lists


def test_impossible_pids_are_dropped_and_the_binding_is_named(node: CollectorProcess) -> None:
    processes = (Process(7, 70), Process(0, 1), Process(PID_MAX + 1, 2), Process(PID_MAX, 3))
    node.write(Scenario(gpus=(Gpu(processes=processes), Gpu(processes=(Process(9, 9),)))))
    reading = node.read(1)
    assert reading.gpus is not None
    assert reading.gpus[0].processes == (
        GpuProcess(pid=7, used_memory_bytes=70),
        GpuProcess(pid=PID_MAX, used_memory_bytes=3),
    )
    assert reading.gpus[1].processes == (GpuProcess(pid=9, used_memory_bytes=9),)
    problem = the_problem(reading)
    assert (problem.kind, problem.subject) == ("garbled_processes", UUID_0)
    assert f"2 of 4 entries of the process list have impossible PIDs (0, {PID_MAX + 1})" in problem.message
    assert "nvidia-ml-py 1" in problem.message


def test_a_list_with_nothing_to_believe_is_absent_and_not_empty(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(processes=(Process(0, 1), Process(2**32 - 1, 2))),)))
    reading = node.read(1)
    assert only_gpu(reading).processes is None
    assert the_problem(reading).kind == "garbled_processes"


def test_a_process_that_ends_is_left_out_without_a_word(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(processes=(Process(7, 70), Process(8, 80))),)))
    node.read(1)
    node.write(Scenario(gpus=(Gpu(processes=(Process(8, 80),)),)))
    reading = node.read(2)
    assert only_gpu(reading).processes == (GpuProcess(pid=8, used_memory_bytes=80),)
    assert reading.problems == ()


def test_a_process_that_the_node_does_not_have_is_still_the_drivers_word(node: CollectorProcess) -> None:
    # The PID may be gone, or of another namespace: who it is, others find out.
    node.write(Scenario(gpus=(Gpu(processes=(Process(PID_MAX, 70),)),)))
    reading = node.read(1)
    assert only_gpu(reading).processes == (GpuProcess(pid=PID_MAX, used_memory_bytes=70),)
    assert reading.problems == ()


def test_the_kernels_largest_pid_is_read_where_it_stands(tmp_path: Path) -> None:
    assert read_pid_max(tmp_path) == PID_LIMIT
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/pid_max").write_text("99\n")
    assert read_pid_max(tmp_path) == 99


# --- text that is no UTF-8


def test_bytes_that_are_no_utf8_show_as_replacements(node: CollectorProcess) -> None:
    gpu = Gpu(name=b"NVIDIA \xf8 80GB", uuid=b"GPU-\xff1")
    node.write(Scenario(gpus=(gpu,), driver_version=b"580\xe9"))
    reading = node.read(1)
    assert only_gpu(reading).name == "NVIDIA \ufffd 80GB"
    assert only_gpu(reading).hw_id == "GPU-\ufffd1"
    assert only_gpu(reading).driver_version == "580\ufffd"
    assert reading.problems == ()


def test_a_process_name_in_another_code_page_costs_nothing(node: CollectorProcess) -> None:
    name = "caf\u00e9".encode("latin-1")
    node.write(Scenario(gpus=(Gpu(processes=(Process(42, 1),)),), process_names=((42, name),)))
    reading = node.read(1)
    assert only_gpu(reading).processes == (GpuProcess(pid=42, used_memory_bytes=1),)
    assert reading.problems == ()


# --- fields that a device does not have, and fields that fail


@pytest.mark.parametrize(
    ("function", "absent"),
    [
        ("nvmlDeviceGetMemoryInfo*", {"memory_total_bytes", "memory_used_bytes"}),
        ("nvmlDeviceGetPowerUsage", {"power_watts"}),
        ("nvmlDeviceGetEnforcedPowerLimit", {"power_limit_watts"}),
        ("nvmlDeviceGetTotalEnergyConsumption", {"energy_joules"}),
        ("nvmlDeviceGetTemperature*", {"temperature_celsius"}),
        ("nvmlDeviceGetClockInfo", {"sm_clock_hz", "memory_clock_hz"}),
        ("nvmlDeviceGetMaxClockInfo", {"sm_clock_max_hz", "memory_clock_max_hz"}),
        ("nvmlDeviceGetCurrentClocks*", {"clock_events"}),
        ("nvmlDeviceGetUtilizationRates", {"busy_ratio", "memory_busy_ratio"}),
        ("nvmlDeviceGetComputeRunningProcesses*", {"processes"}),
        ("nvmlDeviceGetCudaComputeCapability", {"compute_capability"}),
        ("nvmlSystemGetDriverVersion", {"driver_version"}),
        ("nvmlDeviceGetGraphicsRunningProcesses*", set()),
    ],
)
def test_one_function_that_fails_costs_its_own_fields(
    node: CollectorProcess, function: str, absent: set[str]
) -> None:
    gpus = (Gpu(processes=(Process(7, 70),)),)
    node.write(Scenario(gpus=gpus, faults=(Fault(function, "NOT_SUPPORTED"),)))
    by_nature = node.read(1)
    assert (absents(by_nature), by_nature.problems) == (absent, ())
    for seconds, code in ((100, "UNKNOWN"), (200, "NO_PERMISSION"), (300, 77)):
        node.write(Scenario(gpus=gpus, faults=(Fault(function, code),)))
        failed = node.read(seconds)
        assert absents(failed) == absent
        assert {problem.kind for problem in failed.problems} == {"field_error"}
    node.write(Scenario(gpus=gpus))
    assert absents(node.read(400)) == set()


def test_unified_memory_has_no_memory_of_its_own(node: CollectorProcess) -> None:
    node.write(
        Scenario(gpus=(Gpu(name="NVIDIA GB10", memory_total_bytes=None, processes=(Process(7, 2**36),)),))
    )
    reading = node.read(1)
    gpu = only_gpu(reading)
    assert (gpu.memory_total_bytes, gpu.memory_used_bytes) == (None, None)
    assert gpu.processes == (GpuProcess(pid=7, used_memory_bytes=2**36),)
    assert (gpu.power_watts, reading.problems) == (72, ())
    node.write(Scenario(gpus=(Gpu(memory_total_bytes=0),)))
    assert only_gpu(node.read(2)).memory_total_bytes is None


# --- one lost GPU


@pytest.mark.parametrize("code", ["GPU_IS_LOST", "UNKNOWN"])
def test_a_gpu_lost_under_way_is_absent_and_the_others_go_on(node: CollectorProcess, code: str) -> None:
    assert hw_ids(node.read(1)) == [UUID_0, UUID_1]
    node.write(Scenario(faults=(Fault("*", code, gpu=0),)))
    reading = node.read(2)
    assert hw_ids(reading) == [UUID_1]
    assert kinds(reading) == [("gpu_lost", UUID_0)]
    assert the_problem(reading).message.startswith("GPU 0 does not answer: ")
    node.write(Scenario())
    assert hw_ids(node.read(3)) == [UUID_0, UUID_1]


def test_a_gpu_lost_before_the_start_is_named_by_its_index_and_found_later(node: CollectorProcess) -> None:
    node.write(Scenario(faults=(Fault("*", "GPU_IS_LOST", gpu=1),)))
    reading = node.read(1)
    assert hw_ids(reading) == [UUID_0]
    assert kinds(reading) == [("gpu_lost", "gpu1")]
    node.write(Scenario())
    assert hw_ids(node.read(5.5)) == [UUID_0]
    assert hw_ids(node.read(6)) == [UUID_0, UUID_1]


def test_a_gpu_that_may_not_be_opened_is_said_to_be_so(node: CollectorProcess) -> None:
    node.write(Scenario(faults=(Fault("nvmlDeviceGetHandleByIndex*", "NO_PERMISSION", gpu=1),)))
    reading = node.read(1)
    assert hw_ids(reading) == [UUID_0]
    assert kinds(reading) == [("no_permission", "gpu1")]


def test_when_the_only_gpu_is_lost_it_is_not_a_node_without_gpus(node: CollectorProcess) -> None:
    node.write(Scenario(gpus=(Gpu(),)))
    node.read(1)
    node.write(Scenario(gpus=(Gpu(),), faults=(Fault("*", "GPU_IS_LOST", gpu=0),)))
    reading = node.read(2)
    assert reading.gpus is None
    assert kinds(reading) == [("gpu_lost", UUID_0)]


# --- every call fails after hours; versions differ; no driver; no library


def test_unknown_error_from_every_call_ends_in_a_new_initialisation(node: CollectorProcess) -> None:
    assert hw_ids(node.read(1)) == [UUID_0, UUID_1]
    node.write(Scenario(faults=(Fault("*", "UNKNOWN"),)))
    failed = node.read(2)
    assert failed.gpus is None
    assert kinds(failed)[0] == ("unknown_error", "")
    assert "restart the container" in failed.problems[0].remedy
    assert node.read(2.9) == failed  # not asked again before its time
    node.write(Scenario())
    assert node.read(2.95) == failed
    recovered = node.read(3)
    assert hw_ids(recovered) == [UUID_0, UUID_1]
    assert recovered.problems == ()


def test_attempts_are_spaced_further_and_further_up_to_30_seconds(node: CollectorProcess) -> None:
    node.write(Scenario(faults=(Fault("nvmlInit*", "UNKNOWN"),)))
    now = 0.0
    for delay in (1, 2, 4, 8, 16, 30, 30):
        assert node.read(now).gpus is None  # an attempt, which fails
        node.write(Scenario())
        assert node.read(now + delay - 0.001).gpus is None  # no attempt, or it would succeed
        node.write(Scenario(faults=(Fault("nvmlInit*", "UNKNOWN"),)))
        now += delay
    node.write(Scenario())
    assert hw_ids(node.read(now)) == [UUID_0, UUID_1]
    node.write(Scenario(faults=(Fault("*", "UNKNOWN"),)))
    assert node.read(now + 1).gpus is None
    node.write(Scenario())
    assert hw_ids(node.read(now + 2)) == [UUID_0, UUID_1]  # after a success it begins at 1 s again


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("LIB_RM_VERSION_MISMATCH", "version_mismatch"),
        ("DRIVER_NOT_LOADED", "driver_not_loaded"),
        ("UNINITIALIZED", "nvml_error"),
    ],
)
def test_errors_of_all_of_nvml_are_named_and_mended(node: CollectorProcess, code: str, kind: str) -> None:
    broken = Scenario(faults=(Fault("*", code),))
    node.write(broken)
    at_start = node.read(1)
    assert at_start.gpus is None
    assert kinds(at_start) == [(kind, "")]
    assert the_problem(at_start).remedy
    node.write(Scenario())
    assert hw_ids(node.read(2)) == [UUID_0, UUID_1]
    node.write(broken)
    under_way = node.read(3)
    assert (under_way.gpus, kinds(under_way)) == (None, [(kind, "")])
    node.write(Scenario())
    assert hw_ids(node.read(4)) == [UUID_0, UUID_1]


def test_an_upgraded_driver_is_read_through_its_new_library(nvml_library: Path, tmp_path: Path) -> None:
    def install(version: str) -> str:
        name = f"libnvidia-ml.so.{version}"
        shutil.copy(nvml_library / "libnvidia-ml.so.1", tmp_path / name)
        (tmp_path / "link").symlink_to(name)
        (tmp_path / "link").rename(tmp_path / "libnvidia-ml.so.1")
        return name

    old = install("570.1")
    with collector_process(tmp_path, tmp_path) as process:
        process.write(Scenario(kernel_library=old))
        assert hw_ids(process.read(1)) == [UUID_0, UUID_1]
        process.write(Scenario(kernel_library="libnvidia-ml.so.580.2"))  # the kernel first
        assert [the_problem(process.read(seconds)).kind for seconds in (2, 3)] == ["version_mismatch"] * 2
        assert install("580.2") != old
        assert hw_ids(process.read(5)) == [UUID_0, UUID_1]
        assert hw_ids(process.read(6)) == [UUID_0, UUID_1]


def test_a_driver_that_goes_away_takes_no_value_with_it(node: CollectorProcess) -> None:
    node.read(1)
    node.scenario.unlink()
    reading = node.read(2)
    assert (reading.gpus, the_problem(reading).kind) == (None, "driver_not_loaded")


def test_without_the_library_the_remedy_is_the_driver(tmp_path: Path) -> None:
    with collector_process(None, tmp_path) as process:
        reading = process.read(1)
        assert (reading.gpus, the_problem(reading).kind) == (None, "library_missing")
        assert "Install the NVIDIA driver" in the_problem(reading).remedy
        assert process.read(5) == reading


def test_close_shuts_nvml_down_and_the_next_reading_starts_it(node: CollectorProcess) -> None:
    node.read(1)
    node.write(Scenario(faults=(Fault("nvmlInit*", "UNKNOWN"),)))
    assert hw_ids(node.read(2)) == [UUID_0, UUID_1]  # still initialised
    node.close()
    node.close()
    assert node.read(3).gpus is None  # was shut down: it had to be initialised again
    node.write(Scenario())
    assert hw_ids(node.read(4)) == [UUID_0, UUID_1]


def test_close_survives_a_driver_that_answers_no_more(node: CollectorProcess) -> None:
    node.read(1)
    node.write(Scenario(faults=(Fault("*", "UNKNOWN"),)))
    node.close()


def test_gpus_that_change_place_keep_their_own_numbers(node: CollectorProcess) -> None:
    first, second = Gpu(uuid="GPU-a", power_mw=1_000), Gpu(uuid="GPU-b", power_mw=2_000)
    node.write(Scenario(gpus=(first, second)))
    node.read(1)
    node.write(Scenario(gpus=(second, replace(first, power_mw=3_000))))
    reading = node.read(61)
    assert reading.gpus is not None
    assert [(gpu.hw_id, gpu.power_watts) for gpu in reading.gpus] == [("GPU-b", 2), ("GPU-a", 3)]
