"""Finds a libcupti to load: one named, beside this interpreter, in the toolkit, or the engine's own."""

from __future__ import annotations

import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

NAMES = ("libcupti.so.13", "libcupti.so.12")
PIP_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib")
TOOLKITS = (
    "/usr/local/cuda/extras/CUPTI/lib64",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)
MAPPED = re.compile(rb"(/[^\n]*/libcupti\.so\.1[23][^/\s]*)$", re.MULTILINE)
SITE = re.compile(rb"(/[^\n]*/(?:site|dist)-packages)/")


def find_libraries(
    *,
    named: str | None = None,
    engine_pids: Iterable[int] = (),
    proc: Path = Path("/proc"),
    search_path: str | None = None,
) -> tuple[str, ...]:
    """Return the paths of all usable libcupti, best first and each once.

    A library that an engine has mapped is taken only if no one but root and this user could have written it:
    the sampler has rights that an engine's user has not.

    Args:
        named: Taken alone if given.
        engine_pids: Processes that hold the GPU.
        proc: The node's /proc.
        search_path: In place of LD_LIBRARY_PATH.
    """
    if named is not None:
        return (named,)
    path = os.environ.get("LD_LIBRARY_PATH", "") if search_path is None else search_path
    site = Path(sysconfig.get_path("purelib"))
    folders = [Path(each) for each in path.split(os.pathsep) if each]
    folders += [site / each for each in PIP_FOLDERS]
    folders += [Path(each) for each in TOOLKITS]
    found = [folder / name for folder in folders for name in NAMES if (folder / name).exists()]
    found += [each for each in _mapped(proc, engine_pids) if trusted(each)]
    return tuple(dict.fromkeys(str(each.resolve()) for each in found))


def _mapped(proc: Path, pids: Iterable[int]) -> Iterator[Path]:
    for pid in pids:
        try:
            if not os.path.samestat((proc / str(pid) / "root").stat(), Path("/").stat()):
                continue  # another container's file: its tenant is root in there
            maps = (proc / str(pid) / "maps").read_bytes()
        except OSError:
            continue
        mapped = {Path(os.fsdecode(match)) for match in MAPPED.findall(maps)}
        yield from sorted(mapped)
        # An engine that has not loaded it yet has it in its environment.
        for site in sorted({os.fsdecode(match) for match in SITE.findall(maps)}):
            yield from (Path(site) / each / name for each in PIP_FOLDERS for name in NAMES)


def trusted(path: Path) -> bool:
    """Whether only root and this user can write the file and every folder above it."""
    users = (0, os.geteuid())
    try:
        path = path.resolve(strict=True)
        for each in (path, *path.parents):
            found = each.stat()
            sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            if found.st_uid not in users or (found.st_mode & 0o022 and not sticky):
                return False
    except OSError:
        return False
    return True
