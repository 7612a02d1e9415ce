"""CPU time of the NVML rungs beside nvitop's exporter at its default interval, on the same double.

Three readers: the basics at 1 Hz (NvmlCollector); the ladder with them and GPM, which samples each GPU five
times a second; and the exporter. The last column is the cost of one sample of one GPU.

Run from the root of the repository, with the exporter in an environment of its own:

    python -m venv /tmp/exporter && /tmp/exporter/bin/pip install nvitop-exporter
    python -m benchmarks.nvml_cpu --exporter /tmp/exporter/bin/nvitop-exporter

Both run at the same time for the same seconds and see the same GPUs with the same processes. Their CPU time
is the kernel's own count for the process. The exporter also reads the host and the processes, which the
collector leaves to others: this compares NVML readers, not agents. The double answers in about a
microsecond where a driver takes longer, for both alike.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.doubles.nvml import (
    EVENT_TYPES,
    GpmMetric,
    Gpu,
    Process,
    ProcessUtilization,
    Scenario,
    build,
    environment,
)

COLLECTOR = """
import sys, time
from gpuidle.collectors.counters.nvml import NvmlCollector
collector, due = NvmlCollector(), time.monotonic()
gpus = int(sys.argv[1])
while True:
    reading = collector.read(time.monotonic_ns())
    assert len(reading.gpus) == gpus and not reading.problems, reading
    due += 1
    time.sleep(max(0, due - time.monotonic()))
"""

LADDER = """
import sys, time
from gpuidle.collectors.counters.gpm import GpmRung
from gpuidle.collectors.counters.ladder import LadderCollector
from gpuidle.collectors.counters.nvml import NvmlCollector
ladder, due = LadderCollector(NvmlCollector(), [GpmRung()]), time.monotonic()
gpus, tick = int(sys.argv[1]), 0
while True:
    reading = ladder.read(time.monotonic_ns())
    assert len(reading.gpus) == gpus, reading
    samples = sum(len(series) for series in reading.counters)
    assert tick < 2 or samples >= 2 * gpus, (samples, reading.problems)
    tick, due = tick + 1, due + 1
    time.sleep(max(0, due - time.monotonic()))
"""

PER_READ = """
import sys, time
from gpuidle.collectors.counters.nvml import NvmlCollector
collector = NvmlCollector()
gpus, reads = int(sys.argv[1]), 300
assert len(collector.read(0).gpus) == gpus
start = time.process_time_ns()
for second in range(1, reads + 1):
    collector.read(second * 1_000_000_000)
print((time.process_time_ns() - start) / reads)
"""

WARM_UP_S = 5


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process so far (the clock of clock_getcpuclockid(3))."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], env: dict[str, str] | None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def exported_devices(port: int, uuids: list[str]) -> int:
    """Return how many of the devices the exporter shows: one that shows none is cheap and no comparison."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return sum(uuid in page for uuid in uuids)


def node(pids: list[int], uuids: list[str]) -> Scenario:
    """Return a node that serves: each GPU busy, with one live process."""
    busy = Gpu(
        memory_used_bytes=70 * 2**30,
        utilization_gpu_percent=98,
        utilization_memory_percent=60,
        power_mw=400_000,
        energy_growth_mj_per_s=400_000,
        clock_event_reasons=0x4,
        event_types=EVENT_TYPES,
        gpm=(GpmMetric(1, 100.0), GpmMetric(2, 80.0), GpmMetric(5, 3.0), GpmMetric(10, 70.0)),
    )
    return Scenario(
        gpus=tuple(
            replace(
                busy,
                uuid=uuid,
                processes=(Process(pid, 69 * 2**30),),
                utilization_samples=(ProcessUtilization(pid, sm=97),),
            )
            for pid, uuid in zip(pids, uuids, strict=True)
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=30, help="length of the measurement")
    parser.add_argument("--exporter", help="the nvitop-exporter command to compare with")
    options = parser.parse_args()

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sleeper = [sys.executable, "-c", "import time; time.sleep(86400)"]
        pids = [stack.enter_context(running(sleeper, None)).pid for _ in range(options.gpus)]
        uuids = [f"GPU-benchmark-{index}" for index in range(options.gpus)]
        node(pids, uuids).write(folder / "scenario")
        env = environment(build(), folder / "scenario")

        count = str(options.gpus)
        done = subprocess.run(
            [sys.executable, "-c", PER_READ, count], env=env, check=True, capture_output=True, text=True
        )
        per_read_ms = float(done.stdout) / 1e6

        readers = {
            "gpuidle NVML basics, 1 Hz": [sys.executable, "-c", COLLECTOR, count],
            "gpuidle ladder: + GPM at 5 Hz": [sys.executable, "-c", LADDER, count],
        }
        per_s = {name: rate * options.gpus for name, rate in zip(readers, (1, 1 + 5), strict=True)}
        port = free_port()
        if options.exporter:
            readers["nvitop-exporter, default 1 s"] = [options.exporter, "--port", str(port)]
            per_s["nvitop-exporter, default 1 s"] = options.gpus
        processes = {name: stack.enter_context(running(command, env)) for name, command in readers.items()}
        time.sleep(WARM_UP_S)
        if options.exporter and exported_devices(port, uuids) != options.gpus:
            print("the exporter does not show every device", file=sys.stderr)
            return 1
        start = time.monotonic_ns()
        before = {name: cpu_ns(process.pid) for name, process in processes.items()}
        time.sleep(options.seconds)
        elapsed = time.monotonic_ns() - start
        print(
            f"{options.gpus} GPUs with one process each, {elapsed / 1e9:.1f} s after {WARM_UP_S} s of warm-up"
        )
        print(f"one read in a tight loop: {per_read_ms:.3f} ms of CPU\n")
        print(f"{'reader':32}{'CPU s':>10}{'ms per s':>12}{'% of a core':>14}{'us a sample':>14}")
        for name, process in processes.items():
            if process.poll() is not None:
                print(f"{name:32} ended with code {process.returncode}", file=sys.stderr)
                return 1
            used = cpu_ns(process.pid) - before[name]
            load = used / elapsed
            print(
                f"{name:32}{used / 1e9:10.3f}{load * 1000:12.2f}{load * 100:14.3f}"
                f"{load * 1e6 / per_s[name]:14.0f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
