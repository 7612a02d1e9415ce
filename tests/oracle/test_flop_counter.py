"""FLOPs and parameters against torch's own counter and the real modelling code (extra: oracle).

torch counts t x c pairs of attention, masked ones included; the comparison passes the same pairs.
"""

from __future__ import annotations

from typing import Any

import pytest

from gpuidle.agent.physics.builtin import CONFIGS, find_builtin
from gpuidle.agent.physics.families import FAMILIES
from gpuidle.agent.physics.shapes import ModelShape, shape_from_config
from gpuidle.agent.physics.work import work

torch = pytest.importorskip("torch", reason="the oracle needs torch and transformers (extra: oracle)")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers (extra: oracle)")
FlopCounterMode = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode

pytestmark = pytest.mark.filterwarnings("ignore")

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_MHA = {key: value for key, value in _BASE.items() if key != "num_key_value_heads"}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEP = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_MLA = {
    **_DEEP,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": 128}

SMALL: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "attention_bias": True, "mlp_bias": True},
    "mistral": {**_BASE, "head_dim": 32},
    "mixtral": {**_BASE, **_LOCAL},
    "ministral": {**_BASE, "head_dim": 16},
    "ministral3": {**_BASE, "head_dim": 16},
    "qwen2": _BASE,
    "qwen2_moe": {**_BASE, **_MOE, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "qwen3": {**_BASE, "head_dim": 32},
    "qwen3_moe": {**_BASE, **_MOE, "head_dim": 32, "mlp_only_layers": [1]},
    "gemma": {**_BASE, "head_dim": 32},
    "gemma2": {**_BASE, "head_dim": 32, "sliding_window": 16},
    "gemma3_text": {**_BASE, "head_dim": 32, "sliding_window": 16},
    "phi3": _BASE,
    "phi": _MHA,
    "gpt_oss": {**_BASE, **_LOCAL, "head_dim": 32, "sliding_window": 16},
    "deepseek_v2": {**_BASE, **_MLA, "topk_method": "greedy"},
    "deepseek_v3": {**_BASE, **_MLA},
    "glm4": {**_BASE, "head_dim": 32},
    "glm4_moe": {**_BASE, **_DEEP, "head_dim": 32, "use_qk_norm": True},
    "glm4_moe_lite": {**_BASE, **_MLA},
    "dots1": {**_BASE, **_DEEP},
    "minimax_m2": {**_BASE, **_LOCAL, "head_dim": 32},
    "olmo2": _BASE,
    "olmo3": {**_BASE, "sliding_window": 16},
    "olmoe": {**_BASE, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "granite": _BASE,
    "granitemoe": {**_BASE, **_LOCAL},
    "smollm3": _BASE,
    "seed_oss": {**_BASE, "head_dim": 16},
    "ernie4_5": _BASE,
    "hunyuan_v1_dense": {**_BASE, "head_dim": 16},
    "arcee": _BASE,
    "nemotron": _BASE,
    "cohere": _BASE,
    "cohere2": {**_BASE, "sliding_window": 16},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 64,
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": _MHA,
    "starcoder2": _BASE,
}


def build(config: Any, *, device: str) -> Any:
    """Build the model with attention and experts that the counter sees: others count a third of them."""
    torch.manual_seed(0)
    with torch.device(device):
        if any("expert" in key for key in config.to_dict()):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def counted(model: Any, *inputs: Any, **kwargs: Any) -> int:
    """Count one forward pass, less the rotary table: positions times frequencies is no matrix of it."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs, **kwargs)
    rotary = sum(
        sum(by_op.values())
        for name, by_op in counter.get_flop_counts().items()
        if str(name).endswith("rotary_emb")
    )
    return int(counter.get_total_flops()) - int(rotary)


def formula(shape: ModelShape, sequences: int, new: int, context: int) -> float:
    pairs = sequences * new * (context + new)
    step = work(
        shape,
        tokens=sequences * new,
        logit_rows=sequences * new,
        attention_pairs=pairs,
        kv_read_tokens=sequences * context,
        windowed_attention_pairs=pairs,
        decode_pairs=0,
        expanded_tokens=sequences * context,  # the modelling code caches MLA's compressed vectors
    )
    return float(step.total_executed_flops)


def prefilled(model: Any, config: Any, sequences: int, context: int) -> Any:
    with torch.no_grad():
        cache = transformers.DynamicCache()
        model(torch.zeros(sequences, context, dtype=torch.long, device=model.device), past_key_values=cache)
    return cache


@pytest.mark.parametrize("model_type", sorted(SMALL))
def test_small_model_of_each_family_has_the_parameters_and_flops_of_the_real_code(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **SMALL[model_type])
    model = build(config, device="cpu")
    shape = shape_from_config(config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    ids = torch.zeros(2, 32, dtype=torch.long)
    assert counted(model, ids) == pytest.approx(formula(shape, 2, 32, 0), rel=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_small_model_decodes_with_the_flops_of_the_real_code(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **SMALL[model_type])
    model = build(config, device="cpu")
    shape = shape_from_config(config.to_dict())
    cache = prefilled(model, config, 8, 24)
    one = torch.zeros(8, 1, dtype=torch.long)
    assert counted(model, one, past_key_values=cache) == pytest.approx(formula(shape, 8, 1, 24), rel=1e-6)


@pytest.mark.parametrize("name", ["Llama-2-70b-hf", "Llama-3.1-8B", "Llama-3.1-70B", "Qwen2.5-7B"])
def test_full_size_model_on_the_meta_device(name: str) -> None:
    shape = find_builtin(name)
    assert shape is not None
    facts = next(config for hub_id, config in CONFIGS.items() if hub_id.endswith(name))
    kwargs = {key: value for key, value in facts.items() if key not in {"model_type", "dtype"}}
    config = transformers.AutoConfig.for_model(
        str(facts["model_type"]), **kwargs, max_position_embeddings=4096
    )
    model = build(config, device="meta")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    prompt = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    assert counted(model, prompt) == pytest.approx(formula(shape, 1, 2048, 0), rel=1e-6)
    cache = prefilled(model, config, 8, 1024)
    one = torch.zeros(8, 1, dtype=torch.long, device="meta")
    assert counted(model, one, past_key_values=cache) == pytest.approx(formula(shape, 8, 1, 1024), rel=1e-6)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_builtin_shape_has_the_parameters_of_the_real_code(name: str) -> None:
    facts = {
        k: v for k, v in CONFIGS[name].items() if k not in {"dtype", "quantization_config", "model_type"}
    }
    facts.setdefault("tie_word_embeddings", False)
    config = transformers.AutoConfig.for_model(
        str(CONFIGS[name]["model_type"]), **{"pad_token_id": None, **facts}
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = find_builtin(name)
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("model_type", sorted(SMALL))
def test_what_a_file_may_leave_out_has_the_default_of_the_real_code(model_type: str) -> None:
    defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    family = FAMILIES[model_type]
    assert family.tied == bool(defaults.get("tie_word_embeddings", True))
    flags = [
        family.gated,
        family.qk_norm,
        family.qkv_bias,
        family.o_bias,
        family.ffn_bias,
        family.multi_query,
    ]
    for flag in flags:
        if isinstance(flag, str) and flag not in {"", "head", "full"}:
            assert bool(family.defaults.get(flag, False)) == bool(defaults[flag]), flag
    for key, value in family.defaults.items():
        if key in defaults:
            assert defaults[key] == value, key


WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("text_config", _BASE),
    "qwen2_5_vl": ("text_config", _BASE),
    "qwen3_vl": ("text_config", {**_BASE, "head_dim": 16}),
    "qwen3_vl_moe": ("text_config", {**_BASE, **_MOE, "head_dim": 16}),
    "gemma3": ("text_config", {**_BASE, "head_dim": 32}),
    "mistral3": ("text_config", {**_BASE, "head_dim": 16, "model_type": "mistral"}),
    "llava": ("text_config", {**_BASE, "model_type": "llama"}),
}


@pytest.mark.parametrize("model_type", sorted(WRAPPED))
def test_text_part_of_a_vision_language_model_has_the_parameters_of_the_real_code(model_type: str) -> None:
    key, text = WRAPPED[model_type]
    config = transformers.AutoConfig.for_model(model_type, **{key: dict(text)})
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    shape = shape_from_config(config.to_dict())
    names = dict(model.named_parameters())
    of_text = sum(
        p.numel()
        for name, p in names.items()
        if "vision" not in name and "visual" not in name and "projector" not in name
    )
    assert shape.parameters == of_text
