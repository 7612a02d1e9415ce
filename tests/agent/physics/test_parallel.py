from __future__ import annotations

import numpy as np
import pytest

from gpuidle.agent.physics.builtin import find_builtin
from gpuidle.agent.physics.parts import ModelShape
from gpuidle.agent.physics.work import (
    Work,
    block_rounded,
    causal_pairs,
    weights_held_bytes,
    windowed_kv_tokens,
    windowed_pairs,
    work,
)


def shape_of(name: str) -> ModelShape:
    shape = find_builtin(name)
    assert shape is not None
    return shape


def decode(shape: ModelShape, rows: int, context: int, **spread: int) -> Work:
    return work(
        shape,
        tokens=rows,
        logit_rows=rows,
        attention_pairs=rows * (context + 1),
        kv_read_tokens=rows * context,
        **spread,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tensor_parallel_ranks_share_the_work_of_a_dense_model(ranks: int) -> None:
    shape = shape_of("Llama-2-70b-hf")
    whole, part = decode(shape, 16, 1000), decode(shape, 16, 1000, tensor_parallel=ranks)
    assert part.total_flops * ranks == pytest.approx(whole.total_flops, rel=1e-12)
    assert part.weight_bytes * ranks == pytest.approx(whole.weight_bytes, rel=1e-12)
    assert part.kv_bytes * ranks == pytest.approx(whole.kv_bytes, rel=1e-12)


def test_kv_heads_are_copied_where_ranks_outnumber_them() -> None:
    shape = shape_of("Qwen3-30B-A3B")  # 4 KV heads
    four, eight = (decode(shape, 16, 1000, tensor_parallel=ranks) for ranks in (4, 8))
    assert eight.kv_bytes == four.kv_bytes
    assert eight.total_flops > four.total_flops / 2


def test_latent_cache_is_copied_to_each_rank() -> None:
    shape = shape_of("DeepSeek-V3")
    one, eight = decode(shape, 16, 1000), decode(shape, 16, 1000, tensor_parallel=8)
    assert one.kv_bytes == eight.kv_bytes


def test_stages_share_layers() -> None:
    shape = shape_of("Llama-3.1-8B")
    whole, half = decode(shape, 16, 1000), decode(shape, 16, 1000, pipeline_parallel=2)
    assert half.total_flops * 2 == pytest.approx(whole.total_flops, rel=1e-12)
    assert half.collectives == pytest.approx(0.5)
    assert half.collective_bytes == pytest.approx(16 * 4096 * 2 * 2 / 2)


def test_messages_of_70b_over_four_ranks_are_two_reductions_of_16_kib_a_layer() -> None:
    shape = shape_of("Llama-2-70b-hf")
    step = decode(shape, 1, 1000, tensor_parallel=4)
    assert step.collectives == 160 + 1 + 1  # layers; the divided embedding; the logits
    assert step.collective_bytes == 161 * 16384 + 32000 * 2 / 4
    assert decode(shape, 1, 1000).collectives == 0


def test_distinct_experts_are_a_range() -> None:
    shape = shape_of("Qwen3-30B-A3B")
    one, many = decode(shape, 1, 0), decode(shape, 16, 0)
    assert one.weight_bytes_low == pytest.approx(one.weight_bytes, rel=1e-12)
    assert one.weight_bytes == pytest.approx(one.weight_bytes_high, rel=1e-12)
    assert many.weight_bytes_low < many.weight_bytes < many.weight_bytes_high
    per_layer = 3 * 2048 * 768 * 2 * 48
    fixed = one.weight_bytes - 8 * per_layer
    assert many.weight_bytes == pytest.approx(fixed + per_layer * 128 * (1 - (1 - 8 / 128) ** 16), rel=1e-12)
    assert many.weight_bytes_high == pytest.approx(fixed + per_layer * 128, rel=1e-12)


def test_experts_dealt_out_over_replicas_are_read_by_all_tokens() -> None:
    shape = shape_of("DeepSeek-V3")
    spread = {"tensor_parallel": 1, "data_parallel": 8}
    alone = decode(shape, 16, 0)
    dealt = work(
        shape,
        **spread,
        expert_parallel=True,
        tokens=16,
        logit_rows=16,
        attention_pairs=0,
        kv_read_tokens=0,
    )
    assert dealt.weight_bytes < alone.weight_bytes
    assert dealt.total_flops == pytest.approx(
        work(shape, tokens=16, logit_rows=16, attention_pairs=0, kv_read_tokens=0).total_flops, rel=1e-12
    )
    assert dealt.collectives == 2 * 58
    assert dealt.collective_bytes == 2 * 58 * 16 * 8 * 7168 * 2
    held = weights_held_bytes(shape, expert_parallel=True, data_parallel=8)
    assert held < weights_held_bytes(shape) / 6


def test_causal_pairs_are_counted_row_by_row() -> None:
    for new, before in ((1, 0), (5, 0), (7, 13), (64, 1)):
        assert causal_pairs(new, before) == sum(before + row + 1 for row in range(new))


@pytest.mark.parametrize(("new", "before"), [(1, 0), (5, 0), (7, 13), (40, 0), (40, 9), (3, 500)])
def test_windowed_pairs_and_tokens_are_counted_row_by_row(new: int, before: int) -> None:
    window = 16
    seen = [set(range(max(0, p + 1 - window), p + 1)) for p in range(before, before + new)]
    assert windowed_pairs(new, before, window) == sum(len(keys) for keys in seen)
    assert windowed_kv_tokens(new, before, window) == len(set().union(*seen))


def test_default_for_windows_is_an_upper_bound_and_exact_once_outgrown() -> None:
    shape = shape_of("gpt-oss-20b")
    loose = decode(shape, 8, 4000)
    exact = work(
        shape,
        tokens=8,
        logit_rows=8,
        attention_pairs=8 * 4001,
        kv_read_tokens=8 * 4000,
        windowed_attention_pairs=8 * 128,
        windowed_kv_read_tokens=8 * 128,
    )
    assert loose.total_flops == exact.total_flops
    assert loose.kv_bytes == exact.kv_bytes
    short = decode(shape, 8, 50)
    assert short.total_flops == pytest.approx(
        work(
            shape,
            tokens=8,
            logit_rows=8,
            attention_pairs=8 * 51,
            kv_read_tokens=8 * 50,
            windowed_attention_pairs=8 * 51,
        ).total_flops
    )


def test_rejected_drafts_are_executed_and_not_useful() -> None:
    shape = shape_of("Llama-3.1-8B")
    before, rows = 1000, 4  # three drafts, of which one was accepted: two rows kept
    pairs = causal_pairs(rows, before)
    kept = causal_pairs(2, before)
    verified = work(
        shape,
        tokens=rows,
        logit_rows=rows,
        attention_pairs=pairs,
        kv_read_tokens=before,
        rejected_rows=2,
        rejected_pairs=pairs - kept,
    )
    useful = work(shape, tokens=2, logit_rows=2, attention_pairs=kept, kv_read_tokens=before)
    assert verified.total_flops == pytest.approx(useful.total_flops, rel=1e-12)
    whole = work(shape, tokens=rows, logit_rows=rows, attention_pairs=pairs, kv_read_tokens=before)
    assert verified.total_executed_flops == pytest.approx(whole.total_flops, rel=1e-12)
    assert verified.weight_bytes == useful.weight_bytes


def test_latent_attention_costs_more_a_pair_in_decode() -> None:
    shape = shape_of("DeepSeek-V3")
    attention = shape.attentions[0]
    assert (attention.flops_per_pair, attention.absorbed_flops_per_pair) == (81920, 278528)
    in_decode = decode(shape, 1, 999)
    in_prefill = work(shape, tokens=1, logit_rows=1, attention_pairs=1000, kv_read_tokens=999, decode_pairs=0)
    assert in_decode.total_flops - in_prefill.total_flops == (278528 - 81920) * 1000 * 61


def test_expansion_of_cached_tokens_is_executed_and_not_useful() -> None:
    shape = shape_of("DeepSeek-V3")
    chunk = work(
        shape,
        tokens=512,
        logit_rows=0,
        attention_pairs=causal_pairs(512, 4096),
        kv_read_tokens=4096,
        expanded_tokens=4096,
    )
    extra = chunk.total_executed_flops - chunk.total_flops
    assert extra == pytest.approx(2 * 512 * 128 * (128 + 128) * 4096 * 61, rel=1e-12)


def test_a_prompts_middle_chunk_does_not_read_the_head() -> None:
    shape = shape_of("Llama-3.1-8B")
    middle = work(shape, tokens=512, logit_rows=0, attention_pairs=0, kv_read_tokens=0)
    last = work(shape, tokens=512, logit_rows=1, attention_pairs=0, kv_read_tokens=0)
    assert last.weight_bytes - middle.weight_bytes == 128256 * 4096 * 2
    assert last.total_flops - middle.total_flops == 2 * 128256 * 4096


def test_blocks_are_rounded_up() -> None:
    assert np.asarray(block_rounded(np.array([0, 1, 16, 17]), 16)).tolist() == [0, 16, 16, 32]
