"""Records Snapshots to a file, or to a series of files that is rotated by size and age.

Each chunk is one Snapshot and goes to the kernel at once: killing the process loses at most the Snapshot
being written. The writer has no clock: ages and names come from the Snapshots and the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from gpuidle import __version__
from gpuidle.agent.codec import encode_snapshot
from gpuidle.agent.model import SCHEMA_VERSION, Problem, Snapshot
from gpuidle.exporters.recording.framing import GAP_TOPIC, SNAPSHOT_TOPIC, ChunkFramer, closing, opening

SUFFIX = ".gpuidle.mcap"
"""Of every session file, so that both gpuidle and MCAP tools know it."""

_REMEDIES = {
    errno.ENOSPC: "free space there, or keep fewer and smaller parts",
    errno.EDQUOT: "free space in this user's quota, or keep fewer and smaller parts",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or rotate at a smaller size",
    errno.EROFS: "choose a folder on a file system that can be written",
    errno.ENOENT: "create the folder first",
    errno.ENOTDIR: "choose a path whose parents are folders",
    errno.EEXIST: "choose another name, or ask to overwrite it",
}


class RecordingError(Exception):
    """A session file cannot be written (any further); what was written before stays readable."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"cannot record to {path}: {reason}: {remedy}")
        self.path = path
        self.reason = reason
        self.remedy = remedy


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """When a new file of the series begins, and how many files stay; None is no limit.

    A Snapshot that is larger than `max_bytes` gets a file of its own.
    """

    max_bytes: int | None = None
    max_age_ns: int | None = None
    """Measured by `Snapshot.monotonic_ns` from the file's first Snapshot."""
    keep: int | None = None
    """Files that stay, the one being written included. Files of other series are never deleted."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_age_ns", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


def session_name(wall_ns: int) -> str:
    """Return the usual name of a session that begins then: `session-20261129T171852Z.gpuidle.mcap`."""
    begin = datetime.fromtimestamp(wall_ns // 10**9, timezone.utc)
    return f"session-{begin:%Y%m%dT%H%M%SZ}{SUFFIX}"


class SessionWriter:
    """Writes one recording (ports.SnapshotSink).

    Without `rotation` it is the file `path`. With it, it is the series `NAME.0000.gpuidle.mcap`,
    `NAME.0001.gpuidle.mcap` and so on, NAME being that of `path` without its suffix; each file can be read
    alone. Files that exist are left alone unless `overwrite`.

    The first file is opened at once. After a failed write the recording is over: every further call
    raises the same error.
    """

    def __init__(self, path: Path, *, rotation: Rotation | None = None, overwrite: bool = False) -> None:
        """Open the (first) file.

        Raises:
            RecordingError: it exists, or cannot be created.
        """
        self._base = path
        self._rotation = rotation
        self._series = secrets.token_hex(8)
        self._framer = ChunkFramer()
        self._closing = closing()
        self._error: RecordingError | None = None
        self._descriptor: int | None = None
        self._part = 0
        self._size = 0
        self._number = 0
        self._first_ns: int | None = None
        self._parts: list[tuple[Path, tuple[int, int]]] = []
        self._last = (0, 0)
        self._texts: dict[str, str] = {}
        self.written = 0
        """Snapshots on disk, deleted parts included."""
        self.bytes_written = 0
        """Bytes of all parts, deleted ones included."""
        self.problems: tuple[Problem, ...] = ()
        """What went wrong without stopping the recording: an old part that could not be deleted."""
        self._make_room(overwrite=overwrite)
        self._open_part()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of this recording that were not deleted, oldest first."""
        return tuple(path for path, _ in self._parts)

    def write(self, snapshot: Snapshot) -> None:
        """Write one Snapshot as one chunk, blocking until the kernel has it.

        Raises:
            RecordingError: the file cannot be written any further.
            ValueError: the Snapshot is too large for any reader.
        """
        self._check_open()
        chunk = self._chunk(snapshot)
        if self._is_full(len(chunk), snapshot.monotonic_ns):
            self._close_part()
            self._part += 1
            self._open_part()
            self._delete_old_parts()
            chunk = self._chunk(snapshot)
        self._append(chunk)
        if self._first_ns is None:
            self._first_ns = snapshot.monotonic_ns
        self._last = (snapshot.monotonic_ns, snapshot.wall_ns)
        self._number += 1
        self.written += 1

    def gap(self, snapshots: int) -> None:
        """Record that `snapshots` (>= 1) were dropped before the next one written.

        Raises:
            RecordingError: the file cannot be written any further.
        """
        if snapshots < 1:
            raise ValueError(f"a gap of {snapshots} snapshots")
        self._check_open()
        payload = msgspec.json.encode({"snapshots": snapshots})
        self._append(
            self._framer.chunk(
                GAP_TOPIC, payload, number=self._number, monotonic_ns=self._last[0], wall_ns=self._last[1]
            )
        )
        self._number += 1

    def close(self) -> None:
        """Finish the file and bring it to the disk. Closing twice, or after a failure, does nothing.

        Raises:
            RecordingError: the end could not be written; all Snapshots before are readable.
        """
        if self._descriptor is not None:
            self._close_part()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._descriptor is None:
            raise ValueError("the recording is closed")

    # ---------------------------------------------------------------------------------------- chunks

    def _chunk(self, snapshot: Snapshot) -> bytes:
        """Frame a Snapshot; the first of a part is given the texts that only earlier parts have."""
        self._texts.update(snapshot.texts)
        named = {engine.model_text for engine in snapshot.engines}
        self._texts = {key: text for key, text in self._texts.items() if key in named}
        if self._first_ns is None and self._texts.keys() - snapshot.texts.keys():
            snapshot = msgspec.structs.replace(snapshot, texts={**self._texts, **snapshot.texts})
        return self._framer.chunk(
            SNAPSHOT_TOPIC,
            encode_snapshot(snapshot),
            number=self._number,
            monotonic_ns=snapshot.monotonic_ns,
            wall_ns=snapshot.wall_ns,
        )

    def _is_full(self, chunk_bytes: int, monotonic_ns: int) -> bool:
        if self._rotation is None or self._first_ns is None:
            return False
        limit, age = self._rotation.max_bytes, self._rotation.max_age_ns
        too_large = limit is not None and self._size + chunk_bytes + len(self._closing) > limit
        return too_large or (age is not None and monotonic_ns - self._first_ns >= age)

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            raise self._fail(error) from error
        self._size += len(data)
        self.bytes_written += len(data)

    def _fail(self, error: OSError) -> RecordingError:
        """Take back what was written by half, end the file if that is possible, and give up."""
        path = self._parts[-1][0]
        self._error = _recording_error(path, error)
        if self._descriptor is None:
            return self._error
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self._size)
            if self._size == 0:  # not even the opening: nobody misses this file
                path.unlink()
                self._parts.pop()
            else:
                _write_all(self._descriptor, self._closing)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = None
        return self._error

    # ----------------------------------------------------------------------------------------- files

    def _part_path(self, part: int) -> Path:
        if self._rotation is None:
            return self._base
        return self._base.with_name(f"{_stem(self._base)}.{part:04d}{SUFFIX}")

    def _make_room(self, *, overwrite: bool) -> None:
        """Find what stands where this recording will write; delete it if asked, else refuse."""
        try:
            found = [self._base] if self._rotation is None else _parts_of(self._base)
            for path in found:
                mode = path.lstat().st_mode
                if stat.S_ISDIR(mode):
                    raise RecordingError(path, "it is a folder", "name a file in it")
                if not overwrite:
                    raise RecordingError(path, "it exists", "choose another name, or ask to overwrite it")
                if not stat.S_ISREG(mode):
                    raise RecordingError(path, "it is not a regular file", "choose another name")
                path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _recording_error(self._base, error) from error

    def _open_part(self) -> None:
        path = self._part_path(self._part)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o666)
            found = os.fstat(self._descriptor)
        except OSError as error:
            self._error = _recording_error(path, error)
            raise self._error from error
        self._parts.append((path, (found.st_dev, found.st_ino)))
        self._size = 0
        self._number = 0
        self._first_ns = None
        self._append(
            opening(gpuidle_version=__version__, schema=SCHEMA_VERSION, series=self._series, part=self._part)
        )

    def _close_part(self) -> None:
        assert self._descriptor is not None
        try:
            os.ftruncate(self._descriptor, self._size)  # an interrupted write may have left half a chunk
            self._append(self._closing)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._fail(error) from error
        os.close(self._descriptor)
        self._descriptor = None

    def _delete_old_parts(self) -> None:
        keep = self._rotation.keep if self._rotation is not None else None
        while keep is not None and len(self._parts) > keep:
            path, identity = self._parts.pop(0)
            try:
                found = path.lstat()
                if (found.st_dev, found.st_ino) == identity:  # else somebody put another file there
                    path.unlink()
            except FileNotFoundError:
                pass
            except OSError as error:
                self.problems = (
                    Problem(
                        source="recording",
                        kind="old_part_kept",
                        message=f"cannot delete {path}: {error.strerror}",
                        remedy="delete it by hand and give the folder's rights back",
                    ),
                )


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _stem(path: Path) -> str:
    return path.name.removesuffix(".mcap").removesuffix(".gpuidle")


def _parts_of(base: Path) -> list[Path]:
    pattern = re.compile(re.escape(_stem(base)) + r"\.\d{4,}" + re.escape(SUFFIX))
    return sorted(path for path in base.parent.iterdir() if pattern.fullmatch(path.name))


def _recording_error(path: Path, error: OSError) -> RecordingError:
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"choose a folder that user {os.geteuid()} may write, or give it the right"
    else:
        remedy = _REMEDIES.get(error.errno or 0, "choose another place")
    return RecordingError(path, (error.strerror or str(error)).lower(), remedy)
