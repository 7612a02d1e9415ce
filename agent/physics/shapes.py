"""From a model's configuration to its shape. An architecture that is not listed is refused, never guessed.

`config` is a parsed `config.json`; keys keep the names that transformers gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from gpuidle.agent.physics.families import FAMILIES, Family
from gpuidle.agent.physics.gguf_shape import shape_from_gguf
from gpuidle.agent.physics.parts import (
    Attention,
    Matmul,
    ModelShape,
    Part,
    Split,
    UnknownArchitecture,
    WeightFormat,
    kv_cache_bytes,
)
from gpuidle.agent.physics.quantisation import (
    FormatOf,
    UnknownQuantisation,
    formats,
    kv_bytes_of,
    plain_format,
)
from gpuidle.agent.physics.text_part import TextPart, architecture_of, check_head, text_part

__all__ = [
    "Attention",
    "Matmul",
    "ModelShape",
    "UnknownArchitecture",
    "UnknownQuantisation",
    "WeightFormat",
    "kv_cache_bytes",
    "shape_from_config",
]

_LARGEST = 1 << 32
_MOST_LAYERS = 4096
"""Sizes beyond these are damage, and would be counted layer by layer for hours."""

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab": ("vocab_size",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "active": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "expert_ffn": ("moe_intermediate_size",),
}

_MODULES: Mapping[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_a": "self_attn.q_a_proj",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_b": "self_attn.kv_b_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "experts": "mlp.experts.0",
    "shared": "mlp.shared_experts",
    "shared_gate": "mlp.shared_expert_gate",
}


def shape_from_config(
    config: Mapping[str, object],
    *,
    name: str = "",
    dtype: str | None = None,
    quantisation: Mapping[str, object] | None = None,
) -> ModelShape:
    """Return the shape that a `config.json` describes: of the text part, where it is a wrapper's.

    Two keys stand for files that lie beside it or instead of it: "hf_quant_config" holds that file's table,
    "gguf" the header of a GGUF.

    `dtype` overrides the file's ("bfloat16"); `quantisation` is the table of a `hf_quant_config.json`.
    Layers for multi-token prediction are left out: only speculation runs them. Raises UnknownArchitecture
    for an architecture, a layer kind or a number format that is not known, and for a file that lacks a size.
    """
    header = config.get("gguf")
    if isinstance(header, Mapping):
        return shape_from_gguf(cast("Mapping[str, object]", header), name=name)
    beside = config.get("hf_quant_config")
    if quantisation is None and isinstance(beside, Mapping):
        quantisation = cast("Mapping[str, object]", beside)
    text = text_part(config)
    model_type = str(text.values.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnknownArchitecture(f"unknown architecture {architecture_of(config)}: FLOP basis absent")
    check_head(config)
    return _Builder(text, family, model_type, name, dtype, quantisation).build()


class _Builder:
    """Reads one configuration into the lists that a shape is made of."""

    def __init__(
        self,
        text: TextPart,
        family: Family,
        model_type: str,
        name: str,
        dtype: str | None,
        quantisation: Mapping[str, object] | None,
    ) -> None:
        self.text, self.family, self.model_type = text, family, model_type
        self.name = name or str(text.outer.get("_name_or_path") or model_type)
        block = quantisation if quantisation is not None else text.get("quantization_config")
        if block is None:
            block = text.get("compression_config")
        if block is not None and not isinstance(block, Mapping):
            raise UnknownQuantisation("the quantisation block is not a table: FLOP basis absent")
        stated = dtype or text.get("dtype") or text.get("torch_dtype")
        if stated is None:
            stated = "bfloat16"  # every format without a statement that is served is 16 bits wide
        self.plain = plain_format(str(stated))
        self.block = cast("Mapping[str, object] | None", block)
        self.format_of: FormatOf = formats(self.block, self.plain)
        self.hidden = self.size("hidden")
        self.layers = self.size("layers")
        if self.layers > _MOST_LAYERS:
            raise UnknownArchitecture(f"{model_type} with {self.layers} layers: FLOP basis absent")
        self.heads = self.size("heads")
        self.vocab = self.size("vocab")
        self.kv_heads = self._kv_heads()
        self.head_dim = self._integer("head_dim") or self.hidden // self.heads
        self.matmuls: dict[tuple[str, WeightFormat], Matmul] = {}
        self.vectors = 0

    # ---- reading

    def _integer(self, key: str) -> int | None:
        value = self.text.values.get(key)
        if value is None:
            value = self.family.defaults.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise UnknownArchitecture(
                f"{self.model_type} configuration: {key} is {value!r}: FLOP basis absent"
            )
        return value

    def maybe(self, size: str) -> int | None:
        """Return a size under any of its keys."""
        for key in _ALIASES[size]:
            value = self._integer(key)
            if value is not None:
                return value
        return None

    def size(self, size: str) -> int:
        value = self.maybe(size)
        if not value:
            wanted = _ALIASES[size][0]
            raise UnknownArchitecture(f"{self.model_type} configuration lacks {wanted}: FLOP basis absent")
        return value

    def need(self, key: str) -> int:
        value = self._integer(key)
        if value is None:
            raise UnknownArchitecture(f"{self.model_type} configuration lacks {key}: FLOP basis absent")
        return value

    def flag(self, flag: bool | str) -> bool:  # noqa: FBT001
        if isinstance(flag, bool):
            return flag
        value = self.text.values.get(flag)
        return bool(self.family.defaults.get(flag, False) if value is None else value)

    def _kv_heads(self) -> int:
        if self.family.multi_query:
            return 1 if self.flag(self.family.multi_query) else self.heads
        return self.maybe("kv_heads") or self.heads

    # ---- writing

    def matrix(
        self,
        module: str,
        part: Part,
        inputs: int,
        outputs: int,
        split: Split,
        layer: int | None = None,
        *,
        key: str = "",
        experts: int = 1,
        active: int = 1,
    ) -> None:
        """Add one layer's matrix; layers that store it alike are counted together."""
        full = module if layer is None else f"model.layers.{layer}.{module}"
        fmt = self.format_of(full)
        at = (f"{part}:{key or module}:{inputs}:{outputs}", fmt)
        before = self.matmuls.get(at)
        layers = 1 if before is None else before.layers + 1
        self.matmuls[at] = Matmul(module, part, inputs, outputs, layers, fmt, split, experts, active)

    def module(self, key: str) -> str:
        return self.family.modules.get(key, _MODULES[key])

    def build(self) -> ModelShape:
        f = self.family
        windows, routed = self._windows(), self._routed()
        for layer in range(self.layers):
            self._attention(layer)
            if routed[layer]:
                self._experts(layer)
            else:
                self._ffn(layer)
            self.vectors += f.norms * self.hidden * (2 if f.norm_bias else 1)
        self.vectors += self.hidden * (2 if f.norm_bias else 1) if f.final_norm else 0
        self.matrix("lm_head", "lm_head", self.hidden, self.vocab, "shared_out")
        self.vectors += self.vocab if f.lm_head_bias else 0
        tied = self.text.outer.get("tie_word_embeddings")  # a wrapper owns the head, so its word comes first
        tied = self.text.values.get("tie_word_embeddings") if tied is None else tied
        positions = self.need(f.positions) + f.position_offset if f.positions else 0
        kv = kv_bytes_of(self.block)
        activation = self.plain.bits / 8
        return ModelShape(
            name=self.name,
            architecture=self.model_type,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            tied=f.tied if tied is None else bool(tied),
            matmuls=tuple(self.matmuls.values()),
            attentions=self._attentions(windows),
            embedding_parameters=(self.vocab + positions) * self.hidden,
            vector_parameters=self.vectors,
            activation_bytes=activation,
            kv_dtype_bytes=activation if kv is None else kv,
            experts=self.size("experts") if any(routed) else 0,
            experts_per_token=self.size("active") if any(routed) else 0,
        )

    def _attention(self, layer: int) -> None:
        f, d = self.family, self.head_dim
        if f.latent:
            self._latent_attention(layer)
            return
        q, kv = self.heads * d, self.kv_heads * d
        self.matrix(self.module("q"), "attention", self.hidden, q, "shared_out", layer, key="q")
        self.matrix(self.module("k"), "attention", self.hidden, kv, "kv_heads", layer, key="k")
        self.matrix(self.module("v"), "attention", self.hidden, kv, "kv_heads", layer, key="v")
        self.matrix(self.module("o"), "attention", q, self.hidden, "shared_out", layer, key="o")
        self.vectors += q + 2 * kv if self.flag(f.qkv_bias) else 0
        self.vectors += self.hidden if self.flag(f.o_bias) else 0
        self.vectors += self.heads if f.sinks else 0
        if f.qk_norm == "full":
            self.vectors += q + kv
        elif f.qk_norm == "head" or (f.qk_norm and self.flag(f.qk_norm)):
            self.vectors += 2 * d

    def _latent_attention(self, layer: int) -> None:
        rank = self._integer("q_lora_rank")
        c, r = self.need("kv_lora_rank"), self.need("qk_rope_head_dim")
        n, v = self.need("qk_nope_head_dim"), self.need("v_head_dim")
        width = self.heads * (n + r)
        if rank:
            self.matrix(self.module("q_a"), "attention", self.hidden, rank, "copied", layer)
            self.matrix(self.module("q_b"), "attention", rank, width, "shared_out", layer)
            self.vectors += rank
        else:
            self.matrix(self.module("q"), "attention", self.hidden, width, "shared_out", layer)
        self.matrix(self.module("kv_a"), "attention", self.hidden, c + r, "copied", layer)
        self.matrix(self.module("kv_b"), "attention", c, self.heads * (n + v), "shared_out", layer)
        self.matrix(self.module("o"), "attention", self.heads * v, self.hidden, "shared_out", layer)
        self.vectors += c
        if self.flag(self.family.o_bias):
            self.vectors += (rank or 0) + c + r + self.hidden

    def _ffn(self, layer: int) -> None:
        f = self.family
        width = self.maybe("ffn") or f.default_ffn * self.hidden
        if not width:
            raise UnknownArchitecture(
                f"{self.model_type} configuration lacks intermediate_size: FLOP basis absent"
            )
        if self.flag(f.gated):
            self.matrix(self.module("gate"), "ffn", self.hidden, width, "shared_out", layer, key="gate")
        self.matrix(self.module("up"), "ffn", self.hidden, width, "shared_out", layer, key="up")
        self.matrix(self.module("down"), "ffn", width, self.hidden, "shared_out", layer, key="down")
        if self.flag(f.ffn_bias):
            self.vectors += width * (2 if self.flag(f.gated) else 1) + self.hidden

    def _experts(self, layer: int) -> None:
        f = self.family
        count, active = self.size("experts"), self.size("active")
        width = self.maybe("expert_ffn") or self.size("ffn")
        self.matrix(self.module("router"), "router", self.hidden, count, "copied", layer)
        for matrix, (i, o) in (
            ("gate_proj", (self.hidden, width)),
            ("up_proj", (self.hidden, width)),
            ("down_proj", (width, self.hidden)),
        ):
            module = f"{self.module('experts')}.{matrix}"
            self.matrix(module, "expert", i, o, "shared_out", layer, experts=count, active=active)
        self.vectors += count if f.router_bias else 0
        self.vectors += count * (2 * width + self.hidden) if f.expert_bias else 0
        shared = (
            self._integer("shared_expert_intermediate_size")
            or (self._integer("n_shared_experts") or 0) * width
        )
        if shared:
            for matrix, (i, o) in (
                ("gate_proj", (self.hidden, shared)),
                ("up_proj", (self.hidden, shared)),
                ("down_proj", (shared, self.hidden)),
            ):
                module = f"{self.module('shared')}.{matrix}"
                self.matrix(module, "shared", i, o, "shared_out", layer)
            if f.shared_gate:
                self.matrix(self.module("shared_gate"), "router", self.hidden, 1, "copied", layer)

    # ---- which layers

    def _routed(self) -> list[bool]:
        kind = self.family.experts
        count = range(self.layers)
        if kind == "none" or not self.maybe("experts"):
            return [False for _ in count]
        if kind == "all":
            return [True for _ in count]
        if kind == "first_dense":
            first = self._integer("first_k_dense_replace") or 0
            every = self._integer("moe_layer_freq") or 1
            return [layer >= first and layer % every == 0 for layer in count]
        step = self._integer("decoder_sparse_step") or 1
        listed = self.text.values.get("mlp_only_layers")
        dense = (
            [each for each in listed if isinstance(each, int)] if isinstance(listed, (list, tuple)) else []
        )
        return [layer not in dense and (layer + 1) % step == 0 for layer in count]

    def _windows(self) -> list[int | None]:
        """Return each layer's window. A list of layer kinds in the file wins over the family's rule."""
        window = self._integer("sliding_window")
        kinds = self.text.values.get("layer_types")
        if isinstance(kinds, (list, tuple)):
            return self._listed_windows([str(kind) for kind in kinds], window)
        rule = self.family.windows
        if not window or self.text.values.get("use_sliding_window") is False:
            return [None] * self.layers
        if rule == "none":
            raise UnknownArchitecture(f"{self.model_type} with a sliding window: FLOP basis absent")
        if rule == "all":
            return [window] * self.layers
        if rule == "alternate":
            return [window if layer % 2 == 0 else None for layer in range(self.layers)]
        if rule == "pattern":
            every = self.need("sliding_window_pattern")
            return [None if (layer + 1) % every == 0 else window for layer in range(self.layers)]
        if not self.flag("use_sliding_window"):
            return [None] * self.layers
        first = self.need("max_window_layers")
        return [window if layer >= first else None for layer in range(self.layers)]

    def _listed_windows(self, kinds: list[str], window: int | None) -> list[int | None]:
        if len(kinds) != self.layers:
            raise UnknownArchitecture(
                f"{self.model_type}: layer_types does not list every layer: FLOP basis absent"
            )
        for kind in kinds:
            if kind not in {"full_attention", "sliding_attention"}:
                raise UnknownArchitecture(
                    f"unknown layer kind {kind} of {self.model_type}: FLOP basis absent"
                )
        if "sliding_attention" in kinds and not window:
            raise UnknownArchitecture(
                f"{self.model_type} configuration lacks sliding_window: FLOP basis absent"
            )
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def _attentions(self, windows: list[int | None]) -> tuple[Attention, ...]:
        kinds: list[Attention] = []
        latent: int | None = None
        rope, key, value = 0, self.head_dim, self.head_dim
        if self.family.latent:
            latent, rope = self.need("kv_lora_rank"), self.need("qk_rope_head_dim")
            key, value = self.need("qk_nope_head_dim") + rope, self.need("v_head_dim")
        for window in dict.fromkeys(windows):
            layers = windows.count(window)
            kinds.append(Attention(layers, self.heads, self.kv_heads, key, value, window, latent, rope))
        return tuple(kinds)
