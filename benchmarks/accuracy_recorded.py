"""Phases of recorded vLLM runs: from the step log, and from what `/metrics` would have shown of it at 10 Hz.

The runs are tests/data/vllm/steplog_*.jsonl: one row a step, `t` when it was over (seconds), `ms` how long
the engine waited for it, `ctx` prompt tokens computed, `rows` decode rows, `prompt` whole prompts as the
counters book them (on their last chunk), `out` tokens handed out, `first` first tokens, `counted` whether the
engine's own step counter moved. `python -m benchmarks.accuracy_recorded FILE ...` scores others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

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
RUNS = ("steplog_chunk256", "steplog_ngram3", "steplog_chunk1024", "steplog_chunk256_ngram3")
"""The last two were recorded when everything was fixed."""
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
"""The buckets of `vllm:iteration_tokens_total` on the recorded pages."""
SECOND = 10**9
TICK_NS = SECOND // 10
REST_NS = 200_000_000
"""A longer gap between steps is a rest."""
LEAST_BUSY_NS = 50_000_000
"""Seconds with less time in steps are left out."""
MOST_UNKNOWN_NS = SECOND // 10
"""A second of which more is unknown is not labelled: it counts against the coverage, as with the traces."""


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
        waited = self.column["next"] * (self.end - np.concatenate((self.end[:1], self.end[:-1])))
        self._sums["itl_ns"] = np.concatenate(([0], np.cumsum(waited)))
        decoded, requests = self.column["rows"], self.column["next"]
        self._speculates = bool((decoded > requests).any())
        drafted = np.maximum(0, decoded - requests)
        longest = max(1, int(np.ceil(np.max(drafted / np.maximum(1, requests)))))
        for name, counted in (
            ("drafts", -(-drafted // longest)),
            ("drafted", drafted),
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
            inter_token_latency_s=total("itl_ns") / SECOND,
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
                max_batched_tokens=self.limits["max_batched"],
                kv_capacity_tokens=self.limits["kv_tokens"],
                async_scheduling=self.limits["async_scheduling"],
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


class Window(NamedTuple):
    """One second: prefill-containing and decode ns, by us and by the log."""

    told: tuple[int, int]
    unknown_ns: int
    own: tuple[int, int]
    """By the log's own step times, which leave the engine's time between steps out."""
    joined: tuple[int, int]
    """With steps that begin where the one before ended: all that a page of counters shows."""


def windows_of(run: Recorded, lead_ns: int = 0) -> list[Window]:
    """Return the seconds in which steps ran for 50 ms at least."""
    exact = run.steps()
    before = np.concatenate(([0], run.end[:-1]))
    joined = StepSeries(
        "vllm", "plugin", True, 0,
        column(np.where(run.start - before < REST_NS, before, run.start), "i8"), exact.end_ns,
        exact.prefill_tokens, exact.decode_tokens,
    )  # fmt: skip
    found = []
    for begin, containing, decode, _idle, unknown in window_shares(run, lead_ns):
        truth = []
        for series in (exact, joined):
            steps = shares_from_steps([series], begin, begin + SECOND)
            assert steps is not None
            shares = steps.shares
            truth.append((shares.prefill_ns + shares.mixed_ns, shares.decode_ns))
        if sum(truth[0]) >= LEAST_BUSY_NS:
            found.append(Window((containing, decode), unknown, truth[0], truth[1]))
    return found


def errors_of(
    pairs: Iterable[tuple[tuple[float, float], tuple[float, float]]], *, of_busy: bool = True
) -> list[float]:
    """Return by how many points prefill-containing shares differ: of the busy time, or of the second."""
    errors = []
    for one, other in pairs:
        if sum(one) and sum(other):
            wholes = (sum(one), sum(other)) if of_busy else (SECOND, SECOND)
            errors.append(100 * abs(one[0] / wholes[0] - other[0] / wholes[1]))
    return errors


def coverage_of(windows: Sequence[Window]) -> float:
    """Return the labelled part of the busy time."""
    labelled = sum(sum(window.told) for window in windows)
    return labelled / (labelled + sum(window.unknown_ns for window in windows))


def labelled_of(windows: Sequence[Window]) -> list[Window]:
    return [window for window in windows if window.unknown_ns <= MOST_UNKNOWN_NS]


def usual_parts(run: Recorded) -> tuple[float, float]:
    """Return the part of the time from end to end that steps with and without a prompt take in this run."""
    before = np.concatenate(([0], run.end[:-1]))
    near = run.start - before < REST_NS
    prompts = run.column["ctx"] > 0
    parts = [
        float((run.end - run.start)[near & kind].sum() / (run.end - before)[near & kind].sum())
        for kind in (prompts, ~prompts)
    ]
    return parts[0], parts[1]


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


def report(paths: Sequence[Path] = ()) -> None:
    """Print our errors and those of labellers that know more: a page shows no time between steps.

    The first knows the end and the kind of each step, and nothing of the gaps; the second is told in addition
    which part of the time they take in this run, by kind of step. No page tells that either.
    """
    for path in paths or [DATA / f"{name}.jsonl" for name in RUNS]:
        run = Recorded(path)
        print(f"recorded {path.stem}: steps labelled right {exact_labels(run):.4f}")
        alignments = [windows_of(run, lead_ns=lead * 37_000_000) for lead in range(10)]
        every = [window for windows in alignments for window in windows]
        pooled = labelled_of(every)
        parts = usual_parts(run)
        scaled = [(w.joined[0] * parts[0], w.joined[1] * parts[1]) for w in pooled]
        rows = [
            ("10 Hz deltas, the log's step times", errors_of((w.told, w.own) for w in pooled)),
            ("  all steps known, but not the gaps", errors_of((w.joined, w.own) for w in pooled)),
            (
                f"  and told that {parts[0]:.2f} and {parts[1]:.2f} of steps' time are steps",
                errors_of((one, w.own) for one, w in zip(scaled, pooled, strict=True)),
            ),
            (
                "10 Hz deltas, the log's step times, of the second",
                errors_of(((w.told, w.own) for w in pooled), of_busy=False),
            ),
            (
                "  all steps known, but not the gaps",
                errors_of(((w.joined, w.own) for w in pooled), of_busy=False),
            ),
        ]
        for what, errors in rows:
            middle, high = quantiles(errors)
            print(f"  {what}: median {middle:.2f} points, 95 % {high:.2f}")
        covers = [coverage_of(windows) for windows in alignments]
        print(
            f"  coverage {min(covers):.3f} of the time,"
            f" {len(pooled) / len(every):.3f} of {len(every)} windows of 1 s (10 alignments)"
        )


if __name__ == "__main__":
    report([Path(name) for name in sys.argv[1:]])
