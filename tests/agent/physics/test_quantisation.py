from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpuidle.agent.physics.quantisation import UnknownQuantisation, is_excluded
from gpuidle.agent.physics.shapes import ModelShape, shape_from_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def quantised(block: Mapping[str, object], config: Mapping[str, object] | None = None) -> ModelShape:
    return shape_from_config({**(config or LLAMA), "quantization_config": block})


def found(shape: ModelShape, part: str) -> set[tuple[str, float, str]]:
    return {
        (m.format.name, round(m.format.bits, 4), m.format.compute) for m in shape.matmuls if m.part == part
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
FP8_BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def scheme(weights: dict[str, object], activations: dict[str, object] | None) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
    }


@pytest.mark.parametrize(
    ("block", "bits", "compute"),
    [
        (AWQ, 4.1562, "bf16"),
        (GPTQ, 4.1562, "bf16"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 8, "fp8"),
        (FP8_BLOCK, 8.002, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, 4.5, "fp4"),
        ({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, 4.5, "fp4"),
        (scheme({"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 8}), 8, "fp8"),
        (scheme({"type": "float", "num_bits": 8}, None), 8, "bf16"),
        (scheme({"type": "int", "num_bits": 8}, {"type": "int", "num_bits": 8}), 8, "int8"),
        (scheme({"type": "int", "num_bits": 4, "group_size": 128, "symmetric": True}, None), 4.125, "bf16"),
        (
            scheme(
                {"type": "float", "num_bits": 4, "group_size": 16},
                {"type": "float", "num_bits": 4, "group_size": 16},
            ),
            4.5,
            "fp4",
        ),
        (scheme({"type": "float", "num_bits": 4, "group_size": 16}, None), 4.5, "bf16"),
    ],
)
def test_bits_and_rate_of_each_method(block: dict[str, object], bits: float, compute: str) -> None:
    shape = quantised(block)
    for part in ("attention", "ffn"):
        assert {(b, c) for _, b, c in found(shape, part)} == {(bits, compute)}
    assert found(shape, "lm_head") == {("bf16", 16, "bf16")}


def test_routers_stay_in_16_bits_and_experts_do_not() -> None:
    shape = quantised(FP8_BLOCK, MOE)
    assert found(shape, "router") == {("bf16", 16, "bf16")}
    assert {compute for _, _, compute in found(shape, "expert")} == {"fp8"}


def test_mxfp4_covers_experts_only_and_multiplies_in_16_bits() -> None:
    shape = quantised({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, MOE)
    assert found(shape, "expert") == {("mxfp4", 4.25, "bf16")}
    assert found(shape, "attention") == {("bf16", 16, "bf16")}


def test_layers_left_out_by_name_are_counted_layer_by_layer() -> None:
    ignored = ["lm_head", "model.layers.0.self_attn.q_proj", "re:.*layers\\.3\\.mlp.*"]
    block = {**scheme({"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 8}), "ignore": ignored}
    shape = quantised(block)
    q = {m.format.name: m.layers for m in shape.matmuls if m.name == "self_attn.q_proj"}
    up = {m.format.name: m.layers for m in shape.matmuls if m.name == "mlp.up_proj"}
    k = {m.format.name: m.layers for m in shape.matmuls if m.name == "self_attn.k_proj"}
    assert (q, up, k) == ({"bf16": 1, "fp8": 3}, {"fp8": 3, "bf16": 1}, {"fp8": 4})
    assert shape.parameters == shape_from_config(LLAMA).parameters


def test_modelopt_mixed_precision_names_each_layer() -> None:
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp": {"quant_algo": "W4A16_AWQ", "group_size": 128},
    }
    block: dict[str, object] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    shape = quantised(block)
    assert {m.format.name: m.layers for m in shape.matmuls if m.name == "self_attn.q_proj"} == {
        "fp8": 1,
        "bf16": 3,
    }
    assert {m.format.name: m.layers for m in shape.matmuls if m.name == "mlp.up_proj"} == {
        "bf16": 3,
        "int4-g128": 1,
    }


def test_table_of_a_file_beside_counts_where_the_configuration_has_no_block() -> None:
    beside = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }
    shape = shape_from_config({**LLAMA, "hf_quant_config": beside})
    assert shape.compute_dtype == "fp8"
    assert shape.kv_dtype_bytes == 1


def test_kv_cache_scheme_of_the_checkpoint_is_taken() -> None:
    block = scheme({"type": "float", "num_bits": 8}, {"type": "float", "num_bits": 8})
    assert quantised({**block, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}).kv_dtype_bytes == 1
    assert quantised(block).kv_dtype_bytes == 2


@pytest.mark.parametrize(
    "block",
    [
        {"quant_method": "gguf"},
        {"quant_method": "awq"},
        {"quant_method": "modelopt", "quant_algo": "FP2"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "compressed-tensors"},
        scheme({"type": "float", "num_bits": 6}, None),
        {"quant_method": "bitsandbytes"},
        {},
    ],
)
def test_unknown_scheme_is_refused(block: dict[str, object]) -> None:
    with pytest.raises(UnknownQuantisation):
        quantised(block)


@pytest.mark.parametrize(
    ("pattern", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("self_attn", "model.layers.0.self_attn.q_proj", True),
        ("attn", "model.layers.0.self_attn.q_proj", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("model.layers.*.self_attn*", "model.layers.7.self_attn.q_proj", True),
        ("re:.*mlp.gate$", "model.layers.7.mlp.gate_proj", False),
        ("model.language_model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("language_model.lm_head", "lm_head", True),
    ],
)
def test_exclusions_name_whole_parts(pattern: str, module: str, *, excluded: bool) -> None:
    assert is_excluded(module, [pattern]) is excluded
