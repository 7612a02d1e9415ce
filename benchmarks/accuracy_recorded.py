"""Phases of recorded vLLM runs: from the step log, and from what `/metrics` would have shown of it at 10 Hz.

The runs are tests/data/vllm/steplog_*.jsonl: one row a step, `t` when it was over (seconds), `ms` how long
the engine waited for it, `ctx` prompt tokens computed, `rows` decode rows, `prompt` whole prompts as the
counters book them (on their last chunk), `out` tokens handed out, `first` first tokens, `counted` whether the
engine's own step counter moved.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.stepshares import shares_from_steps
from gpuidle.agent.model import (
    EngineCounters,
    EngineLimits,
    EngineReading,
    Node,
    Snapshot,
    StepSeries,
    column,
)

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "vllm"
RUNS = ("steplog_chunk256", "steplog_ngram3")
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
"""The buckets of `vllm:iteration_tokens_total` on the recorded pages."""
SECOND = 10**9
TICK_NS = SECOND // 10


class Recorded:
    """One run as columns; times in ns from a second before its first step."""

    def __init__(self, path: Path) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        self.limits = rows[0]
        self.end = np.array([round(row["t"] * SECOND) for row in rows[1:]], dtype=np.int64)
        self.column = {key: np.array([row[key] for row in rows[1:]]) for key in rows[1]}
        self._sums: dict[str, NDArray[np.int64]] = {
            key: np.concatenate(([0], np.cumsum(rows))) for key, rows in self.column.items()
        }
        sizes = np.where(self.column["counted"] > 0, self.column["prompt"] + self.column["out"], np.inf)
        self._at_most = [(n, np.concatenate(([0], np.cumsum(sizes <= n)))) for n in STEP_TOKENS]
        length = np.array([round(row["ms"] * 1e6) for row in rows[1:]], dtype=np.int64)
        before = np.concatenate(([0], self.end[:-1]))
        self.start = np.maximum(before, self.end - length)
        """The log's own times: the step, without the engine's time between steps."""
        self._sums["ttft_ns"] = np.concatenate(([0], np.cumsum(self._first_token_ns())))
        decoded, requests = self.column["rows"], self.column["next"]
        self._speculates = bool((decoded > requests).any())
        for name, counted in (
            ("drafts", np.where(decoded > requests, requests, 0)),
            ("drafted", np.maximum(0, decoded - requests)),
            ("accepted", self.column["out"] - self.column["first"] - requests),
        ):
            self._sums[name] = np.concatenate(([0], np.cumsum(counted)))

    def _first_token_ns(self) -> NDArray[np.int64]:
        """Return what each step adds to the time to first token: from before the first chunk of its prompts.

        The log has no arrivals: where a step ran before, they are taken to be in the middle of it. So time in
        the queue is missing; the analysis does not use it where one is.
        """
        added = np.zeros(len(self.end), dtype=np.int64)
        for i in np.flatnonzero(self.column["first"]):
            begun, missing = int(i), int(self.column["prompt"][i] - self.column["ctx"][i])
            while missing > 0 and begun > 0 and not self.column["first"][begun - 1]:
                begun -= 1
                missing -= int(self.column["ctx"][begun])
            came = int(self.start[begun])
            if begun and self.column["run"][begun - 1]:
                came = int(self.start[begun - 1] + self.end[begun - 1]) // 2
            added[i] = int(self.column["first"][i]) * (int(self.end[i]) - came)
        return added

    def steps(self) -> StepSeries:
        """Return the steps as a plugin would hand them over."""
        return StepSeries(
            "vllm", "plugin", True, 0,
            column(self.start, "i8"), column(self.end, "i8"),
            column(self.column["ctx"], "i8"), column(self.column["rows"], "i8"),
            column(self.column["out"], "i8"),
        )  # fmt: skip

    def reading(self, at_ns: int) -> EngineReading:
        """Return what the engine's page showed at `at_ns`."""
        seen = int(np.searchsorted(self.end, at_ns, side="right"))

        def total(name: str) -> int:
            return int(self._sums[name][seen])

        def gauge(name: str) -> float:
            return float(self.column[name][seen - 1]) if seen else 0.0

        row = EngineCounters(
            rank="0",
            read_ns=at_ns,
            prompt_tokens=total("prompt"),
            computed_prompt_tokens=total("prompt"),
            generated_tokens=total("out"),
            first_tokens=total("first"),
            time_to_first_token_s=total("ttft_ns") / SECOND,
            drafts=total("drafts") if self._speculates else None,
            draft_tokens=total("drafted") if self._speculates else None,
            accepted_tokens=total("accepted") if self._speculates else None,
            counted_steps=total("counted"),
            steps_by_tokens=tuple((tokens, int(sums[seen])) for tokens, sums in self._at_most),
            requests_running=int(gauge("run")),
            requests_waiting=int(gauge("wait")),
            kv_usage_ratio=gauge("kv"),
        )
        return EngineReading(
            engine_id="vllm",
            engine="vllm",
            state="serving",
            read_ns=at_ns,
            limits=EngineLimits(
                max_batched_tokens=self.limits["max_batched"], kv_capacity_tokens=self.limits["kv_tokens"]
            ),
            counters=(row,),
        )


def window_shares(run: Recorded, lead_ns: int = 0) -> list[tuple[int, int, int, int, int]]:
    """Feed 10 Hz readings and return (start, prefill-containing, decode, idle, unknown) ns of each second."""
    analyzer, ticks = Analyzer(), []
    last = int(run.end[-1]) + 4 * SECOND
    settled = []
    for number, at_ns in enumerate(range(lead_ns, last, TICK_NS)):
        frame = analyzer.feed(
            Snapshot(
                sequence=number,
                monotonic_ns=at_ns,
                boottime_ns=at_ns,
                wall_ns=at_ns,
                node=Node(hostname="recorded"),
                engines=(run.reading(at_ns),),
            )
        )
        ticks.append(at_ns)
        shares = frame.engines[0].phases
        if shares.window_ns:
            settled.append(shares)
    seconds = []
    for first in range(0, len(settled) - 9, 10):
        part = settled[first : first + 10]
        seconds.append(
            (
                lead_ns + first * TICK_NS,
                sum(s.prefill_ns + s.mixed_ns for s in part),
                sum(s.decode_ns for s in part),
                sum(s.idle_ns for s in part),
                sum(s.unknown_ns for s in part),
            )
        )
    return seconds


def score(run: Recorded, *, lead_ns: int = 0, own_times: bool = True) -> tuple[list[float], float, int]:
    """Return the errors of the prefill-containing share of busy time in points, the coverage, the windows.

    Counters have no time between steps, so both sides are shares of the time in steps; windows of less than
    50 ms of it are left out. With `own_times` off a step begins where the one before it ended.
    """
    exact = run.steps()
    if not own_times:
        gap = run.start - np.concatenate(([0], run.end[:-1]))
        start = np.where(gap < 200e6, np.concatenate(([0], run.end[:-1])), run.start)
        exact = StepSeries(
            "vllm", "plugin", True, 0, column(start, "i8"), exact.end_ns, exact.prefill_tokens,
            exact.decode_tokens,
        )  # fmt: skip
    errors: list[float] = []
    labelled = busy = 0
    for begin, containing, decode, _idle, unknown in window_shares(run, lead_ns):
        truth = shares_from_steps([exact], begin, begin + SECOND)
        assert truth is not None
        real = truth.shares.prefill_ns + truth.shares.mixed_ns
        spent = real + truth.shares.decode_ns
        if spent < 50e6:
            continue
        busy += containing + decode + unknown
        labelled += containing + decode
        if containing + decode:
            errors.append(100 * abs(containing / (containing + decode) - real / spent))
    return errors, labelled / busy, len(errors)


def exact_labels(run: Recorded) -> float:
    """Return the share of steps whose phase, asked step by step, is what their tokens say."""
    right = 0
    series = [run.steps()]
    for i, (begin, end) in enumerate(zip(run.start.tolist(), run.end.tolist(), strict=True)):
        prefill, decode = run.column["ctx"][i] > 0, run.column["rows"][i] > 0
        name = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        window = shares_from_steps(series, begin, end)
        assert window is not None
        right += window.shares.of(name) == end - begin and window.steps == {name: 1}  # type: ignore[arg-type]
    return right / len(run.end)


def quantiles(errors: Sequence[float]) -> tuple[float, float]:
    return float(np.percentile(errors, 50)), float(np.percentile(errors, 95))


def report() -> None:
    for name in RUNS:
        run = Recorded(DATA / f"{name}.jsonl")
        print(f"recorded {name}: steps labelled right {exact_labels(run):.4f}")
        for own in (True, False):
            pooled: list[float] = []
            covers = []
            for lead in range(10):
                errors, coverage, _ = score(run, lead_ns=lead * 37_000_000, own_times=own)
                pooled += errors
                covers.append(coverage)
            middle, high = quantiles(pooled)
            times = "the log's step times" if own else "steps back to back"
            print(
                f"  10 Hz deltas, {times}: median {middle:.2f} points, 95 % {high:.2f},"
                f" coverage {min(covers):.3f} ({len(pooled)} windows of 1 s, 10 alignments)"
            )


if __name__ == "__main__":
    report()
