"""Snapshots and Frames to bytes and back.

MessagePack for files (columns as [dtype, bytes]), JSON for people and pipes. Encoding is deterministic:
equal objects give equal bytes, which is what "replay equals live" is tested on.

The bytes of a column are transposed: first the lowest byte of every row, then the next one. The upper
bytes hardly change from row to row, and the compressor finds that only when they stand together: a
session of 8 GPUs at 1 kHz takes a fifth less disk and half the time (benchmarks/session_size.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from gpuidle.agent.model import SCHEMA_VERSION, Frame, Snapshot


class CodecError(ValueError):
    """Bytes that are not what they should be; the message says what was expected."""


def _encode_column(value: object) -> object:
    if isinstance(value, np.ndarray):
        planes = np.ascontiguousarray(value).view(np.uint8).reshape(len(value), value.dtype.itemsize).T
        return [value.dtype.str, planes.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_column(_kind: Any, value: Any) -> object:
    dtype, data = value
    kind = np.dtype(dtype)
    if kind.kind not in "iuf":
        raise ValueError(f"a column of {dtype!r}")
    planes = np.frombuffer(data, dtype=np.uint8).reshape(kind.itemsize, -1)
    array = np.ascontiguousarray(planes.T).reshape(-1).view(kind)
    array.flags.writeable = False
    return array


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_column, order="deterministic")
_decoder = msgspec.msgpack.Decoder(Snapshot, dec_hook=_decode_column)
_frame_encoder = msgspec.json.Encoder(order="deterministic")
_frame_decoder = msgspec.json.Decoder(Frame)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the MessagePack form of a Snapshot."""
    return _encoder.encode(snapshot)


def decode_snapshot(data: bytes) -> Snapshot:
    """Return the Snapshot of `encode_snapshot`.

    Raises:
        CodecError: the bytes are no Snapshot, or one of a newer schema.
    """
    try:
        snapshot = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise CodecError(f"not a snapshot: {error}") from error
    if snapshot.version > SCHEMA_VERSION:
        raise CodecError(
            f"snapshot of schema {snapshot.version}, newer than {SCHEMA_VERSION}: upgrade gpuidle"
        )
    return snapshot


def encode_frame(frame: Frame) -> bytes:
    """Return a Frame as one line of JSON, without the newline."""
    return _frame_encoder.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """Return the Frame of `encode_frame`.

    Raises:
        CodecError: the bytes are no Frame.
    """
    try:
        return _frame_decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise CodecError(f"not a frame: {error}") from error
