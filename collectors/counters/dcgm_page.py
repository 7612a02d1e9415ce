"""The page of a dcgm-exporter: which counters it has of which device, and what on it cannot be believed.

Labels differ between versions (`UUID` or `uuid`, `Hostname` or `hostname`, pod labels or none), and so do
names: dcgm-exporter 4.9 spells DCGM_FI_PROF_GR_ENGINE_ACTIVE as DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO. Only the
UUID and the id of a MIG instance are read of the labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuidle.collectors.support.exposition import Page, Sample, parse_page

COLUMNS = ("gr_active", "sm_active", "tensor_active", "dram_active")
_COLUMN_OF: Mapping[str, str] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "gr_active",
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": "gr_active",
    "DCGM_FI_PROF_SM_ACTIVE": "sm_active",
    "DCGM_FI_PROF_SM_UTIL_RATIO": "sm_active",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "tensor_active",
    "DCGM_FI_PROF_TENSOR_UTIL_RATIO": "tensor_active",
    "DCGM_FI_PROF_DRAM_ACTIVE": "dram_active",
    "DCGM_FI_PROF_DRAM_UTIL_RATIO": "dram_active",
}
_ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
"""Millijoules since the driver was loaded: NVML's own counter."""
_PRESENCE = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_GPU_TEMP_CELSIUS",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_BOARD_POWER_WATTS",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_FB_USED",
)
"""Fields that say that a device is there although it has no counters."""
_WANTED = frozenset((*_COLUMN_OF, _ENERGY, *_PRESENCE))
_LARGEST_RATIO = 1.01
"""Ratios are 0 to 1, a mean's last digits may pass it; DCGM's blanks (2^31-16, 2^47, 2^63-14) do by far."""
_LARGEST_MILLIJOULES = 1e18
_SERIES_LIMIT = 5000


class DeviceKey(NamedTuple):
    """A device as the exporter names it: the GPU's UUID, and the instance's id where it is split."""

    uuid: str
    instance_id: int | None = None


@dataclass(frozen=True)
class DeviceRow:
    """What the page has of one device; a column that is not there or not to be believed is left out."""

    ratios: Mapping[str, float]
    """By name of COLUMNS, 0 to 1."""
    energy_joules: float | None = None
    stamp_ms: float | None = None
    """Of the counters, where the exporter gives one."""


@dataclass(frozen=True)
class DcgmPage:
    """One page."""

    devices: Mapping[DeviceKey, DeviceRow]
    recognised: bool
    """Whether it is a page of DCGM at all."""
    bad: tuple[str, ...] = ()
    """Counters with a value that cannot be, as sentences."""
    unreadable: int = 0
    """Lines of wanted counters without a number, such as "N/A"."""
    counted: tuple[str, ...] = field(default=(), repr=False)
    """The values of all profiling counters as they stand there: they change when DCGM has measured anew."""
    values: tuple[str, ...] = field(default=(), repr=False)
    """The values of all counters of DCGM: they change whenever the exporter has refreshed."""


def read_page(text: str) -> DcgmPage:
    """Return what a page tells.

    Raises:
        ExpositionError: it is larger than any exporter's.
    """
    lines = tuple(line for line in text.split("\n") if line.startswith("DCGM_FI_"))
    page: Page = parse_page("\n".join(lines), _WANTED, max_series=_SERIES_LIMIT)
    ratios: dict[DeviceKey, dict[str, float]] = {}
    energies: dict[DeviceKey, float] = {}
    stamps: dict[DeviceKey, float] = {}
    bad: list[str] = []
    for sample in page.samples:
        key = _key(sample)
        if key is None:
            continue
        mine = ratios.setdefault(key, {})
        column = _COLUMN_OF.get(sample.name)
        if column is not None:
            if not 0 <= sample.value <= _LARGEST_RATIO:
                bad.append(f"{sample.name} of {key.uuid} cannot be {sample.value:.17g}")
                continue
            # A GPU that several pods share has a line a pod, all the same.
            mine.setdefault(column, min(sample.value, 1.0))
            if sample.stamp_ms is not None:
                stamps[key] = sample.stamp_ms
        elif sample.name == _ENERGY and 0 < sample.value < _LARGEST_MILLIJOULES:
            energies[key] = sample.value / 1000
    return DcgmPage(
        devices={
            key: DeviceRow(mine, energies.get(key), _stamp(stamps.get(key))) for key, mine in ratios.items()
        },
        recognised=bool(lines),
        bad=tuple(bad),
        unreadable=page.malformed,
        # Without labels: those of pods come and go, which is no measurement.
        counted=tuple(_value(line) for line in lines if line.startswith("DCGM_FI_PROF_")),
        values=tuple(_value(line) for line in lines),
    )


def _value(line: str) -> str:
    return line.rpartition("}")[2]


def _key(sample: Sample) -> DeviceKey | None:
    uuid = sample.labels.get("UUID") or sample.labels.get("uuid")
    if not uuid:
        return None
    instance = sample.labels.get("GPU_I_ID", "")
    return DeviceKey(uuid, int(instance) if instance.isascii() and instance.isdigit() else None)


def _stamp(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None
