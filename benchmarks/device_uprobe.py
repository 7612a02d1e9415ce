"""Counts calls into a library of a running process with perf uprobes, and reads its functions' first bytes.

Standard library only. A probe is placed at function entry alone: in the middle of a function some kernels
harm the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
from contextlib import ExitStack
from pathlib import Path

SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
PMU = Path("/sys/bus/event_source/devices/uprobe/type")
ATTR_SIZE = 112


def symbols(path: str) -> dict[str, int]:
    """Return the file offset of each function that a 64-bit little-endian ELF library exports.

    Raises:
        ValueError: it is no such library.
    """
    data = Path(path).read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit ELF file")
    phoff, shoff = struct.unpack_from("<QQ", data, 32)
    phsize, phcount, shsize, shcount = struct.unpack_from("<HHHH", data, 54)
    loads = []
    for index in range(phcount):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, phoff + index * phsize)
        if kind == 1:
            loads.append((address, offset, size))
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + index * shsize) for index in range(shcount)]
    found: dict[str, int] = {}
    for _, kind, _, _, offset, size, link, _, _, entry in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = sections[link][4]
        for place in range(offset, offset + size, entry):
            name, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", data, place)
            if info & 15 != 2 or not section:
                continue
            text = data[strings + name : data.index(b"\0", strings + name)].decode()
            for address, start, length in loads:
                if address <= value < address + length:
                    found[text] = value - address + start
    return found


def first_bytes(path: str, names: list[str]) -> dict[str, str]:
    """Return the first 12 bytes of functions as hexadecimal: `f30f1efa` is endbr64, `55` push %rbp."""
    places = symbols(path)
    data = Path(path).read_bytes()
    return {name: data[places[name] : places[name] + 12].hex() for name in names if name in places}


def mapped(pid: int, pattern: str) -> list[str]:
    """Return the files matching `pattern` that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    return sorted({line.split(maxsplit=5)[5] for line in maps.splitlines() if re.search(pattern, line)})


class Counter:
    """Hits of functions of one file in one thread (and in threads that it starts later)."""

    def __init__(self, pid: int, path: str, names: list[str]) -> None:
        """Attach.

        Raises:
            OSError: the kernel refuses; uprobes through perf need CAP_SYS_ADMIN.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._path = ctypes.create_string_buffer(os.fsencode(path))
        kind = int(PMU.read_text(encoding="ascii"))
        places = symbols(path)
        self._open = ExitStack()
        self._descriptors = {name: self._attach(kind, pid, places[name]) for name in names if name in places}

    def _attach(self, kind: int, pid: int, offset: int) -> int:
        inherit = 1 << 1
        head = struct.pack("<IIQQQQQII", kind, ATTR_SIZE, 0, 0, 0, 0, inherit, 0, 0)
        attr = head + struct.pack("<QQ", ctypes.addressof(self._path), offset)
        buffer = ctypes.create_string_buffer(attr.ljust(ATTR_SIZE, b"\0"), ATTR_SIZE)
        number = SYS_PERF_EVENT_OPEN[platform.machine()]
        descriptor: int = self._libc.syscall(
            ctypes.c_long(number),
            buffer,
            ctypes.c_int(pid),
            ctypes.c_int(-1),
            ctypes.c_int(-1),
            ctypes.c_ulong(8),
        )
        if descriptor < 0:
            self._open.close()
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._open.callback(os.close, descriptor)
        return descriptor

    def hits(self) -> dict[str, int]:
        """Return the hits so far by function."""
        return {
            name: struct.unpack("<Q", os.read(descriptor, 8))[0]
            for name, descriptor in self._descriptors.items()
        }

    def close(self) -> None:
        """Detach."""
        self._open.close()
