"""Finds the whole chunks of a session file, whatever happened to the bytes between them.

The file may be cut anywhere, damaged anywhere, or made to do harm: nothing is believed before its length
was checked against the file and its content against its checksum, and no more than `MAX_CHUNK_BYTES` is
ever allocated for one chunk.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

FORMAT = "gpuidle.session"
FORMAT_VERSION = 1
SNAPSHOT_TOPIC = "gpuidle/snapshot"
GAP_TOPIC = "gpuidle/gap"
MAX_CHUNK_BYTES = 256 * 2**20

MAGIC = b"\x89MCAP0\r\n"
_HEADER, _FOOTER, _CHANNEL, _MESSAGE, _CHUNK, _METADATA, _DATA_END = 0x01, 0x02, 0x04, 0x05, 0x06, 0x0C, 0x0F
_CLOSING = (
    struct.pack("<BQI", _DATA_END, 4, 0) + struct.pack("<BQQQI", _FOOTER, 20, 0, 0, 0) + MAGIC
)  # the same in every finished file
_RECORD = struct.Struct("<BQ")
_CHUNK_HEAD = struct.Struct("<BQQQQII4sQ")
"""Opcode, length, first and last time, plain size, checksum, length of the word "zstd", it, data size."""
_CHUNK_MARK = b"\x04\x00\x00\x00zstd"
_MARK_AT = _CHUNK_HEAD.size - 8 - len(_CHUNK_MARK)
_OPENING_LIMIT = 4096
_NAMED_AT = len(MAGIC) + _RECORD.size + 4 + len(FORMAT)
"""A file that is cut before this byte cannot say whose it is."""
_WINDOW = 2**20


class Opening(NamedTuple):
    """What a file says of itself."""

    format_version: int
    schema: int
    gpuidle_version: str
    series: str
    part: int


class Chunk(NamedTuple):
    """A whole chunk: its number in the file, and its messages as (topic, payload)."""

    number: int
    messages: tuple[tuple[str, bytes], ...]


class Damage(NamedTuple):
    """Bytes that are no chunk of ours; reading went on behind them if it could."""

    offset: int
    reason: str


class Cut(NamedTuple):
    """The file ends without the mark of a finished one: it was cut, or is still being written."""

    offset: int


class NotASessionError(ValueError):
    """The bytes are not a session file; the message says what they look like."""


class _BadRecordError(ValueError):
    pass


def read_opening(file: BinaryIO) -> tuple[Opening | None, int]:
    """Return what the file says of itself (None: that part is damaged or cut) and where its chunks begin.

    Raises:
        NotASessionError: it is not a session file.
    """
    file.seek(0)
    head = file.read(_OPENING_LIMIT)
    if not head:
        raise NotASessionError("it is empty")
    magic = sum(a == b for a, b in zip(head, MAGIC, strict=False))
    if magic < min(len(head), len(MAGIC) - 1):
        raise NotASessionError("it is of another kind")
    with contextlib.suppress(ValueError, KeyError, struct.error):
        return _parse_opening(head)
    if FORMAT.encode() in head or len(head) < _NAMED_AT:
        return None, 0
    raise NotASessionError("it is an MCAP file of another program")


def scan(file: BinaryIO, offset: int) -> Iterator[Chunk | Damage | Cut]:
    """Yield the chunks from `offset` on in order, and what stands in their way.

    Numbers of chunks rise; a chunk whose number does not is damage. A finished file ends without a Cut.
    """
    last = -1
    while True:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        if size - offset <= len(_CLOSING):
            rest = file.read(len(_CLOSING))
            if rest == _CLOSING:
                return
            if _CLOSING.startswith(rest):
                yield Cut(offset)
                return
        end, outcome = _chunk_at(file, offset, size)
        if isinstance(outcome, Chunk):
            if outcome.number > last:
                last = outcome.number
                yield outcome
            else:
                yield Damage(offset, "a chunk out of order")
        elif end is None or not _record_at(file, end, size):  # its length is not to be believed
            end = _find_chunk(file, offset + 1, size)
            if end is None and not _ends_like_a_finished_file(file, offset, size):
                yield Cut(offset)
                return
            yield Damage(offset, outcome)
            if end is None:
                return
        else:
            yield Damage(offset, outcome)
        assert end is not None
        offset = end


def _parse_opening(head: bytes) -> tuple[Opening, int]:
    if not head.startswith(MAGIC):
        raise _BadRecordError("no magic")
    at = len(MAGIC)
    header, at = _record(head, at, _HEADER)
    profile, _ = _string(header, 0)
    body, at = _record(head, at, _METADATA)
    name, cursor = _string(body, 0)
    if profile != FORMAT or name != FORMAT:
        raise _BadRecordError("another format")
    (length,) = struct.unpack_from("<I", body, cursor)
    cursor += 4
    if cursor + length != len(body):
        raise _BadRecordError("wrong length")
    values: dict[str, str] = {}
    while cursor < len(body):
        key, cursor = _string(body, cursor)
        values[key], cursor = _string(body, cursor)
    checksum = values.pop("crc32")
    canonical = "\n".join(f"{key}={value}" for key, value in sorted(values.items()))
    if f"{zlib.crc32(canonical.encode()):08x}" != checksum:
        raise _BadRecordError("wrong checksum")
    opening = Opening(
        format_version=int(values["format_version"]),
        schema=int(values["schema"]),
        gpuidle_version=values["gpuidle_version"],
        series=values["series"],
        part=int(values["part"]),
    )
    return opening, at


def _chunk_at(file: BinaryIO, offset: int, size: int) -> tuple[int | None, Chunk | str]:
    """Return where the chunk at `offset` ends, and the chunk or why it is none.

    The end is None where even the lengths contradict each other, so that it cannot be known.
    """
    file.seek(offset)
    head = file.read(_CHUNK_HEAD.size)
    if len(head) < _CHUNK_HEAD.size:
        return None, "no chunk"
    opcode, length, _, _, plain_size, checksum, word_length, word, data_size = _CHUNK_HEAD.unpack(head)
    end = offset + _RECORD.size + length
    if length != _CHUNK_HEAD.size - _RECORD.size + data_size or end > size:
        return None, "wrong lengths"
    if opcode != _CHUNK or word_length != 4 or word != b"zstd":
        return end, "no chunk of ours"
    if plain_size > MAX_CHUNK_BYTES or data_size > MAX_CHUNK_BYTES:
        return end, "a chunk larger than any that gpuidle writes"
    data = file.read(data_size)
    if len(data) < data_size:  # somebody cuts the file while it is read
        return None, "no chunk"
    try:
        return end, _parse_chunk(_decompress(data, plain_size), checksum)
    except _BadRecordError as error:
        return end, str(error)


def _decompress(data: bytes, plain_size: int) -> bytes:
    import zstandard

    try:
        # one-shot decompression would allocate what the frame claims, not what the chunk may hold
        if zstandard.get_frame_parameters(data).content_size != plain_size:
            raise _BadRecordError("sizes contradict each other")
        plain: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=plain_size)
    except zstandard.ZstdError as error:
        raise _BadRecordError(f"cannot be decompressed: {error}") from error
    return plain


def _parse_chunk(plain: bytes, checksum: int) -> Chunk:
    if zlib.crc32(plain) != checksum:
        raise _BadRecordError("wrong checksum")
    topics: dict[int, str] = {}
    messages: list[tuple[str, bytes]] = []
    number = -1
    at = 0
    try:
        while at < len(plain):
            opcode = plain[at]
            body, at = _record(plain, at, opcode)
            if opcode == _CHANNEL:
                (channel,) = struct.unpack_from("<H", body)
                topics[channel], _ = _string(body, 4)
            elif opcode == _MESSAGE:
                channel, number = struct.unpack_from("<HI", body)
                messages.append((topics[channel], body[22:]))
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise _BadRecordError("not laid out as gpuidle does") from error
    if not messages:
        raise _BadRecordError("a chunk without a message")
    return Chunk(number, tuple(messages))


def _find_chunk(file: BinaryIO, offset: int, size: int) -> int | None:
    """Return the first place from `offset` on where the head of a chunk of ours stands."""
    overlap = _CHUNK_HEAD.size
    start = offset
    while start < size:
        file.seek(start)
        window = file.read(min(_WINDOW + overlap, size - start))
        at = window.find(_CHUNK_MARK)
        while at >= 0:
            begin = at - _MARK_AT
            head = window[max(begin, 0) : begin + _CHUNK_HEAD.size]
            if len(head) == _CHUNK_HEAD.size and _is_chunk_head(head, size - start - begin):
                return start + begin
            at = window.find(_CHUNK_MARK, at + 1)
        start += _WINDOW
    return None


def _record_at(file: BinaryIO, offset: int, size: int) -> bool:
    """Return whether the file goes on with a chunk at `offset`, or ends there."""
    file.seek(offset)
    head = file.read(_CHUNK_HEAD.size)
    if len(head) < _CHUNK_HEAD.size:
        return _CLOSING.startswith(head)
    return _is_chunk_head(head, size - offset)


def _is_chunk_head(head: bytes, room: int) -> bool:
    fields = _CHUNK_HEAD.unpack(head)
    opcode, length, data_size = fields[0], fields[1], fields[-1]
    consistent: bool = length == _CHUNK_HEAD.size - _RECORD.size + data_size
    return bool(opcode == _CHUNK and consistent and _RECORD.size + length <= room)


def _ends_like_a_finished_file(file: BinaryIO, offset: int, size: int) -> bool:
    file.seek(max(offset, size - len(_CLOSING)))
    tail = file.read(len(_CLOSING))
    same = sum(a == b for a, b in zip(tail[::-1], _CLOSING[::-1], strict=False))
    return same >= len(_CLOSING) - 1 and len(tail) == len(_CLOSING)


def _record(data: bytes, at: int, opcode: int) -> tuple[bytes, int]:
    found, length = _RECORD.unpack_from(data, at)
    at += _RECORD.size
    if found != opcode or at + length > len(data):
        raise _BadRecordError("wrong record")
    return data[at : at + length], at + length


def _string(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<I", data, at)
    at += 4
    if at + length > len(data):
        raise _BadRecordError("wrong string")
    return data[at : at + length].decode(), at + length
