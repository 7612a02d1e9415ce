"""Calls into libcupti and libcuda. Standard library only: the child process imports it.

Without a driver some CUPTI releases fail one call and crash in the next, so nothing is called after the first
error (every call here raises), and nothing of this module runs in the daemon's own process.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from typing import Any

from gpuidle.collectors.counters.cupti import structs

COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76


class CallFailed(Exception):
    """A call of CUPTI or of the driver failed; `library` is "cupti" or "cuda"."""

    def __init__(self, library: str, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} (error {code})")
        self.library = library
        self.call = call
        self.code = code


class Cupti:
    """libcupti, loaded from `path`."""

    def __init__(self, path: str) -> None:
        """Load the library.

        Raises:
            OSError: it cannot be loaded.
        """
        self._library = ctypes.CDLL(path)

    def call(self, name: str, params: structs.Params) -> None:
        """Call a function that takes one structure of parameters.

        Raises:
            CallFailed: it failed, or this release of the library has no such function.
        """
        self._checked(name, byref(params))

    def function(self, name: str) -> Any:
        """Return a function that takes the address of a structure and returns its result code."""
        try:
            function = self._library[name]
        except AttributeError:
            raise CallFailed("cupti", name, 11, "this libcupti has no such function") from None
        function.argtypes = (c_void_p,)
        function.restype = c_int
        return function

    def version(self) -> int:
        """Return CUPTI_API_VERSION of the library (130001 is that of CUDA 13.0)."""
        version = c_uint32()
        self._checked("cuptiGetVersion", byref(version))
        return version.value

    def timestamp(self) -> int:
        """Return the time in nanoseconds of CUPTI's clock, in which samples are stamped."""
        now = c_uint64()
        self._checked("cuptiGetTimestamp", byref(now))
        return now.value

    def result_text(self, code: int) -> str:
        """Return CUPTI's own word for a result code."""
        text = c_char_p()
        known = self._library.cuptiGetResultString(c_int(code), byref(text)) == 0
        return text.value.decode("ascii", "replace") if known and text.value else "unknown result"

    def _checked(self, name: str, argument: Any) -> None:
        try:
            function = self._library[name]
        except AttributeError:
            raise CallFailed("cupti", name, 11, "this libcupti has no such function") from None
        code = function(argument)
        if code:
            raise CallFailed("cupti", name, code, self.result_text(code))


class MetricNames:
    """Metric names as C wants them; alive as long as this object."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._array = (c_char_p * len(names))(*(name.encode("ascii") for name in names))
        self.address = ctypes.addressof(self._array)
        self.count = len(names)


class HostConfig:
    """The host side of a metric set: its configuration image and number of passes. Needs no driver."""

    def __init__(self, cupti: Cupti, chip: str, names: tuple[str, ...]) -> None:
        """Build the configuration.

        Raises:
            CallFailed: the chip or a metric is unknown to this CUPTI.
        """
        self._cupti = cupti
        self.metrics = MetricNames(names)
        made = structs.HostInitialize(
            profilerType=structs.PROFILER_TYPE_PM_SAMPLING, pChipName=chip.encode("ascii")
        )
        cupti.call("cuptiProfilerHostInitialize", made)
        self.host: int = made.pHostObject
        add = structs.HostConfigAddMetrics(
            pHostObject=self.host, ppMetricNames=self.metrics.address, numMetrics=self.metrics.count
        )
        cupti.call("cuptiProfilerHostConfigAddMetrics", add)
        size = structs.HostGetConfigImageSize(pHostObject=self.host)
        cupti.call("cuptiProfilerHostGetConfigImageSize", size)
        # CUPTI reads this image for as long as the session lasts.
        self.image = ctypes.create_string_buffer(size.configImageSize)
        get = structs.HostGetConfigImage(
            pHostObject=self.host, configImageSize=len(self.image), pConfigImage=ctypes.addressof(self.image)
        )
        cupti.call("cuptiProfilerHostGetConfigImage", get)
        passes = structs.HostGetNumOfPasses(
            configImageSize=len(self.image), pConfigImage=ctypes.addressof(self.image)
        )
        cupti.call("cuptiProfilerHostGetNumOfPasses", passes)
        self.passes: int = passes.numOfPasses

    def close(self) -> None:
        """Let go of the host object."""
        self._cupti.call("cuptiProfilerHostDeinitialize", structs.HostDeinitialize(pHostObject=self.host))


def supported_chips(cupti: Cupti) -> tuple[str, ...]:
    """Return the chips that this CUPTI knows. Needs no driver."""
    params = structs.HostGetSupportedChips()
    cupti.call("cuptiProfilerHostGetSupportedChips", params)
    names = ctypes.cast(params.ppChipNames, ctypes.POINTER(c_char_p))
    return tuple((names[index] or b"").decode("ascii") for index in range(params.numChips))


class Cuda:
    """libcuda, initialised; no context is made, so that no memory of the device is taken."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        """Load and initialise the driver library.

        Raises:
            OSError: it cannot be loaded.
            CallFailed: it cannot be initialised.
        """
        self._library = ctypes.CDLL(path)
        self._call("cuInit", c_uint32(0))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._library[name](*arguments)
        if code:
            raise CallFailed("cuda", name, code, "the driver refuses")

    def device_count(self) -> int:
        """Return how many devices this process may see."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def uuid(self, index: int) -> str:
        """Return the UUID of a device in NVML's spelling without its prefix ("GPU-", "MIG-")."""
        raw = (ctypes.c_uint8 * 16)()
        device = c_int()
        self._call("cuDeviceGet", byref(device), c_int(index))
        self._call("cuDeviceGetUuid_v2", byref(raw), device)
        text = bytes(raw).hex()
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def compute_capability(self, index: int) -> tuple[int, int]:
        """Return the compute capability of a device, such as (9, 0)."""
        device, major, minor = c_int(), c_int(), c_int()
        self._call("cuDeviceGet", byref(device), c_int(index))
        self._call("cuDeviceGetAttribute", byref(major), c_int(COMPUTE_CAPABILITY_MAJOR), device)
        self._call("cuDeviceGetAttribute", byref(minor), c_int(COMPUTE_CAPABILITY_MINOR), device)
        return major.value, minor.value
