"""Files that a process has mapped, found through /proc/PID/maps and opened without trusting their names."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

_MAPS_LIMIT = 32 * 1024 * 1024
_LINE = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+) \S+ [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+) +(/.*?)( \(deleted\))?$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class MappedFile:
    """One file in the address space of a process."""

    pid: int
    path: str
    """As the process sees it."""
    device: tuple[int, int]
    inode: int
    address: str
    """Its range, as /proc/PID/map_files names it."""
    deleted: bool

    @property
    def key(self) -> tuple[int, int, int]:
        """What the file is, whoever mapped it under whatever name."""
        return (*self.device, self.inode)


def mapped_files(
    proc: Path, pid: int, wanted: re.Pattern[str], *, ends: tuple[str, ...]
) -> tuple[MappedFile, ...]:
    """Return the mapped files whose path matches `wanted`, one for each inode.

    The maps of an engine are thousands of lines: they are taken apart only where one of `ends` occurs.

    Raises:
        OSError: the process is gone, or (PermissionError) of another user.
    """
    with (proc / str(pid) / "maps").open("rb") as file:
        text = file.read(_MAPS_LIMIT)
    found: dict[tuple[int, int, int], MappedFile] = {}
    if not any(end.encode() in text for end in ends):
        return ()
    for match in _LINE.finditer(text):
        path = os.fsdecode(match[5])
        if wanted.search(path):
            one = MappedFile(
                pid=pid,
                path=path,
                device=(int(match[2], 16), int(match[3], 16)),
                inode=int(match[4]),
                address=match[1].decode("ascii"),
                deleted=match[6] is not None,
            )
            found.setdefault(one.key, one)
    return tuple(found.values())


def open_mapped(proc: Path, file: MappedFile) -> int:
    """Return a read-only descriptor of the very file that is mapped.

    Its name leads through a folder that others may write to, so what is opened there must be a regular file
    with the mapped inode. Where the name is gone, the kernel's own link to the mapping serves (it needs
    CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN).

    Raises:
        OSError: it cannot be opened, or another file stands in its place.
    """
    folder = f"{proc}/{file.pid}"
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    for path, more in (
        (f"{folder}/root{file.path}", os.O_NOFOLLOW),
        (f"{folder}/map_files/{file.address}", 0),
    ):
        try:
            descriptor = os.open(path, flags | more)
        except OSError:
            continue
        status = os.fstat(descriptor)
        # The device is not compared: overlay file systems give another one to maps than to fstat.
        if stat.S_ISREG(status.st_mode) and status.st_ino == file.inode:
            return descriptor
        os.close(descriptor)
    raise OSError(
        f"{file.path}, which process {file.pid} has mapped, cannot be opened, or is another file now"
    )
