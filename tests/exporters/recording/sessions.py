"""Snapshots and session files for the tests of writer and reader."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gpuidle.agent.model import (
    CounterSeries,
    EngineReading,
    GpuReading,
    Node,
    Snapshot,
    StepSeries,
    column,
    rate_column,
)
from gpuidle.exporters.recording.writer import SessionWriter

SECOND = 10**9
START_NS = 5 * 10**15
WALL_NS = 1_796_000_000 * SECOND


def make_snapshot(sequence: int, *, noise_bytes: int = 0, texts: dict[str, str] | None = None) -> Snapshot:
    """One second of one GPU and one engine; `noise_bytes` of text that does not compress."""
    now = START_NS + sequence * SECOND
    noise = random.Random(sequence).randbytes(noise_bytes // 2).hex()
    steps = StepSeries(
        engine_id="vllm/m",
        source="simulator",
        exact=True,
        lost=0,
        start_ns=column([now - 60, now - 30], "i8"),
        end_ns=column([now - 31, now - sequence], "i8"),
        prefill_tokens=column([sequence, 0], "i8"),
    )
    counters = CounterSeries(
        hw_id="GPU-0",
        rung="nvml_gpm",
        end_ns=column([now - 20, now - 10], "i8"),
        width_ns=column([10, 10], "i8"),
        gr_active=column([50000, sequence % 65536], "u2"),
        sm_clock_hz=rate_column([1.98e9, 1.2e9]),
    )
    return Snapshot(
        sequence=sequence,
        monotonic_ns=now,
        boottime_ns=now + 5,
        wall_ns=WALL_NS + sequence * SECOND,
        node=Node(hostname="node" + noise, boot_id="b"),
        gpus=(GpuReading(hw_id="GPU-0", index=0, name="H100", read_ns=now),),
        engines=(
            EngineReading(
                engine_id="vllm/m", engine="vllm", state="serving", read_ns=now, model_text="config:m"
            ),
        ),
        steps=(steps,),
        counters=(counters,),
        texts={} if texts is None else texts,
    )


def write_session(path: Path, snapshots: Iterable[Snapshot]) -> bytes:
    """Write the Snapshots to `path` and return the bytes of the finished file."""
    writer = SessionWriter(path)
    for snapshot in snapshots:
        writer.write(snapshot)
    writer.close()
    return path.read_bytes()


def without_problems(snapshot: Snapshot) -> Snapshot:
    """What was recorded: the reader adds Problems about holes in the file."""
    return msgspec.structs.replace(snapshot, problems=())
