"""The vocabulary and its codec."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from gpuidle.agent.codec import CodecError, decode_snapshot, encode_snapshot
from gpuidle.agent.model import CounterSeries, Node, Snapshot, StepSeries, column, rate_column


def snapshot() -> Snapshot:
    steps = StepSeries("e", "simulator", True, 0, column([1, 5], "i8"), column([4, 9], "i8"))
    return Snapshot(
        sequence=1, monotonic_ns=10, boottime_ns=10, wall_ns=99, node=Node(hostname="n"), steps=(steps,)
    )


def test_a_snapshot_survives_the_codec_byte_for_byte() -> None:
    data = encode_snapshot(snapshot())
    again = decode_snapshot(data)
    assert encode_snapshot(again) == data
    assert again.steps[0].end_ns.tolist() == [4, 9]
    assert again.steps[0].prefill_tokens is None


def test_columns_are_little_endian_contiguous_and_read_only() -> None:
    array = column(np.arange(10, dtype=">i8")[::2], "i8")
    assert array.dtype.str == "<i8"
    assert array.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_bytes_that_are_no_snapshot_are_named() -> None:
    with pytest.raises(CodecError, match="not a snapshot"):
        decode_snapshot(b"\x81\xa3abc\x01")


def test_rates_keep_sixteen_bits_after_the_leading_one() -> None:
    rates = np.array([0.0, 1.0, 1.98e9, 3.35e12 / 3, 1e-300])
    kept = rate_column(rates)
    assert np.all(np.abs(kept - rates) <= rates * 2.0**-17)
    assert not np.any(kept.view(np.uint64) & np.uint64((1 << 36) - 1))
    assert np.array_equal(rate_column(kept), kept)
    assert not kept.flags.writeable


@pytest.mark.parametrize("dtype", ["i8", "u2", "f8"])
@pytest.mark.parametrize("values", [[], [1], [0, 1, 255, 256, 65535]])
def test_a_column_of_any_length_survives_the_codec(dtype: str, values: list[int]) -> None:
    before = CounterSeries("g", "nvml", column(values, "i8"), column(values, "i8"))
    if dtype == "u2":
        before = replace(before, gr_active=column(values, "u2"))
    elif dtype == "f8":
        before = replace(before, sm_clock_hz=column(values, "f8"))
    after = decode_snapshot(encode_snapshot(structs.replace(snapshot(), counters=(before,)))).counters[0]
    for name in ("end_ns", "gr_active", "sm_clock_hz"):
        old, new = getattr(before, name), getattr(after, name)
        if old is None:
            assert new is None
        else:
            assert new.dtype == old.dtype
            assert new.tolist() == old.tolist()
            assert new.flags.c_contiguous
            assert not new.flags.writeable
