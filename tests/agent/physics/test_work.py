from __future__ import annotations

import numpy as np
import pytest

from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.agent.physics.roofline import compute_time_s, limiter, step_time_s
from gpuidle.agent.physics.shapes import shape_from_config
from gpuidle.agent.physics.work import causal_pairs, work

LLAMA_2_70B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def test_llama_2_70b_decode_on_an_h100_is_bound_by_memory_at_24_tokens_a_second() -> None:
    shape = shape_from_config(LLAMA_2_70B)
    peaks = find_peaks("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    assert peaks is not None
    step = work(shape, tokens=1, logit_rows=1, attention_pairs=0, kv_read_tokens=0)
    bound = step_time_s(step, peaks, at_max_clock=True)
    assert limiter(step, peaks) == "memory"
    assert 1 / bound.seconds == pytest.approx(24.4, abs=0.05)
    assert step.total_flops / bound.seconds == pytest.approx(3.35e12, rel=1e-3)
    assert compute_time_s(step, peaks) / bound.seconds == pytest.approx(0.00339, abs=1e-5)


def test_results_are_linear_so_a_window_is_one_row() -> None:
    shape = shape_from_config(LLAMA_2_70B)
    rng = np.random.default_rng(1)
    tokens, before = rng.integers(1, 500, 40), rng.integers(0, 4000, 40)
    pairs = causal_pairs(tokens, before)
    each = work(shape, tokens=tokens, logit_rows=np.ones(40), attention_pairs=pairs, kv_read_tokens=before)
    once = work(
        shape,
        tokens=int(tokens.sum()),
        logit_rows=40,
        attention_pairs=float(np.sum(pairs)),
        kv_read_tokens=int(before.sum()),
        steps=40,
    )
    assert np.sum(each.total_flops) == pytest.approx(once.total_flops, rel=1e-12)
    assert np.sum(each.total_bytes) == pytest.approx(once.total_bytes, rel=1e-12)
