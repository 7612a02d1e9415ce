"""One PM sampling session on one device, in the documented order. Standard library only: the child runs it.

The traps it knows: the configuration image lives as long as the session; the first sample after a start has
no start or a stretched one, and is dropped; after an overflow of the hardware buffer sampling is disabled and
enabled again; a ring buffer is drained before it is stopped; the profiler is de-initialised once.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from ctypes import addressof, sizeof

from gpuidle.collectors.counters.cupti import structs
from gpuidle.collectors.counters.cupti.chips import MetricSet, metric_set
from gpuidle.collectors.counters.cupti.library import CallFailed, Cupti, HostConfig
from gpuidle.collectors.counters.cupti.ring import RingWriter

OUT_OF_MEMORY = 8
NOT_SUPPORTED = 27
SYSTEM_CLOCK_HZ = 1_200_000_000
"""What Turing and GA100 run their system clock at under load, about: their samples tell the true period."""
IMAGE_INTERVALS = 3
"""Decode intervals that fit a counter image: it is laid out anew at each decode, and a huge one costs."""
ROUNDS = 20
"""Images that one decode fills at most: a session that is behind by more never catches up."""


class UnknownChip(Exception):
    """The chip has no counter set; the message is its name."""


class ManyPasses(Exception):
    """The counter set does not fit one pass on this chip with this CUPTI."""


class Session:
    """Samples one device (index 0 of those visible) into a ring."""

    def __init__(
        self,
        cupti: Cupti,
        ring: RingWriter,
        *,
        rate_hz: int,
        decode_hz: int,
        buffer_bytes: int,
        device: int = 0,
    ) -> None:
        """Prepare everything that needs no hold on the counters.

        Args:
            cupti: The library; the driver is initialised.
            ring: Where samples go.
            rate_hz: Samples a second.
            decode_hz: How often `decode` will be called.
            buffer_bytes: Of the hardware buffer, which the driver allocates.
            device: CUDA's index of the device.

        Raises:
            CallFailed, UnknownChip, ManyPasses: this device cannot be sampled.
        """
        self._cupti = cupti
        self._ring = ring
        self._rate_hz = rate_hz
        self._buffer_bytes = buffer_bytes
        self._device = device
        cupti.call("cuptiProfilerInitialize", structs.ProfilerInitialize())
        chip = structs.GetChipName(deviceIndex=device)
        cupti.call("cuptiDeviceGetChipName", chip)
        self.chip: str = (chip.pChipName or b"").decode("ascii", "replace")
        chosen = metric_set(self.chip)
        if chosen is None:
            raise UnknownChip(self.chip)
        self.metrics: MetricSet = chosen
        self._config = HostConfig(cupti, self.chip, chosen.names)
        if self._config.passes != 1:
            raise ManyPasses(f"{self._config.passes} passes on {self.chip}")
        self._slots = max(64, IMAGE_INTERVALS * rate_hz // decode_hz)
        self._pm: int | None = None
        self._fresh = True
        self.overflows = 0
        self._evaluate = cupti.function("cuptiProfilerHostEvaluateToGpuValues")
        self._get_info = cupti.function("cuptiPmSamplingCounterDataGetSampleInfo")

    def start(self) -> None:
        """Take the counters and start sampling.

        Raises:
            CallFailed: for one, another tool holds the counters.
        """
        call = self._cupti.call
        enable = structs.PmEnable(deviceIndex=self._device)
        call("cuptiPmSamplingEnable", enable)
        self._pm = enable.pPmSamplingObject
        image = self._config.image
        interval = 10**9 // self._rate_hz if self.metrics.time_trigger else SYSTEM_CLOCK_HZ // self._rate_hz
        call(
            "cuptiPmSamplingSetConfig",
            structs.PmSetConfig(
                pPmSamplingObject=self._pm,
                configSize=len(image),
                pConfig=addressof(image),
                hardwareBufferSize=self._buffer_bytes,
                samplingInterval=interval,
                triggerMode=structs.TRIGGER_TIME
                if self.metrics.time_trigger
                else structs.TRIGGER_SYSTEM_CLOCK,
                hwBufferAppendMode=structs.KEEP_LATEST if self.metrics.keep_latest else structs.KEEP_OLDEST,
            ),
        )
        self._lay_out()
        call("cuptiPmSamplingStart", structs.PmStart(pPmSamplingObject=self._pm))
        self._fresh = True

    def _lay_out(self) -> None:
        """Make the counter image and, for each of its slots, the parameters of the two calls of a sample."""
        names = self._config.metrics
        size = structs.PmGetCounterDataSize(
            pPmSamplingObject=self._pm,
            pMetricNames=names.address,
            numMetrics=names.count,
            maxSamples=self._slots,
        )
        self._cupti.call("cuptiPmSamplingGetCounterDataSize", size)
        self._image = ctypes.create_string_buffer(size.counterDataSize)
        place, length = addressof(self._image), len(self._image)
        self._reset = structs.PmCounterDataImageInitialize(
            pPmSamplingObject=self._pm, counterDataSize=length, pCounterData=place
        )
        self._cupti.call("cuptiPmSamplingCounterDataImageInitialize", self._reset)
        self._decode = structs.PmDecodeData(
            pPmSamplingObject=self._pm, pCounterDataImage=place, counterDataImageSize=length
        )
        self._count = structs.PmGetCounterDataInfo(pCounterDataImage=place, counterDataImageSize=length)
        self._values = (ctypes.c_double * (self._slots * names.count))()
        info = structs.PmGetSampleInfo(
            pPmSamplingObject=self._pm, pCounterDataImage=place, counterDataImageSize=length
        )
        evaluation = structs.HostEvaluateToGpuValues(
            pHostObject=self._config.host,
            pCounterDataImage=place,
            counterDataImageSize=length,
            ppMetricNames=names.address,
            numMetrics=names.count,
        )
        slots = range(self._slots)
        rows = range(addressof(self._values), addressof(self._values) + sizeof(self._values), 8 * names.count)
        self._infos, words = _repeat(info, self._slots)
        _column(info, words, "sampleIndex")[:] = memoryview(array("Q", slots))
        self._starts = _column(info, words, "startTimestamp")
        self._ends = _column(info, words, "endTimestamp")
        self._evaluations, words = _repeat(evaluation, self._slots)
        _column(evaluation, words, "rangeIndex")[:] = memoryview(array("Q", slots))
        _column(evaluation, words, "pMetricValues")[:] = memoryview(array("Q", rows))
        numbers = memoryview(self._values).cast("B").cast("d")
        self._columns = [numbers[index :: names.count] for index in range(names.count)]
        # Both calls of a sample run from these addresses inside map(): no Python object is made for a sample.
        self._info_places = _places(self._infos, info)
        self._value_places = _places(self._evaluations, evaluation)

    def decode(self) -> int:
        """Move what the hardware has sampled into the ring; return how many samples.

        Raises:
            CallFailed: the session is lost.
        """
        moved = 0
        for _ in range(ROUNDS):
            try:
                self._cupti.call("cuptiPmSamplingDecodeData", self._decode)
            except CallFailed as failed:
                if failed.code != OUT_OF_MEMORY:
                    raise
                self._begin_again()
                return moved
            moved += self._take()
            self._cupti.call("cuptiPmSamplingCounterDataImageInitialize", self._reset)
            if self._decode.overflow:
                self._begin_again()
                return moved
            if self._decode.decodeStopReason != structs.STOPPED_IMAGE_FULL:
                break
        return moved

    def _take(self) -> int:
        self._cupti.call("cuptiPmSamplingGetCounterDataInfo", self._count)
        count: int = min(self._count.numCompletedSamples, self._slots)
        skip = 1 if self._fresh else 0
        if count <= skip:
            self._fresh = self._fresh and count == 0
            return 0
        self._fresh = False
        for name, function, places in (
            ("cuptiPmSamplingCounterDataGetSampleInfo", self._get_info, self._info_places),
            ("cuptiProfilerHostEvaluateToGpuValues", self._evaluate, self._value_places),
        ):
            code = next(filter(None, map(function, places[skip:count])), 0)
            if code:
                raise CallFailed("cupti", name, code, self._cupti.result_text(code))
        self._ring.append(
            self._starts[skip:count], self._ends[skip:count], [column[skip:count] for column in self._columns]
        )
        return count - skip

    def _begin_again(self) -> None:
        self.overflows += 1
        held, self._pm = self._pm, None
        self._try("cuptiPmSamplingStop", structs.PmStop(pPmSamplingObject=held))
        self._cupti.call("cuptiPmSamplingDisable", structs.PmDisable(pPmSamplingObject=held))
        self.start()

    def stop(self) -> None:
        """Let go of the counters: drain, stop, disable, over a step that fails. `start` takes them again."""
        with contextlib.suppress(CallFailed):
            if self._pm is not None:
                self.decode()
        if self._pm is not None:
            held, self._pm = self._pm, None
            self._try("cuptiPmSamplingStop", structs.PmStop(pPmSamplingObject=held))
            self._try("cuptiPmSamplingDisable", structs.PmDisable(pPmSamplingObject=held))

    def close(self) -> None:
        """End the session for good, in the documented order."""
        self.stop()
        self._try("cuptiProfilerHostDeinitialize", structs.HostDeinitialize(pHostObject=self._config.host))
        self._try("cuptiProfilerDeInitialize", structs.ProfilerDeInitialize())

    def _try(self, name: str, params: structs.Params) -> None:
        with contextlib.suppress(CallFailed):
            self._cupti.call(name, params)


def _repeat(params: structs.Params, count: int) -> tuple[ctypes.Array[ctypes.c_char], memoryview]:
    """Return `count` copies of a structure of 64-bit words, and these words."""
    copies = ctypes.create_string_buffer(bytes(params) * count, sizeof(params) * count)
    return copies, memoryview(copies).cast("B").cast("Q")


def _column(params: structs.Params, words: memoryview, field: str) -> memoryview:
    """Return one field of every copy."""
    return words[getattr(type(params), field).offset // 8 :: sizeof(params) // 8]


def _places(copies: ctypes.Array[ctypes.c_char], params: structs.Params) -> list[int]:
    """Return the address of every copy."""
    return list(range(addressof(copies), addressof(copies) + len(copies), sizeof(params)))
