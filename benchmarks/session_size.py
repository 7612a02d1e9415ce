"""What a recording costs: 8 GPUs with 7 fast counters at 1 kHz and decode steps of 30 ms.

Prints megabytes an hour and the share of one core that writing takes, at one Snapshot a second. The
columns are synthetic: a step of 27 ms work and 3 ms gap, noise on every level, jitter on every sample's
end, so that nothing compresses better than it would on hardware. Run: python benchmarks/session_size.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import RATIO_STEP, CounterSeries, Node, Snapshot, StepSeries, column, rate_column
from gpuidle.collectors.recording.reader import read_snapshots
from gpuidle.exporters.recording.writer import SessionWriter

GPUS = 8
RATE_HZ = 1000
STEP_NS = 30_000_000
SECOND = 10**9
SECONDS = 60
START_NS = 10**15
TARGET_MB_PER_HOUR = 450

Floats = NDArray[np.float64]


def counter_series(rng: np.random.Generator, gpu: int, begin_ns: int) -> CounterSeries:
    end_ns = begin_ns + np.arange(1, RATE_HZ + 1) * (SECOND // RATE_HZ)
    end_ns = end_ns + rng.normal(0, 300, RATE_HZ).astype(np.int64)
    width_ns = np.diff(end_ns, prepend=begin_ns)
    working = (end_ns % STEP_NS) < STEP_NS * 0.9

    def ratio(level: float, noise: float) -> NDArray[np.generic]:
        values = np.where(working, rng.normal(level, noise, RATE_HZ), 0.0)
        return column(np.rint(np.clip(values, 0, 1.3) / RATIO_STEP), "u2")

    def rate(level: float, idle: float, noise: float, unit: int) -> Floats:
        """A count in whole units over the sample's own width, as a counter gives it."""
        level_of = np.where(working, level, idle)
        per_s = rng.normal(level_of, level_of * noise)
        return np.asarray(np.rint(per_s * width_ns / SECOND / unit) * unit / (width_ns / SECOND))

    return CounterSeries(
        hw_id=f"GPU-{gpu:036d}",
        rung="cupti_pm",
        end_ns=column(end_ns, "i8"),
        width_ns=column(width_ns, "i8"),
        gr_active=ratio(0.99, 0.004),  # type: ignore[arg-type]
        sm_active=ratio(0.8, 0.004),  # type: ignore[arg-type]
        tensor_active=ratio(0.05, 0.001),  # type: ignore[arg-type]
        dram_read_bytes_per_s=rate(2.6e12, 1e8, 0.01, 32),
        dram_write_bytes_per_s=rate(5e10, 1e8, 0.01, 32),
        sm_clock_hz=rate(1.98e9, 1.98e9, 0.001, 1),
    )


def step_series(rng: np.random.Generator, begin_ns: int) -> StepSeries:
    end_ns = begin_ns + np.arange(1, SECOND // STEP_NS + 1) * STEP_NS + rng.integers(-(10**5), 10**5)
    rows = len(end_ns)
    return StepSeries(
        engine_id="vllm/llama-70b",
        source="plugin",
        exact=True,
        lost=0,
        start_ns=column(end_ns - int(STEP_NS * 0.9), "i8"),
        end_ns=column(end_ns, "i8"),
        prefill_tokens=column(np.zeros(rows), "i8"),
        decode_tokens=column(rng.integers(60, 64, rows), "i8"),
        delivered_tokens=column(rng.integers(60, 64, rows), "i8"),
        sequences=column(rng.integers(60, 64, rows), "i8"),
        kv_tokens=column(rng.integers(10**5, 2 * 10**5, rows), "i8"),
    )


def make_snapshots() -> list[Snapshot]:
    rng = np.random.default_rng(7)
    return [
        Snapshot(
            sequence=i,
            monotonic_ns=START_NS + (i + 1) * SECOND,
            boottime_ns=START_NS + (i + 1) * SECOND,
            wall_ns=1_796_000_000 * SECOND + i * SECOND,
            node=Node(hostname="node"),
            steps=(step_series(rng, START_NS + i * SECOND),),
            counters=tuple(counter_series(rng, gpu, START_NS + i * SECOND) for gpu in range(GPUS)),
        )
        for i in range(SECONDS)
    ]


def with_rounded_rates(snapshot: Snapshot) -> Snapshot:
    """What a collector delivers: its rates through `rate_column`."""
    counters = tuple(
        replace(
            series,
            dram_read_bytes_per_s=rate_column(series.dram_read_bytes_per_s),
            dram_write_bytes_per_s=rate_column(series.dram_write_bytes_per_s),
            sm_clock_hz=rate_column(series.sm_clock_hz),
        )
        for series in snapshot.counters
    )
    return msgspec.structs.replace(snapshot, counters=counters)


def measure(title: str, snapshots: list[Snapshot]) -> float:
    """Write, read back, print, and return megabytes an hour."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.gpuidle.mcap")
        writer = SessionWriter(path)
        writer.write(snapshots[0])  # imports and first allocations are not what an hour costs
        begin = time.process_time()
        for snapshot in snapshots[1:]:
            writer.write(snapshot)
        write_s = (time.process_time() - begin) / (len(snapshots) - 1)
        writer.close()
        megabytes = path.stat().st_size / len(snapshots) * 3600 / 1e6
        begin = time.process_time()
        count = sum(1 for _ in read_snapshots(path))
        read_s = (time.process_time() - begin) / count
    print(
        f"{title:<28} {megabytes:7.0f} MB/h   writing {write_s * 100:5.2f} % of a core"
        f"   reading {read_s * 1e3:5.2f} ms a snapshot"
    )
    return megabytes


def main() -> int:
    snapshots = make_snapshots()
    print(f"{GPUS} GPUs x {RATE_HZ} Hz x 7 metrics, 1 snapshot/s; target {TARGET_MB_PER_HOUR} MB/h")
    measure("rates as they come", snapshots)
    megabytes = measure("rates through rate_column", [with_rounded_rates(snapshot) for snapshot in snapshots])
    return 0 if megabytes < TARGET_MB_PER_HOUR else 1


if __name__ == "__main__":
    sys.exit(main())
