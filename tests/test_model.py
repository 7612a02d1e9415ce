"""The vocabulary and its codec."""

from __future__ import annotations

import numpy as np
import pytest

from gpuidle.agent.codec import CodecError, decode_snapshot, encode_snapshot
from gpuidle.agent.model import Node, Snapshot, StepSeries, column


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
