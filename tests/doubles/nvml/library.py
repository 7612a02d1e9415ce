"""Builds the double with gcc from the header in the package nvidia-nvml-dev; nothing of it is committed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

LIBRARY = "libnvidia-ml.so.1"
FOLDER = Path(__file__).parent
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-deprecated-declarations",
)


class BuildError(Exception):
    """The double cannot be built; the message says what is missing."""


def header() -> Path:
    """Return the path of nvml.h as its package installed it."""
    try:
        files = importlib.metadata.files("nvidia-nvml-dev") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvml.h":
            return Path(str(file.locate()))
    raise BuildError("nvml.h is missing: install the package nvidia-nvml-dev (extra `test`)")


def declared_functions(text: str) -> tuple[str, ...]:
    """Return the names of the functions that a text of nvml.h declares, in order."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return tuple(dict.fromkeys(re.findall(r"\bDECLDIR\b[\s\w*]*?\b(nvml\w+)\s*\(", code)))


def return_codes(text: str) -> dict[str, int]:
    """Return the codes of nvmlReturn_t by name, without their prefix: {"SUCCESS": 0, "UNKNOWN": 999, ...}."""
    rows = re.findall(r"^\s*NVML_(?:ERROR_)?(SUCCESS|(?<=ERROR_)\w+)\s*=\s*(\d+)", text, flags=re.MULTILINE)
    return {name: int(code) for name, code in rows}


def stubs(functions: tuple[str, ...]) -> str:
    """Return C that defines every function weakly; an implementation elsewhere takes its place.

    The stubs take no arguments: in the C calling conventions of Linux the caller clears them away.
    """
    weak = '__attribute__((weak, visibility("default")))'
    lines = [f'{weak} int {name}(void) {{ return double_stub("{name}"); }}' for name in functions]
    return "\n".join(["int double_stub(const char *function);", *lines, ""])


def build() -> Path:
    """Return the folder that holds the double, building it if its sources or the header have changed.

    Raises:
        BuildError: gcc or the header is missing, or the compiler failed.
    """
    nvml_h = header()
    sources = sorted(FOLDER.glob("*.c"))
    digest = hashlib.sha256()
    for path in (nvml_h, Path(__file__), *sorted(FOLDER.glob("*.h")), *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = FOLDER / "build" / digest.hexdigest()[:16]
    if (target / LIBRARY).exists():
        return target
    gcc = shutil.which("gcc")
    if gcc is None:
        raise BuildError("gcc is missing: the NVML double is compiled by the test run")
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        work = Path(scratch)
        text = nvml_h.read_text(encoding="utf-8")
        (work / "errors.inc").write_text("".join(f'{{"{n}", {c}}},\n' for n, c in return_codes(text).items()))
        (work / "stubs.c").write_text(stubs(declared_functions(text)))
        out = work / "out"
        out.mkdir()
        command = [gcc, *FLAGS, "-shared", f"-Wl,-soname,{LIBRARY}", f"-I{nvml_h.parent}", f"-I{work}"]
        command += [*map(str, sources), str(work / "stubs.c"), "-o", str(out / LIBRARY), "-lpthread", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"gcc failed on the NVML double:\n{done.stderr}")
        try:
            out.rename(target)
        except OSError:
            # Another test run was faster: its result is the same, by content.
            if not (target / LIBRARY).exists():
                raise
    return target
