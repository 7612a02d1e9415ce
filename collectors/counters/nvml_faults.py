"""What an error of NVML means for a person: a stable word and a remedy.

The numbers are those of nvmlReturn_t; they stand here so that this module needs no driver binding.
"""

from __future__ import annotations

from typing import NamedTuple

from gpuidle.agent.model import Problem

SOURCE = "nvml"

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18
IN_USE = 19
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999

BY_NATURE = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})
"""Answers that say what a device or driver is, not that something went wrong: absent, without a Problem."""

SESSION_LOST = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH})
"""Errors after which no call on any device can succeed before NVML is initialised again."""


class _Advice(NamedTuple):
    kind: str
    message: str
    remedy: str


_ADVICE = {
    LIBRARY_NOT_FOUND: _Advice(
        "library_missing",
        "libnvidia-ml.so.1 cannot be loaded",
        "Install the NVIDIA driver; run a container with the NVIDIA runtime and its `utility` capability.",
    ),
    DRIVER_NOT_LOADED: _Advice(
        "driver_not_loaded",
        "the NVIDIA kernel driver is not loaded",
        "Load it (`modprobe nvidia`) and see `dmesg` for why it is not.",
    ),
    LIB_RM_VERSION_MISMATCH: _Advice(
        "version_mismatch",
        "the NVIDIA kernel driver and libnvidia-ml.so.1 are of different versions",
        "The driver was upgraded while it was in use: reboot, or stop all GPU work and reload its modules.",
    ),
    NO_PERMISSION: _Advice(
        "no_permission",
        "NVML refuses access",
        "Give this user read and write access to /dev/nvidiactl and /dev/nvidia*.",
    ),
    UNKNOWN: _Advice(
        "unknown_error",
        "NVML answers `Unknown Error` to every call",
        "In a container its GPU devices were taken away (`systemctl daemon-reload` on the host does that): "
        "restart the container. On the host see `dmesg` for Xid lines.",
    ),
}


class SessionLost(Exception):
    """NVML as a whole does not answer; `problems` say why."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(problems[0].message)
        self.problems = problems


class DeviceLost(Exception):
    """One device does not answer; `code` is NVML's."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def session_problem(code: int, text: str) -> Problem:
    """Return why no device can be read. `text` is NVML's own word for `code`."""
    advice = _ADVICE.get(code)
    if advice is None:
        return Problem(
            source=SOURCE,
            kind="nvml_error",
            message=f"NVML fails: {text} (error {code})",
            remedy="See `dmesg` for lines of the NVIDIA driver, and whether `nvidia-smi` works.",
        )
    return Problem(source=SOURCE, kind=advice.kind, message=advice.message, remedy=advice.remedy)


def device_problem(code: int, text: str, index: int, hw_id: str | None) -> Problem:
    """Return why the device at `index` is absent; its `hw_id` where it was once known."""
    if code == NO_PERMISSION:
        kind, remedy = "no_permission", _ADVICE[NO_PERMISSION].remedy
    else:
        kind = "gpu_lost"
        remedy = "See `dmesg` for Xid lines; reset the GPU (`nvidia-smi --gpu-reset`) or reboot."
    return Problem(
        source=SOURCE,
        kind=kind,
        message=f"GPU {index} does not answer: {text} (error {code})",
        remedy=remedy,
        subject=hw_id or f"gpu{index}",
    )


def hanging(index: int, seconds: float, hw_id: str | None) -> Problem:
    """Return why the device at `index` is absent: a call has not returned for `seconds`."""
    return Problem(
        source=SOURCE,
        kind="gpu_hanging",
        message=f"GPU {index} has not answered for {seconds:.1f} s: it is left alone, its values are absent",
        remedy="See `dmesg` for Xid lines; reset the GPU (`nvidia-smi --gpu-reset`) or reboot.",
        subject=hw_id or f"gpu{index}",
    )


def session_hanging(seconds: float) -> Problem:
    """Return why no device can be read: the driver has not answered for `seconds`."""
    return Problem(
        source=SOURCE,
        kind="driver_hanging",
        message=f"the NVIDIA driver has not answered for {seconds:.1f} s: no GPU can be read",
        remedy="It can take some seconds to start without the persistence daemon; else see `dmesg`.",
    )


def field_problem(field: str, code: int, text: str, hw_id: str) -> Problem:
    """Return why one field of a device is absent."""
    return Problem(
        source=SOURCE,
        kind="field_error",
        message=f"{field} cannot be read: {text} (error {code})",
        remedy=_ADVICE[code].remedy if code == NO_PERMISSION else "",
        subject=hw_id,
    )


def bad_reading(field: str, value: float, hw_id: str) -> Problem:
    """Return that the driver gave a number that cannot be."""
    return Problem(
        source=SOURCE,
        kind="bad_reading",
        message=f"{field} cannot be {value:.17g}: left out",
        subject=hw_id,
    )


def garbled_processes(pids: tuple[int, ...], listed: int, binding: str, hw_id: str) -> Problem:
    """Return that a process list holds impossible PIDs; `binding` is the version of nvidia-ml-py."""
    shown = ", ".join(map(str, pids[:4])) + (", ..." if len(pids) > 4 else "")
    return Problem(
        source=SOURCE,
        kind="garbled_processes",
        message=(
            f"{len(pids)} of {listed} entries of the process list have impossible PIDs ({shown}): "
            f"the driver and the binding nvidia-ml-py {binding} disagree about its layout"
        ),
        remedy="Update the driver, or install the nvidia-ml-py release of the driver's generation.",
        subject=hw_id,
    )
