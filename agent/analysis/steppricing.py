"""What exact steps asked of a GPU, by the work model: FLOPs, bytes and messages of each.

Engines that are alike, or cores of one, are priced together: their columns are short, and a call costs more
than the rows in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.columns import known, whole
from gpuidle.agent.analysis.stepwork import Floats, Ints, Steps
from gpuidle.agent.analysis.windowwork import TILE_ROWS
from gpuidle.agent.model import EngineReading, StepSeries
from gpuidle.agent.physics.shapes import ModelShape
from gpuidle.agent.physics.work import Column, Work, work

_NEEDED = ("prefill_tokens", "decode_tokens", "kv_tokens", "sequences")


class Stream(NamedTuple):
    """Steps of one engine or core, and what they are priced by."""

    series: Sequence[StepSeries]
    reading: EngineReading
    shape: ModelShape
    hit_ratio: float = 0.0
    """Share of the prompt tokens that the prefix cache has: prompts attend to these as well."""
    spread: float = 0.0
    """Variance of the prompts' sizes over the square of their mean: of several in one step the mean is known,
    and the longer ones attend to more."""


def steps_of(stream: Stream, start_ns: int, end_ns: int) -> Steps | None:
    """Return the priced steps that touch [start_ns, end_ns); None unless every column needed is known."""
    return steps_of_each([stream], start_ns, end_ns)[0]


def steps_of_each(streams: Sequence[Stream], start_ns: int, end_ns: int) -> list[Steps | None]:
    """Return the same of each stream."""
    found: list[Steps | None] = [None] * len(streams)
    alike: dict[object, list[tuple[int, Stream]]] = {}
    for place, stream in enumerate(streams):
        touching = _touching(stream.series, start_ns, end_ns)
        if touching:
            own = stream._replace(series=touching)
            alike.setdefault(_alike(own), []).append((place, own))
    for members in alike.values():
        priced = _priced([stream for _, stream in members], start_ns, end_ns)
        for (place, _), steps in zip(members, priced, strict=True):
            found[place] = steps
    return found


def _touching(series: Sequence[StepSeries], start_ns: int, end_ns: int) -> list[StepSeries]:
    """Return the series that touch the window, if all that is needed of them is known."""
    usable = [s for s in series if len(s) and s.end_ns.item(-1) > start_ns and s.start_ns.item(0) < end_ns]
    if (
        usable
        and all(s.exact and not s.lost for s in usable)
        and all(known(usable, name) for name in _NEEDED)
    ):
        return usable
    return []


def _alike(stream: Stream) -> object:
    """Return what streams that are priced together have in common."""
    series, reading = stream.series, stream.reading
    return (
        id(stream.shape),
        reading.parallelism,
        reading.limits.max_batched_tokens,
        known(series, "delivered_tokens"),
        known(series, "draft_tokens") and known(series, "accepted_tokens"),
        known(series, "recomputed_tokens"),
    )


def _priced(streams: Sequence[Stream], start_ns: int, end_ns: int) -> list[Steps | None]:
    """Price streams that are alike; None: no step of it lies in the window."""
    series = [s for stream in streams for s in stream.series]
    start, end = whole(series, "start_ns"), whole(series, "end_ns")
    inside = np.minimum(end, end_ns) - np.maximum(start, start_ns)
    edges = [0, *accumulate([sum([len(s) for s in stream.series]) for stream in streams])]
    keep: Any = inside > 0
    if np.count_nonzero(keep) == len(keep):
        keep = slice(None)
    else:
        edges = np.append(0, np.cumsum(keep))[edges].tolist()
    spans = list(pairwise(edges))

    def column(name: str) -> Ints:
        found: Ints = whole(series, name)[keep]
        return found

    start, end, inside = start[keep], end[keep], inside[keep]
    prefill, decode = column("prefill_tokens"), column("decode_tokens")
    context, sequences = column("kv_tokens"), column("sequences")

    drafting = known(series, "draft_tokens") and known(series, "accepted_tokens")
    drafts: Any = column("draft_tokens") if drafting else 0
    rejected: Any = np.maximum(0, drafts - column("accepted_tokens")) if drafting else 0
    again: Any = column("recomputed_tokens") if known(series, "recomputed_tokens") else 0
    decoding_sequences = np.maximum(0, decode - drafts) if drafting else decode
    prompts = np.maximum(sequences - decoding_sequences, prefill > 0)
    tokens = prefill + decode
    if known(series, "delivered_tokens"):
        rows = np.minimum(column("delivered_tokens") + rejected, tokens)
    else:
        rows = decode + prompts
    alone = prefill == 0
    of_decodes = _of_decodes(context, decoding_sequences, alone, spans)
    of_rows = _row_pairs(np.where(alone, context, of_decodes), decode, decoding_sequences, drafting=drafting)
    before = _before(streams, spans, prefill, tokens)
    if before is not None:
        before = np.minimum(before, context - of_decodes)
    of_prompts = _prompt_pairs(streams, spans, prefill, prompts, before)
    padded = (tokens + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS / np.maximum(tokens, 1)
    place = streams[0].reading.parallelism
    ask = partial(
        work,
        streams[0].shape,
        tensor_parallel=place.tensor,
        pipeline_parallel=place.pipeline,
        expert_parallel=place.expert,
        data_parallel=max(1, place.data),
        kv_read_tokens=context,
    )
    done = ask(tokens=tokens, logit_rows=rows, attention_pairs=of_rows + of_prompts)
    moved = np.asarray(done.total_bytes)
    unused: Any = rejected + again
    if isinstance(unused, np.ndarray) and np.count_nonzero(unused):
        # Rows that were thrown away, or computed before and lost: executed, not useful.
        wasted = _per_stream(spans, [bool(np.count_nonzero(unused[a:b])) for a, b in spans])
        kept = np.maximum(1, tokens - unused)
        lost = of_rows * rejected / np.maximum(1, decode) + of_prompts * again / np.maximum(1, prefill)
        useful = ask(tokens=kept, logit_rows=rows - rejected, attention_pairs=of_rows + of_prompts - lost)
        flops = {d: np.where(wasted, useful.flops[d], done.flops[d]) for d in done.flops}
        done = msgspec.structs.replace(done, flops=flops)
        padded = np.where(wasted, padded * tokens / kept, padded)
    length = end - start
    share, computed = inside / length, tokens.astype(np.float64)
    return [
        Steps(
            start=start[a:b],
            end=end[a:b],
            length=length[a:b],
            share=share[a:b],
            tokens=computed[a:b],
            padded=padded[a:b],
            work=_cut(done, slice(a, b)),
            moved=moved[a:b],
        )
        if b > a
        else None
        for a, b in spans
    ]


def _cut(whole_work: Work, rows: slice) -> Work:
    """Return the work of these rows; what is one number for all stays so."""

    def cut(value: Column) -> Column:
        return value[rows] if isinstance(value, np.ndarray) else value

    def each(flops: Mapping[str, Column]) -> dict[str, Column]:
        return {dtype: cut(value) for dtype, value in flops.items()}

    return Work(
        flops=each(whole_work.flops),
        executed_flops=each(whole_work.executed_flops),
        weight_bytes=cut(whole_work.weight_bytes),
        weight_bytes_low=cut(whole_work.weight_bytes_low),
        weight_bytes_high=cut(whole_work.weight_bytes_high),
        kv_bytes=cut(whole_work.kv_bytes),
        collectives=cut(whole_work.collectives),
        collective_bytes=cut(whole_work.collective_bytes),
    )


def _of_decodes(
    context: Ints, sequences: Ints, alone: NDArray[np.bool_], spans: Sequence[tuple[int, int]]
) -> Ints | Floats:
    """Return what of each step's context is that of its decode rows; `alone` are steps without a prompt.

    Contexts are told as one sum: a decode row's share is that of the decode-only steps around it, and a
    chunk reads the chunks before it, which filled their steps.
    """
    rows, held = _sums(sequences * alone, spans), _sums(context * alone, spans)
    each = [tokens / count if count else 0.0 for tokens, count in zip(held, rows, strict=True)]
    found: Floats = np.minimum(context, sequences * _per_stream(spans, each))
    if all(rows):
        return found
    return np.where(_per_stream(spans, [count > 0 for count in rows]), found, context)


def _sums(amounts: Ints, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the sum of each stream."""
    if all(b > a for a, b in spans):
        told: list[int] = np.add.reduceat(amounts, [a for a, _ in spans]).tolist()
        return told
    return [int(amounts[a:b].sum()) for a, b in spans]


def _row_pairs(context: Any, decode: Ints, sequences: Ints, *, drafting: bool) -> Any:
    """Return the keys that decode rows attend to: of each sequence the last token, and its drafts."""
    if not drafting:
        return context + decode
    each = decode / np.maximum(1, sequences)
    return context * each + decode * (each + 1) / 2


def _prompt_pairs(
    streams: Sequence[Stream], spans: Sequence[tuple[int, int]], prefill: Ints, prompts: Ints, before: Any
) -> Floats:
    """Return the keys that the rows of prompts attend to; `before` is what a prompt had, None: nothing."""
    chunk = prefill / np.maximum(1, prompts)
    spread = _per_stream(spans, [stream.spread for stream in streams])
    found: Floats = (prefill * (chunk + 1) + spread * chunk * (prefill - chunk)) / 2
    return found if before is None else found + before * chunk


def _before(streams: Sequence[Stream], spans: Sequence[tuple[int, int]], prefill: Ints, tokens: Ints) -> Any:
    """Return the tokens before those of a prompt that each step computed: chunks, and what the cache had.

    None: there are none.
    """
    before: Any = None
    budget = streams[0].reading.limits.max_batched_tokens
    full = None if budget is None else tokens >= 0.98 * budget
    if full is not None and np.count_nonzero(full):
        before = np.concatenate([_chunks_before(prefill[a:b], full[a:b]) for a, b in spans])
    if any(stream.hit_ratio for stream in streams):
        # What the cache had of the prompts is known on average only.
        hits = _per_stream(spans, [each.hit_ratio / (1 - min(0.99, each.hit_ratio)) for each in streams])
        before = prefill * hits + (0 if before is None else before)
    return before


def _per_stream(spans: Sequence[tuple[int, int]], values: Sequence[float]) -> Any:
    """Return a column with the value of each stream in its rows; the value itself if all have the same."""
    if len(set(values)) == 1:
        return values[0]
    return np.repeat(np.array(values), [b - a for a, b in spans])


def _chunks_before(prefill: Ints, full: NDArray[np.bool_]) -> Ints:
    """Return the prompt tokens computed in the unbroken run of full steps before each step."""
    if not len(prefill):
        return prefill
    total = np.cumsum(prefill)
    # The total at the last step that was not full; what came after it is the run.
    broken = np.maximum.accumulate(np.where(full, 0, total))
    run = np.where(full, total - broken, 0)
    return np.concatenate(([0], run[:-1]))
