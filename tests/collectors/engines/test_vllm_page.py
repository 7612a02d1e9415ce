"""What vLLM's pages say, on pages recorded from real servers, and what may not be made of them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from gpuidle.agent.model import EngineCounters
from gpuidle.collectors.engines.vllm_page import ALL, page_limits, read_counters
from gpuidle.collectors.support.exposition import parse_page

DATA = Path(__file__).parents[2] / "data" / "vllm"


def page(name: str) -> str:
    return next(DATA.glob(f"metrics_{name}_*.txt")).read_text()


def read(text: str) -> tuple[tuple[EngineCounters, ...] | None, list[str]]:
    cores, problems = read_counters(parse_page(text, ALL), 7)
    return cores, [problem.kind for problem in problems]


def core(text: str) -> EngineCounters:
    cores, problems = read(text)
    assert problems == []
    assert cores is not None
    (only,) = cores
    return only


def without(text: str, *families: str) -> str:
    return "".join(
        f"{line}\n" for line in text.splitlines() if not any(f"vllm:{f}" in line for f in families)
    )


def test_a_fresh_server_tells_zeros_that_were_read() -> None:
    got = core(page("0"))
    assert (got.prompt_tokens, got.generated_tokens, got.requests_running, got.read_ns) == (0, 0, 0, 7)
    assert got.asleep is False
    assert got.drafts is None


def test_a_loaded_server_tells_its_requests_and_tokens() -> None:
    got = core(page("4"))
    assert (got.requests_running, got.requests_waiting) == (9, 7)
    assert (got.prompt_tokens, got.generated_tokens, got.first_tokens) == (19504, 12624, 106)
    assert got.kv_usage_ratio == pytest.approx(0.00103766)
    assert got.estimated_flops_per_gpu == 38465958912.0
    assert got.inter_token_latency_s == pytest.approx(157.54173866)


def test_cached_prompt_tokens_are_not_computed_ones() -> None:
    got = core(page("5"))
    assert (got.prompt_tokens, got.computed_prompt_tokens) == (27328, 20160)
    assert (got.prefix_query_tokens, got.prefix_hit_tokens) == (27328, 7168)


def test_before_version_0_16_computed_prompt_tokens_are_unknown() -> None:
    got = core(without(page("5"), "prompt_tokens_by_source"))
    assert got.computed_prompt_tokens is None
    assert got.prompt_tokens == 27328


def test_speculation_keeps_drafted_accepted_and_delivered_tokens_apart() -> None:
    got = core(page("6"))
    assert (got.drafts, got.draft_tokens, got.accepted_tokens, got.generated_tokens) == (
        821,
        2429,
        2411,
        3272,
    )


def test_preemptions_are_told_though_their_recompute_is_not() -> None:
    got = core(page("10"))
    assert got.preemptions == 5
    assert got.computed_prompt_tokens == got.prompt_tokens == 512


def test_each_data_parallel_rank_is_a_row() -> None:
    cores, problems = read(page("7"))
    assert problems == []
    assert [(c.rank, c.prompt_tokens, c.generated_tokens) for c in cores or ()] == [
        ("0", 640, 2000),
        ("1", 640, 2000),
    ]


@pytest.mark.parametrize("name", ["7", "8", "9"])
def test_pages_of_the_multiprocess_mode_are_whole(name: str) -> None:
    text = page(name)
    assert "process_cpu_seconds_total" not in text
    assert "_created" not in text
    cores, problems = read(text)
    assert cores
    assert problems == []


def test_an_estimate_that_stands_still_while_tokens_move_is_switched_off() -> None:
    assert core(page("10")).estimated_flops_per_gpu is None
    assert core(page("4")).estimated_flops_per_gpu is not None


def test_names_of_older_versions_mean_the_same() -> None:
    text = page("5")
    for new in ("kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total"):
        text = text.replace(f"vllm:{new}", f"vllm:gpu_{new.removeprefix('kv_')}")
    # The first versions had no label for the core either.
    text = text.replace('engine="0",', "")
    assert msgspec.structs.replace(core(text), asleep=None) == msgspec.structs.replace(
        core(page("5")), asleep=None
    )


def test_a_version_that_shows_old_and_new_name_is_not_added_up() -> None:
    text = page("5")
    text += text.replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_").replace(
        "vllm:kv_cache_", "vllm:gpu_cache_"
    )
    got = core(text)
    assert got.prefix_hit_tokens == 7168


def test_missing_families_are_a_problem_and_never_zero() -> None:
    cores, problems = read(without(page("4"), "generation_tokens", "num_requests_running"))
    assert problems == ["engine_metrics_missing"]
    assert cores is not None
    assert cores[0].generated_tokens is None
    assert cores[0].requests_running is None
    assert cores[0].prompt_tokens == 19504


def test_a_page_without_any_family_gives_no_counters_at_all() -> None:
    cores, problems = read("# TYPE python_info gauge\npython_info 1.0\n")
    assert cores is None
    assert problems == ["engine_metrics_missing"]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-3.0", "1e300"])
def test_a_value_that_no_counter_can_have_is_absent(value: str) -> None:
    text = re.sub(r"(vllm:generation_tokens_total\{.*\}) .*", rf"\1 {value}", page("4"))
    cores, problems = read(text)
    assert cores is not None
    assert cores[0].generated_tokens is None
    assert "bad_reading" in problems


def test_a_ratio_above_one_is_absent() -> None:
    text = re.sub(r"(vllm:kv_cache_usage_perc\{.*\}) .*", r"\1 87.0", page("4"))
    cores, _ = read(text)
    assert cores is not None
    assert cores[0].kv_usage_ratio is None


def test_rows_of_several_model_names_are_added_but_not_their_kv_usage() -> None:
    text = page("4")
    cores, _ = read(text + text.replace('model_name="tiny"', 'model_name="before"'))
    assert cores is not None
    assert cores[0].generated_tokens == 2 * 12624
    assert cores[0].kv_usage_ratio is None


def test_a_series_that_is_repeated_counts_once() -> None:
    assert core(page("4") + page("4")).generated_tokens == 12624


def test_sleep_is_read_of_each_rank() -> None:
    text = re.sub(r'(vllm:engine_sleep_state\{engine="1".*sleep_state="awake"\}) 1.0', r"\1 0.0", page("7"))
    cores, _ = read(text)
    assert [c.asleep for c in cores or ()] == [False, True]


def test_the_cache_configuration_gives_block_and_capacity() -> None:
    text = page("0")
    assert page_limits(parse_page(text, ALL)) == {
        "kv_block_tokens": 128,
        "kv_capacity_tokens": 2097152,
        "kv_dtype": "auto",
    }
    older = text.replace('kv_cache_size_tokens="2097152",', "").replace(
        'num_gpu_blocks="16384"', 'num_gpu_blocks="100"'
    )
    assert page_limits(parse_page(older, ALL))["kv_capacity_tokens"] == 12800
    unset = older.replace('num_gpu_blocks="100"', 'num_gpu_blocks="None"')
    assert "kv_capacity_tokens" not in page_limits(parse_page(unset, ALL))


def test_steps_are_told_by_their_tokens() -> None:
    got = core(page("4"))
    assert got.steps_by_tokens is not None
    limits, steps = zip(*got.steps_by_tokens, strict=True)
    assert limits == (1, *(2**power for power in range(3, 15)))
    assert list(steps) == sorted(steps)
    assert steps[-1] == got.counted_steps


def test_a_histogram_that_falls_is_left_out_and_said() -> None:
    bucket = re.search(r'vllm:iteration_tokens_total_bucket\{engine="0",le="16384.0".*', page("4"))
    assert bucket is not None
    cores, problems = read(page("4").replace(bucket[0], re.sub(r" \S+$", " 1.0", bucket[0])))
    assert problems == ["bad_reading"]
    assert cores is not None
    assert cores[0].steps_by_tokens is None
    assert cores[0].counted_steps


def test_a_page_without_the_histogram_is_read_all_the_same() -> None:
    got = core(without(page("4"), "iteration_tokens_total_bucket"))
    assert got.steps_by_tokens is None
    assert got.counted_steps
