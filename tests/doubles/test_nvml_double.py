"""The NVML double: complete, driven by its file, and believed by tools that were not written for it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.doubles.nvml import (
    BuildError,
    Fault,
    Gpu,
    Process,
    ProcessUtilization,
    Scenario,
    build,
    environment,
)
from tests.doubles.nvml.library import LIBRARY, declared_functions, header, return_codes
from tests.doubles.nvml.scenario import escape


@pytest.fixture(scope="module")
def live_pid() -> Iterator[int]:
    """A process that the witnesses find in /proc."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.communicate()


@pytest.fixture
def scenario_path(tmp_path: Path) -> Path:
    return tmp_path / "scenario"


def run(command: list[str], library: Path, scenario: Path) -> str:
    done = subprocess.run(
        command, env=environment(library, scenario), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def python(code: str, library: Path, scenario: Path) -> str:
    return run([sys.executable, "-c", "import pynvml as n\n" + code], library, scenario)


BUSY = Gpu(
    name="NVIDIA H100 80GB HBM3",
    memory_used_bytes=40 * 2**30,
    memory_reserved_bytes=512 * 2**20,
    utilization_gpu_percent=97,
    utilization_memory_percent=61,
    power_mw=345_000,
    power_limit_mw=650_000,
    temperature_celsius=61,
)


def test_gpustat_prints_what_the_scenario_says(
    nvml_library: Path, scenario_path: Path, live_pid: int
) -> None:
    busy = replace(BUSY, processes=(Process(live_pid, 39 * 2**30),))
    Scenario(gpus=(busy, Gpu(name="NVIDIA L4", uuid="GPU-second"))).write(scenario_path)
    page = json.loads(run([sys.executable, "-m", "gpustat", "--json"], nvml_library, scenario_path))
    assert page["driver_version"] == Scenario().driver_version
    first, second = page["gpus"]
    assert first["name"] == "NVIDIA H100 80GB HBM3"
    assert first["memory.used"] == 40 * 1024  # the second form of the call: without the reserved part
    assert first["memory.total"] == 85_520_809_984 // 2**20
    assert (first["utilization.gpu"], first["power.draw"], first["enforced.power.limit"]) == (97, 345, 650)
    assert first["temperature.gpu"] == 61
    assert [(p["pid"], p["gpu_memory_usage"]) for p in first["processes"]] == [(live_pid, 39 * 1024)]
    assert (second["name"], second["uuid"], second["processes"]) == ("NVIDIA L4", "GPU-second", [])
    assert second["fan.speed"] is None


def test_nvitop_reads_what_the_scenario_says(nvml_library: Path, scenario_path: Path, live_pid: int) -> None:
    busy = replace(
        BUSY,
        processes=(Process(live_pid, 39 * 2**30),),
        utilization_samples=(ProcessUtilization(live_pid, sm=93, memory=55),),
    )
    Scenario(gpus=(busy, Gpu(name="NVIDIA L4"))).write(scenario_path)
    code = """
import json
from nvitop import Device
print(json.dumps([
    [d.name(), d.memory_used(), d.memory_total(), d.gpu_utilization(), d.memory_utilization(),
     d.power_usage(), d.power_limit(), d.temperature(), d.cuda_compute_capability(), d.bus_id(),
     d.sm_clock(), d.max_memory_clock(),
     [[p.pid, p.gpu_memory(), p.gpu_sm_utilization()] for p in d.processes().values()]]
    for d in Device.all()]))
"""
    first, second = json.loads(run([sys.executable, "-c", code], nvml_library, scenario_path))
    assert first[:2] == ["NVIDIA H100 80GB HBM3", 40 * 2**30]
    assert first[2:8] == [85_520_809_984, 97, 61, 345_000, 650_000, 61]
    assert first[8:12] == [[9, 0], "00000000:19:00.0", 1980, 2619]
    assert first[12] == [[live_pid, 39 * 2**30, 93]]
    assert (second[0], second[12]) == ("NVIDIA L4", [])


def test_nvitop_draws_its_screen_from_the_double(
    nvml_library: Path, scenario_path: Path, live_pid: int
) -> None:
    Scenario(gpus=(replace(BUSY, processes=(Process(live_pid, 2**30),)),)).write(scenario_path)
    screen = run([sys.executable, "-m", "nvitop", "--once"], nvml_library, scenario_path)
    for word in ("H100 80GB HBM3", "345W / 650W", "97%", "40.00GiB", "61C", f"{live_pid} C", "1024MiB"):
        assert word in screen


def test_every_function_of_the_header_is_exported(nvml_library: Path) -> None:
    functions = declared_functions(header().read_text(encoding="utf-8"))
    assert len(functions) > 400
    assert {"nvmlInit", "nvmlInit_v2", "nvmlErrorString", "nvmlGpmMetricsGet"} <= set(functions)
    library = ctypes.CDLL(str(nvml_library / LIBRARY))
    assert [name for name in functions if not hasattr(library, name)] == []


def test_a_function_without_an_answer_says_not_supported(nvml_library: Path, scenario_path: Path) -> None:
    Scenario().write(scenario_path)
    code = """
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
for call in (n.nvmlDeviceGetFanSpeed, n.nvmlDeviceGetEncoderUtilization, n.nvmlGpmQueryDeviceSupport):
    try:
        call(h)
    except n.NVMLError_NotSupported:
        print("not supported")
"""
    assert python(code, nvml_library, scenario_path).split("\n")[:3] == ["not supported"] * 3


def test_a_running_process_sees_a_new_scenario(nvml_library: Path, scenario_path: Path) -> None:
    Scenario(gpus=(Gpu(power_mw=100_000),)).write(scenario_path)
    code = """
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print(n.nvmlDeviceGetPowerUsage(h), flush=True)
input()
print(n.nvmlDeviceGetPowerUsage(h))
"""
    command = [sys.executable, "-c", "import pynvml as n\n" + code]
    env = environment(nvml_library, scenario_path)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "100000\n"
        Scenario(gpus=(Gpu(power_mw=200_000),)).write(scenario_path)
        assert process.communicate("\n", timeout=60)[0] == "200000\n"


def test_faults_take_function_device_and_count(nvml_library: Path, scenario_path: Path) -> None:
    faults = (
        Fault("nvmlDeviceGetPowerUsage", "GPU_IS_LOST", gpu=1),
        Fault("nvmlDeviceGetTemperature*", 999, after_calls=2),
        Fault("nvmlGpm*", "NO_PERMISSION"),
    )
    Scenario(faults=faults).write(scenario_path)
    code = """
n.nvmlInit()
a, b = (n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
def show(call, *args):
    try:
        call(*args)
        print("ok")
    except n.NVMLError as error:
        print(error.value)
show(n.nvmlDeviceGetPowerUsage, a)
show(n.nvmlDeviceGetPowerUsage, b)
for _ in range(3):
    show(n.nvmlDeviceGetTemperature, a, 0)
show(n.nvmlGpmQueryDeviceSupport, a)
n.nvmlShutdown()
show(n.nvmlDeviceGetPowerUsage, a)
"""
    lost, unknown, no_permission, uninitialised = "15", "999", "4", "1"
    expected = ["ok", lost, "ok", "ok", unknown, no_permission, uninitialised]
    assert python(code, nvml_library, scenario_path).split() == expected


def test_a_hanging_call_ends_when_the_scenario_changes(nvml_library: Path, scenario_path: Path) -> None:
    Scenario(faults=(Fault("nvmlDeviceGetCount*", delay_ms=3_600_000),)).write(scenario_path)
    code = "n.nvmlInit()\nprint('in', flush=True)\nprint(n.nvmlDeviceGetCount())"
    command = [sys.executable, "-c", "import pynvml as n\n" + code]
    env = environment(nvml_library, scenario_path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        Scenario(gpus=(Gpu(),) * 3).write(scenario_path)
        assert process.communicate(timeout=60)[0] == "3\n"


def test_threads_see_whole_scenarios_only(nvml_library: Path, scenario_path: Path) -> None:
    def node(round_: int) -> Scenario:
        pids = range(1, 2 + round_ % 5 * 40)
        return Scenario(gpus=(Gpu(processes=tuple(Process(pid, pid) for pid in pids)),))

    node(0).write(scenario_path)
    code = """
import sys, threading
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
stop, seen = threading.Event(), set()
def work():
    while not stop.is_set():
        try:
            rows = n.nvmlDeviceGetComputeRunningProcesses(h)
        except n.NVMLError_InsufficientSize:
            continue  # the list grew between the binding's two calls
        assert [(r.pid, r.usedGpuMemory) for r in rows] == [(i, i) for i in range(1, len(rows) + 1)]
        seen.add(len(rows))
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads:
    t.start()
print("ready", flush=True)
sys.stdin.readline()
stop.set()
for t in threads:
    t.join()
print(sorted(seen - {1, 41, 81, 121, 161}), len(seen) > 0)
"""
    command = [sys.executable, "-c", "import pynvml as n\n" + code]
    env = environment(nvml_library, scenario_path)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for round_ in range(40):
            node(round_).write(scenario_path)
        output, errors = process.communicate("\n", timeout=60)
    assert (output, errors) == ("[] True\n", "")


def test_energy_grows_with_the_monotonic_clock(nvml_library: Path, scenario_path: Path) -> None:
    gpu = Gpu(energy_mj=1_000, energy_growth_mj_per_s=350_000, energy_since_ns=0)
    Scenario(gpus=(gpu,)).write(scenario_path)
    code = """
import time
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
before = time.monotonic_ns()
energy = n.nvmlDeviceGetTotalEnergyConsumption(h)
print(before, energy, time.monotonic_ns())
"""
    before, energy, after = map(int, python(code, nvml_library, scenario_path).split())
    assert before * 350_000 // 10**9 <= energy - 1_000 + 1
    assert energy - 1_000 <= after * 350_000 // 10**9 + 1


def test_all_versions_of_the_process_list_agree(nvml_library: Path, scenario_path: Path) -> None:
    Scenario(gpus=(Gpu(processes=(Process(7, 70), Process(8), Process(9, 90, "graphics"))),)).write(
        scenario_path
    )
    code = """
import ctypes
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
for get in (n.nvmlDeviceGetComputeRunningProcesses_v2, n.nvmlDeviceGetComputeRunningProcesses_v3,
            n.nvmlDeviceGetGraphicsRunningProcesses_v3):
    print([(p.pid, p.usedGpuMemory) for p in get(h)])
class V1(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)]
rows, count = (V1 * 4)(), ctypes.c_uint(4)
print(n.nvmlLib.nvmlDeviceGetComputeRunningProcesses(h, ctypes.byref(count), rows))
print([(r.pid, r.memory) for r in rows[:count.value]])
"""
    lines = python(code, nvml_library, scenario_path).splitlines()
    assert lines[:3] == ["[(7, 70), (8, None)]", "[(7, 70), (8, None)]", "[(9, 90)]"]
    assert lines[3:] == ["0", f"[(7, 70), (8, {2**64 - 1})]"]


def test_names_are_bytes_and_come_back_as_written(nvml_library: Path, scenario_path: Path) -> None:
    raw = b"\xf8 back\\slash \xff"
    Scenario(gpus=(Gpu(name=raw),), process_names=((42, "caf\u00e9".encode("latin-1")),)).write(scenario_path)
    code = """
import ctypes
n.nvmlInit()
buffer = ctypes.create_string_buffer(96)
n.nvmlLib.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(0), buffer, 96)
print(buffer.value.hex())
n.nvmlLib.nvmlSystemGetProcessName(42, buffer, 96)
print(buffer.value.hex())
"""
    assert python(code, nvml_library, scenario_path).split() == [raw.hex(), b"caf\xe9".hex()]
    with pytest.raises(ValueError, match="NUL"):
        escape(b"a\0b")


def test_process_utilisation_has_ages_and_an_empty_answer(nvml_library: Path, scenario_path: Path) -> None:
    samples = (ProcessUtilization(7, sm=50, age_ms=0), ProcessUtilization(8, sm=20, age_ms=10_000))
    Scenario(gpus=(Gpu(utilization_samples=samples), Gpu())).write(scenario_path)
    code = """
import time
n.nvmlInit()
a, b = (n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
since = (time.time_ns() // 1000) - 5_000_000
print([s.pid for s in n.nvmlDeviceGetProcessUtilization(a, 0)])
print([s.pid for s in n.nvmlDeviceGetProcessUtilization(a, since)])
try:
    n.nvmlDeviceGetProcessUtilization(b, 0)
except n.NVMLError_NotFound:
    print("not found")
"""
    assert python(code, nvml_library, scenario_path).splitlines() == ["[7, 8]", "[7]", "not found"]


def test_without_a_scenario_there_is_no_driver(nvml_library: Path, scenario_path: Path) -> None:
    code = "try:\n    n.nvmlInit()\nexcept n.NVMLError_DriverNotLoaded:\n    print('no driver')"
    assert python(code, nvml_library, scenario_path) == "no driver\n"


def test_a_scenario_that_makes_no_sense_ends_the_process(nvml_library: Path, scenario_path: Path) -> None:
    scenario_path.write_text("gpu 0\nfault nvmlInit* - NO_SUCH_CODE 0 0\n")
    done = subprocess.run(
        [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"],
        env=environment(nvml_library, scenario_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert f"{scenario_path}:2: unknown return code" in done.stderr


def test_without_gcc_the_build_says_so(
    nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build() == nvml_library  # built before: no compiler is asked for
    monkeypatch.setattr("tests.doubles.nvml.library.FLAGS", ())
    monkeypatch.setattr("tests.doubles.nvml.library.LIBRARY", "libother.so.1")
    with pytest.raises(BuildError, match="gcc is missing"):
        build()


def test_codes_come_from_the_header() -> None:
    codes = return_codes(header().read_text(encoding="utf-8"))
    assert (codes["SUCCESS"], codes["LIB_RM_VERSION_MISMATCH"], codes["UNKNOWN"]) == (0, 18, 999)
