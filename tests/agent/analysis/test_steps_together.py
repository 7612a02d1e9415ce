"""Streams of steps that are looked at together are told exactly as each of them alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.agent.analysis.builders import LLAMA_8B, engine

from gpuidle.agent.analysis.steppricing import Stream, steps_of, steps_of_each
from gpuidle.agent.analysis.stepshares import shares_from_steps, shares_of_each
from gpuidle.agent.model import EngineLimits, StepSeries, column
from gpuidle.agent.physics.shapes import shape_from_config

MS = 10**6
WINDOW = (1000 * MS, 2000 * MS)
SHAPE = shape_from_config(json.loads(LLAMA_8B))


def series(seed: int, *, begin_ms: int = 700, steps: int = 60, drafts: bool = False) -> StepSeries:
    """Return steps of prompts, decodes and both, with gaps and rests between them."""
    rng = np.random.default_rng(seed)
    lengths, gaps = rng.integers(5 * MS, 40 * MS, steps), rng.choice([0, MS, 30 * MS], steps)
    end = begin_ms * MS + np.cumsum(lengths + gaps)
    prefill = np.where(rng.random(steps) < 0.4, rng.choice([100, 900, 2048], steps), 0)
    decode = np.where(rng.random(steps) < 0.8, rng.integers(1, 90, steps), 0)
    sequences = decode // (3 if drafts else 1) + (prefill > 0)
    spoken: dict[str, Any] = {}
    if drafts:
        spoken = {
            "draft_tokens": column(decode // 2, "i8"),
            "accepted_tokens": column(decode // 4, "i8"),
        }
    return StepSeries(
        engine_id="e",
        source="plugin",
        exact=True,
        lost=0,
        start_ns=column(end - lengths, "i8"),
        end_ns=column(end, "i8"),
        prefill_tokens=column(prefill, "i8"),
        decode_tokens=column(decode, "i8"),
        sequences=column(sequences, "i8"),
        kv_tokens=column(700 * decode + prefill, "i8"),
        **spoken,
    )


def cut(whole: StepSeries, rows: slice) -> StepSeries:
    """Return some of the rows."""
    names = [name for name, value in vars(whole).items() if isinstance(value, np.ndarray)]
    columns: dict[str, Any] = {name: column(getattr(whole, name)[rows], "i8") for name in names}
    return replace(whole, **columns)


STREAMS: dict[str, list[StepSeries]] = {
    "one series": [series(1)],
    "several": [cut(series(2), slice(0, 15)), cut(series(2), slice(15, 40)), cut(series(2), slice(40, None))],
    "out of order": [cut(series(3), slice(30, None)), cut(series(3), slice(0, 30))],
    "overlapping": [series(4), series(5)],
    "reconstructed": [replace(series(6), exact=False)],
    "no tokens": [replace(series(7), prefill_tokens=None, decode_tokens=None)],
    "before the window": [series(8, begin_ms=0, steps=10)],
    "after the window": [series(9, begin_ms=3000)],
    "nothing": [],
    "drafts": [series(10, drafts=True)],
    "chunks": [replace(series(11), decode_tokens=column(np.zeros(60), "i8"))],
}


def test_shares() -> None:
    together = shares_of_each(list(STREAMS.values()), *WINDOW)
    assert together == [shares_from_steps(each, *WINDOW) for each in STREAMS.values()]
    assert {name for name, found in zip(STREAMS, together, strict=True) if found is None} == {
        "no tokens",
        "nothing",
    }


@pytest.mark.parametrize("hits", [0.0, 0.4])
def test_work(hits: float) -> None:
    reading = engine(0.0, limits=EngineLimits(max_batched_tokens=2048))
    streams = [
        Stream(each, reading, SHAPE, hit_ratio=hits * place, spread=0.1 * place)
        for place, each in enumerate(STREAMS.values())
    ]
    together = steps_of_each(streams, *WINDOW)
    alone = [steps_of(stream, *WINDOW) for stream in streams]
    priced = dict(zip(STREAMS, zip(together, alone, strict=True), strict=True))
    assert priced["one series"][0] is not None
    assert priced["reconstructed"] == priced["after the window"] == (None, None)
    for one, other in priced.values():
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            for name in ("start", "end", "share", "tokens", "padded", "moved"):
                assert np.array_equal(getattr(one, name), getattr(other, name))
            told, said = msgspec.structs.asdict(one.work), msgspec.structs.asdict(other.work)
            assert told.keys() == said.keys()
            for name, value in told.items():
                pairs = (
                    zip(value.values(), said[name].values(), strict=True)
                    if isinstance(value, dict)
                    else [(value, said[name])]
                )
                assert all(np.array_equal(a, b) for a, b in pairs)
