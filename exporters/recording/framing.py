"""The bytes of a session file: MCAP records (docs/session-format.md), made here and written by the writer.

The records are those of the `mcap` library. Its `Writer` is not used, because it keeps an index entry of
every chunk in memory until the end, whatever `index_types` says: a recording may last a week.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcap.data_stream import RecordBuilder

FORMAT = "gpuidle.session"
"""Profile of the header and name of the metadata record: what makes an MCAP file ours."""
FORMAT_VERSION = 1
"""Version of the framing. The Snapshots in it have a version of their own."""
SNAPSHOT_TOPIC = "gpuidle/snapshot"
GAP_TOPIC = "gpuidle/gap"
MAX_CHUNK_BYTES = 256 * 2**20
"""Readers refuse a chunk that is larger than this after decompression."""

_MAGIC = b"\x89MCAP0\r\n"
_ENCODINGS = {SNAPSHOT_TOPIC: "msgpack", GAP_TOPIC: "json"}
_CHANNELS = {SNAPSHOT_TOPIC: 1, GAP_TOPIC: 2}
_U32 = 2**32 - 1
_U64 = 2**64 - 1


def opening(*, gpuidle_version: str, schema: int, series: str, part: int) -> bytes:
    """Return what a file begins with: magic, header, and one metadata record that says what it is.

    MCAP protects neither by a checksum; the metadata carries its own in `crc32`, over its other pairs.
    """
    from mcap.data_stream import RecordBuilder
    from mcap.records import Header, Metadata

    values = {
        "format_version": str(FORMAT_VERSION),
        "gpuidle_version": gpuidle_version,
        "part": str(part),
        "schema": str(schema),
        "series": series,
    }
    canonical = "\n".join(f"{key}={value}" for key, value in sorted(values.items()))
    values["crc32"] = f"{zlib.crc32(canonical.encode()):08x}"
    builder = RecordBuilder()
    builder.write(_MAGIC)
    Header(profile=FORMAT, library=f"gpuidle {gpuidle_version}").write(builder)
    Metadata(name=FORMAT, metadata=values).write(builder)
    return _taken(builder)


def closing() -> bytes:
    """Return what a finished file ends with: the same bytes in every file, and no summary."""
    from mcap.data_stream import RecordBuilder
    from mcap.records import DataEnd, Footer

    builder = RecordBuilder()
    DataEnd(data_section_crc=0).write(builder)
    Footer(summary_start=0, summary_offset_start=0, summary_crc=0).write(builder)
    builder.write(_MAGIC)
    return _taken(builder)


class ChunkFramer:
    """Makes chunks: compressed, checksummed, and readable without any other chunk of the file."""

    def __init__(self) -> None:
        import zstandard

        self._compressor = zstandard.ZstdCompressor(level=3)

    def chunk(self, topic: str, payload: bytes, *, number: int, monotonic_ns: int, wall_ns: int) -> bytes:
        """Return one chunk that holds its channel and one message.

        `number` counts the chunks of a file from 0: a hole in it tells the reader how many are lost.

        Raises:
            ValueError: the payload is larger than a reader would accept.
        """
        from mcap.data_stream import RecordBuilder
        from mcap.records import Channel, Chunk, Message

        channel = _CHANNELS[topic]
        log_time = min(max(monotonic_ns, 0), _U64)
        builder = RecordBuilder()
        Channel(id=channel, topic=topic, message_encoding=_ENCODINGS[topic], metadata={}, schema_id=0).write(
            builder
        )
        Message(
            channel_id=channel,
            sequence=number & _U32,
            log_time=log_time,
            publish_time=min(max(wall_ns, 0), _U64),
            data=payload,
        ).write(builder)
        plain = _taken(builder)
        if len(plain) > MAX_CHUNK_BYTES:
            raise ValueError(f"a snapshot of {len(plain)} bytes; a chunk holds {MAX_CHUNK_BYTES} at most")
        Chunk(
            compression="zstd",
            data=self._compressor.compress(plain),
            message_start_time=log_time,
            message_end_time=log_time,
            uncompressed_crc=zlib.crc32(plain),
            uncompressed_size=len(plain),
        ).write(builder)
        return _taken(builder)


def _taken(builder: RecordBuilder) -> bytes:
    """Return what was built and empty the builder."""
    data: bytes = builder.end()  # type: ignore[no-untyped-call]
    return data
