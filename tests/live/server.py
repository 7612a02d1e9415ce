"""A real vLLM on CPU that serves a tiny random model: started, asked, stopped."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil

MODEL = Path(__file__).parent / "tiny-llama"
HEALTH_TIMEOUT_S = 300
CHUNK_TOKENS = 256
"""The server's token budget of a step."""


class Ask(NamedTuple):
    """One completion: so many random prompt tokens in, so many tokens out."""

    prompt_tokens: int
    output_tokens: int


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Client:
    """Asks for completions on a port."""

    def __init__(self, port: int) -> None:
        self.port = port
        # Prefix caching is on: every prompt is drawn anew, so that none is a hit.
        self._random = random.Random()

    def complete(self, ask: Ask) -> int:
        """Ask for one completion; return the tokens that came."""
        prompt = [self._random.randrange(3, 512) for _ in range(ask.prompt_tokens)]
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = json.loads(connection.getresponse().read())
        tokens: int = answer["usage"]["completion_tokens"]
        return tokens

    def complete_beside(self, asks: Sequence[Ask], other: Ask, concurrency: int) -> list[Ask]:
        """Complete `asks` at once, with `other` again and again beside them; return all that was asked."""
        done = threading.Event()

        def again() -> int:
            count = 0
            while not done.is_set():
                assert self.complete(other) == other.output_tokens
                count += 1
            return count

        with ThreadPoolExecutor(concurrency) as beside:
            counts = [beside.submit(again) for _ in range(concurrency)]
            try:
                self.complete_all(asks, len(asks))
            finally:
                done.set()
        return [*asks, *([other] * sum(count.result() for count in counts))]

    def complete_all(self, asks: Sequence[Ask], concurrency: int) -> None:
        with ThreadPoolExecutor(concurrency) as pool:
            done = list(pool.map(self.complete, asks))
        assert done == [ask.output_tokens for ask in asks]


class Server:
    """One vLLM process tree."""

    def __init__(self, python: str, log: Path, *flags: str) -> None:
        self.port = free_port()
        self.log = log
        self.client = Client(self.port)
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--model", str(MODEL), "--served-model-name", "tiny", "--load-format", "dummy",
            "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16",
            "--max-num-batched-tokens", str(CHUNK_TOKENS),
            "--num-gpu-blocks-override", "1024", "--block-size", "32", "--enforce-eager", *flags,
        ]  # fmt: skip
        self._output = log.open("wb")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + HEALTH_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
                try:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        return
                except (OSError, http.client.HTTPException):
                    pass
            time.sleep(0.5)
        raise RuntimeError(f"vLLM did not become healthy:\n{self.log.read_text(errors='replace')[-4000:]}")

    def give_way(self) -> None:
        """Keep the engine's core and worker on one CPU, and leave the others to its HTTP server and to us.

        Both spin while they wait for each other: on two cores others were seen to wait 40 s for their turn.
        """
        cpus = sorted(os.sched_getaffinity(0))
        for pid in self.worker_pids() if len(cpus) > 1 else ():
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, cpus[:1])

    def worker_pids(self) -> list[int]:
        """The processes that would hold the GPU."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if "VLLM::" in " ".join(child.cmdline() or [child.name()])]

    def counter(self, name: str) -> float:
        """The sum of a counter on the server's own page."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{"))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    child.kill()
                self.process.kill()
                self.process.wait(10)
        self._output.close()


if __name__ == "__main__":
    # A load from a process of its own: PORT PROMPT_TOKENS OUTPUT_TOKENS REQUESTS CONCURRENCY
    port, prompt, output, requests, concurrency = map(int, sys.argv[1:])
    client = Client(port)
    client.complete_all([Ask(prompt, output)] * requests, concurrency)
