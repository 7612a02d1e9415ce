"""Rings that are torn, stale, hostile or cut short: the whole is read, the rest is counted, nothing dies."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuidle.collectors.steps import vllm_plugin as layout
from gpuidle.collectors.steps.ring import RingError, RingReader

CAPACITY = 64


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[layout.Ring]:
    made = layout.Ring(f"{tmp_path}/gpuidle", rank=3, version="0.32.0", capacity=CAPACITY)
    yield made
    made.close()


def write(ring: layout.Ring, count: int, tokens: int = 1) -> None:
    for _ in range(count):
        now = time.monotonic_ns()
        ring.write(now - 1000, now, tokens, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def reader(ring: layout.Ring, since_ns: int | None = None) -> RingReader:
    return RingReader(os.open(ring.path, os.O_RDONLY), since_ns)


def patch(ring: layout.Ring, at: int, data: bytes) -> None:
    with Path(ring.path).open("r+b") as file:
        file.seek(at)
        file.write(data)


def slot(index: int) -> int:
    return layout.HEADER_BYTES + index % CAPACITY * layout.RECORD_BYTES


def test_records_come_once_in_order_with_all_their_fields(ring: layout.Ring) -> None:
    follower = reader(ring)
    assert follower.header.rank == 3
    assert follower.header.version == "0.32.0"
    write(ring, 5)
    first = follower.records()
    write(ring, 3, tokens=7)
    second = follower.records()
    assert first.of("index").tolist() == [0, 1, 2, 3, 4]
    assert second.of("prefill_tokens").tolist() == [7, 7, 7]
    assert first.rows[0, 3:].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (first.lost, second.lost, len(follower.records().rows)) == (0, 0, 0)
    follower.close()


def test_a_reader_that_was_too_slow_counts_what_was_overwritten(ring: layout.Ring) -> None:
    follower = reader(ring)
    write(ring, CAPACITY + 10)
    found = follower.records()
    assert len(found.rows) == CAPACITY
    assert found.lost == 10
    assert found.of("index")[0] == 10
    follower.close()


def test_what_the_writer_overtakes_while_it_is_read_is_lost(
    ring: layout.Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = reader(ring)
    write(ring, CAPACITY)
    slots = follower._slots

    def slow(begin: int, end: int) -> bytes:
        data = slots(begin, end)
        write(ring, 6)
        return data

    monkeypatch.setattr(follower, "_slots", slow)
    found = follower.records()
    assert found.lost == 6
    assert found.of("index").tolist() == list(range(6, CAPACITY))
    follower.close()


def test_a_torn_record_is_lost_and_its_neighbours_are_not(ring: layout.Ring) -> None:
    follower = reader(ring)
    write(ring, 8)
    patch(ring, slot(3) + 40, b"\xff" * 8)  # half of another write
    patch(ring, slot(5), struct.pack("<q", 5 + CAPACITY))  # a writer that began and died
    found = follower.records()
    assert found.of("index").tolist() == [0, 1, 2, 4, 6, 7]
    assert found.lost == 2
    follower.close()


@pytest.mark.parametrize(
    "fields",
    [
        (-5, 10, *[1] * 10),
        (20, 10, *[1] * 10),
        (10, 1 << 62, *[1] * 10),
        (10, 20, -1, *[1] * 9),
        (10, 20, 1 << 50, *[1] * 9),
    ],
)
def test_a_record_that_cannot_be_is_lost_though_its_checksum_is_right(
    ring: layout.Ring, fields: tuple[int, ...]
) -> None:
    follower = reader(ring)
    write(ring, 2)
    row = (1, *fields)
    patch(ring, slot(1), layout.RECORD.pack(*row, layout.checksum(row)))
    found = follower.records()
    assert (len(found.rows), found.lost) == (1, 1)
    follower.close()


def test_steps_that_the_plugin_could_not_record_are_lost(ring: layout.Ring) -> None:
    follower = reader(ring)
    write(ring, 1)
    ring.fault()
    ring.fault()
    assert follower.records().lost == 2
    assert follower.records().lost == 0
    follower.close()


def test_more_faults_than_a_writer_would_count_are_a_lie(ring: layout.Ring) -> None:
    follower = reader(ring)
    ring.fault(layout.MOST_FAULTS)
    assert follower.records().lost == layout.MOST_FAULTS
    assert follower.stopped
    patch(ring, layout.FAULTS_AT, struct.pack("<Q", 1 << 60))
    with pytest.raises(RingError):
        follower.records()
    follower.close()


def test_an_old_ring_is_read_from_now_on_and_a_young_one_from_its_beginning(ring: layout.Ring) -> None:
    write(ring, 4)
    old, young = reader(ring, time.monotonic_ns()), reader(ring, 0)
    write(ring, 1)
    assert len(old.records().rows) == 1
    assert len(young.records().rows) == 5
    old.close()
    young.close()


@pytest.mark.parametrize("size", [0, 10, layout.HEADER.size, layout.HEADER_BYTES, layout.HEADER_BYTES + 500])
def test_a_ring_cut_short_is_refused_or_ends_the_reading(ring: layout.Ring, size: int) -> None:
    follower = reader(ring)
    write(ring, CAPACITY)
    os.truncate(ring.path, size)
    with pytest.raises(RingError):
        follower.records()
    with pytest.raises(RingError):
        reader(ring)
    os.truncate(ring.path, layout.HEADER_BYTES + CAPACITY * layout.RECORD_BYTES)
    follower.close()


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (0, b"NOTARING"),
        (8, struct.pack("<I", 99)),
        (12, struct.pack("<I", 0)),
        (16, struct.pack("<I", 7)),
        (20, struct.pack("<I", 0)),
        (20, struct.pack("<I", 0xFFFFFFFF)),
    ],
)
def test_a_header_that_lies_is_refused(ring: layout.Ring, at: int, data: bytes) -> None:
    patch(ring, at, data)
    with pytest.raises(RingError):
        reader(ring)


@pytest.mark.parametrize("committed", [0, 1, (1 << 64) - 1, 1 << 40])
def test_a_count_that_lies_ends_the_reading(ring: layout.Ring, committed: int) -> None:
    follower = reader(ring)
    write(ring, 3)
    follower.records()
    patch(ring, layout.COMMITTED_AT, struct.pack("<Q", committed))
    with pytest.raises(RingError):
        follower.records()
    follower.close()


def test_random_bytes_never_become_steps(ring: layout.Ring) -> None:
    follower = reader(ring)
    write(ring, 3)
    patch(ring, slot(0), os.urandom(3 * layout.RECORD_BYTES))
    found = follower.records()
    assert (len(found.rows), found.lost) == (0, 3)
    follower.close()


WRITER = """
import sys, time
from gpuidle.collectors.steps import vllm_plugin as layout
ring = layout.Ring(sys.argv[1], 0, "x", 64)
print(ring.path, flush=True)
while True:
    now = time.monotonic_ns()
    ring.write(now - 10, now, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
"""


def writer(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, f"{folder}/gpuidle"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_an_engine_killed_in_mid_write_leaves_whole_records_and_a_ring_known_to_be_stale(
    tmp_path: Path,
) -> None:
    process, path = writer(tmp_path)
    follower = RingReader(os.open(path, os.O_RDONLY))
    try:
        assert follower.is_written()
        begin = follower._next
        seen = [follower.records()]
        while follower._next < begin + 500:
            seen.append(follower.records())
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        seen.append(follower.records())
    finally:
        process.kill()
        process.communicate()
    indexes = [int(index) for one in seen for index in one.of("index")]
    assert indexes == sorted(set(indexes))
    assert len(indexes) + sum(one.lost for one in seen) == follower._next - begin
    assert indexes
    for one in seen:
        assert (one.rows[:, 3:] == list(range(1, 11))).all()
    assert not follower.is_written()
    follower.close()
    # The next engine of this user clears it away, and takes nobody's else.
    living, kept = writer(tmp_path)
    try:
        names = sorted(str(each) for each in (tmp_path / "gpuidle").iterdir())
        assert names == [kept]
    finally:
        living.kill()
        living.communicate()


def test_a_ring_without_a_name_is_read_to_its_end(ring: layout.Ring) -> None:
    follower = reader(ring)
    write(ring, 2)
    ring.close()
    assert len(follower.records().rows) == 2
    follower.close()
