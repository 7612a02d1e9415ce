"""How each known architecture is built, as data: one row a `model_type`.

Sources: the modelling files of Hugging Face transformers; each row is checked by the oracle tests, which
build the real model on the meta device and compare its parameters and its FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

Windows = Literal["none", "all", "alternate", "pattern", "qwen"]
"""Which layers have a sliding window where the configuration names one and lists no `layer_types`: all,
every other one from the first, all but each n-th (`sliding_window_pattern`), or Qwen's from a layer on."""

Experts = Literal["none", "all", "sparse_step", "first_dense"]
"""Which layers route to experts: all, by `decoder_sparse_step` and `mlp_only_layers`, or all after
`first_k_dense_replace`."""


class Family(msgspec.Struct, frozen=True):
    """One architecture. A flag that is a string is the configuration's key for it (absent: false)."""

    gated: bool | str = True
    """Three FFN matrices rather than two."""
    norms: int = 2
    """Vectors of width hidden that normalise in each layer."""
    norm_bias: bool = False
    final_norm: bool = True
    qk_norm: str = ""
    """Norms on queries and keys: "head" (a vector of head_dim each), "full" (of all heads), or a key of the
    configuration that switches the "head" kind on."""
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    ffn_bias: bool | str = False
    lm_head_bias: bool = False
    tied: bool = False
    """Default of `tie_word_embeddings`."""
    windows: Windows = "none"
    experts: Experts = "none"
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False
    """Whether the shared expert has a gate of its own (hidden x 1)."""
    sinks: bool = False
    """A learned attention sink a head."""
    latent: bool = False
    """Multi-head latent attention (MLA)."""
    multi_query: str = ""
    """Key of the configuration that says: one KV head."""
    positions: str = ""
    """Key of the configuration that gives the rows of a learned position table."""
    position_offset: int = 0
    default_ffn: int = 0
    """FFN width in multiples of hidden, where the configuration may leave it out."""
    modules: Mapping[str, str] = {}
    """Names of the modules, where they are not Llama's; for the exclusions of quantisers."""
    defaults: Mapping[str, object] = {}
    """Values that transformers takes where the file leaves them out."""


_LLAMA = Family(
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    ffn_bias="mlp_bias",
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
)
_QWEN2 = Family(qkv_bias=True, windows="qwen")
_QWEN3 = Family(qk_norm="head", qkv_bias="attention_bias", o_bias="attention_bias", windows="qwen")
_QWEN3_MOE = replace(_QWEN3, experts="sparse_step")
_GEMMA = Family(qkv_bias="attention_bias", o_bias="attention_bias", tied=True)
_GEMMA3 = replace(
    _GEMMA,
    norms=4,
    qk_norm="head",
    windows="pattern",
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)
_DEEPSEEK = Family(latent=True, experts="first_dense", o_bias="attention_bias")
_FUSED = {
    "q": "self_attn.qkv_proj",
    "k": "self_attn.qkv_proj",
    "v": "self_attn.qkv_proj",
    "gate": "mlp.gate_up_proj",
    "up": "mlp.gate_up_proj",
}

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(windows="all"),
    "mixtral": Family(
        windows="all",
        experts="all",
        modules={"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts.0"},
    ),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": replace(_QWEN2, experts="sparse_step", shared_gate=True),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4, windows="alternate"),
    "gemma3_text": _GEMMA3,
    "phi3": Family(windows="all", modules=_FUSED),
    "gpt_oss": Family(
        qkv_bias=True,
        o_bias=True,
        windows="alternate",
        experts="all",
        router_bias=True,
        expert_bias=True,
        sinks=True,
        modules={"router": "mlp.router"},
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4": Family(
        norms=4,
        qkv_bias="attention_bias",
        defaults={"attention_bias": True},
        modules={"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"},
    ),
    "glm4_moe": Family(qk_norm="use_qk_norm", qkv_bias="attention_bias", experts="first_dense"),
    "dots1": Family(
        qk_norm="head",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows="qwen",
        experts="first_dense",
    ),
    "minimax_m2": Family(
        qk_norm="full",
        experts="all",
        modules={"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts.0"},
    ),
    "ministral": Family(windows="all"),
    "ministral3": Family(windows="all"),
    "olmo2": Family(qk_norm="full", qkv_bias="attention_bias", o_bias="attention_bias"),
    "olmo3": Family(
        qk_norm="full",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows="pattern",
        defaults={"sliding_window_pattern": 4},
    ),
    "olmoe": Family(qk_norm="full", qkv_bias="attention_bias", o_bias="attention_bias", experts="all"),
    "granite": Family(qkv_bias="attention_bias", o_bias="attention_bias", ffn_bias="mlp_bias"),
    "granitemoe": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        experts="all",
        modules={"router": "block_sparse_moe.router.layer", "experts": "block_sparse_moe"},
    ),
    "smollm3": Family(qkv_bias="attention_bias", o_bias="attention_bias", ffn_bias="mlp_bias", tied=True),
    "seed_oss": Family(
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        ffn_bias="mlp_bias",
        defaults={"attention_bias": True},
    ),
    "ernie4_5": Family(qkv_bias="use_bias", o_bias="use_bias", ffn_bias="use_bias", tied=True),
    "hunyuan_v1_dense": Family(qk_norm="head", qkv_bias="attention_bias", o_bias="attention_bias"),
    "arcee": Family(gated=False, qkv_bias="attention_bias", o_bias="attention_bias", ffn_bias="mlp_bias"),
    "nemotron": Family(
        gated=False, norm_bias=True, qkv_bias="attention_bias", o_bias="attention_bias", ffn_bias="mlp_bias"
    ),
    "cohere": Family(norms=1, qkv_bias="attention_bias", o_bias="attention_bias", tied=True),
    "cohere2": Family(
        norms=1,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        tied=True,
        windows="pattern",
        defaults={"sliding_window_pattern": 4},
    ),
    "phi": Family(
        gated=False,
        norms=1,
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        lm_head_bias=True,
        modules={"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    ),
    "opt": Family(
        gated=False,
        norm_bias=True,
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        ffn_bias="enable_bias",
        tied=True,
        positions="max_position_embeddings",
        position_offset=2,
        defaults={"enable_bias": True},
        modules={"o": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
    ),
    "gpt2": Family(
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        tied=True,
        positions="n_positions",
        default_ffn=4,
        modules={
            "q": "attn.c_attn",
            "k": "attn.c_attn",
            "v": "attn.c_attn",
            "o": "attn.c_proj",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
    ),
    "gpt_bigcode": Family(
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        tied=True,
        positions="n_positions",
        default_ffn=4,
        multi_query="multi_query",
        defaults={"multi_query": True},
    ),
    "gpt_neox": Family(
        gated=False,
        norm_bias=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        ffn_bias=True,
        defaults={"attention_bias": True},
        modules={
            "q": "attention.query_key_value",
            "k": "attention.query_key_value",
            "v": "attention.query_key_value",
            "o": "attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
    ),
    "starcoder2": Family(
        gated=False,
        norm_bias=True,
        qkv_bias="use_bias",
        o_bias="use_bias",
        ffn_bias="use_bias",
        tied=True,
        windows="all",
        defaults={"use_bias": True},
        modules={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
}
"""By `model_type`."""

WRAPPERS: Mapping[str, tuple[str, str]] = {
    "llava": ("text_config", "llama"),
    "llava_next": ("text_config", "llama"),
    "mistral3": ("text_config", "mistral"),
    "gemma3": ("text_config", "gemma3_text"),
    "qwen2_vl": ("text_config", "qwen2_vl_text"),
    "qwen2_5_vl": ("text_config", "qwen2_5_vl_text"),
    "qwen3_vl": ("text_config", "qwen3_vl_text"),
    "qwen3_vl_moe": ("text_config", "qwen3_vl_moe_text"),
    "kimi_k25": ("text_config", "kimi_k2"),
    "internvl": ("text_config", "qwen2"),
    "internvl_chat": ("llm_config", "qwen2"),
}
"""Vision-language models: where their text part stands, and its `model_type` where the file omits it."""
