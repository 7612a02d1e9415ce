"""The structures of CUPTI's PM sampling and profiler host API, as ctypes. Standard library only.

Every structure begins with its own size, by which CUPTI 12.6 to 13.x tell which fields a caller knows: the
size is the offset of the last field that the caller fills or reads, plus its length, without padding.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

PROFILER_TYPE_PM_SAMPLING = 1
TRIGGER_SYSTEM_CLOCK = 0
TRIGGER_TIME = 1
KEEP_OLDEST = 0
KEEP_LATEST = 1
STOPPED_IMAGE_FULL = 1
STOPPED_END_OF_RECORDS = 2


class Params(ctypes.Structure):
    """Parameters of one call; `structSize` is filled in, `pPriv` stays null."""

    def __init__(self, **values: Any) -> None:  # fields of ctypes.Structure are given by name only
        super().__init__(**values)
        last = self._fields_[-1][0]
        place = getattr(type(self), last)
        self.structSize = place.offset + place.size


def _params(name: str, *fields: tuple[str, Any]) -> type[Params]:
    return type(name, (Params,), {"_fields_": [("structSize", c_size_t), ("pPriv", c_void_p), *fields]})


ProfilerInitialize = _params("ProfilerInitialize")
ProfilerDeInitialize = _params("ProfilerDeInitialize")
GetChipName = _params("GetChipName", ("deviceIndex", c_size_t), ("pChipName", c_char_p))

HostInitialize = _params(
    "HostInitialize",
    ("profilerType", c_int),
    ("pChipName", c_char_p),
    ("pCounterAvailabilityImage", c_void_p),
    ("pHostObject", c_void_p),
)
HostDeinitialize = _params("HostDeinitialize", ("pHostObject", c_void_p))
HostGetSupportedChips = _params("HostGetSupportedChips", ("numChips", c_size_t), ("ppChipNames", c_void_p))
HostConfigAddMetrics = _params(
    "HostConfigAddMetrics", ("pHostObject", c_void_p), ("ppMetricNames", c_void_p), ("numMetrics", c_size_t)
)
HostGetConfigImageSize = _params(
    "HostGetConfigImageSize", ("pHostObject", c_void_p), ("configImageSize", c_size_t)
)
HostGetConfigImage = _params(
    "HostGetConfigImage", ("pHostObject", c_void_p), ("configImageSize", c_size_t), ("pConfigImage", c_void_p)
)
HostGetNumOfPasses = _params(
    "HostGetNumOfPasses",
    ("configImageSize", c_size_t),
    ("pConfigImage", c_void_p),
    ("numOfPasses", c_size_t),
)
HostEvaluateToGpuValues = _params(
    "HostEvaluateToGpuValues",
    ("pHostObject", c_void_p),
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("rangeIndex", c_size_t),
    ("ppMetricNames", c_void_p),
    ("numMetrics", c_size_t),
    ("pMetricValues", c_void_p),
)

PmEnable = _params("PmEnable", ("deviceIndex", c_size_t), ("pPmSamplingObject", c_void_p))
PmDisable = _params("PmDisable", ("pPmSamplingObject", c_void_p))
PmStart = _params("PmStart", ("pPmSamplingObject", c_void_p))
PmStop = _params("PmStop", ("pPmSamplingObject", c_void_p))
PmSetConfig = _params(
    "PmSetConfig",
    ("pPmSamplingObject", c_void_p),
    ("configSize", c_size_t),
    ("pConfig", c_void_p),
    ("hardwareBufferSize", c_size_t),
    ("samplingInterval", c_uint64),
    ("triggerMode", c_int),
    ("hwBufferAppendMode", c_int),
)
PmGetCounterDataSize = _params(
    "PmGetCounterDataSize",
    ("pPmSamplingObject", c_void_p),
    ("pMetricNames", c_void_p),
    ("numMetrics", c_size_t),
    ("maxSamples", c_uint32),
    ("counterDataSize", c_size_t),
)
PmCounterDataImageInitialize = _params(
    "PmCounterDataImageInitialize",
    ("pPmSamplingObject", c_void_p),
    ("counterDataSize", c_size_t),
    ("pCounterData", c_void_p),
)
PmDecodeData = _params(
    "PmDecodeData",
    ("pPmSamplingObject", c_void_p),
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("decodeStopReason", c_int),
    ("overflow", c_uint8),
)
PmGetCounterDataInfo = _params(
    "PmGetCounterDataInfo",
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("numTotalSamples", c_size_t),
    ("numPopulatedSamples", c_size_t),
    ("numCompletedSamples", c_size_t),
)
PmGetSampleInfo = _params(
    "PmGetSampleInfo",
    ("pPmSamplingObject", c_void_p),
    ("pCounterDataImage", c_void_p),
    ("counterDataImageSize", c_size_t),
    ("sampleIndex", c_size_t),
    ("startTimestamp", c_uint64),
    ("endTimestamp", c_uint64),
)
