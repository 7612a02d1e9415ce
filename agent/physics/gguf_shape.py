"""From the header of a GGUF file to a shape: the list of tensors says all sizes and formats itself.

Sources: the GGUF specification and ggml's block layouts (bits a weight are bytes of a block x 8 / weights).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from gpuidle.agent.physics.parts import (
    Attention,
    Matmul,
    ModelShape,
    Part,
    Split,
    UnknownArchitecture,
    WeightFormat,
)

_FLOATS = {0: ("f32", 32.0, "fp32"), 1: ("f16", 16.0, "bf16"), 30: ("bf16", 16.0, "bf16")}
_BLOCKS: Mapping[int, tuple[str, int, int]] = {
    2: ("q4_0", 18, 32),
    3: ("q4_1", 20, 32),
    6: ("q5_0", 22, 32),
    7: ("q5_1", 24, 32),
    8: ("q8_0", 34, 32),
    9: ("q8_1", 36, 32),
    10: ("q2_k", 84, 256),
    11: ("q3_k", 110, 256),
    12: ("q4_k", 144, 256),
    13: ("q5_k", 176, 256),
    14: ("q6_k", 210, 256),
    15: ("q8_k", 292, 256),
    16: ("iq2_xxs", 66, 256),
    17: ("iq2_xs", 74, 256),
    18: ("iq3_xxs", 98, 256),
    19: ("iq1_s", 50, 256),
    20: ("iq4_nl", 18, 32),
    21: ("iq3_s", 110, 256),
    22: ("iq2_s", 82, 256),
    23: ("iq4_xs", 136, 256),
    29: ("iq1_m", 56, 256),
    34: ("tq1_0", 54, 256),
    35: ("tq2_0", 66, 256),
    39: ("mxfp4", 17, 32),
}
"""ggml type: name, bytes of a block, weights of a block. All are multiplied by integer kernels."""


class _Role(msgspec.Struct, frozen=True):
    part: Part
    split: Split = "shared_out"


_ROLES: Mapping[str, _Role] = {
    "attn_q": _Role("attention"),
    "attn_k": _Role("attention", "kv_heads"),
    "attn_v": _Role("attention", "kv_heads"),
    "attn_qkv": _Role("attention"),
    "attn_output": _Role("attention"),
    "attn_q_a": _Role("attention", "copied"),
    "attn_q_b": _Role("attention"),
    "attn_kv_a_mqa": _Role("attention", "copied"),
    "attn_kv_b": _Role("attention"),
    "attn_k_b": _Role("attention"),
    "attn_v_b": _Role("attention"),
    "ffn_gate": _Role("ffn"),
    "ffn_up": _Role("ffn"),
    "ffn_down": _Role("ffn"),
    "ffn_gate_inp": _Role("router", "copied"),
    "ffn_gate_inp_shexp": _Role("router", "copied"),
    "ffn_gate_exps": _Role("expert"),
    "ffn_up_exps": _Role("expert"),
    "ffn_down_exps": _Role("expert"),
    "ffn_gate_shexp": _Role("shared"),
    "ffn_up_shexp": _Role("shared"),
    "ffn_down_shexp": _Role("shared"),
}

_WINDOWS: Mapping[str, str] = {
    "llama": "none",
    "qwen2": "none",
    "qwen2moe": "none",
    "qwen3": "none",
    "qwen3moe": "none",
    "gemma": "none",
    "gemma2": "alternate",
    "gemma3": "sixth",
    "phi2": "none",
    "phi3": "none",
    "gpt-oss": "alternate",
    "deepseek2": "none",
    "olmo2": "none",
    "olmoe": "none",
    "granite": "none",
    "granitemoe": "none",
    "starcoder2": "none",
    "command-r": "none",
    "glm4": "none",
    "glm4moe": "none",
    "smollm3": "none",
    "seed_oss": "none",
    "ernie4_5": "none",
    "hunyuan-dense": "none",
    "arcee": "none",
    "nemotron": "none",
    "gpt2": "none",
    "gptneox": "none",
    "starcoder": "none",
}
"""`general.architecture`, and which of its layers llama.cpp gives a window: none, from the first every other
one, or all but each sixth."""


def shape_from_gguf(header: Mapping[str, object], *, name: str = "") -> ModelShape:
    """Return the shape that a GGUF header describes.

    `header` is {"metadata": {key: value}, "tensors": [[name, [dimensions], type], ...]}, as the collectors
    read it, all parts of a split file together. Raises UnknownArchitecture for an architecture, a tensor or
    a type that is not known.
    """
    metadata = header.get("metadata")
    tensors = header.get("tensors")
    if not isinstance(metadata, Mapping) or not isinstance(tensors, Sequence):
        raise UnknownArchitecture("not a GGUF header: FLOP basis absent")
    architecture = str(metadata.get("general.architecture", "(unnamed)"))
    if architecture not in _WINDOWS:
        raise UnknownArchitecture(f"unknown architecture {architecture}: FLOP basis absent")
    return _Reader(cast("Mapping[str, object]", metadata), tensors, architecture, name).build()


class _Reader:
    def __init__(
        self, metadata: Mapping[str, object], tensors: Sequence[object], architecture: str, name: str
    ) -> None:
        self.metadata, self.architecture = metadata, architecture
        self.name = name or str(metadata.get("general.name") or architecture)
        self.tensors = [_tensor(row) for row in tensors]
        self.names = {row[0] for row in self.tensors}
        self.hidden = self.number("embedding_length")
        self.layers = self.number("block_count") - (self.maybe("nextn_predict_layers") or 0)
        self.heads = self.number("attention.head_count")
        self.kv_heads = self.maybe("attention.head_count_kv") or self.heads
        self.head_dim = self.maybe("attention.key_length") or self.hidden // self.heads
        self.active = self.maybe("expert_used_count") or 0

    def maybe(self, key: str) -> int | None:
        """Return a number of the architecture; a list of one and the same number counts as it."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, (list, tuple)):
            if len(set(value)) != 1:
                raise UnknownArchitecture(
                    f"{self.architecture} with layers that differ in {key}: FLOP basis absent"
                )
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnknownArchitecture(f"{self.architecture}.{key} is {value!r}: FLOP basis absent")
        return value

    def number(self, key: str) -> int:
        value = self.maybe(key)
        if not value:
            raise UnknownArchitecture(f"GGUF header lacks {self.architecture}.{key}: FLOP basis absent")
        return value

    def build(self) -> ModelShape:
        matmuls: dict[tuple[str, tuple[int, ...], WeightFormat], Matmul] = {}
        vectors = embedding = 0
        head: tuple[tuple[int, ...], WeightFormat] | None = None
        table: tuple[tuple[int, ...], WeightFormat] | None = None
        embedding_bytes = 0.0
        for tensor, dims, kind in self.tensors:
            pieces = tensor.split(".")
            layered = pieces[0] == "blk"
            if layered and int(pieces[1]) >= self.layers:
                continue  # multi-token prediction: run by speculation only
            role = pieces[2] if layered else pieces[0]
            ending = pieces[-1]
            if role in {"token_embd", "position_embd"} and ending == "weight":
                fmt = _format(kind, tensor)
                embedding += math.prod(dims)
                embedding_bytes += math.prod(dims) * fmt.bits / 8
                table = (dims, fmt) if role == "token_embd" else table
            elif role == "output" and ending == "weight":
                head = (dims, _format(kind, tensor))
            elif _is_vector(role, ending, dims):
                vectors += math.prod(dims)
            elif layered and ending == "weight" and role in _ROLES:
                if role == "attn_kv_b" and f"blk.{pieces[1]}.attn_k_b.weight" in self.names:
                    continue  # kept beside its halves for other kernels
                self._add(matmuls, role, dims, _format(kind, tensor))
            else:
                raise UnknownArchitecture(
                    f"unknown tensor {tensor} of {self.architecture}: FLOP basis absent"
                )
        if table is None:
            raise UnknownArchitecture("the GGUF header lists no token_embd.weight: FLOP basis absent")
        vocab = table[0][-1]
        dims, fmt = head or table
        lm_head = Matmul("output", "lm_head", dims[0], dims[-1], 1, fmt, "shared_out")
        self._check(matmuls)
        experts = self.maybe("expert_count") or 0
        return ModelShape(
            name=self.name,
            architecture=self.architecture,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=vocab,
            tied=head is None,
            matmuls=(*matmuls.values(), lm_head),
            attentions=self._attentions(),
            embedding_parameters=embedding,
            vector_parameters=vectors,
            activation_bytes=2.0,
            kv_dtype_bytes=2.0,
            experts=experts,
            experts_per_token=self.active if experts else 0,
            embedding_bytes=embedding_bytes,
        )

    def _add(
        self,
        matmuls: dict[tuple[str, tuple[int, ...], WeightFormat], Matmul],
        role: str,
        dims: tuple[int, ...],
        fmt: WeightFormat,
    ) -> None:
        known = _ROLES[role]
        experts = active = 1
        inputs, outputs = dims[0], dims[1] if len(dims) > 1 else 1
        if known.part == "expert":
            if len(dims) != 3 or not self.active:
                raise UnknownArchitecture(f"{self.architecture}: experts without a count: FLOP basis absent")
            experts, active = dims[2], self.active
        elif len(dims) == 3:  # MLA's halves of kv_b, one matrix a head
            outputs *= dims[2]
        if known.part == "router" and fmt.compute == "fp32":
            # kept in FP32 for its sums, a thousandth of the work: no sheet has a peak for it
            fmt = WeightFormat(fmt.name, fmt.bits, "bf16")
        before = matmuls.get((role, dims, fmt))
        layers = 1 if before is None else before.layers + 1
        matmuls[role, dims, fmt] = Matmul(
            role, known.part, inputs, outputs, layers, fmt, known.split, experts, active
        )

    def _check(self, matmuls: Mapping[tuple[str, tuple[int, ...], WeightFormat], Matmul]) -> None:
        """Every layer must have an output projection, and something that feeds forward."""
        for part, roles in (
            ("attention", {"attn_output"}),
            ("feed-forward part", {"ffn_down", "ffn_down_exps"}),
        ):
            seen = sum(m.layers for (role, _, _), m in matmuls.items() if role in roles)
            if seen != self.layers:
                raise UnknownArchitecture(
                    f"{self.architecture}: {seen} of {self.layers} layers have a known {part}: "
                    "FLOP basis absent"
                )

    def _attentions(self) -> tuple[Attention, ...]:
        value = self.maybe("attention.value_length") or self.head_dim
        rank = self.maybe("attention.kv_lora_rank")
        if rank:
            rope = self.number("rope.dimension_count")
            key = self.maybe("attention.key_length_mla") or self.head_dim
            value = self.maybe("attention.value_length_mla") or value
            return (Attention(self.layers, self.heads, self.heads, key, value, None, rank, rope),)
        kinds = self._windows()
        return tuple(
            Attention(kinds.count(window), self.heads, self.kv_heads, self.head_dim, value, window)
            for window in dict.fromkeys(kinds)
        )

    def _windows(self) -> list[int | None]:
        rule = _WINDOWS[self.architecture]
        window = self.maybe("attention.sliding_window")
        if rule == "none" or not window:
            if window and self.architecture != "phi3":  # llama.cpp runs Phi-3 without its window
                raise UnknownArchitecture(f"{self.architecture} with a sliding window: FLOP basis absent")
            return [None] * self.layers
        every = 2 if rule == "alternate" else 6
        return [None if (layer + 1) % every == 0 else window for layer in range(self.layers)]


def _tensor(row: object) -> tuple[str, tuple[int, ...], int]:
    if isinstance(row, (list, tuple)) and len(row) == 3:
        name, dims, kind = row
        if isinstance(name, str) and isinstance(dims, (list, tuple)) and dims and isinstance(kind, int):
            sizes = tuple(int(size) for size in dims)
            if min(sizes) > 0 and (not name.startswith("blk.") or name.count(".") >= 2):
                return name, sizes, kind
    raise UnknownArchitecture(f"not a tensor of a GGUF header: {str(row)[:80]}: FLOP basis absent")


def _format(kind: int, tensor: str) -> WeightFormat:
    if kind in _FLOATS:
        return WeightFormat(*_FLOATS[kind])
    if kind in _BLOCKS:
        name, size, weights = _BLOCKS[kind]
        return WeightFormat(name, size * 8 / weights, "int8")
    raise UnknownArchitecture(f"unknown type {kind} of tensor {tensor}: FLOP basis absent")


def _is_vector(role: str, ending: str, dims: tuple[int, ...]) -> bool:
    if ending == "bias" or "norm" in role:
        return True
    return role in {
        "attn_sinks",
        "exp_probs_b",
        "rope_freqs",
        "rope_factors_long",
        "rope_factors_short",
    } and (len(dims) == 1)
