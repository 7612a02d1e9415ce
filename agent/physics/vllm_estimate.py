"""vLLM's own estimate of FLOPs (`--enable-mfu-metrics`), reproduced so that the two can be compared.

Source: vllm/v1/metrics/perf.py of vLLM 0.32; the counter is `vllm:estimated_flops_per_gpu_total`. It is not
the measure used elsewhere here. It differs from `work` on purpose of its own:

* attention counts t x c pairs of a request, masked ones included (2 to 4 % more on a 2k prompt);
* each FFN counts three matrices, gated or not; the router and Qwen's shared expert are left out;
* every layer of an MoE model counts as MoE, but for DeepSeek's, whose configuration has `moe_layer_freq`;
* MLA decode is counted against expanded keys, which is 3.4 times low on that term;
* a prompt's chunk counts one row of lm_head even where it does not end the prompt;
* sizes are divided by the ranks with the remainder dropped, and the FFN is divided over data-parallel
  replicas as well.
"""

from __future__ import annotations

from gpuidle.agent.physics.families import FAMILIES
from gpuidle.agent.physics.parts import Matmul, ModelShape, Part


def vllm_estimated_flops(
    shape: ModelShape,
    *,
    tokens: int,
    token_context_products: int,
    logit_rows: int,
    windowed_token_context_products: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    data_parallel: int = 1,
    expert_parallel: bool = False,
) -> int:
    """Return what vLLM adds to its counter for one step.

    Args:
        shape: The model; its `head_dim`, widths and layers are used.
        tokens: Scheduled tokens.
        token_context_products: Sum over requests of scheduled tokens x context after the step.
        logit_rows: Decode tokens (requests with one token) plus requests in prefill (more than one token,
            or new).
        windowed_token_context_products: The same sum with each context cut to the window.
        tensor_parallel: Ranks that divide each matrix.
        pipeline_parallel: Stages.
        data_parallel: Replicas.
        expert_parallel: Whether experts are dealt out whole.
    """
    ffn_ranks = tensor_parallel * data_parallel
    total = _attention(
        shape,
        tokens,
        token_context_products,
        windowed_token_context_products,
        tensor_parallel,
        pipeline_parallel,
    )
    width_ranks, expert_ranks = (1, ffn_ranks) if expert_parallel else (ffn_ranks, 1)
    total += _ffn(shape, tokens, width_ranks, expert_ranks, pipeline_parallel)
    return total + 2 * logit_rows * shape.hidden * (shape.vocab // tensor_parallel)


def _attention(
    shape: ModelShape, tokens: int, pairs: int, windowed_pairs: int | None, ranks: int, stages: int
) -> int:
    q = max(1, shape.heads // ranks)
    if shape.latent:
        return _latent_attention(shape, tokens, pairs, q, stages)
    kv, d, hidden = max(1, shape.kv_heads // ranks), shape.head_dim, shape.hidden
    layers = shape.layers / stages
    total = int(2 * tokens * hidden * (q + 2 * kv) * d * layers) + int(2 * tokens * hidden * q * d * layers)
    half = 0.0
    for a in shape.attentions:
        seen = pairs if a.window is None or windowed_pairs is None else windowed_pairs
        half += 2 * q * seen * d * (a.layers / stages)
    return total + 2 * int(half)


def _latent_attention(shape: ModelShape, tokens: int, pairs: int, q: int, stages: int) -> int:
    layers = shape.layers // stages
    a = shape.attentions[0]
    total = 2 * q * pairs * (a.key_dim + a.value_dim)
    for m in shape.matmuls:
        if m.part == "attention":
            across = _per_head(m, shape, q)
            total += 2 * tokens * across
    return total * layers


def _per_head(m: Matmul, shape: ModelShape, q: int) -> int:
    """Return the weights that a rank with `q` heads holds of a matrix of one MLA layer."""
    if m.split == "copied":
        return m.inputs * m.outputs
    return m.inputs * m.outputs // shape.heads * q


def _ffn(shape: ModelShape, tokens: int, width_ranks: int, expert_ranks: int, stages: int) -> int:
    family = FAMILIES.get(shape.architecture)
    dense, routed = _width(shape, "ffn"), _width(shape, "expert")
    moe_layers = shape.layers if routed else 0
    if routed and shape.latent:
        moe_layers = max(m.layers for m in shape.matmuls if m.part == "expert")
    per_width = 2 * shape.hidden * 3
    total = per_width * (dense // width_ranks) * tokens * ((shape.layers - moe_layers) // stages)
    if not routed:
        return total
    moe_layers //= stages
    width = routed // width_ranks
    total += per_width * width * (tokens * shape.experts_per_token // expert_ranks) * moe_layers
    if family is not None and family.experts == "first_dense":
        total += per_width * width * (_width(shape, "shared") // routed) * tokens * moe_layers
    return total


def _width(shape: ModelShape, part: Part) -> int:
    return next((m.outputs for m in shape.matmuls if m.part == part), 0)
