"""NVML's GPM calls for one device: a sample now, and the means between two samples.

Values are of nvml.h: percent from 0 to 100 for ids below 20. Every function here raises pynvml.NVMLError.
NVML must be up: the collector of the basics holds it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gpuidle.collectors.counters import nvml_faults as faults
from gpuidle.collectors.counters.nvml_binding import nvml
from gpuidle.collectors.counters.nvml_events import MIG_CHANGE, EventSet

GRAPHICS, SM, TENSOR, DRAM = 1, 2, 5, 10
"""NVML_GPM_METRIC_GRAPHICS_UTIL, _SM_UTIL, _ANY_TENSOR_UTIL, _DRAM_BW_UTIL."""
METRICS = (GRAPHICS, SM, TENSOR, DRAM)

MOST_PERCENT = 101.0
"""Rounding of the driver is let pass; what is beyond is a blank or a spike, and no reading."""


class Means(NamedTuple):
    """Means over one window as ratios from 0 to 1; None: not supported, failed, or no number that can be."""

    graphics: float | None
    sm: float | None
    tensor: float | None
    dram: float | None
    bad: int
    """How many of them the driver gave as success with a number that cannot be."""


def mean_ratio(code: int, percent: float) -> tuple[float | None, bool]:
    """Return a metric as a ratio, and whether it was given as success and cannot be."""
    if code:
        return None, False
    if not math.isfinite(percent) or not 0 <= percent <= MOST_PERCENT:
        return None, True
    return min(1.0, percent / 100), False


class GpmDevice:
    """A GPU, or a MIG instance of one, and its two sample buffers."""

    def __init__(self, gpu_uuid: str, instance: tuple[str, int] | None) -> None:
        """Open the GPU; `instance` is the MIG device's UUID and its GPU instance id.

        Raises pynvml.NVMLError, with NOT_SUPPORTED where the device has no GPM.
        """
        self._library: Any = nvml.nvmlLib
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        self._instance = instance
        self._changes = 0
        self._events: EventSet | None = None
        if not nvml.nvmlGpmQueryDeviceSupport(self._gpu).isSupportedDevice:
            raise nvml.NVMLError(faults.NOT_SUPPORTED)
        if instance is not None:
            try:
                self._events = EventSet(self._gpu, MIG_CHANGE)
            except nvml.NVMLError as error:
                if error.value not in (*faults.BY_NATURE, faults.NO_PERMISSION):
                    raise
        self._old: Any = nvml.nvmlGpmSampleAlloc()
        self._new: Any = nvml.nvmlGpmSampleAlloc()
        self._means = nvml.c_nvmlGpmMetricsGet_t()
        self._means.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._means.numMetrics = len(METRICS)
        self._rows = [self._means.metrics[slot] for slot in range(len(METRICS))]
        for row, metric in zip(self._rows, METRICS, strict=True):
            row.metricId = metric

    def sample(self) -> None:
        """Take a sample; the one before becomes the old one."""
        if nvml.nvmlLib is not self._library:  # a driver's upgrade: the handle is the old library's
            raise nvml.NVMLError(faults.UNINITIALIZED)
        self._old, self._new = self._new, self._old
        if self._instance is None:
            nvml.nvmlGpmSampleGet(self._gpu, self._new)
        else:
            nvml.nvmlGpmMigSampleGet(self._gpu, self._instance[1], self._new)

    def identity(self) -> object:
        """Return what tells an instance from another that was created in its place; None for a whole GPU.

        A new instance can have the id, and with the same profile even the UUID, of the one before: the
        driver's events of MIG changes tell the two apart, where it has them.
        """
        if self._instance is None:
            return None
        uuid, gpu_instance = self._instance
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        found = nvml.nvmlDeviceGetGpuInstanceId(handle)
        if found != gpu_instance:
            raise nvml.NVMLError(faults.NOT_FOUND)
        attributes = nvml.nvmlDeviceGetAttributes_v2(handle)
        if self._events is not None:
            self._changes += len(self._events.poll())
        return found, attributes.multiprocessorCount, attributes.memorySizeMB, self._changes

    def means(self) -> Means:
        """Return the means between the last two samples."""
        self._means.sample1, self._means.sample2 = self._old, self._new
        nvml.nvmlGpmMetricsGet(self._means)
        ratios = [mean_ratio(row.nvmlReturn, row.value) for row in self._rows]
        graphics, sm, tensor, dram = (ratio for ratio, _ in ratios)
        return Means(graphics, sm, tensor, dram, sum(bad for _, bad in ratios))

    def close(self) -> None:
        """Free the buffers, once; a library that is past answering, or another one, leaves them be."""
        samples, self._old, self._new = (self._old, self._new), None, None
        if samples[0] is None or nvml.nvmlLib is not self._library:
            return
        if self._events is not None:
            self._events.close()
        try:
            for sample in samples:
                nvml.nvmlGpmSampleFree(sample)
        except nvml.NVMLError:
            return


def state_of(code: int) -> tuple[str, str, str]:
    """Return (state, message, remedy) of a rung's status for an error of NVML."""
    if code in faults.BY_NATURE:
        return (
            "unsupported",
            "NVML's GPM needs a GPU of Hopper or newer and a driver of R520 or newer",
            "Run a dcgm-exporter on the node, or use CUPTI PM sampling.",
        )
    if code == faults.NO_PERMISSION:
        return "refused", "NVML refuses its GPM samples to this user", "Run gpuidle with more rights."
    if code == faults.IN_USE:
        return "busy", "another tool holds the GPM samples", "They come back when that tool ends."
    if code in (*faults.SESSION_LOST, faults.GPU_IS_LOST, faults.UNKNOWN, faults.NOT_FOUND):
        return "lost", "NVML does not find the device", ""
    return "failed", "NVML fails to take a GPM sample", ""
