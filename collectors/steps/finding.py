"""Which of an engine's processes have mapped a ring of ours or metric files of vLLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuidle.collectors.steps.mappings import MappedFile, mapped_files, open_mapped
from gpuidle.collectors.steps.metric_files import NAME, MetricFile, MetricFileError

_RING = re.compile(r"/gpuidle-\d+/steps-\d+-\d+-\d+\.ring$")
_WANTED = re.compile(f"{_RING.pattern}|{NAME.pattern}")


@dataclass(frozen=True)
class FrontEnd:
    """The two metric files of one API server."""

    counters: MappedFile
    histograms: MappedFile


@dataclass(frozen=True)
class Found:
    """What an engine's processes have mapped."""

    rings: tuple[MappedFile, ...] = ()
    front_ends: tuple[FrontEnd, ...] = ()
    """API servers that count steps."""
    hidden: tuple[int, ...] = ()
    """Processes that may not be looked at."""


def find_files(proc: Path, pids: Sequence[int]) -> Found:
    """Return what the processes have mapped; one that is gone has nothing."""
    rings: dict[tuple[int, int, int], MappedFile] = {}
    metrics: dict[tuple[int, int, int], MappedFile] = {}
    hidden: list[int] = []
    for pid in pids:
        try:
            files = mapped_files(proc, pid, _WANTED, ends=(".ring", ".db"))
        except PermissionError:
            hidden.append(pid)
            continue
        except OSError:
            continue
        # A forked child has its parent's mappings too: each file counts once.
        for file in files:
            (rings if _RING.search(file.path) else metrics).setdefault(file.key, file)
    counters = {file.path: file for file in metrics.values()}
    fronts = [
        FrontEnd(other, file)
        for file in metrics.values()
        if (other := counters.get(file.path.replace("/histogram_", "/counter_"))) is not None
        and other is not file
        and _counts_steps(proc, file)
    ]
    return Found(tuple(rings.values()), tuple(fronts), tuple(hidden))


def _counts_steps(proc: Path, file: MappedFile) -> bool:
    try:
        opened = MetricFile(open_mapped(proc, file))
    except OSError:
        return False
    try:
        opened.refresh()
        return opened.counts_steps()
    except (MetricFileError, OSError):
        return False
    finally:
        opened.close()
