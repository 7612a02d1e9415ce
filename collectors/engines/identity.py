"""Names of engines: the same after a restart of the engine or of gpuidle, different for two on one node."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Container, Sequence
from pathlib import PurePosixPath
from urllib.parse import urlsplit

_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


def engine_id(
    engine: str, model: str | None, place: Sequence[str], taken: Container[str], label: str = ""
) -> str:
    """Return "engine-model-1a2b3c4d", made of the engine's name, its model and its place.

    `place` is the sorted hw_ids, or the address of an endpoint named by hand. Engines that are equal in all
    of it are numbered: the first number whose name is not in `taken`. `label` stands for the model's name.
    """
    shown = _UNSAFE.sub("-", label or PurePosixPath(model or "unknown").name)[:60].strip("-.") or "unknown"
    ordinal = 0
    while True:
        source = "\0".join((engine, model or "", *place, str(ordinal)))
        name = f"{engine}-{shown}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        if name not in taken:
            return name
        ordinal += 1


def port_of(url: str) -> int:
    """Return the port of an http or https URL."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def is_loopback(url: str) -> bool:
    """Return whether a URL leads to this machine by its loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
