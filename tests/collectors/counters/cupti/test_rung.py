"""CuptiPmRung on the double: what is read, every fault that others met, and what becomes of the children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.collectors.counters.cupti.conftest import LIMIT_S, Node, gpu, uuid
from tests.doubles.cupti import Scenario

from gpuidle.agent.model import RATIO_STEP, GpuProcess
from gpuidle.collectors.counters.cupti.rung import CuptiPmRung, PmOptions, parse_duty

HOUR_NS = 3_600_000_000_000
IN_ORDER = [
    "cuptiPmSamplingStop",
    "cuptiPmSamplingDisable",
    "cuptiProfilerHostDeinitialize",
    "cuptiProfilerDeInitialize",
]


def gone(pid: int) -> bool:
    """Whether a process has ended; one of ours may still wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def high(time_ns: np.ndarray, period_ns: float, duty: float) -> np.ndarray:
    """Time of [0, t) in which the double's wave is high."""
    whole, rest = np.divmod(time_ns, period_ns)
    return whole * period_ns * duty + np.minimum(rest, period_ns * duty)


def test_samples_are_exact_in_value_and_in_time(node: Node) -> None:
    period, duty = 50e6, 0.3
    node.play(
        Scenario(
            settings={
                "clock_offset_ns": 1_700_000_000 * 10**9,
                "clock_drift_ppm": 20,
                "wave_period_ns": period,
                "wave_duty": duty,
                "high.tensor": 80,
                "low.tensor": 10,
            }
        )
    )
    node.start()
    node.until(lambda: node.samples() > 1500)
    assert not node.kinds() & {"bad_timestamp", "bad_reading"}
    end = np.concatenate([s.end_ns for s in node.series])
    width = np.concatenate([s.width_ns for s in node.series])
    tensor = (
        np.concatenate([s.tensor_active for s in node.series if s.tensor_active is not None]) * RATIO_STEP
    )
    assert (np.diff(end) > 0).all()
    assert (end - width >= np.concatenate(([0], end[:-1]))).all()
    share = (high(end, period, duty) - high(end - width, period, duty)) / width
    truth = 0.1 + 0.7 * share
    # Off by the clock fit's doubt only, at the edges of the wave.
    assert np.mean(np.abs(truth - tensor)) < 0.01
    assert node.status().state == "serving"


def test_the_child_is_stopped_in_the_documented_order(node: Node) -> None:
    node.start()
    node.until_state("serving")
    assert node.rung is not None
    node.rung.close()
    assert node.calls() == ["cuptiPmSamplingEnable", "cuptiPmSamplingStart", *IN_ORDER]


def test_the_first_sample_has_no_start_and_is_never_handed_over(node: Node) -> None:
    node.start()
    node.until(lambda: node.samples() > 200)
    assert node.kinds() == set()
    assert all((series.width_ns < 2_000_000).all() for series in node.series)


def test_impossible_times_are_left_out_and_counted(node: Node) -> None:
    node.play(Scenario(settings={"bad_every": 10}))
    node.start()
    node.until(lambda: node.samples() > 500 and "bad_timestamp" in node.kinds())
    widths = np.concatenate([series.width_ns for series in node.series])
    assert widths.min() > 0
    assert widths.max() < 50_000_000
    node.until(lambda: node.samples() > 1000)
    counted = sum(int(p.message.split()[0]) for p in node.problems if p.kind == "bad_timestamp")
    assert counted == pytest.approx(node.samples() / 9, rel=0.05)


def test_values_that_cannot_be_are_left_out_and_counted(node: Node) -> None:
    node.play(Scenario(settings={"high.tensor": 4294967295}))
    node.start()
    node.until(lambda: "bad_reading" in node.kinds() and node.samples() > 100)
    tensor = np.concatenate([s.tensor_active for s in node.series if s.tensor_active is not None])
    assert tensor.max() * RATIO_STEP < 1.31


def test_an_overflow_starts_sampling_anew_and_is_told(node: Node) -> None:
    node.play(Scenario(settings={"chip": "TU104", "overflow_at": 5}))
    node.start()
    node.until(lambda: "overflow" in node.kinds() and node.samples() > 800)
    assert node.calls()[2:6] == [
        "cuptiPmSamplingStop",
        "cuptiPmSamplingDisable",
        "cuptiPmSamplingEnable",
        "cuptiPmSamplingStart",
    ]


@pytest.mark.parametrize("chip", ["TU104", "GA100"])
def test_chips_without_a_time_trigger_are_sampled_by_their_clock(node: Node, chip: str) -> None:
    node.play(Scenario(settings={"chip": chip, "sys_clock_hz": 0.6e9}))
    node.start()
    node.until(lambda: node.samples() > 200)
    assert np.median(node.series[-1].width_ns) == pytest.approx(2_000_000, rel=0.01)


def test_counters_that_are_held_are_taken_up_when_they_are_free(node: Node) -> None:
    node.play(Scenario(faults=(("cuptiPmSamplingEnable", 7, 0),)))
    node.start()
    status = node.until_state("busy")
    assert "cannot" not in status.message
    assert "dcgmi profiling --pause" in status.remedy
    node.play(Scenario())
    node.until_state("serving")


def test_counters_taken_away_in_the_middle_are_busy_and_the_gap_is_told(node: Node) -> None:
    node.start()
    node.until(lambda: node.samples() > 100)
    node.play(Scenario(faults=(("cuptiPmSamplingDecodeData", 26, 0),)))
    status = node.until_state("busy")
    assert "taken away" in status.message
    node.play(Scenario())
    node.until(lambda: "gap" in node.kinds())
    assert node.status().state == "serving"


@pytest.mark.parametrize(
    ("code", "state", "said"),
    [
        (35, "refused", "CAP_PERFMON"),
        (27, "unsupported", "Turing"),
        (40, "refused", "vGPU"),
        (41, "unsupported", "confidential"),
        (43, "unsupported", "compute instance"),
        (8, "failed", "memory"),
        (14, "unsupported", "driver"),
        (999, "failed", "report"),
    ],
)
def test_each_refusal_has_its_own_state_and_remedy(node: Node, code: int, state: str, said: str) -> None:
    node.play(Scenario(faults=(("cuptiPmSamplingEnable", code, 0),)))
    node.start()
    status = node.until_state(state)
    assert said in status.message + status.remedy
    assert node.samples() == 0


@pytest.mark.parametrize(
    ("settings", "state", "said"),
    [
        ({"passes": 2}, "unsupported", "one pass"),
        ({"chip": "XX100"}, "unsupported", "XX100"),
        ({"compute_capability": 7.0}, "unsupported", "7.0"),
        ({"driver_uuid": "GPU-11111111-0000-4000-8000-000000000000"}, "failed", "was asked for"),
    ],
)
def test_what_cannot_be_sampled_is_told(
    node: Node, settings: dict[str, object], state: str, said: str
) -> None:
    node.play(Scenario(settings=settings))
    node.start()
    assert said in node.until_state(state).message


def test_without_a_library_or_memory_nothing_is_started(node: Node) -> None:
    node.start(PmOptions(library=str(node.folder / "missing.so")))
    assert "cannot be loaded" in node.until_state("refused").message
    assert node.rung is not None
    node.rung.close()
    node.devices = [msgspec.structs.replace(gpu(), memory_total_bytes=2**30, memory_used_bytes=2**30 - 2**20)]
    node.start()
    assert "1 MiB left" in node.until_state("refused").message
    assert node.rung.pids() == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_readings_resume_after_a_child_was_killed_and_the_gap_is_marked(
    node: Node, number: signal.Signals
) -> None:
    node.start()
    node.until(lambda: node.samples() > 100)
    killed = node.child()
    os.kill(killed, number)
    node.until(lambda: "gap" in node.kinds())
    (problem,) = [problem for problem in node.problems if problem.kind == "gap"]
    assert f"signal {number}" in problem.message
    assert problem.subject == uuid(0)
    # The bound is on what is missing in the data, whatever this test waited for.
    end = np.concatenate([series.end_ns for series in node.series])
    width = np.concatenate([series.width_ns for series in node.series])
    assert np.max((end - width)[1:] - end[:-1]) < 5e9
    assert node.child() != killed
    wait_until_gone(killed)


def test_a_crash_in_the_library_costs_its_device_only(node: Node) -> None:
    node.devices = [gpu(0), gpu(1)]
    node.play(Scenario(faults=(("cuptiPmSamplingDecodeData", "crash", 8, uuid(1)),)))
    node.start()
    node.until(lambda: "gap" in node.kinds())
    assert {problem.subject for problem in node.problems if problem.kind == "gap"} == {uuid(1)}
    end = np.concatenate([series.end_ns for series in node.series if series.hw_id == uuid(0)])
    assert np.max(np.diff(end)) < 500_000_000


def test_a_call_that_hangs_costs_its_device_only_and_is_ended(node: Node) -> None:
    node.devices = [gpu(0), gpu(1)]
    node.start()
    node.until(lambda: node.samples(0) > 100 and node.samples(1) > 100)
    hung = node.child(1)
    node.play(Scenario(faults=(("cuptiPmSamplingDecodeData", "hang", 0, uuid(1)),)))
    node.until(lambda: node.status(1).state == "lost")
    assert node.status(0).state == "serving"
    wait_until_gone(hung)
    node.play(Scenario())
    node.until(lambda: "gap" in node.kinds() and node.status(1).state == "serving")


def test_a_session_of_another_process_is_left_alone(node: Node) -> None:
    locked = Scenario(settings={"lock_folder": node.folder})
    node.play(locked)
    other = CuptiPmRung(node.options(), node.proc)
    node.start()
    node.until_state("serving")
    try:
        deadline = time.monotonic() + LIMIT_S
        while (status := other.read(time.monotonic_ns(), node.devices).status[0]).state == "starting":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert status.state == "busy"
        before = node.samples()
        node.until(lambda: node.samples() > before + 100)
        assert node.status().state == "serving"
    finally:
        other.close()


def test_it_yields_to_nsight_and_returns(node: Node) -> None:
    node.start()
    node.until_state("serving")
    nsight = node.proc / "4711"
    nsight.mkdir()
    (nsight / "comm").write_text("nsys\n")
    status = node.until_state("busy")
    assert "nsys (PID 4711)" in status.message
    node.until(lambda: node.rung is not None and not node.rung.pids())
    assert node.calls()[-4:] == IN_ORDER
    (nsight / "comm").write_text("bash\n")
    node.until(lambda: "gap" in node.kinds())
    assert node.status().state == "serving"


@pytest.mark.parametrize("maps", ["", "7f00-7f01 r-xp 0 0:0 1 /usr/lib/libdcgmmoduleprofiling.so.4\n"])
def test_it_never_takes_the_counters_from_a_dcgm_profiler(node: Node, maps: str) -> None:
    dcgm = node.proc / "12"
    dcgm.mkdir()
    (dcgm / "comm").write_text("nv-hostengine\n")
    (dcgm / "maps").write_text(maps)
    node.start()
    if maps:
        assert "nv-hostengine (PID 12)" in node.until_state("busy").message
        assert node.calls() == []
    else:
        node.until_state("serving")


def test_bursts_let_go_of_the_counters_in_between(node: Node) -> None:
    on_s, period_s = parse_duty("0.5s/1.5s")
    node.start(node.options(duty_on_s=on_s, duty_period_s=period_s))
    node.until(lambda: node.calls().count("cuptiPmSamplingEnable") >= 3)
    end = np.concatenate([series.end_ns for series in node.series])
    pauses = np.diff(end)[np.diff(end) > 100_000_000]
    assert len(pauses) >= 1
    assert (pauses > 400_000_000).all()
    assert "gap" not in node.kinds()
    assert node.calls().count("cuptiPmSamplingDisable") >= 2
    node.until(lambda: node.status().state == "starting")
    assert "burst" in node.status().message


@pytest.mark.parametrize("text", ["1/30", "1s", "30s/30s", "0s/1s", "1s/30s "])
def test_a_burst_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"burst|not ON"):
        parse_duty(text)


def test_a_mig_instance_is_sampled_under_its_own_id(node: Node) -> None:
    instance = "MIG-00000000-0000-4000-8000-00000000000a"
    node.devices = [msgspec.structs.replace(gpu(), hw_id=instance, parent_hw_id=uuid(0), instance_id=1)]
    node.start()
    node.until(lambda: len(node.series) > 0)
    assert {series.hw_id for series in node.series} == {instance}


def test_a_device_that_is_gone_is_let_go_of(node: Node) -> None:
    node.devices = [gpu(0), gpu(1)]
    node.start()
    node.until(lambda: node.samples(0) > 0 and node.samples(1) > 0)
    left = node.child(1)
    node.devices = [gpu(0)]
    node.until(lambda: gone(left))
    assert [row.hw_id for row in node.read().status] == [uuid(0)]


AGENT = """
import sys, time
from pathlib import Path
from gpuidle.agent.model import GpuReading
from gpuidle.collectors.counters.cupti.rung import CuptiPmRung, PmOptions
library, proc, hw_id = sys.argv[1:]
rung = CuptiPmRung(PmOptions(library=library), Path(proc))
device = GpuReading(hw_id=hw_id, index=0, name="GPU", read_ns=0)
while not rung.read(time.monotonic_ns(), [device]).series:
    time.sleep(0.05)
print(rung.pids()[hw_id], flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("hanging", [False, True])
def test_killing_the_agent_ends_the_child_in_order(node: Node, hanging: bool) -> None:
    command = [sys.executable, "-c", AGENT, str(node.library / "libcupti.so.13"), str(node.proc), uuid(0)]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent, agent.stdout:
        child = int(agent.stdout.readline())
        if hanging:
            node.play(Scenario(faults=(("cuptiPmSamplingDecodeData", "hang", 0),)))
            time.sleep(0.3)
        agent.kill()
        wait_until_gone(child)
    if not hanging:
        assert node.calls()[-4:] == IN_ORDER


def test_sigterm_of_the_child_ends_its_session_in_order(node: Node) -> None:
    node.start()
    node.until_state("serving")
    child = node.child()
    os.kill(child, signal.SIGTERM)
    wait_until_gone(child)
    assert node.calls()[2:6] == IN_ORDER


ENGINE = """
import sys
print("up", flush=True)
sys.stdin.readline()
print(open("/proc/self/maps").read().count("libcupti"), flush=True)
print(open("/proc/self/status").read().split("TracerPid:")[1].split()[0], flush=True)
"""


def test_nothing_is_injected_into_the_engine(node: Node) -> None:
    """The sampler lives beside the engine: no library, tracer, descriptor or variable reaches it."""
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    with engine, engine.stdin, engine.stdout:
        assert engine.stdout.readline() == "up\n"
        before = {name: read_proc(engine.pid, name) for name in ("environ", "cmdline")}
        descriptors = list_descriptors(engine.pid)
        holder = GpuProcess(pid=engine.pid, used_memory_bytes=2**30)
        node.devices = [msgspec.structs.replace(gpu(), processes=(holder,))]
        node.start(PmOptions())
        node.until(lambda: node.samples() > 500)
        assert {name: read_proc(engine.pid, name) for name in before} == before
        assert list_descriptors(engine.pid) == descriptors
        child = node.child()
        assert b"libcupti" in read_proc(child, "maps")
        assert not {b"CUDA_INJECTION64_PATH", b"LD_PRELOAD", b"NVTX_INJECTION64_PATH"} & {
            row.partition(b"=")[0] for row in read_proc(child, "environ").split(b"\0")
        }
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert engine.stdout.readline().strip() == "0"
        assert engine.stdout.readline().strip() == "0"
    assert b"libcupti" not in Path("/proc/self/maps").read_bytes()


def list_descriptors(pid: int) -> list[str]:
    return sorted(entry.name for entry in Path(f"/proc/{pid}/fd").iterdir())


def read_proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()
