"""Who else uses the hardware counters: DCGM's profiler, Nsight. Found in /proc before and while sampling.

CUPTI itself is mapped in every process that runs PyTorch and is no sign of a session.
"""

from __future__ import annotations

import os
from pathlib import Path

NSIGHT = frozenset(
    {"ncu", "nsys", "nsys-ui", "nsight-sys", "ncu-ui", "nv-nsight-cu-cli", "nsys-launcher", "dcgmproftester"}
)
DCGM = frozenset({"nv-hostengine", "dcgm-exporter"})
DCGM_PROFILER = "libdcgmmoduleprofiling.so"
"""DCGM loads it when someone watches a profiling field."""


def find_holder(proc: Path) -> str:
    """Return a tool that holds the counters or is about to, such as "nsys (PID 12)", or ""."""
    for pid in os.listdir(proc):  # noqa: PTH208  # pathlib takes three times as long
        if not pid.isdecimal():
            continue
        try:
            with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                name = file.read().strip()
        except OSError:
            continue
        # The kernel cuts names after 15 characters; none here is longer.
        if name in NSIGHT or (name in DCGM and _profiles(proc / pid)):
            return f"{name} (PID {pid})"
    return ""


def _profiles(process: Path) -> bool:
    try:
        maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
    except PermissionError:
        return True  # not to be seen: taking its counters would break it
    except OSError:
        return False
    return DCGM_PROFILER in maps
