"""Which counters are sampled on which chip, as data. Standard library only: the child process imports it.

Each set is collected in a single pass (more is refused by PM sampling). `check.py` proves names and passes
with NVIDIA's library for every discrete chip that it lists, without a driver.
"""

from __future__ import annotations

from typing import NamedTuple

RATIO = ".pct_of_peak_sustained_elapsed"
RATE = ".sum.per_second"


class MetricSet(NamedTuple):
    """Metric names by column, in the order in which a sample carries them."""

    columns: tuple[str, ...]
    names: tuple[str, ...]
    time_trigger: bool
    """Whether the chip can sample at a fixed time; else it counts cycles of a clock that moves."""
    keep_latest: bool
    """Whether a full hardware buffer drops the oldest records; else it stops with an overflow."""


TURING = ("TU102", "TU104", "TU106", "TU116", "TU117")
GA100 = ("GA100",)
GA10X = ("GA102", "GA103", "GA104", "GA106", "GA107")
ADA = ("AD102", "AD103", "AD104", "AD106", "AD107")
HOPPER = ("GH100",)
BLACKWELL = ("GB100", "GB102", "GB103", "GB110", "GB112")
BLACKWELL_GRAPHICS = ("GB202", "GB203", "GB205", "GB206", "GB207")

TENSOR = "sm__pipe_tensor_cycles_active_realtime"
TENSOR_BY_FAMILY = {
    "TU": "sm__pipe_shared_cycles_active_realtime",
    "AD": "sm__pipe_tensor_cycles_active_realtime_v2",
}
"""The tensor pipe has another name on Turing (where it is shared with FP64 and FP16) and on Ada."""


def metric_set(chip: str) -> MetricSet | None:
    """Return the set of `chip` (such as "GH100", as CUPTI names it), or None for a chip that is not known."""
    if chip not in (*TURING, *GA100, *GA10X, *ADA, *HOPPER, *BLACKWELL, *BLACKWELL_GRAPHICS):
        return None
    dram = "dram__bytes_op_" if chip in BLACKWELL_GRAPHICS else "dram__bytes_"
    rows = [
        ("gr_active", "gr__cycles_active.sum" + RATIO),
        ("sm_active", "sm__cycles_active.avg" + RATIO),
        ("sm_issue_active", "sm__inst_executed_realtime.avg" + RATIO),
        ("tensor_active", TENSOR_BY_FAMILY.get(chip[:2], TENSOR) + ".avg" + RATIO),
        ("dram_read_bytes_per_s", dram + "read" + RATE),
        ("dram_write_bytes_per_s", dram + "write" + RATE),
        ("sm_clock_hz", "sm__cycles_elapsed.avg.per_second"),
    ]
    return MetricSet(
        columns=tuple(column for column, _ in rows),
        names=tuple(name for _, name in rows),
        time_trigger=chip not in (*TURING, *GA100),
        keep_latest=chip not in TURING,
    )
