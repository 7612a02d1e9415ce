"""Our variant of vLLM's estimate against vLLM's own code, fed with the same configuration and batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuidle.agent.physics.shapes import shape_from_config
from gpuidle.agent.physics.vllm_estimate import vllm_estimated_flops

perf = pytest.importorskip("vllm.v1.metrics.perf", reason="the comparison needs vLLM")
arg_utils = pytest.importorskip("vllm.engine.arg_utils", reason="the comparison needs vLLM")

pytestmark = pytest.mark.filterwarnings("ignore")

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "opt": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 64,
        "ffn_dim": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 64,
        "torch_dtype": "bfloat16",
    },
    "qwen3_moe": {
        **_BASE,
        **_MOE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
    },
    "deepseek_v3": {**_BASE, **_MLA, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
    "gemma2": {
        **_BASE,
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 32,
        "sliding_window": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
BATCH = ((32, 32, True), (5, 40, True), (1, 17, False), (1, 90, False), (1, 8, False))


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("case", sorted(CASES))
def test_variant_equals_vllms_code(case: str, tensor_parallel: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES[case]))
    config = arg_utils.EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy", max_model_len=128
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = tensor_parallel
    context = perf.ExecutionContext()
    for new, end, is_prefill in BATCH:
        context.add(new, end, is_prefill=is_prefill)
    shape = shape_from_config(CASES[case])
    window = next((a.window for a in shape.attentions if a.window), None)
    assert perf.ModelMetrics(config).get_num_flops(context) == vllm_estimated_flops(
        shape,
        tokens=sum(new for new, _, _ in BATCH),
        token_context_products=sum(new * end for new, end, _ in BATCH),
        windowed_token_context_products=sum(new * min(end, window or end) for new, end, _ in BATCH),
        logit_rows=5,
        tensor_parallel=tensor_parallel,
    )
