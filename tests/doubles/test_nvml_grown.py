"""The NVML double's GPM, MIG and events: what the header says, and as unforgiving as a driver may be."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.doubles.nvml import (
    EVENT_TYPES,
    Event,
    Fault,
    GpmMetric,
    Gpu,
    MigInstance,
    Process,
    Scenario,
    environment,
)

SECOND = 10**9


@pytest.fixture
def scenario_path(tmp_path: Path) -> Path:
    return tmp_path / "scenario"


def run(command: list[str], library: Path, scenario: Path) -> str:
    done = subprocess.run(
        command,
        env=environment(library, scenario),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str, library: Path, scenario: Path) -> str:
    code = "import json, time\nimport pynvml as n\nn.nvmlInit()\n" + code
    return run([sys.executable, "-c", code], library, scenario)


GPM = """
def means(a, b, *ids):
    m = n.c_nvmlGpmMetricsGet_t()
    m.version, m.numMetrics, m.sample1, m.sample2 = n.NVML_GPM_METRICS_GET_VERSION, len(ids), a, b
    for i, id_ in enumerate(ids):
        m.metrics[i].metricId = id_
    n.nvmlGpmMetricsGet(m)
    return [[m.metrics[i].nvmlReturn, m.metrics[i].value] for i in range(len(ids))]
def sample(h):
    s = n.nvmlGpmSampleAlloc()
    n.nvmlGpmSampleGet(h, s)
    return s
h = n.nvmlDeviceGetHandleByIndex(0)
"""


def test_gpm_gives_the_integral_between_two_refreshes(nvml_library: Path, scenario_path: Path) -> None:
    now = time.monotonic_ns()
    metrics = (
        GpmMetric(1, 100.0),
        GpmMetric(2, ((0, 20.0), (now, 60.0))),
        GpmMetric(5, 12.5, code=3),
        GpmMetric(10, 140737488355328.0),
        GpmMetric(60, 4096.0),
    )
    Scenario(gpus=(Gpu(gpm=metrics), Gpu())).write(scenario_path)
    code = (
        GPM
        + """
print(n.nvmlGpmQueryDeviceSupport(h).isSupportedDevice)
a = sample(h)
time.sleep(0.25)
print(json.dumps(means(a, sample(h), 1, 2, 5, 10, 60, 3)))
b = sample(h)
while True:  # two samples of one refresh
    b, c = c if "c" in dir() else b, sample(h)
    if (pair := means(b, c, 1))[0][1] == 0:
        break
print(pair)
"""
    )
    supported, answer, same_refresh = python(code, nvml_library, scenario_path).splitlines()
    assert supported == "1"
    ratios = json.loads(answer)
    assert [code for code, _ in ratios] == [0, 0, 3, 0, 0, 3]
    assert ratios[0][1] == pytest.approx(100)
    assert 20 < ratios[1][1] <= 60.000001
    assert ratios[3][1] == 140737488355328.0
    assert ratios[4][1] == pytest.approx(4096)
    assert same_refresh == "[[0, 0.0]]"  # success, and it means nothing


def test_instances_are_devices_and_handles_name_a_place(nvml_library: Path, scenario_path: Path) -> None:
    first = MigInstance("MIG-a", 9, processes=(Process(7, 70),), gpm=(GpmMetric(2, 10.0),))
    second = MigInstance("MIG-b", 11, 1, multiprocessors=60, name="H100 MIG 3g.40gb")
    split = Gpu(mig_mode=1, instances=(first, second), utilization_gpu_percent=99)
    Scenario(gpus=(Gpu(mig_mode=0), split)).write(scenario_path)
    code = """
plain, split = (n.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
print(n.nvmlDeviceGetMigMode(plain), n.nvmlDeviceGetMigMode(split), n.nvmlDeviceGetMaxMigDeviceCount(split))
def refused(call, *args):
    try:
        call(*args)
    except n.NVMLError as error:
        return error.value
print(refused(n.nvmlDeviceGetUtilizationRates, split),
      refused(n.nvmlDeviceGetMigDeviceHandleByIndex, split, 2))
for i in (0, 1):
    m = n.nvmlDeviceGetMigDeviceHandleByIndex(split, i)
    print(n.nvmlDeviceGetUUID(m), n.nvmlDeviceGetGpuInstanceId(m), n.nvmlDeviceGetComputeInstanceId(m),
          n.nvmlDeviceGetAttributes(m).multiprocessorCount, n.nvmlDeviceIsMigDeviceHandle(m).value,
          n.nvmlDeviceGetUUID(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m)),
          refused(n.nvmlDeviceGetPowerUsage, m))
print([(p.pid, p.gpuInstanceId) for p in n.nvmlDeviceGetComputeRunningProcesses(split)])
print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID("MIG-b")))
s = n.nvmlGpmSampleAlloc()
print(refused(n.nvmlGpmMigSampleGet, split, 9, s), refused(n.nvmlGpmMigSampleGet, split, 8, s))
"""
    parent = "GPU-00000000-0000-4000-8000-000000000001"
    assert python(code, nvml_library, scenario_path).splitlines() == [
        "[0, 0] [1, 1] 7",
        "3 6",
        f"MIG-a 9 0 16 1 {parent} 3",
        f"MIG-b 11 1 60 1 {parent} 3",
        "[(7, 9)]",
        "MIG-b",
        "None 6",
    ]


def test_nvitop_finds_the_instances(nvml_library: Path, scenario_path: Path) -> None:
    instances = (MigInstance("MIG-a", 9, memory_used_bytes=2**30), MigInstance("MIG-b", 10))
    Scenario(gpus=(Gpu(mig_mode=1, instances=instances), Gpu())).write(scenario_path)
    code = """
from nvitop import Device
print([[d.name(), d.memory_used(),
        [[m.uuid(), m.memory_used(), m.gpu_instance_id()] for m in d.mig_devices()]] for d in Device.all()])
"""
    name = "NVIDIA H100 80GB HBM3"
    found = [["MIG-a", 2**30, 9], ["MIG-b", 0, 10]]
    assert python(code, nvml_library, scenario_path) == f"{[[name, 0, found], [name, 0, []]]}\n"


def test_nvitop_draws_the_screen_of_a_split_gpu(nvml_library: Path, scenario_path: Path) -> None:
    instances = (MigInstance("MIG-a", 9, memory_used_bytes=2**30), MigInstance("MIG-b", 10))
    Scenario(gpus=(Gpu(mig_mode=1, instances=instances), Gpu())).write(scenario_path)
    screen = run([sys.executable, "-m", "nvitop", "--once"], nvml_library, scenario_path)
    for word in ("@ GI/CI: 9/0", "@ GI/CI:10/0", "1024MiB /  9984MiB", "BAR1:       0B /  0%"):
        assert word in screen


def test_an_event_is_told_once_to_those_who_registered_before(
    nvml_library: Path, scenario_path: Path
) -> None:
    now = time.monotonic_ns()
    past = Event(now - SECOND, data=31)
    soon = (Event(now, data=79), Event(now, data=79), Event(now, type=4), Event(now + 3600 * SECOND, data=48))
    before = Gpu(event_types=EVENT_TYPES, events=(past,))
    Scenario(gpus=(before,)).write(scenario_path)
    code = """
import sys
h = n.nvmlDeviceGetHandleByIndex(0)
s = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(h, 8, s)
try:
    n.nvmlDeviceRegisterEvents(h, 0x10, s)
except n.NVMLError_NotSupported:
    print("not this one", flush=True)
input()
for _ in range(3):
    try:
        event = n.nvmlEventSetWait_v2(s, 0)
        print(event.eventType, event.eventData, n.nvmlDeviceGetIndex(event.device))
    except n.NVMLError_Timeout:
        print("none")
"""
    command = [sys.executable, "-c", "import pynvml as n\nn.nvmlInit()\n" + code]
    env = environment(nvml_library, scenario_path)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "not this one\n"
        Scenario(gpus=(Gpu(event_types=EVENT_TYPES, events=(past, *soon)),)).write(scenario_path)
        assert process.communicate("\n", timeout=60)[0].splitlines() == ["8 79 0", "8 79 0", "none"]


def test_a_fault_of_one_gpu_is_a_fault_of_its_instances_and_events(
    nvml_library: Path, scenario_path: Path
) -> None:
    split = Gpu(mig_mode=1, event_types=8, instances=(MigInstance("MIG-a", 9),))
    faults = (Fault("nvmlDeviceGetName", "GPU_IS_LOST", gpu=1), Fault("nvmlEventSetWait*", 999, gpu=1))
    Scenario(gpus=(split, split), faults=faults).write(scenario_path)
    code = """
for i in (0, 1):
    g = n.nvmlDeviceGetHandleByIndex(i)
    s = n.nvmlEventSetCreate()
    n.nvmlDeviceRegisterEvents(g, 8, s)
    for call, args in ((n.nvmlDeviceGetName, (n.nvmlDeviceGetMigDeviceHandleByIndex(g, 0),)),
                       (n.nvmlEventSetWait_v2, (s, 0))):
        try:
            call(*args)
            print("ok")
        except n.NVMLError as error:
            print(error.value)
"""
    assert python(code, nvml_library, scenario_path).split() == ["ok", "10", "15", "999"]
