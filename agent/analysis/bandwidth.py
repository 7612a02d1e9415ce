"""How fast DRAM can be read at best: the rate at which bytes are turned into memory-bound time.

Counters of a running engine do not tell it. They show what its kernels reach, and by how much kernels stay
behind the best copy is their own: matrix products of decode reach 0.7 to 0.9 of the sheet's bandwidth on
devices whose best copies reach 0.88 to 0.95. So what is seen is a lower bound, below what is assumed here.
"""

from __future__ import annotations

from typing import NamedTuple

from gpuidle.agent.model import GpuReading
from gpuidle.agent.physics.peaks import DevicePeaks

USUAL_RATIO = 0.93
"""Of the sheet's bandwidth, what long copies reach: 0.92 to 0.944 on data-centre cards from A100 to B200,
0.88 on RTX 5090 (BabelStream in NVIDIA/cccl's pull requests 2086, 3172, 9481, 9881). Reads alone were seen at
0.88 to 0.90 on an A100, and at up to 0.96 at moments of an H100's traces."""
BELIEVED_RATIOS = (0.75, 1.0)
"""A copy outside of these was slowed by someone else, or the sheet is another device's."""


class Reachable(NamedTuple):
    """What long transfers reach on one device."""

    bytes_per_s: float
    measured: bool
    """By a copy on this device (`calibrate`); else it is what devices usually reach, give or take 3 %."""


def reachable(reading: GpuReading | None, peaks: DevicePeaks) -> Reachable:
    """Return what DRAM can move on this device in a second, reads and writes together."""
    copied = None if reading is None else reading.copy_bytes_per_s
    sheet = peaks.memory_bytes_per_s
    if copied is not None and BELIEVED_RATIOS[0] * sheet <= copied <= BELIEVED_RATIOS[1] * sheet:
        return Reachable(copied, measured=True)
    return Reachable(USUAL_RATIO * sheet, measured=False)
