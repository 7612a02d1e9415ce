"""What a model is made of, as far as arithmetic and traffic go: matrices, attention, vectors.

Every architecture comes down to a list of matrices (`Matmul`), each with the number of layers that have it,
and a list of attention kinds (`Attention`). All figures of a step are sums over these two lists, so that no
part can be dropped by a formula that does not know it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec


class UnknownArchitecture(ValueError):
    """The model's structure or number format is not known: there is no FLOP basis, and none is guessed."""


Part = Literal["attention", "ffn", "router", "expert", "shared", "lm_head"]
Split = Literal["shared_out", "kv_heads", "copied"]
"""How tensor parallelism treats a matrix: divided over the ranks, divided by KV heads (copied once ranks
outnumber them), or copied whole to each rank."""


class WeightFormat(msgspec.Struct, frozen=True):
    """How a matrix is stored and at which rate its product runs."""

    name: str
    """Such as "bf16", "fp8", "int4-g128"."""
    bits: float
    """Stored bits a weight, scales and zero points included."""
    compute: str
    """The dtype whose peak the product is measured against: "fp32", "bf16" (any 16-bit float), "fp8",
    "int8" or "fp4". Weight-only formats multiply in 16 bits."""


class Matmul(msgspec.Struct, frozen=True):
    """One matrix of `inputs` x `outputs` weights, present in `layers` layers."""

    name: str
    part: Part
    inputs: int
    outputs: int
    layers: int
    format: WeightFormat
    split: Split
    experts: int = 1
    """Copies with different weights in each layer (routed experts)."""
    active: int = 1
    """How many of those copies one token passes."""

    @property
    def parameters(self) -> int:
        """Weights of all layers and all experts."""
        return self.inputs * self.outputs * self.experts * self.layers

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with."""
        return self.inputs * self.outputs * self.active * self.layers


class Attention(msgspec.Struct, frozen=True):
    """Attention of `layers` layers that are alike. Dimensions are per head."""

    layers: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Keys that a query sees, itself included; None: all before it."""
    latent_dim: int | None = None
    """MLA: width of the compressed KV vector that the cache holds; None: keys and values are cached."""
    rope_dim: int = 0
    """MLA: width of the shared rotary key, cached beside the compressed vector."""

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one (query, key) pair in one layer: 2 H (key_dim + value_dim)."""
        return 2 * self.heads * (self.key_dim + self.value_dim)

    @property
    def absorbed_flops_per_pair(self) -> int:
        """The same in decode. MLA multiplies against the compressed cache there: 2 H (2 c + r)."""
        if self.latent_dim is None:
            return self.flops_per_pair
        return 2 * self.heads * (2 * self.latent_dim + self.rope_dim)

    @property
    def kv_elements_per_token(self) -> int:
        """Cached elements a token and layer: K (key_dim + value_dim), or c + r with MLA."""
        if self.latent_dim is None:
            return self.kv_heads * (self.key_dim + self.value_dim)
        return self.latent_dim + self.rope_dim


class ModelShape(msgspec.Struct, frozen=True, dict=True):
    """A model's text part. Build it with `shape_from_config`; all sizes are of the whole model."""

    name: str
    architecture: str
    """`model_type` of the configuration, or `general.architecture` of a GGUF."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Whether lm_head is the embedding table: counted once."""
    matmuls: tuple[Matmul, ...]
    attentions: tuple[Attention, ...]
    embedding_parameters: int
    """Token and learned position tables: looked up, never multiplied."""
    vector_parameters: int
    """Norms, biases and attention sinks."""
    activation_bytes: float
    """Bytes of an activation; also of embeddings, norms and biases."""
    kv_dtype_bytes: float
    """Bytes of a cached element, unless the engine was told otherwise."""
    experts: int = 0
    """Routed experts of an MoE layer; 0: dense."""
    experts_per_token: int = 0
    embedding_bytes: float | None = None
    """Bytes of the tables, where they are not stored as activations are (GGUF)."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.architecture, self.layers, self.hidden, self.matmuls, self.attentions))

    def __hash__(self) -> int:
        """Return what is found once: figures that are kept by shape are asked for in each window."""
        return self._hash

    @property
    def parameters(self) -> int:
        """All weights: matrices, tables and vectors; a tied lm_head once."""
        matrices = sum(m.parameters for m in self.matmuls if not (self.tied and m.part == "lm_head"))
        return matrices + self.embedding_parameters + self.vector_parameters

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with, lm_head included: its linear FLOPs are twice this."""
        return sum(m.active_parameters for m in self.matmuls)

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of all matrices as stored, each read once, every expert included; no tables, no vectors."""
        return sum(m.parameters * m.format.bits / 8 for m in self.matmuls)

    @property
    def stored_bytes(self) -> float:
        """Bytes that the model takes in memory, tables and vectors included."""
        matrices = sum(
            m.parameters * m.format.bits / 8 for m in self.matmuls if not (self.tied and m.part == "lm_head")
        )
        tables = self.embedding_bytes
        if tables is None:
            tables = self.embedding_parameters * self.activation_bytes
        return matrices + tables + self.vector_parameters * self.activation_bytes

    def kv_bytes_per_token(self, kv_dtype_bytes: float | None = None) -> float:
        """Bytes that one more token of context takes in the cache of all layers (windows not yet full).

        2 L K d b; with MLA L (c + r) b. Layers with a window stop growing at it: see `kv_cache_bytes`.
        """
        b = self.kv_dtype_bytes if kv_dtype_bytes is None else kv_dtype_bytes
        return sum(a.layers * a.kv_elements_per_token for a in self.attentions) * b

    @cached_property
    def compute_dtype(self) -> str:
        """The dtype of the largest share of the linear FLOPs."""
        shares: dict[str, int] = {}
        for m in self.matmuls:
            shares[m.format.compute] = shares.get(m.format.compute, 0) + m.active_parameters
        return max(shares, key=lambda dtype: shares[dtype])

    @property
    def windowed(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(a.window is not None for a in self.attentions)

    @cached_property
    def latent(self) -> bool:
        """Whether the cache holds compressed vectors (MLA)."""
        return any(a.latent_dim is not None for a in self.attentions)


def kv_cache_bytes(
    shape: ModelShape,
    context_tokens: int,
    *,
    block_tokens: int = 1,
    kv_dtype_bytes: float | None = None,
) -> float:
    """Bytes that a sequence of `context_tokens` holds in a paged cache, all layers, whole model.

    Full layers hold ceil(n / block) blocks. Windowed layers hold those that the window touches, at most
    ceil(W / block) + 1 since a window rarely begins at a block's edge (0 more with blocks of 1). Checked
    against NIXL transfers of gpt-oss-20b: 2*16*8*64*2 B x (12 ceil(n/16) + 12*9).
    """
    b = shape.kv_dtype_bytes if kv_dtype_bytes is None else kv_dtype_bytes
    held = -(-context_tokens // block_tokens)
    total = 0.0
    for a in shape.attentions:
        blocks = held
        if a.window is not None:
            blocks = min(held, -(-a.window // block_tokens) + (1 if block_tokens > 1 else 0))
        total += a.layers * blocks * block_tokens * a.kv_elements_per_token * b
    return total
