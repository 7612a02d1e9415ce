"""CPU that a scrape takes in a real vLLM's API server, beside `/health` and the whole page.

`python -m benchmarks.scrape_cost --vllm PYTHON` starts the server (tests/live/server.py: a tiny model on the
CPU), gives it some work so that every series exists, and asks it in batches, one kind after the other. CPU is
the server process's own, by the kernel's count; of the batches the least and the median are printed, since
other work on the machine adds to a batch and never takes away.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.live.server import Ask, Server

from gpuidle.collectors.engines.vllm_page import FAST, QUICK, SLOW

BATCHES, REQUESTS = 40, 100


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process since its start: all of its threads."""
    return sum(
        int(schedstat.read_text().split()[0]) for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def batch_ms(pid: int, connection: http.client.HTTPConnection, target: str) -> float:
    """Return the server's CPU per request, in ms; the connection is kept, as gpuidle keeps its own."""
    before = cpu_ns(pid)
    for _ in range(REQUESTS):
        connection.request("GET", target)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    return (cpu_ns(pid) - before) / REQUESTS / 1e6


def filtered(names: Sequence[str]) -> str:
    # As collectors/engines/vllm.py asks: without the slash another route answers, which ignores the filter.
    return "/metrics/?" + "&".join(f"name[]={name}" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="interpreter with vLLM")
    python = parser.parse_args().vllm
    with tempfile.TemporaryDirectory() as folder:
        server = Server(python, Path(folder) / "server.log")
        try:
            server.wait_until_healthy()
            server.client.complete_all([Ask(300, 20)] * 8, 4)
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            kinds = {
                "/health": "/health",
                "what gpuidle reads each second": filtered(FAST),
                "the same without the histogram of steps": filtered(
                    [name for name in FAST if not name.endswith("_bucket")]
                ),
                "that, and what it reads every ten seconds": filtered((*FAST, *SLOW)),
                "what it reads where it asks more than twice a second": filtered((*FAST, *QUICK)),
                "the whole page": "/metrics",
            }
            seen: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(BATCHES):
                for kind, target in kinds.items():
                    requests = seen[kind]
                    requests.append(batch_ms(server.process.pid, connection, target))
                    time.sleep(0.01)
        finally:
            server.stop()
    for kind, found in seen.items():
        print(f"{kind}: {min(found):.2f} ms at least, {statistics.median(found):.2f} median")
    fast, slow = (min(seen[kind]) for kind in list(kinds)[1:4:2])
    print(f"gpuidle: {(9 * fast + slow) / 10:.2f} ms of the server's CPU a second (limit 1.00)")


if __name__ == "__main__":
    main()
