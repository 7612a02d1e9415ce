"""vLLM's metrics page: which names are asked for how often, and what they mean, over the versions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from gpuidle.agent.model import EngineCounters, Problem
from gpuidle.collectors.support.exposition import Page, Sample
from gpuidle.collectors.support.text import clean


def problem(kind: str, message: str, remedy: str = "") -> Problem:
    """Return a Problem of this engine."""
    return Problem(source="vllm", kind=kind, message=message, remedy=remedy)


_ALIASES: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "computed_prompt_tokens": ("vllm:prompt_tokens_by_source_total",),  # since 0.16
    "generated_tokens": ("vllm:generation_tokens_total",),
    "first_tokens": ("vllm:time_to_first_token_seconds_count",),
    "time_to_first_token_s": ("vllm:time_to_first_token_seconds_sum",),
    "inter_token_latency_s": (
        "vllm:inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_sum",
    ),
    "counted_steps": ("vllm:iteration_tokens_total_count",),
    "requests_running": ("vllm:num_requests_running",),
    "requests_waiting": ("vllm:num_requests_waiting",),
    "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total",),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
    "prefix_query_tokens": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "estimated_flops_per_gpu": ("vllm:estimated_flops_per_gpu_total",),
}
"""Fields of EngineCounters by sample names, the newest first."""
_QUICK_FIELDS = ("inter_token_latency_s",)
_SLOW_FIELDS = ("prefix_query_tokens", "prefix_hit_tokens", "estimated_flops_per_gpu")
_CORE_FIELDS = (
    "prompt_tokens",
    "generated_tokens",
    "first_tokens",
    "requests_running",
    "requests_waiting",
    "kv_usage_ratio",
)
"""What every version since 0.8.5 tells."""
SLEEP = "vllm:engine_sleep_state"
CACHE_CONFIG = "vllm:cache_config_info"
STEP_TOKENS = "vllm:iteration_tokens_total_bucket"
FAST = (
    *(
        name
        for key, names in _ALIASES.items()
        if key not in (*_SLOW_FIELDS, *_QUICK_FIELDS)
        for name in names
    ),
    STEP_TOKENS,
)
QUICK = tuple(name for key in _QUICK_FIELDS for name in _ALIASES[key])
"""What tells where in a short window decodes ended. A histogram more costs the server 0.11 ms."""
SLOW = (*(name for key in _SLOW_FIELDS for name in _ALIASES[key]), SLEEP, CACHE_CONFIG)
ALL = frozenset((*FAST, *QUICK, *SLOW))
_FLOATS = ("time_to_first_token_s", "inter_token_latency_s", "estimated_flops_per_gpu")
_LARGEST = 2.0**53
_LIMIT = re.compile(r"[0-9]{1,12}(\.0*)?")
"""The upper end of a bucket of tokens: vLLM's are whole numbers."""


def read_counters(page: Page, read_ns: int) -> tuple[tuple[EngineCounters, ...] | None, tuple[Problem, ...]]:
    """Return one row per `engine` label, and what is missing or unusable on the page.

    Rows that differ in other labels (an engine that was restarted under another served name and shares its
    counter files) are added up; the KV usage of several such rows is not known.
    """
    rows: dict[str, dict[str, list[float]]] = {}
    bad: set[str] = set()
    samples = _distinct(page.samples)
    for sample in samples:
        if sample.name in (SLEEP, CACHE_CONFIG, STEP_TOKENS):
            continue
        if (
            sample.name == "vllm:prompt_tokens_by_source_total"
            and sample.labels.get("source") != "local_compute"
        ):
            continue
        rank = clean(sample.labels.get("engine", "0"), 40)
        if not 0.0 <= sample.value <= (1e30 if "flops" in sample.name else _LARGEST):
            bad.add(sample.name)
        rows.setdefault(rank, {}).setdefault(sample.name, []).append(sample.value)
    for found in rows.values():
        for name in bad & found.keys():
            del found[name]  # a sum over the other rows would be wrong
    sizes = _steps_by_tokens(samples, bad)
    asleep = {
        clean(s.labels.get("engine", "0"), 40): s.value == 0.0
        for s in page.samples
        if s.name == SLEEP and s.labels.get("sleep_state") == "awake"
    }
    problems: list[Problem] = []
    if bad or page.malformed:
        what = ", ".join(sorted(bad)) or f"{page.malformed} lines"
        problems.append(problem("bad_reading", f"values that no counter can have were left out: {what}"))
    cores = tuple(
        _row(rank, read_ns, found, asleep.get(rank), sizes.get(rank))
        for rank, found in sorted(rows.items(), key=_rank_order)
    )
    missing = [name for name in _CORE_FIELDS if all(getattr(core, name) is None for core in cores)]
    if missing:
        names = ", ".join(_ALIASES[name][0] for name in missing)
        problems.append(
            problem(
                "engine_metrics_missing",
                f"the metrics page has no {names}",
                "this is not known of any version from 0.8.5 on: say which version it is",
            )
        )
    return (cores if len(missing) < len(_CORE_FIELDS) else None), tuple(problems)


def _rank_order(item: tuple[str, object]) -> tuple[int, str]:
    return (len(item[0]), item[0])


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples without repeated series, the last of which counts."""
    return list({(s.name, *sorted(s.labels.items())): s for s in samples}.values())


def _steps_by_tokens(samples: Sequence[Sample], bad: set[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return each core's steps by their tokens, cumulative; cores without a good histogram are left out."""
    found: dict[str, dict[int, float]] = {}
    refused: set[str] = set()
    for sample in samples:
        if sample.name != STEP_TOKENS:
            continue
        rank, limit = clean(sample.labels.get("engine", "0"), 40), sample.labels.get("le", "")
        if _LIMIT.fullmatch(limit) is None or not 0.0 <= sample.value <= _LARGEST:
            if limit != "+Inf":
                refused.add(rank)
            continue
        row = found.setdefault(rank, {})
        row[int(float(limit))] = row.get(int(float(limit)), 0.0) + sample.value
    told = {rank: sorted(row.items()) for rank, row in found.items()}
    refused |= {rank for rank, row in told.items() if any(a[1] > b[1] for a, b in pairwise(row))}
    if refused:
        bad.add(STEP_TOKENS)
    return {
        rank: tuple((tokens, int(steps)) for tokens, steps in row)
        for rank, row in told.items()
        if rank not in refused
    }


def _row(
    rank: str,
    read_ns: int,
    found: Mapping[str, list[float]],
    asleep: bool | None,  # noqa: FBT001
    steps_by_tokens: tuple[tuple[int, int], ...] | None,
) -> EngineCounters:
    told: dict[str, float | int | None] = {}
    for key, names in _ALIASES.items():
        values = next((found[name] for name in names if name in found), None)
        if values is None:
            continue
        if key == "kv_usage_ratio":
            told[key] = values[0] if len(values) == 1 and values[0] <= 1.0 else None
        elif key in _FLOATS:
            told[key] = math.fsum(values)
        else:
            told[key] = int(sum(values))
    # The family is always there; it stands at 0 while work is done only where the estimate is switched off.
    if told.get("estimated_flops_per_gpu") == 0.0 and told.get("prompt_tokens") != 0:
        told["estimated_flops_per_gpu"] = None
    return EngineCounters(
        rank=rank,
        read_ns=read_ns,
        asleep=asleep,
        steps_by_tokens=steps_by_tokens,
        **told,  # type: ignore[arg-type]
    )


def page_limits(page: Page) -> dict[str, object]:
    """Return what cache_config_info tells of one core; of several cores the smallest capacity."""
    told: dict[str, object] = {}
    capacities: list[int] = []
    for sample in page.samples:
        if sample.name != CACHE_CONFIG:
            continue
        labels = sample.labels
        block, blocks = _int(labels.get("block_size")), _int(labels.get("num_gpu_blocks"))
        whole = _int(labels.get("kv_cache_size_tokens"))
        if whole is None and block is not None and blocks is not None:
            whole = block * blocks
        if whole is not None:
            capacities.append(whole)
        if block is not None:
            told["kv_block_tokens"] = block
        if labels.get("cache_dtype"):
            told["kv_dtype"] = clean(labels["cache_dtype"], 40)
    if capacities:
        told["kv_capacity_tokens"] = min(capacities)
    if any(sample.name.startswith("vllm:spec_decode") for sample in page.samples):
        told["speculative"] = True
    return told


def _int(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 16 else None
