"""What a step asks of each GPU: FLOPs by dtype, bytes of weights and of KV cache, messages to its peers.

Every number a caller passes is a scalar or a column with one row a step. The results are linear in the sums
(tokens, pairs, KV tokens, steps), so a window of S steps is one row with its sums and steps=S; only the
number of distinct experts is not linear, and is taken at the window's mean tokens a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.physics.parts import Attention, Matmul, ModelShape

Column: TypeAlias = "float | NDArray[np.float64]"
Number: TypeAlias = "float | NDArray[np.int64] | NDArray[np.float64]"


class Work(msgspec.Struct, frozen=True, eq=False):
    """Work of one GPU, the mean over the ranks; each field a float or a float64 column.

    Bytes are those that must cross the memory interface once: activations, which mostly stay on the chip,
    are left out, so a time made of them is a lower bound.
    """

    flops: Mapping[str, Column]
    """Useful FLOPs by dtype: of tokens that were kept."""
    executed_flops: Mapping[str, Column]
    """Useful ones plus those of rejected rows and of MLA's re-expansion."""
    weight_bytes: Column
    """Weights read, distinct experts as uniform routing has them: E (1 - (1 - k/E)^T)."""
    weight_bytes_low: Column
    """The same if all tokens chose the same k experts."""
    weight_bytes_high: Column
    """The same if as many experts as possible were chosen: min(T k, E)."""
    kv_bytes: Column
    """KV cache read and written."""
    collectives: Column
    """Messages that all ranks take part in."""
    collective_bytes: Column
    """Sum of their payloads on one rank."""

    @property
    def total_flops(self) -> Column:
        """Useful FLOPs of all dtypes together."""
        return _total(self.flops)

    @property
    def total_executed_flops(self) -> Column:
        """Executed FLOPs of all dtypes together."""
        return _total(self.executed_flops)

    @property
    def total_bytes(self) -> Column:
        """Weights (uniform routing) and KV cache together."""
        return self.weight_bytes + self.kv_bytes


def causal_pairs(new_tokens: Number, context_before: Number) -> Column:
    """Return the (query, key) pairs of `new_tokens` rows after `context_before` cached ones.

    t (c - t) + t (t + 1) / 2 with c = context_before + t: each row sees the cache, the rows before it and
    itself. Sum it over the sequences of a step.
    """
    t = np.asarray(new_tokens, dtype=np.float64)
    return _column(t * np.asarray(context_before, dtype=np.float64) + t * (t + 1) / 2)


def windowed_pairs(new_tokens: Number, context_before: Number, window: int) -> Column:
    """Return the pairs where a row sees min(position, window) keys, itself included."""
    before = np.asarray(context_before, dtype=np.float64)
    end = before + np.asarray(new_tokens, dtype=np.float64)

    def up_to(position: NDArray[np.float64]) -> NDArray[np.float64]:
        inside = np.minimum(position, window)
        seen: NDArray[np.float64] = inside * (inside + 1) / 2 + np.maximum(position - window, 0) * window
        return seen

    return _column(up_to(end) - up_to(before))


def windowed_kv_tokens(new_tokens: Number, context_before: Number, window: int) -> Column:
    """Return the distinct keys that a sequence's rows see in a layer with a window: min(c, W - 1 + t)."""
    t = np.asarray(new_tokens, dtype=np.float64)
    return _column(np.minimum(np.asarray(context_before, dtype=np.float64) + t, window - 1 + t))


def block_rounded(tokens: Number, block_tokens: int) -> Column:
    """Round each sequence's tokens up to whole blocks of a paged cache, as its kernels read them."""
    return _column(np.ceil(np.asarray(tokens, dtype=np.float64) / block_tokens) * block_tokens)


def work(
    shape: ModelShape,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    data_parallel: int = 1,
    tokens: Number,
    logit_rows: Number,
    attention_pairs: Number,
    kv_read_tokens: Number,
    kv_dtype_bytes: float | None = None,
    steps: Number = 1,
    windowed_attention_pairs: Number | None = None,
    windowed_kv_read_tokens: Number | None = None,
    decode_pairs: Number | None = None,
    rejected_rows: Number = 0,
    rejected_pairs: Number = 0,
    expanded_tokens: Number = 0,
) -> Work:
    """Return the work of one GPU for steps of one data-parallel rank.

    Args:
        shape: The model.
        tensor_parallel: Ranks that divide each matrix.
        pipeline_parallel: Stages that divide the layers; figures are the mean over the stages.
        expert_parallel: Whether experts are dealt out whole to the ranks of all data-parallel replicas.
        data_parallel: Replicas that share experts; matters with `expert_parallel` only.
        tokens: Rows that passed the layers. Tokens found in a prefix cache are not rows. Verification of
            k drafts is k + 1 rows a sequence.
        logit_rows: Rows that passed lm_head: decode rows, and one a sequence that ended its prefill.
        attention_pairs: Sum over rows of the keys that each attends to (`causal_pairs`).
        kv_read_tokens: Cached tokens read, summed over sequences, in a layer without a window.
        kv_dtype_bytes: Bytes of a cached element; None: as the model is configured.
        steps: Forward passes in the row.
        windowed_attention_pairs: Pairs in a layer with a window (`windowed_pairs`). None: the upper bound
            min(attention_pairs, tokens x window), exact once each context has outgrown the window.
        windowed_kv_read_tokens: Tokens read there (`windowed_kv_tokens`). None: the upper bound
            min(kv_read_tokens, tokens x window), exact for decode under the same condition.
        decode_pairs: The part of `attention_pairs` computed against MLA's compressed cache. None: all where
            each row is a decode row (tokens = logit_rows), else none, which is the lower bound.
        rejected_rows: Rows of `tokens`, and of `logit_rows`, whose results were thrown away (rejected
            drafts).
        rejected_pairs: Their part of `attention_pairs`.
        expanded_tokens: Cached tokens that MLA's chunked prefill expanded again: executed, not useful.

    Formulas: 2 x tokens x weights of each matrix; pairs x 2 H (key + value dim) for attention, heads and
    KV heads divided by the ranks (KV heads are copied once ranks outnumber them).
    """
    t, rows, pairs = _float(tokens), _float(logit_rows), _float(attention_pairs)
    reads, count = _float(kv_read_tokens), _float(steps)
    rejected = _float(rejected_rows)
    tp, pp = tensor_parallel, pipeline_parallel
    keeps_all = _nothing(rejected_rows) and _nothing(rejected_pairs)
    ranks = tp * data_parallel if expert_parallel else tp
    groups = data_parallel if expert_parallel else 1
    sums = _matrices(shape, tp, ranks)
    useful: dict[str, Column] = {}
    executed = useful if keeps_all and _nothing(expanded_tokens) else {}
    for dtype in dict.fromkeys((*sums.per_token, *sums.per_logit_row)):
        body, head = sums.per_token.get(dtype, 0.0) / pp, sums.per_logit_row.get(dtype, 0.0) / pp
        executed[dtype] = t * body + rows * head
        useful[dtype] = executed[dtype] if keeps_all else executed[dtype] - rejected * (body + head)
    fixed = _least(count, t) * (sums.body_bytes / pp) + _least(count, rows) * (sums.head_bytes / pp)
    low = mean = high = fixed
    for (experts, active), each in sums.expert_bytes.items():
        fewest, uniform, most = _distinct_experts(experts, active, t * groups, count)
        low, mean, high = (was + each / pp * of for was, of in ((low, fewest), (mean, uniform), (high, most)))

    kv: Column | None = None
    b = shape.kv_dtype_bytes if kv_dtype_bytes is None else kv_dtype_bytes
    for a in shape.attentions:
        seen, read_here = _seen(a, t, pairs, reads, windowed_attention_pairs, windowed_kv_read_tokens)
        scale = a.layers / tp / pp
        flops = scale * a.flops_per_pair * seen
        if a.latent_dim is not None:
            absorbed = np.where(t <= rows, pairs, 0.0) if decode_pairs is None else _float(decode_pairs)
            in_decode = np.minimum(absorbed, pairs) * _part(seen, pairs)
            flops = flops + scale * in_decode * (a.absorbed_flops_per_pair - a.flops_per_pair)
            width = a.heads * (a.key_dim - a.rope_dim + a.value_dim)
            if executed is not useful:
                expanding = scale * 2.0 * a.latent_dim * width * _float(expanded_tokens)
                _add(executed, "bf16", flops + expanding)
        elif executed is not useful:
            _add(executed, "bf16", flops)
        if not keeps_all:
            thrown = scale * a.absorbed_flops_per_pair * _float(rejected_pairs)
            flops = flops - thrown * _part(seen, pairs)
        _add(useful, "bf16", flops)
        held = kv_held_share(shape, tp)
        moved = (read_here + t) * (a.layers * a.kv_elements_per_token * b * held / pp)
        kv = moved if kv is None else kv + moved

    messages, payload = _collectives(shape, tp, pp, data_parallel if expert_parallel else 1, t, rows, count)
    flops_by_dtype = {dtype: _column(value) for dtype, value in useful.items()}
    return Work(
        flops=flops_by_dtype,
        executed_flops=flops_by_dtype
        if executed is useful
        else {dtype: _column(value) for dtype, value in executed.items()},
        weight_bytes=_column(mean),
        weight_bytes_low=_column(low),
        weight_bytes_high=_column(high),
        kv_bytes=0.0 if kv is None else _column(kv),
        collectives=_column(messages),
        collective_bytes=_column(payload),
    )


def weights_held_bytes(
    shape: ModelShape,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: bool = False,
    data_parallel: int = 1,
) -> float:
    """Return the bytes of weights that one GPU holds, tables and vectors included, the mean over stages."""
    tp = tensor_parallel
    ranks = tp * data_parallel if expert_parallel else tp
    total = shape.vector_parameters * shape.activation_bytes
    tables = shape.embedding_bytes
    total += (shape.embedding_parameters * shape.activation_bytes if tables is None else tables) / tp
    for m in shape.matmuls:
        if shape.tied and m.part == "lm_head":
            continue
        share = 1 / ranks if m.part == "expert" else _share(m, shape, tp)
        total += m.parameters * m.format.bits / 8 * share
    return total / pipeline_parallel


def kv_held_share(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Return the part of the KV cache that one rank holds: heads are copied once ranks outnumber them."""
    if shape.latent:
        return 1.0
    return -(-shape.kv_heads // tensor_parallel) / shape.kv_heads


def _share(m: Matmul, shape: ModelShape, tp: int) -> float:
    """Return the part of a matrix that one tensor-parallel rank holds and multiplies."""
    if m.split == "copied":
        return 1.0
    if m.split == "kv_heads":
        return -(-shape.kv_heads // tp) / shape.kv_heads
    return 1.0 / tp


class _Matrices(msgspec.Struct, frozen=True):
    """Sums over a model's matrices, on one tensor-parallel rank, all stages together."""

    per_token: Mapping[str, float]
    """FLOPs of a row of the layers, by dtype."""
    per_logit_row: Mapping[str, float]
    body_bytes: float
    """Weights of the layers that each step reads once."""
    head_bytes: float
    expert_bytes: Mapping[tuple[int, int], float]
    """By (experts, active): the bytes of one expert in every layer that routes so."""


@lru_cache(maxsize=64)
def _matrices(shape: ModelShape, tp: int, expert_ranks: int) -> _Matrices:
    per_token: dict[str, float] = {}
    per_row: dict[str, float] = {}
    experts: dict[tuple[int, int], float] = {}
    body = head = 0.0
    for m in shape.matmuls:
        share = _share(m, shape, tp)
        flops = per_row if m.part == "lm_head" else per_token
        flops[m.format.compute] = flops.get(m.format.compute, 0.0) + 2.0 * m.active_parameters * share
        stored = m.inputs * m.outputs * m.layers * m.format.bits / 8
        if m.part == "expert":
            kind = (m.experts, m.active)
            experts[kind] = experts.get(kind, 0.0) + stored / expert_ranks
        elif m.part == "lm_head":
            head += stored * share
        else:
            body += stored * share
    return _Matrices(per_token, per_row, body, head, experts)


def _distinct_experts(
    experts: int, active: int, tokens: Column, steps: Column
) -> tuple[Column, Column, Column]:
    """Return the experts of a layer that `steps` steps read: fewest, by uniform routing, most."""
    a_step = np.divide(
        tokens, steps, out=np.zeros(np.broadcast_shapes(np.shape(tokens), np.shape(steps))), where=steps > 0
    )
    fewest = np.minimum(a_step, 1.0) * active
    uniform = experts * (1.0 - np.exp(np.log1p(-active / experts) * a_step)) if active < experts else fewest
    most = np.minimum(a_step * active, experts)
    return fewest * steps, uniform * steps, most * steps


def _seen(
    a: Attention,
    tokens: Column,
    pairs: Column,
    reads: Column,
    windowed_pairs_: Number | None,
    windowed_reads: Number | None,
) -> tuple[Column, Column]:
    """Return the pairs and the cached tokens read in a layer of this kind."""
    if a.window is None:
        return pairs, reads
    seen = _least(pairs, tokens * a.window) if windowed_pairs_ is None else _float(windowed_pairs_)
    read = _least(reads, tokens * a.window) if windowed_reads is None else _float(windowed_reads)
    return seen, read


def _collectives(
    shape: ModelShape,
    tp: int,
    pp: int,
    expert_groups: int,
    tokens: Column,
    rows: Column,
    steps: Column,
) -> tuple[Column, Column]:
    """Count messages and payload bytes of one rank, the mean over the pipeline's stages.

    Tensor parallelism: an all-reduce of T x D after attention and after the FFN of each layer, one after
    the divided embedding, and a gather of the logits. Experts over data-parallel replicas: their all-reduce
    becomes dispatch and combine of T x k x D. Pipeline: hidden states and residual, once a boundary.
    """
    messages, payload = _zeros(steps), _zeros(tokens)
    if tp == pp == expert_groups == 1:
        return messages, payload
    hidden = shape.hidden * shape.activation_bytes
    moe_layers = max((m.layers for m in shape.matmuls if m.part == "expert"), default=0)
    if tp > 1:
        reduces = 2 * shape.layers - (moe_layers if expert_groups > 1 else 0) + 1
        messages = messages + steps * (reduces + 1) / pp
        payload = payload + tokens * (reduces * hidden / pp)
        payload = payload + rows * (shape.vocab * shape.activation_bytes / tp / pp)
    if expert_groups > 1:
        messages = messages + steps * (2 * moe_layers / pp)
        payload = payload + tokens * (2 * moe_layers * shape.experts_per_token * hidden / tp / pp)
    if pp > 1:
        messages = messages + steps * ((pp - 1) / pp)
        payload = payload + tokens * (2 * hidden * (pp - 1) / pp)
    return messages, payload


def _part(seen: Column, pairs: Column) -> Column:
    """Return the share of the pairs that a layer computes."""
    nothing = np.zeros(np.broadcast_shapes(np.shape(seen), np.shape(pairs)))
    return np.divide(seen, pairs, out=nothing, where=pairs > 0)


def _add(sums: dict[str, Column], key: str, value: Column) -> None:
    sums[key] = sums[key] + value if key in sums else value


def _nothing(value: Number) -> bool:
    return not isinstance(value, np.ndarray) and not value


def _float(value: Number) -> Column:
    # Arithmetic with plain numbers is many times as fast as with arrays of none but one.
    return np.asarray(value, dtype=np.float64) if isinstance(value, np.ndarray) else float(value)


def _least(one: Column, other: Column) -> Column:
    if isinstance(one, float) and isinstance(other, float):
        return min(one, other)
    return np.minimum(one, other)


def _zeros(like: Column) -> Column:
    return np.zeros(like.shape) if isinstance(like, np.ndarray) else 0.0


def _column(value: Column) -> Column:
    return value if isinstance(value, np.ndarray) and value.ndim else float(value)


def _total(sums: Mapping[str, Column]) -> Column:
    total: Column = 0.0
    for value in sums.values():
        total = total + value
    return total
