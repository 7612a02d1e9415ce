"""Tensor, SM and DRAM activity of Hopper and newer through NVML's GPM: one mean each 150 to 250 ms, no root.

The driver refreshes its counters every 100 ms, so each mean is of a window that may begin and end up to
100 ms before the times that stand in the series, and a faster reading would be invalid (nvml.h, NVIDIA on
DCGM#310). The period is jittered, since engine steps are periodic and would alias with a fixed one. One
thread samples all GPUs; when a call hangs, its GPU stays with that thread, and the others go to another one.

A mean is handed over only if its two samples are of the same device and at a distance that a window may have;
otherwise the pair is thrown away and counted, and the sampling begins anew. The first window of a device is
therefore absent.

DRAM: GPM gives the share of the theoretical bandwidth. Bytes are that share of the sheet's bandwidth, known
for listed devices only; the driver's own maximum (by its clock) can differ from the sheet by 2 to 3 %. What
the share refers to on a MIG instance is not documented: there the column is absent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuReading, Problem, Rung, column, rate_column
from gpuidle.agent.physics.peaks import find_peaks
from gpuidle.collectors.counters.gpm_thread import PERIOD_NS, GpmThread, Row, Taken, Target
from gpuidle.collectors.counters.rung import RungReading, RungState, RungStatus

RUNG: Rung = "nvml_gpm"
HANGING_S = 1.0
"""A call that takes longer has no part in this tick."""
CLOSE_S = 0.3

_peaks = lru_cache(maxsize=64)(find_peaks)


class GpmRung:
    """The rung `nvml_gpm` (rung.CounterRung).

    NVML must be up while devices are asked for: the collector that lists them holds it. `clock` is
    CLOCK_MONOTONIC; `period_ns` the mean time between two samples, above the driver's 100 ms.
    """

    def __init__(self, *, period_ns: int = PERIOD_NS, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._period_ns = period_ns
        self._clock = clock
        self._threads: list[GpmThread] = []
        self._thread_of: dict[str, GpmThread] = {}
        """By GPU."""
        self._served: set[str] = set()
        """Devices that have had a window since anything was wrong with them."""

    @property
    def name(self) -> Rung:
        """Its rung."""
        return RUNG

    def read(self, now_ns: int, devices: Sequence[GpuReading]) -> RungReading:  # noqa: ARG002
        """Hand over the windows that ended since the last call; see rung.CounterRung."""
        series: list[CounterSeries] = []
        status: list[RungStatus] = []
        problems: list[Problem] = []
        shared = _shared(devices)
        self._aim([_target(device) for device in devices if device.hw_id not in shared])
        hanging = dict(at for thread in self._threads if (at := thread.hangs_at(HANGING_S)) is not None)
        taken: dict[str, Taken] = {}
        for thread in self._threads:
            taken.update(thread.take())
        for device in devices:
            gpu = _gpu_of(device)
            if device.hw_id in shared:
                status.append(_says(device, "unsupported", SHARED, SHARED_REMEDY))
                continue
            if gpu in hanging:
                self._served.discard(device.hw_id)
                status.append(_says(device, "lost", f"a GPM call has not returned for {hanging[gpu]:.0f} s"))
                continue
            found = taken.get(device.hw_id, Taken())
            made = _series(device.hw_id, found.rows)
            if made is not None:
                series.append(made)
                self._served.add(device.hw_id)
            elif found.state != "serving":
                self._served.discard(device.hw_id)
            status.append(_status(device, found, served=device.hw_id in self._served))
            problems += _problems(device, found)
        self._served &= {device.hw_id for device in devices}
        return RungReading(series=tuple(series), status=tuple(status), problems=tuple(problems))

    def _aim(self, targets: Sequence[Target]) -> None:
        """Give each GPU to a thread: as it was, but away from a thread that hangs at another GPU."""
        stuck = {
            id(thread): at[0] for thread in self._threads if (at := thread.hangs_at(HANGING_S)) is not None
        }
        for gpu in dict.fromkeys(target.gpu_uuid for target in targets):
            thread = self._thread_of.get(gpu)
            if thread is None or stuck.get(id(thread), gpu) != gpu:
                thread = next((free for free in self._threads if id(free) not in stuck), None)
                if thread is None:
                    thread = GpmThread(self._period_ns, self._clock)
                    self._threads.append(thread)
                self._thread_of[gpu] = thread
        for thread in self._threads:
            thread.aim(tuple(t for t in targets if self._thread_of[t.gpu_uuid] is thread))

    def close(self) -> None:
        """Stop the threads; one that hangs is left behind."""
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(CLOSE_S if thread.hangs_at(HANGING_S) is None else 0.0)
        self._threads.clear()
        self._thread_of.clear()


SHARED = "GPM counts a GPU instance as a whole, and several compute instances share this one"
SHARED_REMEDY = "Give each compute instance a GPU instance of its own."


def _gpu_of(device: GpuReading) -> str:
    return device.parent_hw_id or device.hw_id


def _shared(devices: Sequence[GpuReading]) -> set[str]:
    """Return the MIG devices that stand on the same GPU instance as another."""
    places = Counter((d.parent_hw_id, d.instance_id) for d in devices if d.parent_hw_id is not None)
    return {d.hw_id for d in devices if d.parent_hw_id and places[d.parent_hw_id, d.instance_id] > 1}


def _target(device: GpuReading) -> Target:
    if device.parent_hw_id is not None:
        return Target(device.hw_id, device.parent_hw_id, device.instance_id, None)
    peaks = _peaks(device.name, device.memory_total_bytes)
    known = None if peaks is None or peaks.formula else peaks.memory_bytes_per_s
    return Target(device.hw_id, device.hw_id, None, known)


def _says(device: GpuReading, state: RungState, message: str = "", remedy: str = "") -> RungStatus:
    return RungStatus(rung=RUNG, hw_id=device.hw_id, state=state, message=message, remedy=remedy)


def _status(device: GpuReading, found: Taken, *, served: bool) -> RungStatus:
    if found.state != "serving":
        return _says(device, found.state, found.message, found.remedy)
    if served:
        return _says(device, "serving")
    if found.rows:
        return _says(device, "failed", "the driver gives no GPM metric that can be used")
    return _says(device, "starting")


def _problems(device: GpuReading, found: Taken) -> list[Problem]:
    problems = []
    thrown = {why: count for why, count in found.thrown.items() if count}
    if thrown:
        parts = ", ".join(f"{count} {why}" for why, count in sorted(thrown.items()))
        problems.append(
            Problem(
                source=RUNG,
                kind="windows_thrown_away",
                message=f"GPM windows left out as they cannot be trusted: {parts}",
                subject=device.hw_id,
            )
        )
    bad = sum(row.means.bad for row in found.rows)
    if bad:
        problems.append(
            Problem(
                source=RUNG,
                kind="bad_reading",
                message=f"{bad} GPM values were no percentage: left out",
                subject=device.hw_id,
            )
        )
    return problems


# --------------------------------------------------------------------------------------------------------
# Columns


def _series(hw_id: str, rows: Sequence[Row]) -> CounterSeries | None:
    """Return the rows as columns, or None if there is nothing in them.

    A metric that most rows lack is an absent column; a row that lacks another one is left out.
    """
    columns = {name: [getattr(row.means, name) for row in rows] for name in ("graphics", "sm", "tensor")}
    kept = {name: values for name, values in columns.items() if _mostly_known(values)}
    dram = [
        None
        if row.means.dram is None or row.peak_bytes_per_s is None
        else row.means.dram * row.peak_bytes_per_s
        for row in rows
    ]
    with_dram = _mostly_known(dram)
    whole = [
        index
        for index in range(len(rows))
        if all(values[index] is not None for values in kept.values())
        and not (with_dram and dram[index] is None)
    ]
    if not whole or not kept:
        return None

    def ratios(name: str) -> NDArray[np.uint16] | None:
        return None if name not in kept else _ratio_column([kept[name][index] for index in whole])

    return CounterSeries(
        hw_id=hw_id,
        rung=RUNG,
        end_ns=column([rows[index].end_ns for index in whole], "i8"),
        width_ns=column([rows[index].width_ns for index in whole], "i8"),
        gr_active=ratios("graphics"),
        sm_active=ratios("sm"),
        tensor_active=ratios("tensor"),
        dram_bytes_per_s=rate_column([dram[index] for index in whole]) if with_dram else None,
    )


def _mostly_known(values: Sequence[float | None]) -> bool:
    return 2 * sum(value is not None for value in values) > len(values)


def _ratio_column(values: Sequence[float]) -> NDArray[np.uint16]:
    return column(np.rint(np.asarray(values) / RATIO_STEP), "u2")
