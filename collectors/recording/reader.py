"""Reads recorded sessions: every whole Snapshot in order, and a Problem for each one that is missing.

A hole in a recording (dropped while recording, damaged, a part deleted) is a Problem of the Snapshot behind
it, so that whoever analyses the replay is told where it is. What is wrong at the end has no Snapshot
behind it and stands in `Session.problems` only, which has the others as well.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from gpuidle.agent.codec import CodecError, decode_snapshot
from gpuidle.agent.model import SCHEMA_VERSION, CounterSeries, Problem, Snapshot, StepSeries
from gpuidle.collectors.recording.scan import (
    FORMAT_VERSION,
    GAP_TOPIC,
    SNAPSHOT_TOPIC,
    Chunk,
    Cut,
    Damage,
    NotASessionError,
    Opening,
    read_opening,
    scan,
)

SUFFIX = ".gpuidle.mcap"
_PART = re.compile(r"(?P<stem>.+?)(\.(?P<part>\d{4,}))?" + re.escape(SUFFIX))
_MAX_PROBLEMS = 100
_REMEDIES = {
    "gap": "record to a faster disk, or sample less often",
    "missing_part": "put the missing files back, unless rotation was meant to delete them",
    "damaged": "copy the file again, if another copy exists",
}
_COLUMNS = {
    StepSeries: dict.fromkeys(
        (
            "start_ns",
            "end_ns",
            "prefill_tokens",
            "decode_tokens",
            "delivered_tokens",
            "sequences",
            "kv_tokens",
            "draft_tokens",
            "accepted_tokens",
            "preemptions",
            "recomputed_tokens",
        ),
        "<i8",
    ),
    CounterSeries: {
        "end_ns": "<i8",
        "width_ns": "<i8",
        "gr_active": "<u2",
        "sm_active": "<u2",
        "tensor_active": "<u2",
        "dram_read_bytes_per_s": "<f8",
        "dram_write_bytes_per_s": "<f8",
        "dram_bytes_per_s": "<f8",
        "sm_clock_hz": "<f8",
    },
}


class SessionError(Exception):
    """The path leads to no session that can be read; the message says why and what to do."""


class _Gap(msgspec.Struct, frozen=True):
    snapshots: int


class _Version(msgspec.Struct, frozen=True):
    version: int


class Session:
    """One recording: a file, or the parts of a rotated series in order.

    Iterating reads it from the start; `problems` and the counts are those of the latest iteration.
    """

    def __init__(self, path: Path) -> None:
        """Find the files and read the first one's opening.

        Args:
            path: a file; a folder that holds one recording; or the name that a rotated recording was
                given, when no such file exists but its parts do.

        Raises:
            SessionError: there is nothing to read, more than one recording, or a newer format.
        """
        self.paths = _find_parts(path)
        self._alone = self.paths == (path,)
        self.opening = _open_first(self.paths)
        """What the first readable file says of itself; None: that part of the file is damaged."""
        self.problems: tuple[Problem, ...] = ()
        """At most 100; the counts go on."""
        self.damaged = 0
        """Chunks that are known to be lost to damage."""
        self.dropped = 0
        """Snapshots that were dropped while recording."""

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield the Snapshots that can be read.

        Raises:
            SessionError: a part was written by a newer gpuidle, or a file cannot be read any further.
        """
        self.problems, self.damaged, self.dropped = (), 0, 0
        pending: list[Problem] = []
        expected = 0
        for path in self.paths:
            part = _part_number(path)
            if part is not None:
                if part > expected and not self._alone:
                    self._tell(
                        pending, "missing_part", path, f"{part - expected} parts before it are missing"
                    )
                expected = part + 1
            try:
                yield from self._part(path, pending)
            except FileNotFoundError:
                self._tell(pending, "missing_part", path, "deleted before it was read")
            except OSError as error:
                raise SessionError(f"cannot read {path}: {error.strerror}") from error

    def _part(self, path: Path, pending: list[Problem]) -> Iterator[Snapshot]:
        """Yield one file's Snapshots; `pending` are Problems for the next one, which empties it."""
        with path.open("rb") as file:
            try:
                opening, offset = read_opening(file)
            except NotASessionError as error:
                self._tell(pending, "not_a_session", path, f"left out: {error}")
                return
            if opening is not None:
                _check_version(path, opening)
                if self.opening is not None and opening.series != self.opening.series:
                    self._tell(pending, "not_a_session", path, "left out: it is of another recording")
                    return
            expected, damages = 0, 0
            for event in scan(file, offset):
                if isinstance(event, Damage):
                    damages += 1
                    continue
                if isinstance(event, Cut):
                    self._tell(pending, "cut", path, "ends without its mark: cut, or still being written")
                    continue
                lost = event.number - expected
                if lost or damages:
                    self.damaged += lost
                    self._tell(pending, "damaged", path, f"{lost} chunks are lost to damage")
                expected, damages = event.number + 1, 0
                yield from self._chunk(path, event, pending)
            if damages:
                self.damaged += damages
                self._tell(pending, "damaged", path, f"its end is damaged in {damages} places")

    def _chunk(self, path: Path, chunk: Chunk, pending: list[Problem]) -> Iterator[Snapshot]:
        for topic, payload in chunk.messages:
            if topic == SNAPSHOT_TOPIC:
                snapshot = _decode(path, payload)
                if snapshot is None:
                    self.damaged += 1
                    self._tell(pending, "damaged", path, f"chunk {chunk.number} holds no snapshot")
                    continue
                if pending:
                    snapshot = msgspec.structs.replace(snapshot, problems=(*snapshot.problems, *pending))
                    pending.clear()
                yield snapshot
            elif topic == GAP_TOPIC:
                try:
                    gap = msgspec.json.decode(payload, type=_Gap).snapshots
                except msgspec.DecodeError:
                    self.damaged += 1
                    self._tell(pending, "damaged", path, f"chunk {chunk.number} holds no gap")
                    continue
                self.dropped += gap
                self._tell(pending, "gap", path, f"{gap} snapshots were dropped while recording")

    def _tell(self, pending: list[Problem], kind: str, path: Path, message: str) -> None:
        problem = Problem(
            source="recording", kind=kind, message=f"{path.name}: {message}", remedy=_REMEDIES.get(kind, "")
        )
        if len(pending) < _MAX_PROBLEMS:
            pending.append(problem)
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems = (*self.problems, problem)


def read_snapshots(path: Path) -> Iterator[Snapshot]:
    """Yield the Snapshots of a recording; see Session for the path and for what is raised."""
    return iter(Session(path))


def _find_parts(path: Path) -> tuple[Path, ...]:
    try:
        if path.is_dir():
            return _only_recording(path)
        if path.exists():
            if not stat.S_ISREG(path.stat().st_mode):
                raise SessionError(f"{path} is not a regular file")
            return (path,)
        parts = _recordings(path.parent).get(path.name.removesuffix(".mcap").removesuffix(".gpuidle"))
    except FileNotFoundError:
        parts = None
    except OSError as error:
        raise SessionError(f"cannot read {path}: {error.strerror}") from error
    if not parts:
        raise SessionError(f"{path} does not exist")
    return parts


def _only_recording(folder: Path) -> tuple[Path, ...]:
    found = _recordings(folder)
    if not found:
        raise SessionError(f"{folder} holds no recording (*{SUFFIX})")
    if len(found) > 1:
        names = ", ".join(str(folder / f"{stem}{SUFFIX}") for stem in sorted(found))
        raise SessionError(f"{folder} holds {len(found)} recordings; name one of {names}")
    return next(iter(found.values()))


def _recordings(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the recordings of a folder by name, the parts of each in order."""
    found: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        match = _PART.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault(match["stem"], []).append(path)
    return {stem: tuple(sorted(paths, key=_part_order)) for stem, paths in found.items()}


def _part_number(path: Path) -> int | None:
    match = _PART.fullmatch(path.name)
    return int(match["part"]) if match and match["part"] else None


def _part_order(path: Path) -> int:
    number = _part_number(path)
    return -1 if number is None else number


def _open_first(paths: tuple[Path, ...]) -> Opening | None:
    """Return the opening of the first file that has one whole; refuse when none is a session."""
    refusals: list[str] = []
    for path in paths:
        opening, refusal = _opening_of(path)
        if opening is not None:
            _check_version(path, opening)
            return opening
        if refusal:
            refusals.append(refusal)
    if len(refusals) == len(paths):
        raise SessionError(refusals[0])
    return None


def _opening_of(path: Path) -> tuple[Opening | None, str]:
    """Return the opening, if it is whole, and why the file is no session, if it is none."""
    try:
        with path.open("rb") as file:
            return read_opening(file)[0], ""
    except NotASessionError as error:
        return None, f"{path} is no gpuidle session: {error}"
    except OSError as error:
        raise SessionError(f"cannot read {path}: {error.strerror}") from error


def _check_version(path: Path, opening: Opening) -> None:
    if opening.format_version > FORMAT_VERSION or opening.schema > SCHEMA_VERSION:
        raise _newer(path, opening.gpuidle_version)


def _newer(path: Path, version: str) -> SessionError:
    return SessionError(f"{path} was written by a newer gpuidle ({version}): upgrade gpuidle to read it")


def _decode(path: Path, payload: bytes) -> Snapshot | None:
    """Return the Snapshot, or None where the bytes are none."""
    try:
        snapshot = decode_snapshot(payload)
    except (CodecError, RecursionError):
        try:
            version = msgspec.msgpack.decode(payload, type=_Version).version
        except (msgspec.DecodeError, RecursionError):
            return None
        if version > SCHEMA_VERSION:
            raise _newer(path, f"schema {version}") from None
        return None
    sound = all(map(_is_sound, snapshot.steps)) and all(map(_is_sound, snapshot.counters))
    return snapshot if sound else None


def _is_sound(series: StepSeries | CounterSeries) -> bool:
    """Return whether all columns have their own type and one length."""
    rows = len(series.end_ns)
    for name, dtype in _COLUMNS[type(series)].items():
        values = getattr(series, name)
        if values is not None and (values.dtype != np.dtype(dtype) or values.shape != (rows,)):
            return False
    return True
