"""A dcgm-exporter for tests: its page follows from what its GPUs do over time, and from what goes wrong.

It refreshes every `interval_s`; what it then shows is the mean of one interval, which ended `lag_s` before.
Between two refreshes the page stands still, as NVIDIA's does. Times are seconds of the clock that the
caller gives.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Counter = Literal["gr", "sm", "tensor", "dram"]
COUNTERS: tuple[Counter, ...] = ("gr", "sm", "tensor", "dram")
LEGACY: Mapping[Counter, str] = {
    "gr": "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "sm": "DCGM_FI_PROF_SM_ACTIVE",
    "tensor": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "dram": "DCGM_FI_PROF_DRAM_ACTIVE",
}
CURRENT: Mapping[Counter, str] = {
    "gr": "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",
    "sm": "DCGM_FI_PROF_SM_UTIL_RATIO",
    "tensor": "DCGM_FI_PROF_TENSOR_UTIL_RATIO",
    "dram": "DCGM_FI_PROF_DRAM_UTIL_RATIO",
}
"""The names since dcgm-exporter 4.9."""


@dataclass(frozen=True)
class Level:
    """What a GPU does from a moment on: shares of time, 0 to 1."""

    from_s: float
    gr: float = 0.0
    sm: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0


@dataclass(frozen=True)
class Device:
    """One GPU, or one MIG instance of it: then `uuid` is the GPU's."""

    uuid: str
    levels: tuple[Level, ...] = ()
    gpu: int = 0
    model: str = "NVIDIA H100 80GB HBM3"
    instance: tuple[int, str] | None = None
    """GPU_I_ID and GPU_I_PROFILE."""
    labels: tuple[tuple[str, str], ...] = ()
    """Others, such as ("pod", "vllm-0")."""
    power_watts: float = 300.0
    energy_joules: float = 5_000_000.0
    """At second 0; it grows by the power."""

    def mean(self, counter: Counter, begin_s: float, end_s: float) -> float:
        """Return the mean of a counter over a span; nothing is done before the first level."""
        total = 0.0
        for at, level in enumerate(self.levels):
            until = self.levels[at + 1].from_s if at + 1 < len(self.levels) else math.inf
            inside = min(end_s, until) - max(begin_s, level.from_s)
            total += max(0.0, inside) * float(getattr(level, counter))
        return total / (end_s - begin_s)

    def energy_at(self, moment_s: float) -> float:
        """Return joules at a moment."""
        return self.energy_joules + self.power_watts * moment_s


FaultKind = Literal["zero", "missing", "value", "frozen", "slow", "error", "empty"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong in [from_s, to_s).

    zero: the counters read 0. missing: their lines are not there. value: they read `text`. frozen: the page
    does not change any more. slow: an answer takes `delay_s`. error: HTTP 500. empty: a page without lines.
    """

    kind: FaultKind
    from_s: float = 0.0
    to_s: float = math.inf
    counter: Counter | None = None
    """None: all."""
    uuid: str | None = None
    text: str = "N/A"
    delay_s: float = 0.0

    def hits(self, now_s: float, counter: Counter | None = None, uuid: str | None = None) -> bool:
        """Return whether it holds now for this counter of this GPU."""
        return (
            self.from_s <= now_s < self.to_s
            and (counter is None or self.counter in (None, counter))
            and (uuid is None or self.uuid in (None, uuid))
        )


@dataclass(frozen=True)
class DcgmScenario:
    """An exporter and its node."""

    devices: tuple[Device, ...]
    interval_s: float = 1.0
    phase_s: float = 0.0
    """A moment at which it refreshes."""
    skew_s: float = 0.0
    """How much later than the GPU before each GPU is refreshed."""
    device_phase_s: float = 0.0
    """How much later than the counters temperature, power and energy are refreshed."""
    lag_s: float = 0.0
    faults: tuple[Fault, ...] = ()
    counters: tuple[Counter, ...] = COUNTERS
    names: Mapping[Counter, str] = field(default_factory=lambda: LEGACY)
    uuid_label: str = "UUID"
    host_label: str | None = "Hostname"
    timestamps: bool = False
    wall_offset_s: float = 1_700_000_000.0
    """Wall clock less the caller's clock, for timestamps."""
    device_fields: bool = True
    """Whether temperature, power and energy are on the page too."""

    def measured(self, now_s: float, gpu: int = 0, after_s: float = 0.0) -> tuple[float, float]:
        """Return the span that a GPU's line of this moment is the mean of."""
        for fault in self.faults:
            if fault.kind == "frozen" and fault.hits(now_s):
                now_s = fault.from_s
        phase_s = self.phase_s + gpu * self.skew_s + after_s
        refresh = phase_s + math.floor((now_s - phase_s) / self.interval_s) * self.interval_s
        return refresh - self.lag_s - self.interval_s, refresh - self.lag_s

    def page(self, now_s: float) -> str:
        """Return the text of /metrics at a moment."""
        if any(fault.kind == "empty" and fault.hits(now_s) for fault in self.faults):
            return ""
        lines: list[str] = []

        def ended(device: Device) -> float:
            return self.measured(now_s, device.gpu, self.device_phase_s)[1]

        def family(name: str, rows: list[tuple[Device, str]]) -> None:
            if rows:
                lines.extend([f"# HELP {name} A counter.", f"# TYPE {name} gauge"])
                lines.extend(
                    f"{name}{{{self._labels(device)}}} {text}{self._stamp(device, now_s)}"
                    for device, text in rows
                )

        whole = [device for device in self.devices if device.instance is None] or list(self.devices[:1])
        if self.device_fields:
            family("DCGM_FI_DEV_GPU_TEMP", [(device, "41") for device in whole])
            # The last digits of a sensor never stand still.
            family(
                "DCGM_FI_DEV_POWER_USAGE",
                [(d, f"{d.power_watts + 0.001 * (round(ended(d) * 1000) % 977):.6f}") for d in whole],
            )
            family(
                "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
                [(d, str(round(d.energy_at(ended(d)) * 1000))) for d in whole],
            )
        for counter in self.counters:
            rows = [(d, self._text(d, counter, *self.measured(now_s, d.gpu), now_s)) for d in self.devices]
            family(self.names[counter], [(device, text) for device, text in rows if text is not None])
        return "\n".join(lines) + "\n"

    def _stamp(self, device: Device, now_s: float) -> str:
        if not self.timestamps:
            return ""
        return f" {round((self.measured(now_s, device.gpu)[1] + self.wall_offset_s) * 1000)}"

    def _text(
        self, device: Device, counter: Counter, begin_s: float, end_s: float, now_s: float
    ) -> str | None:
        for fault in self.faults:
            if fault.hits(now_s, counter, device.uuid):
                if fault.kind == "zero":
                    return "0.000000"
                if fault.kind == "missing":
                    return None
                if fault.kind == "value":
                    return fault.text
        return f"{device.mean(counter, begin_s, end_s):.6f}"

    def _labels(self, device: Device) -> str:
        labels = {
            "gpu": str(device.gpu),
            self.uuid_label: device.uuid,
            "pci_bus_id": f"00000000:{0x19 + device.gpu:02X}:00.0",
            "device": f"nvidia{device.gpu}",
            "modelName": device.model,
        }
        if device.instance is not None:
            labels["GPU_I_PROFILE"], labels["GPU_I_ID"] = device.instance[1], str(device.instance[0])
        if self.host_label is not None:
            labels[self.host_label] = "node-1"
        labels.update(device.labels)
        return ",".join(f'{name}="{value}"' for name, value in labels.items())


class DcgmExporter:
    """Serves a scenario on the loopback; `scenario` may be replaced while it runs."""

    def __init__(self, scenario: DcgmScenario, clock: Callable[[], float] = time.monotonic) -> None:
        self.scenario = scenario
        self.requests = 0
        self._clock = clock
        self._release = threading.Event()
        exporter = self

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                status, body = exporter.answer(self.path)
                data = body.encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "text/plain; version=0.0.4")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._handler = Answers

    def answer(self, target: str) -> tuple[int, str]:
        """Return status and body of GET `target`, after the delay that a fault asks for."""
        self.requests += 1
        if target != "/metrics":
            return 404, "404 page not found\n"
        now_s = self._clock()
        for fault in self.scenario.faults:
            if fault.hits(now_s) and fault.kind == "slow":
                self._release.wait(fault.delay_s)
            if fault.hits(now_s) and fault.kind == "error":
                return 500, "internal server error\n"
        return 200, self.scenario.page(self._clock())

    @contextlib.contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """Yield the URL of the running exporter."""
        server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            self._release.set()
            server.shutdown()
            thread.join(5)
            server.server_close()
