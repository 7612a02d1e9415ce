"""Builds the double with gcc from the headers of CUPTI and of the driver; nothing of them is committed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = "libcupti.so.13"
DRIVER = "libcuda.so.1"
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
PACKAGES = ("nvidia-cuda-cupti", "nvidia-cuda-runtime")
TOOLKITS = ("/usr/local/cuda/include", "/usr/local/cuda/extras/CUPTI/include")
INCLUDE_VARIABLE = "GPUIDLE_CUPTI_INCLUDE"


class BuildError(Exception):
    """The double cannot be built; the message says what is missing."""


def _folders() -> Iterator[Path]:
    for each in os.environ.get(INCLUDE_VARIABLE, "").split(os.pathsep):
        if each:
            yield Path(each)
    for package in PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name in ("cupti_pmsampling.h", "cuda.h"):
                yield Path(str(file.locate())).parent
    yield from map(Path, TOOLKITS)


def headers() -> tuple[Path, ...]:
    """Return the folders that hold CUPTI's headers and cuda.h, from packages or a toolkit."""
    folders = tuple(dict.fromkeys(folder for folder in _folders() if folder.is_dir()))
    for name in ("cupti_pmsampling.h", "cuda.h"):
        if not any((folder / name).exists() for folder in folders):
            raise BuildError(f"{name} is missing: install {' and '.join(PACKAGES)} 13.0 (extra `test`)")
    return folders


def _compile(gcc: str, sources: tuple[str, ...], out: Path, includes: list[str], library: str) -> None:
    command = [gcc, *FLAGS, f"-Wl,-soname,{library}", *includes, *(str(FOLDER / name) for name in sources)]
    done = subprocess.run(
        [*command, "-o", str(out / library), "-lpthread", "-lm"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"gcc failed on the CUPTI double:\n{done.stderr}")


def build() -> Path:
    """Return the folder that holds the doubles of libcupti and libcuda, building them if something changed.

    Raises:
        BuildError: gcc or a header is missing, or the compiler failed.
    """
    folders = headers()
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted(FOLDER.glob("*.[ch]"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for folder in folders:
        digest.update(str(folder).encode() + b"\0")
    target = FOLDER / "build" / digest.hexdigest()[:16]
    if (target / LIBRARY).exists():
        return target
    gcc = shutil.which("gcc")
    if gcc is None:
        raise BuildError("gcc is missing: the CUPTI double is compiled by the test run")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        work = Path(scratch)
        # One header of a C library includes the C++ header <string> without using it.
        (work / "string").write_text("")
        out = work / "out"
        out.mkdir()
        includes = [f"-isystem{work}", *(f"-isystem{folder}" for folder in folders)]
        _compile(gcc, ("cuda.c", "scenario.c"), out, includes, DRIVER)
        _compile(gcc, ("cupti.c", "scenario.c"), out, includes, LIBRARY)
        try:
            out.rename(target)
        except OSError:
            # Another test run was faster: its result is the same, by content.
            if not (target / LIBRARY).exists():
                raise
    return target
