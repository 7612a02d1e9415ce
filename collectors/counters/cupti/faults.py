"""What a fault of the sampler means for a person: a state of the rung, a message and a remedy."""

from __future__ import annotations

import msgspec

from gpuidle.collectors.counters.rung import RungState

INVALID_OPERATION = 7
OUT_OF_MEMORY = 8
NOT_COMPATIBLE = 14
HARDWARE_BUSY = 26
PRIVILEGES = 35

ENABLE = "cuptiPmSamplingEnable"

OFTEN_S = 10
SELDOM_S = 300


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What the child said: where it failed ("cupti", "cuda", "library", ...), the code, its text."""

    reason: str
    call: str
    code: int
    text: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What follows: how the rung stands, why, what would mend it, and when it is worth trying again."""

    state: RungState
    message: str
    remedy: str
    retry_s: int = SELDOM_S


NEXT_LIBRARY = frozenset({"library", "passes", "unknown_chip"})
"""Faults of one libcupti that another one on this node may not have."""

_RIGHTS = (
    "Give gpuidle CAP_PERFMON or CAP_SYS_ADMIN, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0 (options nvidia in /etc/modprobe.d)."
)
_BY_CODE: dict[int, Verdict] = {
    PRIVILEGES: Verdict(
        state="refused", message="the driver gives its counters to administrators only", remedy=_RIGHTS
    ),
    40: Verdict(
        state="refused",
        message="the hypervisor does not give this virtual GPU its counters",
        remedy="Enable profiling for the vGPU on the host (plugin0.enable_profiling=1).",
    ),
    27: Verdict(
        state="unsupported",
        message="this GPU or driver does not sample counters",
        remedy="PM sampling needs a GPU of Turing or newer and a driver that is not older than CUPTI's CUDA.",
    ),
    33: Verdict(
        state="unsupported",
        message="virtual GPUs of this kind do not sample counters",
        remedy="The next counter source serves.",
    ),
    41: Verdict(
        state="unsupported",
        message="confidential computing is on: it hides the counters",
        remedy="The next counter source serves; without confidential computing this one works.",
    ),
    43: Verdict(
        state="unsupported",
        message="this MIG instance does not own its counters",
        remedy="PM sampling works on a compute instance that owns its whole GPU instance; on others the next "
        "counter source serves.",
    ),
    42: Verdict(state="unsupported", message="mining cards have no counters", remedy="None is known."),
    44: Verdict(state="unsupported", message="SLI is on: no counters", remedy="Switch SLI off."),
    45: Verdict(state="unsupported", message="WSL does not sample counters", remedy="Run on Linux."),
    NOT_COMPATIBLE: Verdict(
        state="unsupported",
        message="the driver is older than this libcupti",
        remedy="Install the nvidia-cuda-cupti of the driver's CUDA, or a newer driver.",
    ),
}


def explain(fault: Fault, holder: str = "", *, served: bool = False) -> Verdict:
    """Return what `fault` means.

    Args:
        fault: As the child told it.
        holder: Who was found to use the counters, if anyone.
        served: Whether samples came before, so that the counters were taken away.
    """
    by = f" by {holder}" if holder else " by a tool that could not be found"
    busy = fault.code == HARDWARE_BUSY or (
        fault.code == INVALID_OPERATION and fault.call.startswith("cuptiPmSampling")
    )
    if fault.reason == "cupti" and busy:
        return Verdict(
            state="busy",
            message=f"the counters {'were taken away' if served else 'are held'}{by} ({fault.text})",
            remedy="It is taken up again when they are free. A DCGM profiler lets go with "
            "`dcgmi profiling --pause`; Nsight and other CUPTI sessions when they end.",
            retry_s=OFTEN_S,
        )
    if fault.reason == "cupti" and fault.code == OUT_OF_MEMORY:
        return Verdict(
            state="failed",
            message=f"no memory for the counters' buffer ({fault.text})",
            remedy="Leave the GPU some memory, or sample at a lower rate.",
        )
    if fault.reason == "cupti" and fault.code in _BY_CODE:
        return _BY_CODE[fault.code]
    return _other(fault)


def _other(fault: Fault) -> Verdict:
    if fault.reason == "cuda":
        return Verdict(
            state="failed",
            message=f"the CUDA driver cannot be used: {fault.text}",
            remedy="See whether `nvidia-smi` works, and `dmesg` for lines of the driver.",
            retry_s=OFTEN_S,
        )
    if fault.reason == "library":
        return Verdict(
            state="refused",
            message=f"a library cannot be loaded: {fault.text}",
            remedy="Install the NVIDIA driver and the package nvidia-cuda-cupti==13.0.85 beside gpuidle.",
        )
    if fault.reason == "unknown_chip":
        return Verdict(
            state="unsupported",
            message=f"no counter set for the chip {fault.text}",
            remedy="Update gpuidle; the next counter source serves.",
        )
    if fault.reason == "old_chip":
        return Verdict(
            state="unsupported",
            message=f"compute capability {fault.text}: PM sampling begins with 7.5",
            remedy="The next counter source serves.",
        )
    if fault.reason == "passes":
        return Verdict(
            state="unsupported",
            message=f"the counter set does not fit one pass: {fault.text}",
            remedy="Install nvidia-cuda-cupti==13.0.85 beside gpuidle.",
        )
    if fault.reason == "wrong_device":
        return Verdict(
            state="failed",
            message=fault.text,
            remedy="The driver did not heed CUDA_VISIBLE_DEVICES: in a container list all devices to it.",
        )
    return Verdict(
        state="failed",
        message=f"CUPTI fails: {fault.text}",
        remedy="The next counter source serves. Please report it with this message.",
    )
