"""Proves the counter sets with NVIDIA's own libcupti and no driver: `python -m ...cupti.check LIBCUPTI ...`.

Every discrete chip that a library lists must have a set, each name must exist, and the set must take one
pass. Exits 1 if any of this is not so. The library is called in child processes: without a driver some
releases crash, and one chip's crash must not hide the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpuidle.collectors.counters.cupti.chips import metric_set
from gpuidle.collectors.counters.cupti.library import CallFailed, Cupti, HostConfig, supported_chips

FAMILIES = ("TU", "GA", "AD", "GH", "GB")
INTEGRATED = ("GA10B", "GA10F", "GB10B", "GB20B", "GB20C", "AD10B")
"""Chips of Orin, Thor, consoles and desktops with shared memory: they are not cards of a server."""
CHILD_LIMIT_S = 120


def discrete(chips: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chips of Turing and newer that sit on a card."""
    return tuple(chip for chip in chips if chip[:2] in FAMILIES and chip not in INTEGRATED)


def check_chip(path: str, chip: str) -> str:
    """Return "" if the set of `chip` is right, else what is wrong. Calls CUPTI in this process."""
    chosen = metric_set(chip)
    if chosen is None:
        return "no counter set"
    try:
        config = HostConfig(Cupti(path), chip, chosen.names)
    except CallFailed as failed:
        return str(failed)
    return "" if config.passes == 1 else f"{config.passes} passes"


def _in_child(path: str, *words: str) -> tuple[int, list[str]]:
    """Run this module as a child; return its status and the lines that it wrote, even if it crashed."""
    # libcupti looks for libnvperf_host.so on the search path, and takes another release's if there is one.
    env = {**os.environ, "LD_LIBRARY_PATH": str(Path(path).parent)}
    command = [sys.executable, "-m", __spec__.name, path, *words]
    try:
        done = subprocess.run(  # noqa: S603  # this module itself
            command, env=env, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        return 1, (late.stdout or b"").decode().splitlines()
    return done.returncode, done.stdout.splitlines()


def check_library(path: str) -> dict[str, str]:
    """Return what is wrong by chip ("" is nothing), for every discrete chip that the library lists.

    Raises:
        RuntimeError: the library does not list its chips.
    """
    status, lines = _in_child(path, "--chips")
    if status or not lines:
        raise RuntimeError(f"{path} does not list its chips (status {status})")
    left = list(discrete(tuple(lines)))
    found: dict[str, str] = {}
    while left:
        status, lines = _in_child(path, *left)
        rows = [line.partition(":") for line in lines]
        found |= {chip: wrong.strip() for chip, _, wrong in rows}
        if len(rows) < len(left):
            found[left[len(rows)]] = f"the library ended its process (status {status})"
        left = [chip for chip in left if chip not in found]
    return found


def main(arguments: list[str]) -> int:
    """Check the libraries named; as a child, list the chips of one or check those named after it."""
    out = sys.stdout
    if len(arguments) > 1 and not all(Path(each).exists() for each in arguments):
        path, *words = arguments
        if words == ["--chips"]:
            out.writelines(f"{chip}\n" for chip in supported_chips(Cupti(path)))
            return 0
        for chip in words:
            out.write(f"{chip}:{check_chip(path, chip)}\n")
            out.flush()
        return 0
    wrong = 0
    for path in arguments:
        found = check_library(path)
        bad = {chip: why for chip, why in found.items() if why}
        wrong += len(bad) + (not found)
        out.write(f"{path}: one pass on {len(found) - len(bad)} of {len(found)} chips ({' '.join(found)})\n")
        out.writelines(f"  {chip}: {why}\n" for chip, why in bad.items())
    return 1 if wrong or not arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
