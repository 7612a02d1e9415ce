"""The binding: `pynvml` as it is, and what has to be read past it.

Strings and process lists are read through the library that pynvml loaded, with pynvml's structs: its own
functions decode names strictly (one byte that is no UTF-8 loses them) and list processes with two calls,
between which the list can grow.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from pathlib import Path
from typing import Any

import pynvml

from gpuidle.collectors.counters import nvml_faults as faults

nvml: Any = pynvml
"""The module, which has no types of its own."""

TEXT_BYTES = 256
"""Room for a name; NVML's longest is 96."""
PROCESS_ROOM = 64


def version() -> str:
    """Return the version of nvidia-ml-py."""
    try:
        return importlib.metadata.version("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def error_text(code: int) -> str:
    """Return NVML's word for an error, as pynvml knows it without the library."""
    return str(nvml.NVMLError(code))


def function(name: str) -> Any:
    """Return a function of the loaded library.

    Raises:
        pynvml.NVMLError: the library is older than the function.
    """
    try:
        return getattr(nvml.nvmlLib, name)
    except AttributeError:
        raise nvml.NVMLError(faults.FUNCTION_NOT_FOUND) from None


def check(code: int) -> None:
    """Raise pynvml.NVMLError unless `code` is success."""
    if code:
        raise nvml.NVMLError(code)


def text(name: str, *handle: object) -> str:
    """Return what a function of the form (handle, char *, length) says; bad UTF-8 shows as replacements."""
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    check(function(name)(*handle, buffer, ctypes.c_uint(TEXT_BYTES)))
    return buffer.value.decode(errors="replace")


def process_list(kind: str, handle: object) -> list[tuple[int, int | None]]:
    """Return (PID, bytes of memory) of the processes of one kind ("Compute"), as the driver gives them."""
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    try:
        call = function(f"{name}_v3")
    except nvml.NVMLError:
        call = function(f"{name}_v2")  # drivers before R510; the struct is the same
    room = PROCESS_ROOM
    while True:
        rows = (nvml.c_nvmlProcessInfo_v2_t * room)()
        count = ctypes.c_uint(room)
        code = call(handle, ctypes.byref(count), rows)
        if code != faults.INSUFFICIENT_SIZE or room > 16 * PROCESS_ROOM:
            check(code)
            break
        room = max(2 * room, count.value + PROCESS_ROOM)
    unknown = nvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
    listed = ((row.pid, row.usedGpuMemory) for row in rows[: count.value])
    return [(pid, None if used == unknown else used) for pid, used in listed]


def reload_library() -> None:
    """Load libnvidia-ml.so.1 anew, in case an upgrade has put another file in its place.

    A process keeps the library that it loaded first, whatever its name means by now, and after an upgrade
    of the driver that one never fits again. The new one is asked for by its own path, which the loader does
    not take for the old one. The old one stays mapped: someone may be inside it.
    """
    name = "libnvidia-ml.so"
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
            mapped = next((line.split(maxsplit=5)[5] for line in maps if f"/{name}" in line), None)
        if mapped is None:
            return
        nvml.nvmlLib = ctypes.CDLL(str((Path(mapped).parent / f"{name}.1").resolve()))
    except OSError:
        return  # what is loaded stays; the next initialisation says what is wrong with it
    nvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001  # it would keep the old functions
