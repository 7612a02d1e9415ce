"""The sections of `device_check`: each asks one question of a GPU and gives rows for the table."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.device_bench import Bench, Pm, Row, mean
from benchmarks.device_loads import CONTEXT, PREFILL_TOKENS, Load, Ran, find_load, run_for
from benchmarks.device_probes import exports, uprobes
from benchmarks.device_session import Rights, Tried, try_session
from numpy.typing import NDArray

from gpuidle.agent.clock import SystemClock
from gpuidle.agent.model import Node, Snapshot
from gpuidle.agent.physics.peaks import FLOP_PER_CLOCK_PER_SM
from gpuidle.collectors.counters.cupti.child import buffer_bytes
from gpuidle.collectors.counters.cupti.find import find_libraries
from gpuidle.collectors.counters.cupti.holders import find_holder
from gpuidle.collectors.counters.gpm_calls import GpmDevice
from gpuidle.collectors.counters.nvml import NvmlCollector
from gpuidle.collectors.counters.nvml_binding import nvml
from gpuidle.exporters.recording.writer import SessionWriter


def facts(bench: Bench) -> list[Row]:
    """What this node is, and what of CUPTI is on it."""
    gpu = bench.device()
    tried = try_session(bench.library, bench.hw_id, seconds=0.5)
    rows = [
        Row(what="GPU", got=f"{gpu.name}, driver {gpu.driver_version}, cc {gpu.compute_capability}"),
        Row(what="libcupti in use", got=f"{bench.library} (API {tried.version})"),
        Row(what="libcupti found", got=" ".join(find_libraries()) or "none"),
        Row(what="holds the counters", got=find_holder(Path("/proc")) or "no one that is known"),
        Row(
            what="CUPTI's clock less CLOCK_MONOTONIC", got=f"{tried.offset_ns} +- {tried.doubt_ns}", unit="ns"
        ),
        Row(what="the same, of the newest sample at its decoding", got=f"{tried.sample_lag_ns}", unit="ns"),
        Row(what="first raw samples (start, end)", got=tried.first or tried.error),
    ]
    with suppress(OSError):
        params = Path("/proc/driver/nvidia/params").read_text(encoding="utf-8")
        wanted = [line for line in params.splitlines() if "Profiling" in line]
        rows.append(Row(what="driver option", got=" ".join(wanted)))
    return rows


def known(bench: Bench) -> list[Row]:
    """Products and copies of known work against PM sampling; GPM and NVML beside it."""
    load = find_load(rehearse=bench.rehearse)
    seconds = 5 * bench.scale
    product, flops = load.matmul()
    run_for(load, product, seconds)
    rows = [Row(what="load", got=load.name)]
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(bench.hw_id)
    sms, capability = _multiprocessors(bench), bench.device().compute_capability
    per_clock = FLOP_PER_CLOCK_PER_SM.get(capability or "", 0)
    bench.play(tensor=60, clock=1.5e9)
    levels: list[tuple[float, float, float, float]] = []
    with Pm(bench) as pm:
        ran, seen = pm.during(lambda: run_for(load, product, seconds))
        clock = mean(seen, "sm_clock_hz")
        want = flops * ran.calls / ran.seconds / (sms * per_clock * clock) if per_clock else float("nan")
        rows += [
            Row(
                what="tensor active of a BF16 product",
                got=mean(seen, "tensor_active"),
                want=0.6 if bench.rehearse else want,
                within=0.02,
            ),
            Row(what="its FLOP/s", got=flops * ran.calls / ran.seconds / 1e12, unit="TFLOP/s"),
            Row(
                what="SM clock, PM against NVML",
                got=clock / 1e6,
                want=_clock_mhz(handle),
                unit="MHz",
                within=0.02,
            ),
        ]
        copy, bytes_read = load.copy()
        run_for(load, copy, 0.5 * seconds)
        bench.play(read=1e12, write=1e12)
        ran, seen = pm.during(lambda: run_for(load, copy, seconds))
        rate = 1e12 if bench.rehearse else bytes_read * ran.calls / ran.seconds
        for name in ("dram_read_bytes_per_s", "dram_write_bytes_per_s"):
            rows.append(
                Row(
                    what=f"{name} of a copy",
                    got=mean(seen, name) / 1e9,
                    want=rate / 1e9,
                    unit="GB/s",
                    within=0.03,
                )
            )
        bench.play()
        for duty in (0.0, 0.25, 0.5, 0.75, 1.0):
            gpm = _Gpm(bench)

            def at_duty(duty: float = duty) -> Ran:
                if duty:
                    return run_for(load, product, seconds / 2, duty)
                start = time.monotonic_ns()
                time.sleep(seconds / 2)
                return Ran(start, time.monotonic_ns(), 0)

            gpm.begin()
            ran, seen = pm.during(at_duty)
            busy = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
            tensor, graphics = gpm.end()
            levels.append((mean(seen, "tensor_active"), tensor, mean(seen, "gr_active"), busy))
            rows.append(Row(what=f"duty {duty:.2f}: GPM gr beside PM gr", got=graphics, want=levels[-1][2]))
    table = np.array(levels)
    rows += _slope("GPM tensor over PM tensor", table[:, 0], table[:, 1])
    rows += _slope("NVML utilisation over PM gr", table[:, 2], table[:, 3])
    rows += [Row(what="Problem while sampling", got=each) for each in pm.problems]
    nvml.nvmlShutdown()
    return rows


def _slope(what: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> list[Row]:
    known_rows = np.isfinite(x) & np.isfinite(y)
    if known_rows.sum() < 2 or np.ptp(x[known_rows]) < 1e-6:
        return [Row(what=what, got="no two levels to compare")]
    slope, offset = np.polyfit(x[known_rows], y[known_rows], 1)
    return [Row(what=f"{what}: slope", got=float(slope)), Row(what=f"{what}: offset", got=float(offset))]


class _Gpm:
    """Means of GPM over a stretch; NaN where the GPU has no GPM."""

    def __init__(self, bench: Bench) -> None:
        self._gpm: GpmDevice | None = None
        with suppress(nvml.NVMLError):
            self._gpm = GpmDevice(bench.hw_id, None)

    def begin(self) -> None:
        if self._gpm is not None:
            self._gpm.sample()

    def end(self) -> tuple[float, float]:
        if self._gpm is None:
            return float("nan"), float("nan")
        self._gpm.sample()
        means = self._gpm.means()
        self._gpm.close()
        return _or_nan(means.tensor), _or_nan(means.graphics)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _clock_mhz(handle: Any) -> float:
    return float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))


def _multiprocessors(bench: Bench) -> int:
    if bench.rehearse:
        return 132
    torch: Any = importlib.import_module("torch")
    count: int = torch.cuda.get_device_properties(0).multi_processor_count
    return count


def steps(bench: Bench) -> list[Row]:
    """Decode and prefill steps of a transformer, recorded at 1 kHz as a session, with the truth beside it."""
    load = find_load(rehearse=bench.rehearse)
    rows, clock, sequence = [Row(what="load", got=load.name)], SystemClock(), 0
    collector = NvmlCollector()
    bench.play()
    node = Node(hostname="device-check", simulated=bench.rehearse)
    writer = SessionWriter(bench.out / "steps.gpuidle.mcap", overwrite=True)
    truth = (bench.out / "steps.truth.jsonl").open("w", encoding="utf-8")
    with ExitStack() as stack, truth:
        stack.callback(writer.close)
        stack.callback(collector.close)
        pm = stack.enter_context(Pm(bench))
        for graphs in (False, True):
            for batch in (1, 8, 64, 256):
                name = f"batch {batch}{' with graphs' if graphs else ''}"
                try:
                    decode, prefill = load.steps(batch, graphs=graphs)
                except (MemoryError, RuntimeError) as error:
                    rows.append(Row(what=name, got=f"not run: {error}"))
                    continue
                labelled = partial(_labelled, load, decode, prefill, batch, graphs, truth, bench.scale)
                ran, seen = pm.during(labelled)
                now = clock.now()
                writer.write(
                    Snapshot(
                        sequence=sequence,
                        monotonic_ns=now.monotonic_ns,
                        boottime_ns=now.boottime_ns,
                        wall_ns=now.wall_ns,
                        node=node,
                        gpus=collector.read(now.monotonic_ns).gpus,
                        counters=(seen,),
                    )
                )
                sequence += 1
                rows.append(
                    Row(
                        what=name,
                        got=f"tensor {mean(seen, 'tensor_active'):.4f}, DRAM read "
                        f"{mean(seen, 'dram_read_bytes_per_s') / 1e9:.0f} GB/s, gr "
                        f"{mean(seen, 'gr_active'):.3f}, {ran.calls} steps, {len(seen)} samples",
                    )
                )
                del decode, prefill, labelled
    rows += [Row(what="Problem while sampling", got=each) for each in pm.problems]
    return [*rows, Row(what="recorded", got="steps.gpuidle.mcap, steps.truth.jsonl")]


def _labelled(
    load: Load,
    decode: Callable[[], object],
    prefill: Callable[[], object],
    batch: int,
    graphs: bool,
    truth: Any,
    scale: float,
) -> Ran:
    """Run decode steps with a prefill at every tenth; write each step's true interval."""
    begin, count = time.monotonic_ns(), 0
    while time.monotonic_ns() - begin < 3e9 * scale:
        is_prefill = count % 10 == 9
        start = time.monotonic_ns()
        (prefill if is_prefill else decode)()
        load.wait()
        step = {
            "start_ns": start,
            "end_ns": time.monotonic_ns(),
            "phase": "prefill" if is_prefill else "decode",
            "prefill_tokens": PREFILL_TOKENS if is_prefill else 0,
            "decode_tokens": 0 if is_prefill else batch,
            "kv_tokens": 0 if is_prefill else batch * CONTEXT,
            "graphs": graphs,
        }
        truth.write(json.dumps(step) + "\n")
        count += 1
    return Ran(begin, time.monotonic_ns(), count)


def gpm(bench: Bench) -> list[Row]:
    """GPM read faster and slower than the 100 ms at which the driver refreshes it, under a steady load."""
    load = find_load(rehearse=bench.rehearse)
    product, _ = load.matmul()
    nvml.nvmlInit()
    rows: list[Row] = []
    try:
        device = GpmDevice(bench.hw_id, None)
    except nvml.NVMLError as error:
        return [Row(what="GPM", got=f"not supported: {error}")]
    for period_s in (0.02, 0.05, 0.1, 0.15, 0.25):
        values: list[float] = []
        missing = 0
        device.sample()
        for _ in range(max(4, round(2 * bench.scale / period_s))):
            run_for(load, product, period_s)
            device.sample()
            tensor = device.means().tensor
            missing += tensor is None
            values += [] if tensor is None else [tensor]
        spread = f"{min(values):.4f} to {max(values):.4f}, mean {np.mean(values):.4f}" if values else "none"
        rows.append(Row(what=f"GPM tensor each {period_s * 1e3:.0f} ms", got=f"{spread}; {missing} absent"))
    device.close()
    nvml.nvmlShutdown()
    return rows


def rights(bench: Bench) -> list[Row]:
    """PM sampling as root, without the two capabilities, and as another user with and without CAP_PERFMON."""
    tries: dict[str, Rights] = {
        "as this user": "own",
        "root without CAP_SYS_ADMIN and CAP_PERFMON": "bare_root",
        "another user with CAP_PERFMON": "perfmon",
        "another user without capabilities": "none",
    }
    return [
        Row(what=f"PM sampling {name}", got=_told(bench.sample(rights=kind))) for name, kind in tries.items()
    ]


def _told(tried: Tried) -> str:
    return tried.error or f"works: {tried.samples} samples, first after {tried.start_s:.2f} s"


HOLDER = "import torch; x = torch.zeros(1, device='cuda'); print('up', flush=True); input()"
HOLDER_REHEARSED = "print('up', flush=True); input()"


def context(bench: Bench) -> list[Row]:
    """PM sampling without a context, with another process's, with one of its own; the memory it takes."""
    rows = [Row(what="PM, no context of this check", got=_told(bench.sample()))]
    holder = HOLDER_REHEARSED if bench.rehearse else HOLDER
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        if other.stdout.readline() == "up\n":
            told = _told(bench.sample())
        else:
            told = "not run: torch does not make a context"
        rows.append(Row(what="PM, a context in another process", got=told))
        other.stdin.close()
    tried = bench.sample(own_context=True)
    rows.append(Row(what="PM, a context of its own", got=_told(tried)))
    before = bench.device().memory_used_bytes or 0
    for rate_hz in (1000, 10_000):
        with Pm(bench, rate_hz):
            taken = (bench.device().memory_used_bytes or 0) - before
        rows.append(
            Row(
                what=f"device memory taken at {rate_hz} Hz",
                got=taken / 2**20,
                unit="MiB",
                want=f"buffer {(buffer_bytes(rate_hz, 2**28) or 0) / 2**20:.0f}",
            )
        )
    return rows


def cost(bench: Bench) -> list[Row]:
    """A load, its clock and the sampler's CPU time with sampling off and at 1, 5 and 10 kHz."""
    load = find_load(rehearse=bench.rehearse)
    decode, _ = load.steps(8, graphs=True)
    product, _ = load.matmul()
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(bench.hw_id)
    seconds, rows = 4 * bench.scale, []
    bench.play()
    base: dict[str, float] = {}
    for rate_hz in (0, 1000, 5000, 10_000, 0):
        with ExitStack() as stack:
            pm = stack.enter_context(Pm(bench, rate_hz)) if rate_hz else None
            for name, call in (("decode steps", decode), ("products", product)):
                cpu, begin = pm.cpu_s() if pm else 0.0, time.monotonic()
                ran = run_for(load, call, seconds)
                clock = _clock_mhz(handle)
                speed = ran.calls / ran.seconds
                used = (pm.cpu_s() - cpu) / (time.monotonic() - begin) if pm else 0.0
                ratio = speed / base.setdefault(name, speed)
                rows.append(
                    Row(
                        what=f"{name} at {rate_hz or 'no'} Hz sampling",
                        got=f"{speed:.2f}/s ({ratio - 1:+.2%}), {clock:.0f} MHz, "
                        f"sampler {used:.2%} of a core",
                    )
                )
            if pm is not None:
                pm.read()
                rows += [Row(what=f"Problem at {rate_hz} Hz", got=each) for each in pm.problems]
    nvml.nvmlShutdown()
    return rows


def together(bench: Bench) -> list[Row]:
    """GPM and PM at the same time against each alone."""
    load = find_load(rehearse=bench.rehearse)
    product, _ = load.matmul()
    nvml.nvmlInit()
    seconds = 3 * bench.scale
    bench.play(tensor=60)

    def gpm_during() -> float:
        device = _Gpm(bench)
        device.begin()
        run_for(load, product, seconds)
        return device.end()[0]

    rows = [Row(what="GPM tensor alone", got=gpm_during())]
    with Pm(bench) as pm:
        _, alone = pm.during(lambda: run_for(load, product, seconds))
        rows.append(Row(what="PM tensor alone", got=mean(alone, "tensor_active")))
        both = _Gpm(bench)
        both.begin()
        _, seen = pm.during(lambda: run_for(load, product, seconds))
        rows += [
            Row(what="GPM tensor beside PM", got=both.end()[0]),
            Row(
                what="PM tensor beside GPM",
                got=mean(seen, "tensor_active"),
                want=mean(alone, "tensor_active"),
                within=0.02,
            ),
        ]
    rows += [Row(what="Problem while sampling", got=each) for each in pm.problems]
    nvml.nvmlShutdown()
    return rows


SECTIONS: dict[str, tuple[Callable[[Bench], list[Row]], float]] = {
    "facts": (facts, 20),
    "exports": (exports, 10),
    "rights": (rights, 25),
    "context": (context, 40),
    "known": (known, 60),
    "together": (together, 30),
    "gpm": (gpm, 25),
    "steps": (steps, 75),
    "cost": (cost, 60),
    "uprobes": (uprobes, 30),
}
"""By name: what runs, and its limit in seconds. All limits together are more than what is allowed in all."""
