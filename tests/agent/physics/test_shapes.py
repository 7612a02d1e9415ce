from __future__ import annotations

import pytest

from gpuidle.agent.physics.builtin import CONFIGS, find_builtin
from gpuidle.agent.physics.shapes import UnknownArchitecture, kv_cache_bytes, shape_from_config

EXACT = {
    "meta-llama/Llama-2-7b-hf": 6738415616,
    "meta-llama/Llama-2-13b-hf": 13015864320,
    "meta-llama/Llama-2-70b-hf": 68976648192,
    "meta-llama/Llama-3.1-8B": 8030261248,
    "meta-llama/Llama-3.1-70B": 70553706496,
    "meta-llama/Llama-3.1-405B": 405853388800,
    "mistralai/Mistral-7B-v0.1": 7241732096,
    "mistralai/Mixtral-8x7B-v0.1": 46702792704,
    "Qwen/Qwen2.5-7B": 7615616512,
    "Qwen/Qwen2.5-72B": 72706203648,
    "Qwen/Qwen3-8B": 8190735360,
    "Qwen/Qwen3-32B": 32762123264,
    "Qwen/Qwen3-30B-A3B": 30532122624,
    "Qwen/Qwen3-235B-A22B": 235093634560,
    "deepseek-ai/DeepSeek-V3": 671026404352,
    "google/gemma-2-9b": 9241705984,
    "google/gemma-3-27b-it": 27009346304,
    "openai/gpt-oss-120b": 116829156672,
    "openai/gpt-oss-20b": 20914757184,
    "microsoft/phi-4": 14659507200,
}
"""Parameters that transformers 5.24.0 builds on the meta device."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
WINDOWED = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_builtin_shape_has_exactly_the_published_parameters(name: str) -> None:
    shape = find_builtin(name)
    assert shape is not None
    assert shape.parameters == EXACT[name]


def test_there_are_twenty_builtin_shapes_and_each_is_counted() -> None:
    assert sorted(CONFIGS) == sorted(EXACT)
    assert len(CONFIGS) == 20


def test_builtin_is_found_without_its_owner_and_in_any_case() -> None:
    shape = find_builtin("llama-2-70B-HF")
    assert shape is not None
    assert shape.name == "meta-llama/Llama-2-70b-hf"
    assert find_builtin("llama") is None


def test_active_parameters_of_mixtures_are_those_that_one_token_meets() -> None:
    active = {
        "mistralai/Mixtral-8x7B-v0.1": 12748587008,
        "Qwen/Qwen3-30B-A3B": 3041656832,
        "Qwen/Qwen3-235B-A22B": 21567635456,
        "openai/gpt-oss-120b": 5131100160,
        "openai/gpt-oss-20b": 3607142400,
        # 36.62 billion less the norms of the two ranks, which multiply nothing
        "deepseek-ai/DeepSeek-V3": 36624721920 - 61 * (1536 + 512),
    }
    for name, parameters in active.items():
        shape = find_builtin(name)
        assert shape is not None
        assert shape.matmul_parameters == parameters, name


def test_gpt_oss_takes_the_memory_of_its_checkpoint() -> None:
    for name, gibibytes in (("gpt-oss-120b", 60.77), ("gpt-oss-20b", 12.82)):
        shape = find_builtin(name)
        assert shape is not None
        assert shape.stored_bytes / 2**30 == pytest.approx(gibibytes, abs=0.005)


@pytest.mark.parametrize("tokens", [1, 16, 128, 129, 7321, 10007])
def test_kv_bytes_of_gpt_oss_20b_are_those_that_were_transferred(tokens: int) -> None:
    shape = find_builtin("gpt-oss-20b")
    assert shape is not None
    blocks = -(-tokens // 16)
    expected = 2 * 16 * 8 * 64 * 2 * (12 * blocks + 12 * min(blocks, 9))
    assert kv_cache_bytes(shape, tokens, block_tokens=16) == expected


def test_kv_bytes_of_a_token_by_kind_of_cache() -> None:
    for name, expected in (("Llama-2-70b-hf", 327680), ("DeepSeek-V3", 70272), ("gemma-2-9b", 344064)):
        shape = find_builtin(name)
        assert shape is not None
        assert shape.kv_bytes_per_token() == expected
        assert shape.kv_bytes_per_token(1) == expected / 2


def test_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnknownArchitecture, match="unknown architecture FooForCausalLM: FLOP basis absent"):
        shape_from_config({"architectures": ["FooForCausalLM"], "model_type": "foo"})
    with pytest.raises(UnknownArchitecture, match="unknown architecture foo: FLOP basis absent"):
        shape_from_config({"model_type": "foo"})
    with pytest.raises(UnknownArchitecture, match="FLOP basis absent"):
        shape_from_config({})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": None, "model_type": "qwen2"},
        {"intermediate_size": None, "model_type": "qwen2"},
        {"hidden_size": "64"},
        {"hidden_size": True},
        {"num_attention_heads": -4},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]},
        {"layer_types": ["full_attention"]},
        {"sliding_window": 16},
        {"torch_dtype": "int3"},
        {"quantization_config": {"quant_method": "hqq"}},
        {"quantization_config": "awq"},
    ],
)
def test_what_is_not_understood_is_refused_and_never_dropped(change: dict[str, object]) -> None:
    with pytest.raises(UnknownArchitecture, match="FLOP basis absent"):
        shape_from_config({**LLAMA, **change})


def test_tied_head_is_counted_once_and_multiplied_all_the_same() -> None:
    untied, tied = shape_from_config(LLAMA), shape_from_config({**LLAMA, "tie_word_embeddings": True})
    assert untied.parameters - tied.parameters == 256 * 64
    assert untied.matmul_parameters == tied.matmul_parameters


def test_windows_are_read_from_layer_kinds_or_from_the_familys_rule() -> None:
    everywhere = shape_from_config(WINDOWED)
    assert [(a.layers, a.window) for a in everywhere.attentions] == [(4, 16)]
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    listed = shape_from_config({**WINDOWED, "layer_types": kinds})
    assert {(a.layers, a.window) for a in listed.attentions} == {(3, 16), (1, None)}
    off = shape_from_config({**WINDOWED, "sliding_window": None})
    assert [(a.layers, a.window) for a in off.attentions] == [(4, None)]
    gemma = find_builtin("gemma-3-27b-it")
    assert gemma is not None
    assert {(a.layers, a.window) for a in gemma.attentions} == {(52, 1024), (10, None)}


def test_qwen_uses_its_window_only_where_it_is_switched_on() -> None:
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 16}
    assert not shape_from_config({**config, "use_sliding_window": False}).windowed
    on = shape_from_config({**config, "use_sliding_window": True, "max_window_layers": 3})
    assert {(a.layers, a.window) for a in on.attentions} == {(3, None), (1, 16)}


def test_layers_without_experts_keep_their_dense_ffn() -> None:
    shape = find_builtin("DeepSeek-V3")
    assert shape is not None
    assert {m.layers for m in shape.matmuls if m.part == "ffn"} == {3}
    assert {m.layers for m in shape.matmuls if m.part == "expert"} == {58}
    assert {m.outputs for m in shape.matmuls if m.part == "shared" and "gate" in m.name} == {2048}


def test_text_part_of_a_wrapper_is_counted_alone() -> None:
    text = {key: value for key, value in LLAMA.items() if key not in {"architectures", "torch_dtype"}}
    wrapper = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "torch_dtype": "float16",
        "text_config": text,
        "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24},
    }
    assert shape_from_config(wrapper).parameters == shape_from_config(LLAMA).parameters
    with pytest.raises(UnknownArchitecture, match="lacks text_config"):
        shape_from_config({**wrapper, "text_config": None})


def test_dtype_of_the_engine_overrides_the_files() -> None:
    assert shape_from_config(LLAMA, dtype="float32").compute_dtype == "fp32"
    assert shape_from_config(LLAMA, dtype="float32").weight_bytes == 2 * shape_from_config(LLAMA).weight_bytes
