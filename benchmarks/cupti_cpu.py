"""CPU time of PM sampling end to end, against the double of libcupti.

Run from the root of the repository:

    python -m benchmarks.cupti_cpu --gpus 8 --rates 1000,5000,10000 --seconds 10

End to end is: children that decode ten times a second and write columns to shared memory, the thread that
looks after them, converts, and looks for other profilers among this machine's processes, and a reader that
takes series once a second, as the sampler does. CPU time is the kernel's own count for the processes. The
double makes samples in about a microsecond: CUPTI's real decoding comes on top, and only a GPU can tell how
much that is. `--one` samples all GPUs in one child process instead (in a benchmark only), for the choice
between the two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.doubles.cupti import Scenario, build, environment

from gpuidle.agent.model import GpuReading
from gpuidle.collectors.counters.cupti.child import COLUMNS, DECODE_HZ
from gpuidle.collectors.counters.cupti.ring import create, layout
from gpuidle.collectors.counters.cupti.rung import CuptiPmRung, PmOptions

WARM_UP_S = 3

ALL_IN_ONE = """
import json, sys, time
from gpuidle.collectors.counters.cupti.library import Cuda, Cupti
from gpuidle.collectors.counters.cupti.ring import Layout, RingWriter
from gpuidle.collectors.counters.cupti.session import Session
orders = json.loads(sys.argv[1])
cuda, cupti = Cuda(), Cupti(orders["library"])
sessions = []
for descriptor in orders["descriptors"]:
    ring = RingWriter(descriptor, Layout(*orders["layout"]))
    rates = {key: orders[key] for key in ("rate_hz", "decode_hz")}
    sessions.append(Session(cupti, ring, buffer_bytes=10**8, **rates))
    sessions[-1].start()
due = time.monotonic()
while True:
    for session in sessions:
        session.decode()
    cupti.timestamp()
    due = max(due + 1 / orders["decode_hz"], time.monotonic())
    time.sleep(max(0, due - time.monotonic()))
"""


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process so far (the clock of clock_getcpuclockid(3))."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def resident_mib(pid: int) -> float:
    """Return what a process has for itself, in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def children(gpus: int, rate_hz: int, seconds: float, library: str) -> None:
    """Measure one child a GPU, with the parent's work."""
    devices = [
        GpuReading(hw_id=f"GPU-00000000-0000-4000-8000-{i:012x}", index=i, name="double", read_ns=0)
        for i in range(gpus)
    ]
    rung = CuptiPmRung(PmOptions(rate_hz=rate_hz, library=library, memory_limit_bytes=2**30))
    end = time.monotonic() + WARM_UP_S
    while time.monotonic() < end:
        rung.read(time.monotonic_ns(), devices)
        time.sleep(0.2)
    pids = rung.pids()
    before = {pid: cpu_ns(pid) for pid in pids.values()}
    parent, start, samples = time.process_time_ns(), time.monotonic_ns(), 0
    while time.monotonic_ns() - start < seconds * 1e9:
        time.sleep(1)
        reading = rung.read(time.monotonic_ns(), devices)
        samples += sum(len(series) for series in reading.series)
        for status in {(row.state, row.message) for row in reading.status if row.state != "serving"}:
            print("  ", *status)
        for problem in reading.problems:
            print("  ", problem.kind, problem.message)
    took = time.monotonic_ns() - start
    used = sum(cpu_ns(pid) - before[pid] for pid in pids.values()) if rung.pids() == pids else -1
    own = time.process_time_ns() - parent
    memory = sum(resident_mib(pid) for pid in pids.values())
    rung.close()
    expected = gpus * rate_hz * took / 1e9
    print(
        f"one child a GPU  {rate_hz:6d} Hz: children {used / took:7.2%}  parent {own / took:6.2%}  "
        f"sum {(used + own) / took:7.2%} of a core   samples {samples / expected:6.1%} of {expected:.0f}   "
        f"children's memory {memory:.0f} MiB"
    )


def one_child(gpus: int, rate_hz: int, seconds: float, library: str) -> None:
    """Measure one child for all GPUs, without the parent's work."""
    import json

    of = layout(rate_hz, COLUMNS)
    rings = [create(of) for _ in range(gpus)]
    orders = json.dumps(
        {
            "library": library,
            "descriptors": rings,
            "layout": list(of),
            "rate_hz": rate_hz,
            "decode_hz": DECODE_HZ,
        }
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-0"}
    process = subprocess.Popen([sys.executable, "-c", ALL_IN_ONE, orders], pass_fds=rings, env=env)
    try:
        time.sleep(WARM_UP_S)
        before, start = cpu_ns(process.pid), time.monotonic_ns()
        time.sleep(seconds)
        used, took = cpu_ns(process.pid) - before, time.monotonic_ns() - start
        print(
            f"one for all      {rate_hz:6d} Hz: child    {used / took:7.2%} of a core, without the parent's "
            f"part   memory {resident_mib(process.pid):.0f} MiB"
        )
    finally:
        process.kill()
        process.wait()
        for ring in rings:
            os.close(ring)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rates", default="1000,5000,10000")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--one", action="store_true", help="also measure one child for all GPUs")
    options = parser.parse_args()
    folder = build()
    library = str(folder / "libcupti.so.13")
    with tempfile.TemporaryDirectory() as scratch:
        scenario = Path(scratch) / "scenario"
        Scenario().write(scenario)
        os.environ.update(environment(folder, scenario))
        print(f"{options.gpus} GPUs x {COLUMNS} metrics, decoded at {DECODE_HZ} Hz, {options.seconds:.0f} s")
        for rate_hz in map(int, options.rates.split(",")):
            children(options.gpus, rate_hz, options.seconds, library)
            if options.one:
                one_child(options.gpus, rate_hz, options.seconds, library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
