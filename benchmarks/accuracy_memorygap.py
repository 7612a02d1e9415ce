"""Labels and bandwidth on MemoryGap's rows: vLLM's counters and nvidia-smi at 1 Hz on an H100 of 64 GB.

Source: FerranAgulloLopez/vLLMBatchingMemoryGap (Apache-2.0), read from the folder of third-party data.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
from benchmarks.nodes import NO_TRACES, shared_data

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import (
    EngineCounters,
    EngineLimits,
    EngineReading,
    GpuProcess,
    GpuReading,
    Node,
    Shares,
    Snapshot,
)
from gpuidle.agent.physics.builtin import find_builtin
from gpuidle.agent.physics.work import work

FILE = Path("counters") / "memorygap_h100_64gb_engine_nvml_1hz.csv"
BANDWIDTH = 2.039e12
SECOND = 10**9
Row = Mapping[str, str]


def runs(folder: Path) -> Iterable[tuple[tuple[str, int], list[Row]]]:
    """Yield ((model, batch), rows) of every run."""
    with (folder / FILE).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for key, group in groupby(rows, key=lambda row: (row["model"], int(row["max_num_seqs"]))):
        yield key, list(group)


def _known(text: str, scale: float = 1.0) -> float | None:
    return float(text) * scale if text else None


def _snapshots(rows: list[Row], *, engine: bool) -> Iterable[Snapshot]:
    prompts = generated = steps = 0.0
    before = 0.0
    for number, row in enumerate(rows):
        at = float(row["t_s"]) + 1
        width, before = at - before, at
        running = float(row["running"])
        if row["gen_tok_s"]:
            prompts += float(row["prompt_tok_s"]) * width
            generated += float(row["gen_tok_s"]) * width
            steps += float(row["gen_tok_s"]) * width / max(1.0, running)
        at_ns = round(at * SECOND)
        counters = EngineCounters(
            rank="0",
            read_ns=at_ns,
            computed_prompt_tokens=round(prompts),
            generated_tokens=round(generated),
            counted_steps=round(steps),
            requests_running=round(running),
            requests_waiting=round(float(row["waiting"])),
            kv_usage_ratio=float(row["kv_usage"]),
        )
        yield Snapshot(
            sequence=number,
            monotonic_ns=at_ns,
            boottime_ns=at_ns,
            wall_ns=at_ns,
            node=Node(hostname="memorygap"),
            gpus=(
                GpuReading(
                    hw_id="GPU-0",
                    index=0,
                    name="NVIDIA H100 64GB",
                    read_ns=at_ns,
                    busy_ratio=_known(row["nvml_sm_pct"], 0.01),
                    memory_busy_ratio=_known(row["nvml_mem_pct"], 0.01),
                    power_watts=_known(row["power_w"]),
                    processes=(GpuProcess(pid=7),),
                ),
            ),
            engines=(
                EngineReading(
                    engine_id="vllm",
                    engine="vllm",
                    state="serving" if engine else "unobserved",
                    read_ns=at_ns,
                    pids=(7,),
                    limits=EngineLimits(),
                    counters=(counters,) if engine else None,
                ),
            ),
        )


def _after(last: Row) -> list[Row]:
    """Return three more seconds of nothing, in which the last windows settle."""
    return [{**last, "t_s": str(float(last["t_s"]) + i), "gen_tok_s": ""} for i in (1, 2, 3)]


def labels(rows: list[Row], *, engine: bool) -> list[tuple[str, Shares]]:
    """Return the row's own label and the engine's (or the GPU's) shares of each settled window."""
    analyzer, shares = Analyzer(), []
    for snapshot in _snapshots([*rows, *_after(rows[-1])], engine=engine):
        frame = analyzer.feed(snapshot)
        row = frame.engines[0].phases if engine else frame.gpus[0].phases
        if row.window_ns:
            shares.append(row)
    return [(row["window_label"], each) for row, each in zip(rows[1:], shares, strict=False)]


def said(shares: Shares) -> str:
    """Return the label of a window: what moved in it, as the data set defines it; "" where not known."""
    if shares.prefill_ns or shares.mixed_ns:
        return "mixed"
    if shares.unknown_ns > 0.05 * shares.window_ns:
        return ""
    return "decode" if shares.decode_ns else "idle"


def bandwidth_use(folder: Path) -> dict[int, float]:
    """Return DRAM bytes of the work model over the sheet's, by batch, of Llama-2-7B's decode windows.

    The cache's capacity in tokens is not in the data: it follows from how fast one sequence fills it.
    """
    shape = find_builtin("Llama-2-7b-hf")
    assert shape is not None
    of = {batch: rows for (model, batch), rows in runs(folder) if model == "llama-2-7b"}
    pairs = [
        (float(b["gen_tok_s"]), float(b["kv_usage"]) - float(a["kv_usage"]))
        for batch in (1, 2, 4, 8)
        for a, b in zip(of[batch], of[batch][1:], strict=False)
        if b["window_label"] == a["window_label"] == "decode" and float(b["kv_usage"]) > float(a["kv_usage"])
    ]
    capacity = sum(tokens for tokens, _ in pairs) / sum(rise for _, rise in pairs)
    found = {}
    for batch in (8, 16, 32, 64, 128):
        shares = []
        for row in of[batch]:
            running, tokens = float(row["running"]), float(row["gen_tok_s"] or 0)
            if row["window_label"] != "decode" or running < 0.9 * batch:
                continue
            done = work(
                shape,
                tokens=running,
                logit_rows=running,
                attention_pairs=0,
                kv_read_tokens=capacity * float(row["kv_usage"]),
            )
            shares.append(float(done.total_bytes) * tokens / running / BANDWIDTH)
        found[batch] = float(np.median(shares))
    return found


def report() -> None:
    folder = shared_data()
    if folder is None or not (folder / FILE).is_file():
        print(f"MemoryGap: {NO_TRACES}")
        return
    right: dict[str, list[bool]] = {}
    confident = wrong = windows = idles = rests = 0
    for _, rows in runs(folder):
        for real, shares in labels(rows, engine=True):
            if real:
                right.setdefault(real, []).append(said(shares) == real)
        for real, shares in labels(rows, engine=False):
            idle = shares.idle_ns > 0.95 * shares.window_ns
            claims = idle or bool(shares.prefill_ns or shares.decode_ns or shares.mixed_ns)
            confident += claims
            windows += bool(real)
            idles += real == "idle"
            rests += real == "idle" and idle
            wrong += claims and real not in ("idle" if idle else "", "")
    for label, results in sorted(right.items()):
        print(f"MemoryGap {label}: {sum(results) / len(results):.4f} right of {len(results)} rows")
    print(
        f"MemoryGap from NVML alone: {wrong} confidently wrong of {windows} rows"
        f" ({wrong / windows:.4f}) and of {confident} labels ({wrong / max(1, confident):.4f}), all idle:"
        f" coverage {confident / windows:.3f} of all rows, {rests / max(1, idles):.3f} of the idle ones"
    )
    use = bandwidth_use(folder)
    middle = float(np.mean(list(use.values())))
    spread = max(abs(value / middle - 1) for value in use.values())
    rows_ = ", ".join(f"{batch}: {value:.3f}" for batch, value in use.items())
    print(f"MemoryGap bandwidth use by batch (7B): {rows_}; spread {spread:.4f}")


if __name__ == "__main__":
    report()
