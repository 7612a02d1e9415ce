"""Who else uses the hardware counters: DCGM's profiler, Nsight. Found in /proc before and while sampling.

CUPTI itself is mapped in every process that runs PyTorch and is no sign of a session.
"""

from __future__ import annotations

from pathlib import Path

NSIGHT = frozenset(
    {"ncu", "nsys", "nsys-ui", "nsight-sys", "ncu-ui", "nv-nsight-cu-cli", "nsys-launcher", "dcgmproftester"}
)
DCGM = frozenset({"nv-hostengine", "dcgm-exporter"})
DCGM_PROFILER = "libdcgmmoduleprofiling.so"
"""DCGM loads it when someone watches a profiling field."""


def find_holder(proc: Path) -> str:
    """Return a tool that holds the counters or is about to, such as "nsys (PID 12)", or ""."""
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            name = (entry / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if name in NSIGHT:
            return f"{name} (PID {entry.name})"
        # The kernel cuts names after 15 characters.
        if any(name == known[:15] for known in DCGM) and _profiles(entry):
            return f"{name} (PID {entry.name})"
    return ""


def _profiles(process: Path) -> bool:
    try:
        maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
    except PermissionError:
        return True  # not to be seen: taking its counters would break it
    except OSError:
        return False
    return DCGM_PROFILER in maps
