"""The writer of session files, with the reader and the mcap library's own readers as witnesses."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from mcap.reader import NonSeekingReader, make_reader
from mcap.records import Channel, Message, Metadata
from mcap.stream_reader import StreamReader
from tests.exporters.recording.sessions import SECOND, WALL_NS, make_snapshot, write_session

from gpuidle.agent.codec import decode_snapshot, encode_snapshot
from gpuidle.agent.model import Node, Snapshot
from gpuidle.collectors.recording import scan
from gpuidle.collectors.recording.reader import Session, read_snapshots
from gpuidle.exporters.recording import framing
from gpuidle.exporters.recording.writer import RecordingError, Rotation, SessionWriter, session_name


def encoded(snapshots: Iterator[Snapshot]) -> list[bytes]:
    return [encode_snapshot(snapshot) for snapshot in snapshots]


def test_what_was_written_is_read_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    snapshots = [make_snapshot(i) for i in range(5)]
    write_session(path, snapshots)
    session = Session(path)
    assert encoded(iter(session)) == encoded(iter(snapshots))
    assert session.problems == ()


def test_writer_and_reader_agree_on_the_names_of_the_format() -> None:
    for name in ("FORMAT", "FORMAT_VERSION", "SNAPSHOT_TOPIC", "GAP_TOPIC", "MAX_CHUNK_BYTES"):
        assert getattr(framing, name) == getattr(scan, name)
    assert framing.closing() == scan._CLOSING


def test_other_mcap_readers_read_the_file_and_verify_its_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    write_session(path, [make_snapshot(i) for i in range(3)])
    with path.open("rb") as file:
        records = list(StreamReader(file, validate_crcs=True).records)
    metadata = [record for record in records if isinstance(record, Metadata)]
    assert [record.name for record in metadata] == ["gpuidle.session"]
    assert metadata[0].metadata["schema"] == "1"
    assert {record.topic for record in records if isinstance(record, Channel)} == {"gpuidle/snapshot"}
    messages = [record for record in records if isinstance(record, Message)]
    assert [decode_snapshot(message.data).sequence for message in messages] == [0, 1, 2]
    with path.open("rb") as file:
        header = make_reader(file).get_header()
    assert header.profile == "gpuidle.session"
    assert header.library.startswith("gpuidle ")
    with path.open("rb") as file:
        logged = [message.log_time for _, _, message in NonSeekingReader(file).iter_messages()]
    assert logged == [make_snapshot(i).monotonic_ns for i in range(3)]


def test_a_gap_is_counted_in_the_file_and_told_with_the_next_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    writer = SessionWriter(path)
    writer.write(make_snapshot(0))
    writer.gap(7)
    writer.write(make_snapshot(8))
    writer.gap(2)
    writer.close()
    session = Session(path)
    first, second = list(session)
    assert first.problems == ()
    assert [(problem.kind, problem.message) for problem in second.problems] == [
        ("gap", "a.gpuidle.mcap: 7 snapshots were dropped while recording")
    ]
    assert session.dropped == 9
    assert len(session.problems) == 2
    with path.open("rb") as file:
        messages = [record for record in StreamReader(file).records if isinstance(record, Message)]
    assert json.loads(messages[1].data) == {"snapshots": 7}
    with pytest.raises(ValueError, match="gap of 0"):
        writer.gap(0)


def test_files_rotate_by_size_and_each_is_whole_by_itself(tmp_path: Path) -> None:
    snapshots = [make_snapshot(i, noise_bytes=2000) for i in range(12)]
    writer = SessionWriter(tmp_path / "n.gpuidle.mcap", rotation=Rotation(max_bytes=9000))
    for snapshot in snapshots:
        writer.write(snapshot)
    writer.close()
    assert [path.name for path in writer.paths[:2]] == ["n.0000.gpuidle.mcap", "n.0001.gpuidle.mcap"]
    assert len(writer.paths) > 2
    assert all(path.stat().st_size <= 9000 for path in writer.paths)
    assert sum(path.stat().st_size for path in writer.paths) == writer.bytes_written
    alone = [encoded(read_snapshots(path)) for path in writer.paths]
    assert all(alone)
    assert list(chain.from_iterable(alone)) == encoded(iter(snapshots))
    assert encoded(read_snapshots(tmp_path)) == encoded(iter(snapshots))
    assert encoded(read_snapshots(tmp_path / "n.gpuidle.mcap")) == encoded(iter(snapshots))


def test_files_rotate_by_the_age_of_their_first_snapshot(tmp_path: Path) -> None:
    writer = SessionWriter(tmp_path / "n.gpuidle.mcap", rotation=Rotation(max_age_ns=3 * SECOND))
    for i in (0, 1, 2, 3, 5, 7, 30):
        writer.write(make_snapshot(i))
    writer.close()
    sequences = [[snapshot.sequence for snapshot in read_snapshots(path)] for path in writer.paths]
    assert sequences == [[0, 1, 2], [3, 5], [7], [30]]


def test_only_files_of_this_series_are_deleted_and_the_reader_says_what_is_missing(tmp_path: Path) -> None:
    foreign = tmp_path / "other.0000.gpuidle.mcap"
    foreign.write_bytes(b"kept")
    rotation = Rotation(max_age_ns=SECOND, keep=3)
    writer = SessionWriter(tmp_path / "n.gpuidle.mcap", rotation=rotation)
    for i in range(6):
        writer.write(make_snapshot(i))
        if i == 1:  # somebody puts a file of his own in the place of the first part
            (tmp_path / "n.0000.gpuidle.mcap").rename(tmp_path / "moved")
            (tmp_path / "n.0000.gpuidle.mcap").write_bytes(b"theirs")
    writer.close()
    assert foreign.read_bytes() == b"kept"
    assert (tmp_path / "n.0000.gpuidle.mcap").read_bytes() == b"theirs"
    assert [path.name for path in writer.paths] == [f"n.000{i}.gpuidle.mcap" for i in (3, 4, 5)]
    assert writer.problems == ()
    assert writer.written == 6
    (tmp_path / "n.0000.gpuidle.mcap").unlink()
    session = Session(tmp_path / "n.gpuidle.mcap")
    snapshots = list(session)
    assert [snapshot.sequence for snapshot in snapshots] == [3, 4, 5]
    assert [problem.kind for problem in snapshots[0].problems] == ["missing_part"]


def test_a_rotated_file_brings_the_texts_that_only_earlier_files_had(tmp_path: Path) -> None:
    writer = SessionWriter(tmp_path / "n.gpuidle.mcap", rotation=Rotation(max_age_ns=2 * SECOND))
    writer.write(make_snapshot(0, texts={"config:m": "{}", "config:gone": "x"}))
    for i in range(1, 4):
        writer.write(make_snapshot(i))
    writer.close()
    second = list(read_snapshots(writer.paths[1]))
    assert second[0].texts == {"config:m": "{}"}
    assert second[1].texts == {}


def test_no_file_is_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    path.write_bytes(b"precious")
    with pytest.raises(RecordingError, match="exists: choose another name, or ask to overwrite") as caught:
        SessionWriter(path)
    assert caught.value.path == path
    assert path.read_bytes() == b"precious"
    writer = SessionWriter(path, overwrite=True)
    writer.write(make_snapshot(3))
    writer.close()
    assert [snapshot.sequence for snapshot in read_snapshots(path)] == [3]


def test_a_series_neither_joins_nor_leaves_parts_of_an_older_one(tmp_path: Path) -> None:
    base, rotation = tmp_path / "n.gpuidle.mcap", Rotation(max_age_ns=SECOND)
    old = SessionWriter(base, rotation=rotation)
    for i in range(3):
        old.write(make_snapshot(i))
    old.close()
    (tmp_path / "n.0000.gpuidle.mcap").unlink()
    with pytest.raises(RecordingError, match="exists"):
        SessionWriter(base, rotation=rotation)
    new = SessionWriter(base, rotation=rotation, overwrite=True)
    new.write(make_snapshot(9))
    new.close()
    assert [path.name for path in tmp_path.iterdir()] == ["n.0000.gpuidle.mcap"]


def test_overwriting_takes_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "target").write_bytes(b"precious")
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("folder", "folder: name a file"), ("link", "regular"), ("fifo", "regular")):
        with pytest.raises(RecordingError, match=message):
            SessionWriter(tmp_path / name, overwrite=True)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_a_missing_folder_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"none/a.gpuidle.mcap: .*: create the folder first"):
        SessionWriter(tmp_path / "none" / "a.gpuidle.mcap")


def test_a_folder_that_may_not_be_written_is_named_with_its_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root's rights ignore the permission bits
    try:
        with pytest.raises(RecordingError, match=r"permission denied: choose a folder that user \d+ may"):
            SessionWriter(folder / "a.gpuidle.mcap")
    finally:
        os.seteuid(user)
    assert list(folder.iterdir()) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
from gpuidle.exporters.recording.writer import RecordingError, SessionWriter
from tests.exporters.recording.sessions import make_snapshot
limit, path = int(sys.argv[1]), Path(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    writer = SessionWriter(path)
    for i in range(100):
        writer.write(make_snapshot(i, noise_bytes=1000))
except RecordingError as error:
    print(error)
else:
    sys.exit("the limit was never reached")
for again in (lambda: writer.write(make_snapshot(0)), lambda: writer.gap(1)):
    try:
        again()
    except RecordingError:
        pass
    else:
        sys.exit("a failed recording went on")
writer.close()
print(writer.written)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".editable", "."]), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=Path(__file__).parents[3],
    )


@pytest.mark.parametrize("limit", [20_000, 20_700, 21_400])
def test_when_the_disk_takes_no_more_the_file_is_ended_and_all_of_it_is_readable(
    tmp_path: Path, limit: int
) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    result = run_python(FULL_DISK, str(limit), str(path))
    assert result.returncode == 0, result.stderr
    message, written = result.stdout.splitlines()
    assert message.startswith(f"cannot record to {path}: file too large: raise the limit")
    session = Session(path)
    assert [snapshot.sequence for snapshot in session] == list(range(int(written)))
    assert int(written) > 5
    room = limit - path.stat().st_size
    assert {problem.kind for problem in session.problems} <= ({"cut"} if room < 50 else set())


def test_a_file_that_could_not_even_begin_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    result = run_python(FULL_DISK.replace("for again", "sys.exit(0)\nfor again"), "100", str(path))
    assert result.returncode == 0, result.stderr
    assert "file too large" in result.stdout
    assert not path.exists()


KILLED = """
import sys
import tempfile
from pathlib import Path
from gpuidle.exporters.recording.writer import SessionWriter
from tests.exporters.recording.sessions import make_snapshot
writer = SessionWriter(Path(sys.argv[1]))
for i in range(100000):
    writer.write(make_snapshot(i, noise_bytes=20000))
    print(i, flush=True)
"""


def test_a_killed_process_loses_at_most_the_snapshot_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".editable", "."])},
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 20:
                break
        process.kill()
        told = [20, *(int(line) for line in process.stdout if line.endswith("\n"))][-1]
    session = Session(path)
    sequences = [snapshot.sequence for snapshot in session]
    assert sequences == list(range(len(sequences)))
    assert told <= sequences[-1] <= told + 2
    assert [problem.kind for problem in session.problems] == ["cut"]


def test_memory_stays_flat_over_twenty_thousand_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    writer = SessionWriter(path)
    snapshot = Snapshot(sequence=0, monotonic_ns=1, boottime_ns=1, wall_ns=1, node=Node(hostname="n"))

    def blocks_kept_by(writes: int) -> int:
        before = sys.getallocatedblocks()
        for _ in range(writes):
            writer.write(snapshot)
        return sys.getallocatedblocks() - before

    blocks_kept_by(200)
    assert blocks_kept_by(20_000) < 2_000  # an index entry would be several blocks a snapshot
    writer.close()
    reader = read_snapshots(path)
    next(reader)
    before = sys.getallocatedblocks()
    assert sum(1 for _ in reader) == 20_199
    assert sys.getallocatedblocks() - before < 2_000


def test_a_closed_recording_takes_nothing_more_and_closes_once(tmp_path: Path) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    writer = SessionWriter(path)
    writer.close()
    size = path.stat().st_size
    writer.close()
    assert path.stat().st_size == size
    with pytest.raises(ValueError, match="closed"):
        writer.write(make_snapshot(0))
    session = Session(path)
    assert list(session) == []
    assert session.problems == ()


def test_a_write_that_was_interrupted_leaves_no_half_chunk_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    writer = SessionWriter(path)
    writer.write(make_snapshot(0))
    real = os.write

    def half_then_interrupt(descriptor: int, data: memoryview) -> int:
        real(descriptor, data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.write(make_snapshot(1))
    writer.close()
    session = Session(path)
    assert [snapshot.sequence for snapshot in session] == [0]
    assert session.problems == ()


def test_limits_that_make_no_sense_are_refused() -> None:
    for name in ("max_bytes", "max_age_ns", "keep"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            Rotation(**{name: 0})


def test_the_usual_name_says_when_the_session_began() -> None:
    assert session_name(WALL_NS) == "session-20261130T005320Z.gpuidle.mcap"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "no space left on device: free space there"),
        (errno.EDQUOT, "free space in this user's quota"),
        (errno.EIO, "choose another place"),
    ],
)
def test_after_a_failed_write_the_file_is_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    path = tmp_path / "a.gpuidle.mcap"
    writer = SessionWriter(path)
    writer.write(make_snapshot(0))
    real = os.write
    failures = iter([code])

    def half_then_fail(descriptor: int, data: memoryview) -> int:
        failing = next(failures, None)
        if failing is None:
            return real(descriptor, data)
        real(descriptor, data[: len(data) // 2])
        raise OSError(failing, os.strerror(failing))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_fail)
        with pytest.raises(RecordingError, match=message):
            writer.write(make_snapshot(1))
    session = Session(path)
    assert [snapshot.sequence for snapshot in session] == [0]
    assert session.problems == ()


def test_a_read_only_file_system_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RecordingError, match="choose a folder on a file system that can be written"):
        SessionWriter(tmp_path / "a.gpuidle.mcap")


def test_a_part_that_cannot_be_opened_ends_the_recording_with_the_parts_before_whole(tmp_path: Path) -> None:
    writer = SessionWriter(tmp_path / "n.gpuidle.mcap", rotation=Rotation(max_age_ns=SECOND))
    writer.write(make_snapshot(0))
    (tmp_path / "n.0001.gpuidle.mcap").write_bytes(b"theirs")
    for _ in range(2):
        with pytest.raises(RecordingError, match=r"n.0001.gpuidle.mcap: file exists"):
            writer.write(make_snapshot(1))
    writer.close()
    session = Session(tmp_path / "n.0000.gpuidle.mcap")
    assert [snapshot.sequence for snapshot in session] == [0]
    assert session.problems == ()
    assert (tmp_path / "n.0001.gpuidle.mcap").read_bytes() == b"theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_old_part_that_cannot_be_deleted_does_not_stop_the_recording() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)  # sticky: only its owner deletes a file
        os.seteuid(65534)
        try:
            rotation = Rotation(max_age_ns=SECOND, keep=1)
            writer = SessionWriter(Path(folder, "n.gpuidle.mcap"), rotation=rotation)
            writer.write(make_snapshot(0))
            os.seteuid(0)
            os.chown(writer.paths[0], 0, 0)
            os.seteuid(65534)
            writer.write(make_snapshot(1))
            writer.close()
        finally:
            os.seteuid(0)
        assert [problem.kind for problem in writer.problems] == ["old_part_kept"]
        assert len(list(Path(folder).iterdir())) == 2
        assert [snapshot.sequence for snapshot in read_snapshots(Path(folder))] == [0, 1]
