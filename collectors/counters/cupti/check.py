"""Proves the counter sets with NVIDIA's own libcupti, without a driver: `python -m ...cupti.check LIBCUPTI`.

Every discrete chip that the library lists must have a set, each name must exist, and the set must take one
pass. Each chip is asked in a process of its own, since a fault of the library must not hide the others.
Exits 1 if any of this is not so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpuidle.collectors.counters.cupti.chips import metric_set
from gpuidle.collectors.counters.cupti.library import CallFailed, Cupti, HostConfig, supported_chips

FAMILIES = ("TU", "GA", "AD", "GH", "GB")
INTEGRATED = ("GA10B", "GA10F", "GB10B", "GB20B", "GB20C", "AD10B")
"""Chips of Orin, Thor, consoles and desktops with shared memory: they are not cards of a server."""
CHIP_LIMIT_S = 120


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


def _in_child(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", __spec__.name, *arguments]
    # libcupti looks for libnvperf_host.so on the search path, and takes another release's if there is one.
    env = {**os.environ, "LD_LIBRARY_PATH": str(Path(arguments[0]).parent)}
    try:
        done = subprocess.run(  # noqa: S603  # this module itself
            command, env=env, capture_output=True, text=True, timeout=CHIP_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "no answer"
    return done.returncode, done.stdout.strip()


def main(arguments: list[str]) -> int:
    """Check all chips of a library, or one (`LIBCUPTI CHIP`)."""
    out = sys.stdout
    path = arguments[0]
    if len(arguments) == 2 and arguments[1] == "--chips":
        out.write(json.dumps(supported_chips(Cupti(path))))
        return 0
    if len(arguments) == 2:
        wrong = check_chip(path, arguments[1])
        out.write(wrong)
        return 1 if wrong else 0
    code, listed = _in_child(path, "--chips")
    if code:
        out.write(f"{path}: cannot list its chips (exit {code})\n")
        return 1
    chips = discrete(tuple(json.loads(listed)))
    failed = 0 if chips else 1
    for chip in chips:
        code, wrong = _in_child(path, chip)
        failed += code != 0
        out.write(f"{chip}: {'one pass' if code == 0 else wrong or f'exit {code}'}\n")
    out.write(f"{len(chips)} chips, {failed} wrong\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
