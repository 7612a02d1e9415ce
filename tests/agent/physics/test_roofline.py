from __future__ import annotations

import math

import numpy as np
import pytest

from gpuidle.agent.physics.builtin import find_builtin
from gpuidle.agent.physics.capacity import (
    Parallel,
    cards_needed,
    compute_bound_rows,
    compute_variants,
    decode_work,
    headroom_rows,
    kv_limited_sequences,
    kv_room_bytes,
)
from gpuidle.agent.physics.parts import ModelShape
from gpuidle.agent.physics.peaks import DevicePeaks, find_peaks
from gpuidle.agent.physics.quantisation import BF16
from gpuidle.agent.physics.roofline import (
    compute_time_s,
    fits_l2,
    intensity,
    limiter,
    matmul_time_s,
    ridge,
    step_time_s,
)
from gpuidle.agent.physics.work import causal_pairs, work


def shape_of(name: str) -> ModelShape:
    shape = find_builtin(name)
    assert shape is not None
    return shape


def h100() -> DevicePeaks:
    peaks = find_peaks("NVIDIA H100 80GB HBM3", 81559 << 20)
    assert peaks is not None
    return peaks


def test_ridge_of_an_h100_is_295_flops_a_byte() -> None:
    assert ridge(h100(), "bf16") == pytest.approx(295, abs=0.5)


def test_intensity_of_a_single_row_is_one_flop_a_byte() -> None:
    step = work(shape_of("Llama-2-70b-hf"), tokens=1, logit_rows=1, attention_pairs=0, kv_read_tokens=0)
    assert intensity(step) == pytest.approx(1, rel=1e-5)


def test_a_step_without_work_takes_no_time_and_has_no_intensity() -> None:
    step = work(shape_of("Llama-3.1-8B"), tokens=0, logit_rows=0, attention_pairs=0, kv_read_tokens=0)
    assert step_time_s(step, h100()).seconds == 0
    assert intensity(step) == 0


def test_columns_give_what_scalars_give() -> None:
    shape = shape_of("Qwen3-30B-A3B")
    tokens, rows = np.array([1, 64, 2048]), np.array([1, 64, 1])
    pairs, reads = causal_pairs(tokens, np.array([500, 900, 0])), np.array([500, 57600, 0])
    together = work(shape, tokens=tokens, logit_rows=rows, attention_pairs=pairs, kv_read_tokens=reads)
    bound = step_time_s(together, h100())
    limits = limiter(together, h100())
    for index in range(3):
        alone = work(
            shape,
            tokens=int(tokens[index]),
            logit_rows=int(rows[index]),
            attention_pairs=float(np.asarray(pairs)[index]),
            kv_read_tokens=int(reads[index]),
        )
        assert np.asarray(bound.seconds)[index] == step_time_s(alone, h100()).seconds
        assert limits[index] == limiter(alone, h100())


def test_prefill_is_bound_by_compute_and_decode_by_memory() -> None:
    shape = shape_of("Llama-3.1-8B")
    prefill = work(shape, tokens=2048, logit_rows=1, attention_pairs=causal_pairs(2048, 0), kv_read_tokens=0)
    assert limiter(prefill, h100()) == "compute"
    assert limiter(decode_work(shape, 8, 1024), h100()) == "memory"


def test_the_ridge_without_a_cache_is_at_the_intensity_of_the_weights() -> None:
    rows = compute_bound_rows(shape_of("Llama-2-70b-hf"), h100(), 0)
    assert rows is not None
    # each row writes its own keys and values: a little more than the ridge's 295
    assert 295 <= rows <= 310


def test_decode_with_much_cache_never_reaches_the_ridge() -> None:
    assert compute_bound_rows(shape_of("Llama-2-7b-hf"), h100(), 600) is None
    assert headroom_rows(shape_of("Llama-2-7b-hf"), h100(), 8, 600) is None
    many = decode_work(shape_of("Llama-2-7b-hf"), 1e6, 600)
    assert intensity(many) == pytest.approx(42, abs=1.5)


def test_headroom_shrinks_row_by_row_and_ends_at_none_left() -> None:
    shape = shape_of("Llama-2-70b-hf")
    at_one, at_many = headroom_rows(shape, h100(), 1, 0), headroom_rows(shape, h100(), 10_000, 0)
    turning = compute_bound_rows(shape, h100(), 0)
    assert turning is not None
    assert (at_one, at_many) == (turning - 1, 0)


def test_turning_point_is_the_first_row_that_compute_binds() -> None:
    shape = shape_of("Qwen3-30B-A3B")
    turning = compute_bound_rows(shape, h100(), 0)
    assert turning is not None
    assert limiter(decode_work(shape, turning - 1, 0), h100()) == "memory"
    assert limiter(decode_work(shape, turning + 1, 0), h100()) == "compute"


def test_70b_in_16_bits_needs_two_cards_of_80_gb() -> None:
    shape = shape_of("Llama-2-70b-hf")
    assert cards_needed(shape, h100()) == 2
    assert kv_room_bytes(shape, h100()) < 0
    assert kv_limited_sequences(shape, kv_room_bytes(shape, h100()), 4096) == 0


def test_kv_room_of_8b_holds_the_sequences_that_bytes_allow() -> None:
    shape = shape_of("Llama-3.1-8B")
    room = kv_room_bytes(shape, h100())
    assert room == pytest.approx(0.9 * 80e9 - 16.06e9, rel=1e-3)
    assert kv_limited_sequences(shape, room, 4096) == math.floor(room / (4096 * 131072))
    two = Parallel(tensor=2)
    assert kv_limited_sequences(shape, room, 4096, parallel=two) == math.floor(room / (4096 * 131072 / 2))
    sixteen = Parallel(tensor=16)
    assert kv_limited_sequences(shape, room, 4096, parallel=sixteen) == math.floor(room / (4096 * 131072 / 8))


def test_mxfp4_on_blackwell_is_a_range_and_elsewhere_is_not() -> None:
    b200 = find_peaks("NVIDIA B200", None)
    assert b200 is not None
    shape = shape_of("gpt-oss-20b")
    step = [decode_work(variant, 4096, 0) for variant in compute_variants(shape, b200)]
    assert compute_time_s(step[1], b200) < compute_time_s(step[0], b200)
    assert compute_variants(shape, h100()) == (shape,)
    assert compute_variants(shape_of("Llama-3.1-8B"), b200) == (shape_of("Llama-3.1-8B"),)


def test_bound_at_the_maximum_clock_is_the_lower_one() -> None:
    step = decode_work(shape_of("Llama-3.1-8B"), 4096, 0)
    fast, sheet = step_time_s(step, h100()), step_time_s(step, h100(), at_max_clock=False)
    assert fast.seconds < sheet.seconds
    assert sheet.compute_s / fast.compute_s == pytest.approx(1.082, abs=1e-3)


def test_weights_that_fit_the_l2_cache_are_named() -> None:
    l40s = find_peaks("NVIDIA L40S", None)
    assert l40s is not None
    small = matmul_time_s(1, 4096, 4096, BF16, l40s)
    large = matmul_time_s(1, 16384, 16384, BF16, l40s)
    assert (small.in_l2, large.in_l2) == (True, False)
    # served from L2 at several times the memory's rate, a loop over them beats the bound on memory
    l2_bytes_per_s = 5 * l40s.memory_bytes_per_s
    assert 4096 * 4096 * 2 / l2_bytes_per_s < small.memory_s
    assert fits_l2(np.array([1e6, 1e9]), l40s).tolist() == [True, False]  # type: ignore[union-attr]
    unknown = find_peaks("MI300X", None)
    assert unknown is not None
    assert fits_l2(1e6, unknown) is None
    assert step_time_s(decode_work(shape_of("Llama-3.1-8B"), 1, 0), h100()).in_l2 is False
