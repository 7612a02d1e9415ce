"""Recorded request traces as arrivals: Azure's and Mooncake's columns, from a file that the caller names."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

from gpuidle.collectors.simulator.scenario import SECOND_NS, Listed, Request, ScenarioError


def read_trace(path: Path) -> tuple[Request, ...]:
    """Return the requests of a trace in order of arrival, the first at 0.

    Columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference 2023), or timestamp_ms,
    input_length, output_length and maybe prefix_hit_blocks_infinite_cache of 512 tokens (Mooncake). Requests
    without a prompt or an output are left out.

    Raises:
        OSError: the file cannot be read.
        ScenarioError: its columns are of neither kind.
    """
    with path.open(newline="") as lines:
        table = list(csv.DictReader(lines))
    try:
        known = [_azure(row) if "TIMESTAMP" in row else _mooncake(row) for row in table]
    except (KeyError, ValueError) as error:
        raise ScenarioError(f"{path.name}: not a trace that is known: {error}") from error
    rows = sorted(row for row in known if row[1] > 0 and row[2] > 0)
    first = rows[0][0] if rows else 0
    return tuple(
        Request(at - first, prompt, output, min(hits, prompt - 1)) for at, prompt, output, hits in rows
    )


def _azure(row: dict[str, str]) -> tuple[int, int, int, int]:
    whole, _, part = row["TIMESTAMP"].partition(".")
    seconds = (datetime.fromisoformat(whole) - datetime(2023, 1, 1)).total_seconds()  # noqa: DTZ001
    nanoseconds = int(seconds) * SECOND_NS + int((part or "0").ljust(9, "0")[:9])
    return nanoseconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]), 0


def _mooncake(row: dict[str, str]) -> tuple[int, int, int, int]:
    hits = 512 * int(row.get("prefix_hit_blocks_infinite_cache") or 0)
    return int(row["timestamp_ms"]) * 1_000_000, int(row["input_length"]), int(row["output_length"]), hits


def stretch(
    requests: tuple[Request, ...],
    *,
    load: float = 1.0,
    start_ns: int = 0,
    duration_ns: int | None = None,
    longest_tokens: int | None = None,
) -> Listed:
    """Return a cut of a trace from `start_ns` on, `load` times as dense; its first moment becomes 0.

    Requests whose context would exceed `longest_tokens` are left out, as an engine would refuse them.
    """
    kept = []
    for request in requests:
        at_ns = round((request.arrival_ns - start_ns) / load)
        if at_ns < 0 or (duration_ns is not None and at_ns >= duration_ns):
            continue
        if longest_tokens is not None and request.prompt_tokens + request.output_tokens > longest_tokens:
            continue
        kept.append(Request(at_ns, request.prompt_tokens, request.output_tokens, request.prefix_hit_tokens))
    return Listed(tuple(kept))
