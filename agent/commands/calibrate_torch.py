"""Timing products and copies with torch, on a GPU, or on the CPU as a rehearsal."""

from __future__ import annotations

import importlib
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from gpuidle.agent.physics.calibration import Calibration

_REPEATS = 5


class CalibrationError(RuntimeError):
    """The device cannot be measured; the message says why and what to do."""


def measure(device_name: str, *, seconds: float, force: bool) -> Calibration:
    """Measure one device of torch ("cuda:0", "cpu"), some `seconds` a figure.

    Raises:
        CalibrationError: torch is missing, the device is not there, or others use its memory (`force` runs
            all the same: the figures are then too low, and the others are slowed).
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise CalibrationError('torch is not installed: pip install "gpuidle[torch]"') from error
    try:
        device = torch.device(device_name)
    except RuntimeError as error:
        raise CalibrationError(f"{device_name!r} is no device of torch") from error
    if device.type == "cuda":
        _check_idle(torch, device, force=force)
        properties = torch.cuda.get_device_properties(device)
        name, hw_id = str(properties.name), f"GPU-{getattr(properties, 'uuid', 'unknown')}"
        size, copy_elements = 8192, min(1 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    elif device.type == "cpu":
        name, hw_id, size, copy_elements = platform.processor() or platform.machine(), "cpu", 768, 1 << 26
    else:
        raise CalibrationError(f"devices of kind {device.type!r} are not known here: cuda:N or cpu")
    flops: dict[str, float] = {}
    missing: dict[str, str] = {}
    for dtype, product in _products(torch, device, size).items():
        took = _try(torch, device, product, seconds)
        if isinstance(took, str):
            missing[dtype] = took
        else:
            flops[dtype] = 2 * size**3 / took
    source = torch.ones(copy_elements, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _seconds_a_call(torch, device, lambda: target.copy_(source), seconds)
    return Calibration(
        device=name,
        hw_id=hw_id,
        flops_per_s=flops,
        copy_bytes_per_s=2 * copy_elements / copy_s,
        wall_ns=time.time_ns(),
        tool=f"torch {torch.__version__}",
        missing=missing,
    )


def _check_idle(torch: Any, device: Any, *, force: bool) -> None:
    if not torch.cuda.is_available():
        raise CalibrationError("torch finds no GPU here: --device cpu rehearses on the processor")
    if (device.index or 0) >= torch.cuda.device_count():
        raise CalibrationError(f"there is no {device}: torch finds {torch.cuda.device_count()} GPUs")
    free, total = torch.cuda.mem_get_info(device)
    if free < 0.9 * total and not force:
        raise CalibrationError(
            f"{(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB are taken: calibration would slow whoever "
            "uses this GPU and read too low; stop it first, or insist with --force"
        )


def _products(torch: Any, device: Any, size: int) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return by dtype what prepares a square product and gives the call to be timed."""

    def floats(dtype: Any) -> Callable[[], object]:
        a = torch.randn(size, size, dtype=dtype, device=device)
        b = torch.randn(size, size, dtype=dtype, device=device)
        return lambda: a @ b

    def eights() -> Callable[[], object]:
        a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: SLF001

    def integers() -> Callable[[], object]:
        a = torch.randint(-8, 8, (size, size), dtype=torch.int8, device=device)
        b = torch.randint(-8, 8, (size, size), dtype=torch.int8, device=device).t()
        return lambda: torch._int_mm(a, b)  # noqa: SLF001

    return {
        "bf16": lambda: floats(torch.bfloat16),
        "fp8": eights,
        "int8": integers,
        "fp32": lambda: floats(torch.float32),
    }


def _try(torch: Any, device: Any, product: Callable[[], Callable[[], object]], seconds: float) -> float | str:
    """Return the seconds of a product, or why this torch or this device cannot do it."""
    try:
        return _seconds_a_call(torch, device, product(), seconds)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
        return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _seconds_a_call(torch: Any, device: Any, call: Callable[[], object], seconds: float) -> float:
    """Time a call: the median of some runs, each long enough for the clock and the launches to vanish."""
    wait: Callable[[], object] = (
        (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None
    )
    call()
    wait()
    begin = time.perf_counter()
    call()
    wait()
    once = max(time.perf_counter() - begin, 1e-7)
    calls = max(1, int(seconds / _REPEATS / once))
    runs = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        runs.append((time.perf_counter() - begin) / calls)
    return median(runs)
