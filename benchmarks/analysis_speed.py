"""How fast the analysis is, on columns in memory: rows a second of fast counters, and a day of eight GPUs.

python -m benchmarks.analysis_speed [hours]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import numpy as np

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import (
    CounterSeries,
    EngineCounters,
    EngineLimits,
    EngineReading,
    GpuProcess,
    GpuReading,
    Node,
    Snapshot,
    StepSeries,
    column,
    rate_column,
)
from gpuidle.collectors.simulator.scenario import LLAMA_3_8B

SECOND = 10**9
ROWS_PER_S = 2_000_000
DAY_S = 90.0
WINDOW_NS = 10 * SECOND
STEP_NS = 30_000_000
TEXT = json.dumps(dict(LLAMA_3_8B))


class Session:
    """Windows of a node whose GPUs each serve an 8B model: the same columns, moved on in time."""

    def __init__(self, gpus: int, hz: float) -> None:
        rng = np.random.default_rng(0)
        rows = int(WINDOW_NS / SECOND * hz)
        width = WINDOW_NS // rows
        self.gpus = gpus
        self.rows = rows
        self._end = np.arange(1, rows + 1) * width
        self._width = column(np.full(rows, width), "i8")
        prefill = rng.random(rows) < 0.1
        self._tensor = column((np.where(prefill, 0.5, 0.1) + rng.normal(0, 0.01, rows)) / 2e-5, "u2")
        self._active = column(np.full(rows, 0.98 / 2e-5), "u2")
        self._read = rate_column(np.where(prefill, 0.3e12, 1.9e12))
        self._write = rate_column(np.full(rows, 1e10))
        self._clock = rate_column(np.full(rows, 1.755e9))
        steps = WINDOW_NS // STEP_NS
        self._step_end = np.arange(1, steps + 1) * STEP_NS
        with_prompt = rng.random(steps) < 0.1
        self._prefill = column(np.where(with_prompt, 900, 0), "i8")
        self._decode = column(np.full(steps, 32), "i8")
        self._delivered = column(32 + with_prompt, "i8")
        self._sequences = column(32 + with_prompt, "i8")
        self._kv = column(np.full(steps, 32_000), "i8")
        self._tokens = (int(self._prefill.sum()), int(self._delivered.sum()), int(with_prompt.sum()), steps)

    def snapshots(self, windows: int) -> Iterator[Snapshot]:
        """Yield `windows` + 1 snapshots."""
        for number in range(windows + 1):
            yield self._snapshot(number)

    def _snapshot(self, number: int) -> Snapshot:
        at_ns = (number + 1) * WINDOW_NS
        begin = at_ns - WINDOW_NS
        prompts, generated, firsts, steps = (number * value for value in self._tokens)
        names = [f"GPU-{i}" for i in range(self.gpus)]
        counted = EngineCounters(
            rank="0",
            read_ns=at_ns,
            computed_prompt_tokens=prompts,
            generated_tokens=generated,
            first_tokens=firsts,
            counted_steps=steps,
            requests_running=32,
            requests_waiting=0,
            kv_usage_ratio=0.1,
        )
        return Snapshot(
            sequence=number,
            monotonic_ns=at_ns,
            boottime_ns=at_ns,
            wall_ns=at_ns,
            node=Node(hostname="speed"),
            gpus=tuple(
                GpuReading(
                    hw_id=name,
                    index=i,
                    name="NVIDIA H100 80GB HBM3",
                    read_ns=at_ns,
                    memory_total_bytes=85_520_809_984,
                    busy_ratio=1.0,
                    processes=(GpuProcess(pid=100 + i),),
                )
                for i, name in enumerate(names)
            ),
            engines=tuple(
                EngineReading(
                    engine_id=f"vllm-{i}",
                    engine="vllm",
                    state="serving",
                    read_ns=at_ns,
                    pids=(100 + i,),
                    model_text="8b",
                    limits=EngineLimits(max_batched_tokens=8192, kv_capacity_tokens=400_000),
                    counters=(counted,),
                )
                for i in range(self.gpus)
            ),
            steps=tuple(
                StepSeries(
                    f"vllm-{i}",
                    "plugin",
                    True,
                    0,
                    column(self._step_end - STEP_NS + begin, "i8"),
                    column(self._step_end + begin, "i8"),
                    self._prefill,
                    self._decode,
                    self._delivered,
                    self._sequences,
                    self._kv,
                )
                for i in range(self.gpus)
            ),
            counters=tuple(
                CounterSeries(
                    name,
                    "cupti_pm",
                    column(self._end + begin, "i8"),
                    self._width,
                    gr_active=self._active,
                    sm_active=self._active,
                    tensor_active=self._tensor,
                    dram_read_bytes_per_s=self._read,
                    dram_write_bytes_per_s=self._write,
                    sm_clock_hz=self._clock,
                )
                for name in names
            ),
            texts={"8b": TEXT},
        )


def analysed_s(session: Session, windows: int) -> float:
    """Return the seconds of CPU that the Analyzer takes for `windows` windows."""
    analyzer, spent = Analyzer(), 0.0
    for snapshot in session.snapshots(windows):
        begin = time.process_time()
        analyzer.feed(snapshot)
        spent += time.process_time() - begin
    return spent


def main() -> int:
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    fast = Session(gpus=1, hz=1000.0)
    windows = 200
    took = analysed_s(fast, windows)
    rate = windows * fast.rows / took
    print(f"1 GPU at 1 kHz with 30 ms steps: {rate:,.0f} rows/s (at least {ROWS_PER_S:,})")
    day = Session(gpus=8, hz=10.0)
    windows = int(hours * 3600 * SECOND / WINDOW_NS)
    took = analysed_s(day, windows) * 24 / hours
    print(f"24 h of 8 GPUs, 8 engines, 10 Hz, 30 ms steps: {took:.0f} s, from {hours:g} h (< {DAY_S:g})")
    return 0 if rate >= ROWS_PER_S and took < DAY_S else 1


if __name__ == "__main__":
    sys.exit(main())
