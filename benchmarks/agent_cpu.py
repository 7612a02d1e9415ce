"""CPU time and memory of the whole agent at its defaults beside nvitop's exporter, on the same double.

    python -m venv /tmp/exporter && /tmp/exporter/bin/pip install nvitop-exporter
    python -m benchmarks.agent_cpu --exporter /tmp/exporter/bin/nvitop-exporter

Both run at the same time for the same seconds, see the same GPUs with the same processes, and are scraped
every five seconds. The agent does all it does by default: NVML, discovery, a scripted vLLM's counters each
second (a recorded page), analysis, and the Prometheus endpoint. The double answers in about a microsecond
where a driver takes longer, for both alike.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
from benchmarks.nvml_cpu import WARM_UP_S, cpu_ns, exported_devices, free_port, node, running
from tests.doubles.nvml import build, environment

PAGE = Path(__file__).parents[1] / "tests" / "data" / "vllm" / "metrics_4_mfu_during_40conc.txt"

# Serves the recorded page, filtered as prometheus_client's own server would.
ENGINE = """
import sys
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

class Page:
    def collect(self):
        return list(text_string_to_metric_families(open(sys.argv[2]).read()))

registry = CollectorRegistry()
registry.register(Page())
start_http_server(int(sys.argv[1]), "127.0.0.1", registry=registry)
import threading; threading.Event().wait()
"""


def scrape(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        answer.read()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=60, help="length of the measurement")
    parser.add_argument("--exporter", help="the nvitop-exporter command to compare with")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sleeper = [sys.executable, "-c", "import time; time.sleep(86400)"]
        pids = [stack.enter_context(running(sleeper, None)).pid for _ in range(options.gpus)]
        uuids = [f"GPU-benchmark-{index}" for index in range(options.gpus)]
        node(pids, uuids).write(folder / "scenario")
        env = environment(build(), folder / "scenario")
        engine_port, port = free_port(), free_port()
        stack.enter_context(running([sys.executable, "-c", ENGINE, str(engine_port), str(PAGE)], None))
        command = [sys.executable, "-m", "gpuidle", "run", "--prometheus", f"127.0.0.1:{port}"]
        command += ["--engine-url", f"http://127.0.0.1:{engine_port}"]
        subjects = {"gpuidle run": (stack.enter_context(running(command, env)).pid, port)}
        if options.exporter:
            other = free_port()
            exporter = [options.exporter, "--hostname", "127.0.0.1", "--port", str(other)]
            subjects["nvitop-exporter"] = (stack.enter_context(running(exporter, env)).pid, other)
        time.sleep(WARM_UP_S)
        for name, (_, each) in subjects.items():
            shown = exported_devices(each, uuids)
            if shown != options.gpus:
                print(f"{name} shows {shown} of {options.gpus} devices: no comparison", file=sys.stderr)
                return 1
        before = {name: cpu_ns(pid) for name, (pid, _) in subjects.items()}
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < options.seconds:
            for _, each in subjects.values():
                scrape(each)
            time.sleep(5)
        print(f"{options.gpus} GPUs, one engine, {elapsed:.0f} s at the defaults, scraped every 5 s")
        print(f"{'':20}{'CPU':>22}{'memory':>12}")
        for name, (pid, _) in subjects.items():
            used_ms = (cpu_ns(pid) - before[name]) / 1e6
            memory = psutil.Process(pid).memory_info().rss / 1e6
            print(f"{name:20}{used_ms / elapsed:8.2f} ms/s {used_ms / elapsed / 10:6.2f} %{memory:9.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
