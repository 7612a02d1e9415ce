"""The rung `cupti_pm` of the ladder: PM sampling of every device, opt-in, in bursts if asked.

One thread looks after one child a device. A child of its own for each: a hang or a crash of the library costs
the readings of that device, CUDA shows each child its one device only, and a wake-up ten times a second is
cheap (`benchmarks/cupti_cpu.py` has the figures of both ways).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpuidle.agent.model import CounterSeries, GpuReading, Problem, Rung
from gpuidle.collectors.counters.cupti.child import Orders, buffer_bytes
from gpuidle.collectors.counters.cupti.columns import join
from gpuidle.collectors.counters.cupti.find import find_libraries
from gpuidle.collectors.counters.cupti.holders import find_holder
from gpuidle.collectors.counters.cupti.track import SECOND_NS, SOURCE, Track
from gpuidle.collectors.counters.rung import RungReading, RungStatus

POLL_S = 0.2
HOLDERS_NS = 2 * SECOND_NS
LEAST_HZ, MOST_HZ = 100, 20_000
MEMORY_LIMIT_BYTES = 128 * 2**20
PENDING_PARTS = 1200
"""Batches kept for a caller that does not ask: two minutes."""
CLOSE_S = 0.8

_DUTY = re.compile(r"(?P<on>\d+(?:\.\d+)?)s/(?P<period>\d+(?:\.\d+)?)s")


class PmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample."""

    rate_hz: int = 1000
    """100 to 20000."""
    duty_on_s: float = 0.0
    """Length of a burst; 0 samples all the time."""
    duty_period_s: float = 0.0
    library: str | None = None
    """Path of the libcupti to use; None looks for one."""
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES
    """Most that the driver may be asked to hold for a device's samples."""

    def __post_init__(self) -> None:
        if not LEAST_HZ <= self.rate_hz <= MOST_HZ:
            raise ValueError(f"the rate is {self.rate_hz} Hz: from {LEAST_HZ} to {MOST_HZ} can be had")
        if self.duty_period_s and not 0.2 <= self.duty_on_s < self.duty_period_s:
            raise ValueError("a burst lasts at least 0.2 s and less than its period")


def parse_duty(text: str) -> tuple[float, float]:
    """Return the seconds of "1s/30s": a burst of 1 s every 30 s.

    Raises:
        ValueError: it is written otherwise, or no burst.
    """
    match = _DUTY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not ONs/PERIODs, such as 1s/30s")
    on_s, period_s = float(match["on"]), float(match["period"])
    PmOptions(duty_on_s=on_s, duty_period_s=period_s)
    return on_s, period_s


class CuptiPmRung:
    """Samples hardware counters through CUPTI (CounterRung); `proc` is where the node's /proc is mounted."""

    def __init__(self, options: PmOptions | None = None, proc: Path = Path("/proc")) -> None:
        self._options = options or PmOptions()
        self._proc = proc
        self._lock = threading.Lock()
        self._tracks: dict[str, Track] = {}
        self._leaving: list[Track] = []
        self._refused: dict[str, RungStatus] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._crash = ""

    @property
    def name(self) -> Rung:
        """Its rung."""
        return "cupti_pm"

    def read(self, now_ns: int, devices: Sequence[GpuReading]) -> RungReading:
        """Hand over what was sampled for `devices`; the first call starts the sampling."""
        with self._lock:
            self._follow(now_ns, devices)
            series: list[CounterSeries] = []
            problems: list[Problem] = []
            status = [
                self._refused[device.hw_id]
                if device.hw_id in self._refused
                else self._tracks[device.hw_id].status()
                for device in devices
            ]
            for track in self._tracks.values():
                parts, track.parts = track.parts, []
                if parts:
                    series.append(join(parts))
                problems += track.problems()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_after, name="cupti-pm", daemon=True)
            self._thread.start()
        if self._crash:
            problems.append(
                Problem(
                    source=SOURCE,
                    kind="failed",
                    message=self._crash,
                    remedy="this is a fault of gpuidle: please report it with this message",
                )
            )
        return RungReading(series=tuple(series), status=tuple(status), problems=tuple(problems))

    def close(self) -> None:
        """End all sessions in order; a child that needs more than a second goes on to its end alone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * CLOSE_S + 1)

    def pids(self) -> dict[str, int]:
        """Return the PID of the child of each device that has one."""
        with self._lock:
            return {hw_id: track.pid for hw_id, track in self._tracks.items() if track.pid is not None}

    def _follow(self, now_ns: int, devices: Sequence[GpuReading]) -> None:
        there = {device.hw_id for device in devices}
        for hw_id in [hw_id for hw_id in self._tracks if hw_id not in there]:
            track = self._tracks.pop(hw_id)
            track.stop(now_ns)
            self._leaving.append(track)
        self._refused = {hw_id: status for hw_id, status in self._refused.items() if hw_id in there}
        for device in devices:
            if device.hw_id in self._tracks:
                continue
            made = self._take_up(device, now_ns)
            if isinstance(made, Track):
                self._tracks[device.hw_id] = made
                self._refused.pop(device.hw_id, None)
            else:
                self._refused[device.hw_id] = made

    def _take_up(self, device: GpuReading, now_ns: int) -> Track | RungStatus:
        options = self._options
        if device.vendor != "nvidia":
            return _refusal(device, "unsupported", "CUPTI samples NVIDIA GPUs only", "")
        need = buffer_bytes(options.rate_hz, options.memory_limit_bytes)
        if need is None:
            return _refusal(
                device,
                "refused",
                f"{options.rate_hz} Hz need more than the {options.memory_limit_bytes / 2**20:.0f} MiB of "
                "memory that sampling may take",
                "Sample at a lower rate.",
            )
        total, used = device.memory_total_bytes, device.memory_used_bytes
        if total is not None and used is not None and total - used < 2 * need:
            return _refusal(
                device,
                "refused",
                f"sampling needs up to {need / 2**20:.0f} MiB and the GPU has {(total - used) / 2**20:.0f} "
                "MiB left: the engine's memory is not touched",
                "Sample at a lower rate, or leave the GPU some memory.",
            )
        pids = [process.pid for process in device.processes or ()]
        libraries = find_libraries(named=options.library, engine_pids=pids, proc=self._proc)
        if not libraries:
            return _refusal(
                device,
                "refused",
                "no libcupti on this node",
                "Install the package nvidia-cuda-cupti==13.0.85 beside gpuidle, or a CUDA toolkit.",
            )
        orders = Orders(
            uuid=device.hw_id,
            library=libraries[0],
            rate_hz=options.rate_hz,
            buffer_bytes=need,
            duty_on_s=options.duty_on_s,
            duty_period_s=options.duty_period_s,
        )
        return Track(device.hw_id, orders, libraries, now_ns)

    def _look_after(self) -> None:
        holder, looked_ns = "", -HOLDERS_NS
        try:
            while not self._stop.wait(POLL_S):
                now_ns = time.monotonic_ns()
                if now_ns - looked_ns >= HOLDERS_NS:
                    holder, looked_ns = find_holder(self._proc), now_ns
                with self._lock:
                    for track in self._tracks.values():
                        track.tick(now_ns, holder)
                        track.forget(PENDING_PARTS)
                    for track in self._leaving:
                        track.tick(now_ns, "a device that is gone")
                    self._leaving = [track for track in self._leaving if track.pid is not None]
        except Exception as error:  # noqa: BLE001  # told in the next reading; the children end with this thread
            self._crash = f"{type(error).__name__}: {error}"
        finally:
            self._end()

    def _end(self) -> None:
        now_ns = time.monotonic_ns()
        with self._lock:
            tracks = [*self._tracks.values(), *self._leaving]
            for track in tracks:
                track.stop(now_ns)
            deadline = time.monotonic() + CLOSE_S
            for track in tracks:
                track.finish(max(0.0, deadline - time.monotonic()))


def _refusal(device: GpuReading, state: str, message: str, remedy: str) -> RungStatus:
    return RungStatus(
        rung="cupti_pm",
        hw_id=device.hw_id,
        state="unsupported" if state == "unsupported" else "refused",
        message=message,
        remedy=remedy,
    )
