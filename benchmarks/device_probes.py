"""The sections of `device_check` about probes: functions of driver and runtime, and who calls them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.device_bench import Bench, Row
from benchmarks.device_uprobe import Counter, first_bytes, mapped

DRIVER_CALLS = [
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuGraphLaunch",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuMemcpyAsync",
    "cuMemcpyDtoHAsync_v2",
]
RUNTIME_CALLS = [
    "cudaLaunchKernel",
    "__cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaGraphLaunch",
    "cudaEventSynchronize",
    "cudaStreamSynchronize",
    "cudaMemcpyAsync",
]
TIMES = 500

TARGET = f"""
import torch
a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
b = torch.empty_like(a)
for _ in range(3):
    torch.matmul(a, a, out=b)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(10):
        b.add_(1)
print("up", flush=True)
input()
for _ in range({TIMES}):
    graph.replay()
    torch.matmul(a, a, out=b)
    b.sum().item()
print("done", flush=True)
input()
"""
TARGET_REHEARSED = f"""
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print("up", flush=True)
input()
for _ in range({TIMES}):
    cuda.cuDeviceGetCount(ctypes.byref(count))
print("done", flush=True)
input()
"""


def uprobes(bench: Bench) -> list[Row]:
    """Which functions of the driver and the runtime graph replays and cuBLAS hit, counted by uprobes."""
    script = TARGET_REHEARSED if bench.rehearse else TARGET
    command = [sys.executable, "-c", script]
    rows = [
        Row(
            what="each round of the target",
            got=f"1 graph replay, 1 cuBLAS product, 1 .item(); {TIMES} rounds",
        )
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdin is not None
        assert target.stdout is not None
        target.stdout.readline()
        counters: list[tuple[str, Counter]] = []
        wanted = [(r"/libcuda\.so", DRIVER_CALLS), (r"/libcudart\.so", RUNTIME_CALLS)]
        if bench.rehearse:
            wanted = [(r"/libcuda\.so", ["cuDeviceGetCount"])]
        try:
            for pattern, names in wanted:
                paths = mapped(target.pid, pattern)
                counters += [(Path(path).name, Counter(target.pid, path, names)) for path in paths]
        except (OSError, KeyError) as error:
            return [*rows, Row(what="uprobes", got=f"cannot be placed: {error}")]
        finally:
            with suppress(BrokenPipeError):
                target.stdin.write("\n")
                target.stdin.flush()
            target.stdout.readline()
        for library, counter in counters:
            rows += [
                Row(
                    what=f"{library} {name}",
                    got=float(hits),
                    want=float(TIMES) if bench.rehearse else "",
                    unit="hits",
                    within=0.0 if bench.rehearse else None,
                )
                for name, hits in counter.hits().items()
            ]
            counter.close()
        target.stdin.close()
    return rows


def exports(bench: Bench) -> list[Row]:
    """First bytes of the driver's functions: what a probe at their entry costs."""
    ctypes.CDLL("libcuda.so.1")
    (path,) = mapped(os.getpid(), r"/libcuda\.so")[:1]
    names = [*DRIVER_CALLS, "cuDeviceGetCount"] if bench.rehearse else DRIVER_CALLS
    found = first_bytes(path, names)
    return [Row(what=f"first bytes of {name}", got=text) for name, text in found.items()]
