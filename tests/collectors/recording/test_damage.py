"""Session files that were cut, damaged or made to do harm."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
import zstandard
from tests.exporters.recording.sessions import make_snapshot, without_problems, write_session

from gpuidle.agent.codec import encode_snapshot
from gpuidle.agent.model import SCHEMA_VERSION, Snapshot, StepSeries, column
from gpuidle.collectors.recording.reader import Session, SessionError
from gpuidle.exporters.recording.framing import SNAPSHOT_TOPIC, ChunkFramer, closing, opening

SNAPSHOTS = [
    msgspec.structs.replace(
        make_snapshot(i),
        gpus=None,
        engines=(),
        counters=(),
        steps=make_snapshot(i).steps if i % 4 == 1 else (),
    )
    for i in range(5)
]  # small: every byte of the file is tried
ENCODED = [encode_snapshot(snapshot) for snapshot in SNAPSHOTS]


def read(path: Path) -> tuple[list[bytes], Session]:
    session = Session(path)
    return [encode_snapshot(without_problems(snapshot)) for snapshot in session], session


def chunk_ends(data: bytes) -> list[int]:
    """Walk over the records of an intact file and return where each chunk ends."""
    ends, at = [], 8
    while at < len(data) - 8:
        opcode, length = struct.unpack_from("<BQ", data, at)
        at += 9 + length
        if opcode == 0x06:
            ends.append(at)
    return ends


def session_bytes(*chunks: bytes, schema: int = SCHEMA_VERSION) -> bytes:
    begin = opening(gpuidle_version="9.9", schema=schema, series="s", part=0)
    return b"".join((begin, *chunks, closing()))


def snapshot_chunk(payload: bytes, number: int) -> bytes:
    return ChunkFramer().chunk(SNAPSHOT_TOPIC, payload, number=number, monotonic_ns=0, wall_ns=0)


def chunk_of(plain: bytes, *, plain_size: int | None = None) -> bytes:
    data = zstandard.compress(plain)
    size = len(plain) if plain_size is None else plain_size
    body = struct.pack("<QQQII4sQ", 0, 0, size, zlib.crc32(plain), 4, b"zstd", len(data)) + data
    return struct.pack("<BQ", 6, len(body)) + body


def test_a_file_cut_at_any_byte_gives_every_whole_chunk_and_says_that_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    data = write_session(path, SNAPSHOTS)
    ends = chunk_ends(data)
    assert len(ends) == 5
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        found, session = read(path)
        whole = sum(end <= cut for end in ends)
        assert found == ENCODED[:whole], cut
        assert [problem.kind for problem in session.problems] == ["cut"], cut
        assert session.damaged == 0, cut
    path.write_bytes(data)
    assert read(path)[1].problems == ()


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_costs_at_most_its_own_chunk_and_is_told(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    data = write_session(path, SNAPSHOTS)
    ends = chunk_ends(data)
    for at in range(0, len(data), 1 if mask == 0x80 else 7):
        flipped = bytearray(data)
        flipped[at] ^= mask
        path.write_bytes(flipped)
        found, session = read(path)
        hit = sum(end <= at for end in ends)
        others = [encoded for i, encoded in enumerate(ENCODED) if i != hit]
        assert found in (ENCODED, others), at
        if found != ENCODED:
            assert session.damaged == 1, at
            assert "damaged" in {problem.kind for problem in session.problems}, at


def test_the_snapshot_behind_a_damaged_chunk_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    data = bytearray(write_session(path, SNAPSHOTS))
    first, second, third, *_ = chunk_ends(bytes(data))
    data[first + 100] ^= 0xFF
    data[second + 3] ^= 0xFF  # the length of the third chunk: the next one must be searched for
    data[third - 10] ^= 0xFF
    path.write_bytes(data)
    session = Session(path)
    snapshots = list(session)
    assert [snapshot.sequence for snapshot in snapshots] == [0, 3, 4]
    assert [len(snapshot.problems) for snapshot in snapshots] == [0, 1, 0]
    assert snapshots[1].problems == session.problems
    assert "2 chunks are lost to damage" in session.problems[0].message
    assert session.damaged == 2


def test_a_hole_of_zeros_or_a_missing_piece_costs_only_what_it_hit(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    data = write_session(path, SNAPSHOTS)
    ends = chunk_ends(data)
    middle = (ends[0] + ends[1]) // 2
    for damaged in (
        data[: ends[0]] + bytes(ends[2] - ends[0]) + data[ends[2] :],
        data[:middle] + data[ends[2] :],
        data[: ends[0]] + data[ends[2] :],
    ):
        path.write_bytes(damaged)
        found, session = read(path)
        assert found == [ENCODED[0], *ENCODED[3:]]
        assert session.damaged == 2


def test_chunks_that_repeat_are_not_replayed_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    data = write_session(path, SNAPSHOTS)
    path.write_bytes(data + data)
    found, session = read(path)
    assert found == ENCODED
    assert session.problems


def test_damage_in_the_closing_mark_loses_nothing_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    data = bytearray(write_session(path, SNAPSHOTS))
    data[-1] ^= 1
    path.write_bytes(data)
    found, session = read(path)
    assert found == ENCODED
    assert [problem.kind for problem in session.problems] == ["damaged"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"hello, this is text about gpuidle.session", "it is of another kind"),
        (bytes(5000), "it is of another kind"),
        (b"\x89MCAP0\r\n" + struct.pack("<BQ", 1, 108) + bytes(108), "an MCAP file of another program"),
        (b"\x28\xb5\x2f\xfd" * 20, "it is of another kind"),
    ],
)
def test_what_is_no_session_is_refused_with_its_kind(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    path.write_bytes(content)
    with pytest.raises(SessionError, match=message):
        Session(path)


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    from mcap.writer import Writer

    path = tmp_path / "robot.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2")
        channel = writer.register_channel("/camera", "cdr", writer.register_schema("s", "ros2msg", b""))
        writer.add_message(channel, 1, b"x", 1)
        writer.finish()  # type: ignore[no-untyped-call]
    with pytest.raises(SessionError, match="an MCAP file of another program"):
        Session(path)


def test_paths_that_are_no_regular_file_are_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SessionError, match="not a regular file"):
        Session(tmp_path / "fifo")
    with pytest.raises(SessionError, match="does not exist"):
        Session(tmp_path / "none.gpuidle.mcap")
    with pytest.raises(SessionError, match="does not exist"):
        Session(tmp_path / "no folder" / "none.gpuidle.mcap")
    with pytest.raises(SessionError, match="holds no recording"):
        Session(tmp_path)


def test_a_newer_schema_asks_for_an_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    path.write_bytes(session_bytes(schema=SCHEMA_VERSION + 1))
    with pytest.raises(SessionError, match=r"newer gpuidle \(9.9\): upgrade gpuidle"):
        Session(path)


@pytest.mark.parametrize("decodable", [True, False])
def test_a_newer_snapshot_asks_for_an_upgrade_even_where_the_opening_is_damaged(
    tmp_path: Path, decodable: bool
) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    newer: object = msgspec.structs.replace(SNAPSHOTS[0], version=SCHEMA_VERSION + 1)
    if not decodable:
        newer = {"version": SCHEMA_VERSION + 1, "node": "of another type"}
    payload = encode_snapshot(newer) if isinstance(newer, Snapshot) else msgspec.msgpack.encode(newer)
    data = bytearray(session_bytes(snapshot_chunk(payload, 0)))
    data[90] ^= 0xFF
    path.write_bytes(data)
    session = Session(path)
    assert session.opening is None
    with pytest.raises(SessionError, match="upgrade gpuidle"):
        list(session)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode({"sequence": 1}),
        encode_snapshot(
            msgspec.structs.replace(
                SNAPSHOTS[0],
                steps=(StepSeries("e", "plugin", True, 0, column([1], "i8"), column([2, 3], "i8")),),
            )
        ),
        encode_snapshot(
            msgspec.structs.replace(
                SNAPSHOTS[0],
                steps=(StepSeries("e", "plugin", True, 0, column([1], "i8"), column([2], "f8")),),
            )
        ),
        ENCODED[1].replace(b"<i8", b"|O8"),
        ENCODED[1].replace(b"<i8", b"<i0"),
        ENCODED[1].replace(b"<i8", b"<x8"),
    ],
)
def test_chunks_that_are_sound_outside_and_rotten_inside_give_no_garbage(
    tmp_path: Path, payload: bytes
) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    path.write_bytes(session_bytes(snapshot_chunk(payload, 0), snapshot_chunk(ENCODED[1], 1)))
    session = Session(path)
    snapshots = list(session)
    assert [encode_snapshot(without_problems(snapshot)) for snapshot in snapshots] == [ENCODED[1]]
    assert [problem.kind for problem in snapshots[0].problems] == ["damaged"]
    assert session.damaged == 1


@pytest.mark.parametrize(
    "plain",
    [
        b"",
        b"\x05",
        struct.pack("<BQ", 5, 2**63),
        struct.pack("<BQ", 5, 2) + b"xx",
        struct.pack("<BQ", 5, 22) + bytes(22),
        struct.pack("<BQ", 4, 8) + struct.pack("<HHI", 1, 0, 2**31),
        struct.pack("<BQ", 4, 10) + struct.pack("<HHI", 1, 0, 2) + b"\xff\xfe",
        struct.pack("<BQ", 0x77, 3) + b"abc",
    ],
)
def test_chunks_laid_out_by_nobody_are_left_out(tmp_path: Path, plain: bytes) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    path.write_bytes(session_bytes(chunk_of(plain), snapshot_chunk(ENCODED[1], 1)))
    found, session = read(path)
    assert found == [ENCODED[1]]
    assert session.damaged == 1


READ_HOSTILE = """
import resource, sys
from pathlib import Path
from gpuidle.collectors.recording.reader import Session
session = Session(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sequences = [snapshot.sequence for snapshot in session]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(sequences, session.damaged, grown)
"""


def test_lengths_and_bombs_that_ask_for_gigabytes_get_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    compressor = zstandard.ZstdCompressor().compressobj(size=3 * 2**30)
    bomb = b"".join(compressor.compress(bytes(2**24)) for _ in range(192)) + compressor.flush()
    head = struct.pack("<QQQII4sQ", 0, 0, 3 * 2**30, 0, 4, b"zstd", len(bomb))
    liar = struct.pack("<QQQII4sQ", 0, 0, 1000, 0, 4, b"zstd", len(bomb))
    huge = struct.pack("<BQ", 6, 2**62) + struct.pack("<QQQII4sQ", 0, 0, 9, 0, 4, b"zstd", 2**62 - 44)
    path.write_bytes(
        session_bytes(
            struct.pack("<BQ", 6, len(head) + len(bomb)) + head + bomb,
            struct.pack("<BQ", 6, len(liar) + len(bomb)) + liar + bomb,
            huge,
            struct.pack("<BQ", 0xFF, 2**64 - 1),
            snapshot_chunk(ENCODED[3], 3),
        )
    )
    with path.open("r+b") as file:  # a chunk of a terabyte that takes no disk
        file.seek(0, os.SEEK_END)
        file.write(
            struct.pack("<BQ", 6, 44 + 2**40) + struct.pack("<QQQII4sQ", 0, 0, 9, 0, 4, b"zstd", 2**40)
        )
        file.seek(2**40, os.SEEK_CUR)
        file.write(snapshot_chunk(ENCODED[4], 4) + closing())
    result = subprocess.run(
        [sys.executable, "-c", READ_HOSTILE, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": ".editable"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)),
    )
    assert result.returncode == 0, result.stderr
    sequences, _, rest = result.stdout.partition("]")
    assert sequences == "[3, 4"
    assert int(rest.split()[1]) < 64 * 1024  # kilobytes


def test_floods_of_damage_are_counted_without_a_problem_each(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    chunks = [snapshot_chunk(b"\xc1", number) for number in range(500)]
    path.write_bytes(session_bytes(*chunks, snapshot_chunk(ENCODED[0], 500)))
    session = Session(path)
    (snapshot,) = session
    assert session.damaged == 500
    assert len(session.problems) == len(snapshot.problems) == 100
