"""The header of a GGUF file: its metadata and its list of tensors. Weights are never read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The file
may be hostile or cut short: every count is bounded, and what exceeds a bound is an error.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_HEADER_LIMIT = 256 * 1024 * 1024
_MAX_TENSORS = 100_000
_MAX_KEYS = 10_000
_MAX_PARTS = 1_000
_KEPT_ARRAY = 4096
"""Longer arrays (vocabularies) are skipped; those of one value a layer are kept."""
_KEPT_TEXT = 4096
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufError(ValueError):
    """The file is no GGUF of a known version, or it is damaged; the message says where."""


def read_gguf_header(path: Path) -> dict[str, object]:
    """Return {"metadata": {...}, "tensors": [[name, [dimensions], type], ...]} of a GGUF file.

    Of a split file ("...-00001-of-00003.gguf") all parts are read, and their tensors put together.
    Vocabularies and chat templates are left out.

    Raises:
        GgufError: no GGUF, damaged, or a part is missing.
        OSError: it cannot be read.
    """
    metadata, tensors = _read_one(path)
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        if parts > _MAX_PARTS or _SPLIT.search(path.name) is None:
            raise GgufError(f"{path.name} is a part of {parts} without their numbers in its name")
        tensors = []
        for number in range(1, parts + 1):
            part = path.with_name(_SPLIT.sub(f"-{number:05d}-of-{parts:05d}.gguf", path.name))
            of_part, listed = _read_one(part)
            if number == 1:
                metadata = of_part
            tensors += listed
        expected = metadata.get("split.tensors.count")
        if isinstance(expected, int) and expected != len(tensors):
            raise GgufError(f"{path.name}: {len(tensors)} tensors in all parts, {expected} were announced")
    return {"metadata": metadata, "tensors": tensors}


def _read_one(path: Path) -> tuple[dict[str, object], list[list[object]]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=1 << 20) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise GgufError(f"{path} is no regular file")
        return _Header(file, path.name).read()


class _Header:
    """Reads one file from its start, with a budget of bytes."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name, self.left = file, name, _HEADER_LIMIT

    def read(self) -> tuple[dict[str, object], list[list[object]]]:
        if self.take(4) != _MAGIC:
            raise GgufError(f"{self.name} is no GGUF file")
        version = self.number("<I")
        if version not in {2, 3}:
            raise GgufError(f"{self.name}: GGUF version {version} (big-endian, or newer than this reader)")
        tensors, keys = self.number("<Q"), self.number("<Q")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            raise GgufError(f"{self.name}: {tensors} tensors and {keys} keys: the header is damaged")
        metadata: dict[str, object] = {}
        for _ in range(keys):
            key = self.text()
            value = self.value(self.number("<I"))
            if value is not None:
                metadata[key] = value
        return metadata, [self.tensor() for _ in range(tensors)]

    def tensor(self) -> list[object]:
        name, axes = self.text(), self.number("<I")
        if not 1 <= axes <= 4:
            raise GgufError(f"{self.name}: tensor {name} has {axes} dimensions: the header is damaged")
        dims = [self.number("<Q") for _ in range(axes)]
        kind = self.number("<I")
        self.take(8)  # where its weights begin
        return [name, dims, kind]

    def value(self, kind: int) -> object:
        """Read a value; None for one that is too long to keep."""
        if kind in _SCALARS:
            unpacked: object = _SCALARS[kind].unpack(self.take(_SCALARS[kind].size))[0]
            return unpacked
        if kind == _STRING:
            text = self.text()
            return text if len(text) <= _KEPT_TEXT else None
        if kind != _ARRAY:
            raise GgufError(f"{self.name}: unknown kind {kind} of a value")
        inner, count = self.number("<I"), self.number("<Q")
        if inner == _STRING:
            for _ in range(self.bounded(count, 8)):
                self.skip(self.number("<Q"))
            return None
        if inner not in _SCALARS:
            raise GgufError(f"{self.name}: array of unknown kind {inner}")
        scalar = _SCALARS[inner]
        size = self.bounded(count, scalar.size) * scalar.size
        if count > _KEPT_ARRAY:
            self.skip(size)
            return None
        return [row[0] for row in scalar.iter_unpack(self.take(size))]

    def text(self) -> str:
        return self.take(self.bounded(self.number("<Q"), 1)).decode("utf-8", "replace")

    def number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def bounded(self, count: int, size: int) -> int:
        if count * size > self.left:
            raise GgufError(f"{self.name}: a length of {count}: the header is damaged")
        return count

    def skip(self, size: int) -> None:
        while size > 0:
            step = min(size, 1 << 20)
            self.take(step)
            size -= step

    def take(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise GgufError(f"{self.name}: the header is longer than {_HEADER_LIMIT} bytes")
        data = self.file.read(size)
        if len(data) != size:
            raise GgufError(f"{self.name} ends inside its header")
        return data
