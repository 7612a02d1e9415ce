"""What a device reached when it was measured: matmul FLOP/s by dtype and copy bandwidth, beside the sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import msgspec

from gpuidle.agent.physics.peaks import DevicePeaks, NoPeak

VERSION = 1


class BadCalibration(ValueError):
    """A saved calibration is damaged, or of another version."""


class Calibration(msgspec.Struct, frozen=True):
    """One device, measured once. It is what library kernels reach, not a bound."""

    device: str
    """The driver's name, or the processor's."""
    hw_id: str
    """The driver's UUID; "cpu" for a processor."""
    flops_per_s: Mapping[str, float]
    """By dtype: "bf16", "fp8", "int8", "fp32". What could not be measured is absent."""
    copy_bytes_per_s: float
    """Bytes read plus bytes written a second by a large copy."""
    wall_ns: int
    """When it was measured."""
    tool: str
    """Such as "torch 2.13.0"."""
    missing: Mapping[str, str]
    """By dtype: why it was not measured."""


class Comparison(msgspec.Struct, frozen=True):
    """One measured figure beside the sheet's, in FLOP/s or bytes/s."""

    what: str
    reached: float | None
    sheet: float | None

    @property
    def share(self) -> float | None:
        """Reached over sheet; None where either is unknown."""
        if self.reached is None or not self.sheet:
            return None
        return self.reached / self.sheet


def compare(calibration: Calibration, peaks: DevicePeaks | None) -> tuple[Comparison, ...]:
    """Return each figure beside the sheet's, whose FP8 and FP4 are taken only where the device has them."""
    rows = []
    for dtype in dict.fromkeys((*calibration.flops_per_s, *calibration.missing)):
        sheet = None
        if peaks is not None and dtype in peaks.flops_per_s:
            try:
                sheet = peaks.rate(dtype)
            except NoPeak:
                sheet = None
        rows.append(Comparison(dtype, calibration.flops_per_s.get(dtype), sheet))
    bandwidth = None if peaks is None else peaks.memory_bytes_per_s
    return (*rows, Comparison("copy", calibration.copy_bytes_per_s, bandwidth))


def to_table(calibration: Calibration) -> dict[str, object]:
    """Return what is written to a file."""
    return {
        "version": VERSION,
        "device": calibration.device,
        "hw_id": calibration.hw_id,
        "flops_per_s": dict(calibration.flops_per_s),
        "copy_bytes_per_s": calibration.copy_bytes_per_s,
        "wall_ns": calibration.wall_ns,
        "tool": calibration.tool,
        "missing": dict(calibration.missing),
    }


def from_table(table: Mapping[str, object]) -> Calibration:
    """Return the calibration that `to_table` wrote. Raises BadCalibration for anything else."""
    if table.get("version") != VERSION:
        raise BadCalibration(f"a calibration of version {table.get('version')!r}, not {VERSION}")
    flops, missing = table.get("flops_per_s"), table.get("missing")
    if not isinstance(flops, Mapping) or not isinstance(missing, Mapping):
        raise BadCalibration("a calibration without its figures")
    rates = {str(dtype): _rate(rate, str(dtype)) for dtype, rate in flops.items()}
    wall = table.get("wall_ns")
    if not isinstance(wall, int):
        raise BadCalibration("a calibration without its time")
    return Calibration(
        device=str(table.get("device")),
        hw_id=str(table.get("hw_id")),
        flops_per_s=rates,
        copy_bytes_per_s=_rate(table.get("copy_bytes_per_s"), "copy"),
        wall_ns=wall,
        tool=str(table.get("tool")),
        missing={str(dtype): str(why) for dtype, why in cast("Mapping[object, object]", missing).items()},
    )


def _rate(value: object, what: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value <= 0
    ):
        raise BadCalibration(f"a calibration whose {what} is {value!r}")
    return float(value)
