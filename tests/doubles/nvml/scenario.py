"""What the double answers, as frozen data, and the text that the C side reads.

A field that is None is a thing the device cannot do: its function returns NVML_ERROR_NOT_SUPPORTED.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

SCENARIO_VARIABLE = "GPUIDLE_NVML_SCENARIO"
UNKNOWN_MEMORY = 2**64 - 1
"""What the driver gives as a process's memory when it does not know (NVML_VALUE_NOT_AVAILABLE)."""


def escape(value: str | bytes) -> str:
    """Return a value as it stands in the file: printable ASCII, every other byte as \\xHH."""
    raw = value.encode() if isinstance(value, str) else value
    if b"\0" in raw:
        raise ValueError("a C string cannot hold NUL")
    return "".join(
        "\\\\" if byte == 0x5C else chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw
    )


@dataclass(frozen=True)
class Process:
    """A process on a GPU; `memory_bytes` None is the driver's "not available"."""

    pid: int
    memory_bytes: int | None = None
    kind: Literal["compute", "graphics", "mps"] = "compute"


@dataclass(frozen=True)
class ProcessUtilization:
    """One sample of nvmlDeviceGetProcessUtilization, in percent; it is `age_ms` old at every call."""

    pid: int
    sm: int = 0
    memory: int = 0
    encoder: int = 0
    decoder: int = 0
    age_ms: int = 0
    garbage_timestamp_us: int | None = None
    """Give this sample with this time at every call, whatever was asked for, as some drivers do."""

    def line(self) -> str:
        """Return the line of the file."""
        if self.garbage_timestamp_us is not None:
            return f"utilization_garbage {self.garbage_timestamp_us} {self.pid} {self.sm}"
        shares = f"{self.sm} {self.memory} {self.encoder} {self.decoder}"
        return f"utilization_sample {self.pid} {shares} {self.age_ms}"


@dataclass(frozen=True)
class GpmMetric:
    """One GPM metric: percent below id 20, else MiB/s.

    `steps` are (CLOCK_MONOTONIC ns, value) in order: a value holds until the next one; a single number holds
    for ever. `code` is the metric's own nvmlReturn. A value beyond 200 %, below 0 or NaN is given as it is.
    """

    id: int
    steps: tuple[tuple[int, float], ...] | float
    code: int = 0

    def line(self) -> str:
        """Return the line of the file."""
        steps = ((0, self.steps),) if isinstance(self.steps, (int, float)) else self.steps
        return f"gpm {self.id} {self.code} " + " ".join(f"{at_ns}:{value!r}" for at_ns, value in steps)


@dataclass(frozen=True)
class Event:
    """Something that happens to a GPU at a moment of CLOCK_MONOTONIC; `type` is NVML's bit (8: Xid)."""

    at_ns: int
    type: int = 8
    data: int = 0
    """The Xid."""
    gpu_instance: int = 0xFFFFFFFF


EVENT_TYPES = 0x8 | 0x2 | 0x1 | 0x100 | 0x200
"""What a data-centre GPU supports: Xid, both ECC events, MIG changes, ECC storms."""


@dataclass(frozen=True)
class MigInstance:
    """One MIG device, of a GPU instance and a compute instance. By default a 1g.10gb of an H100.

    What stands here is all that NVML tells of an instance: no power, no clock, no utilisation.
    """

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int = 0
    name: str = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    compute_capability: str = "9.0"
    multiprocessors: int = 16
    gpu_slices: int = 1
    compute_slices: int = 1
    memory_total_bytes: int = 10_468_982_784
    memory_used_bytes: int = 0
    memory_reserved_bytes: int = 0
    bar1_total_bytes: int = 17_178_820_608
    bar1_used_bytes: int = 0
    processes: tuple[Process, ...] = ()
    gpm: tuple[GpmMetric, ...] | None = None
    gpm_since_ns: int = 0
    """When its counters began at 0."""

    def lines(self, index: int) -> list[str]:
        """Return the section of the file for the MIG device at `index` of its GPU."""
        special = ("processes", "gpm")
        plain = [
            (field.name, getattr(self, field.name)) for field in fields(self) if field.name not in special
        ]
        return [
            f"instance {index}",
            *(f"{key} {escape(value) if isinstance(value, str) else value}" for key, value in plain),
            *_process_lines(self.processes),
            *_gpm_lines(self.gpm),
        ]


def _process_lines(processes: tuple[Process, ...]) -> list[str]:
    return [
        f"process_{p.kind} {p.pid} {UNKNOWN_MEMORY if p.memory_bytes is None else p.memory_bytes}"
        for p in processes
    ]


def _gpm_lines(gpm: tuple[GpmMetric, ...] | None) -> list[str]:
    return [] if gpm is None else ["gpm_support 1", *(metric.line() for metric in gpm)]


@dataclass(frozen=True)
class Fault:
    """Makes functions fail or hang.

    `function` is a shell pattern ("nvmlDeviceGetPowerUsage", "nvmlDevice*", "*"), `code` a name without
    NVML_ERROR_ or a number, `gpu` an index or None for every call. The first `after_calls` matching calls
    since the file was read go well. `delay_ms` passes before the answer; writing another scenario ends it.
    """

    function: str
    code: str | int = "SUCCESS"
    gpu: int | None = None
    delay_ms: int = 0
    after_calls: int = 0


@dataclass(frozen=True)
class Gpu:
    """One device, by default an H100 SXM that decodes for one user. Names say the units."""

    uuid: str | bytes | None = None
    """None: made from the index."""
    name: str | bytes | None = "NVIDIA H100 80GB HBM3"
    pci_bus_id: str | None = None
    """Such as "00000000:19:00.0"; None: made from the index."""
    compute_capability: str | None = "9.0"
    memory_total_bytes: int | None = 85_520_809_984
    memory_used_bytes: int | None = 0
    """Without the reserved part."""
    memory_reserved_bytes: int | None = 629_145_600
    bar1_total_bytes: int | None = 137_438_953_472
    bar1_used_bytes: int | None = 1_048_576
    utilization_gpu_percent: int | None = 0
    utilization_memory_percent: int | None = 0
    power_mw: int | None = 72_000
    power_limit_mw: int | None = 700_000
    energy_mj: int | None = 5_000_000_000
    energy_growth_mj_per_s: int = 0
    energy_since_ns: int = 0
    """The moment of CLOCK_MONOTONIC at which `energy_mj` held; it grows from there on."""
    temperature_celsius: int | None = 34
    fan_percent: int | None = None
    clock_sm_mhz: int | None = 1980
    clock_graphics_mhz: int | None = 1980
    clock_memory_mhz: int | None = 2619
    clock_video_mhz: int | None = 1545
    max_clock_sm_mhz: int | None = 1980
    max_clock_graphics_mhz: int | None = 1980
    max_clock_memory_mhz: int | None = 2619
    max_clock_video_mhz: int | None = 1545
    clock_event_reasons: int | None = 0
    """NVML's bit mask."""
    mig_mode: int | None = None
    """0 or 1 where the GPU can be split; 1: a driver then tells no utilisation of the whole."""
    event_types: int | None = None
    processes: tuple[Process, ...] = ()
    utilization_samples: tuple[ProcessUtilization, ...] = ()
    instances: tuple[MigInstance, ...] = ()
    gpm: tuple[GpmMetric, ...] | None = None
    """None: the GPU has no GPM."""
    events: tuple[Event, ...] = ()

    def lines(self, index: int) -> list[str]:
        """Return the section of the file for the device at `index`."""
        uuid = self.uuid if self.uuid is not None else f"GPU-00000000-0000-4000-8000-{index:012x}"
        bus = self.pci_bus_id if self.pci_bus_id is not None else f"00000000:{0x19 + index:02X}:00.0"
        lines = [f"gpu {index}", f"uuid {escape(uuid)}", f"pci_bus_id {escape(bus)}"]
        special = {"uuid", "pci_bus_id", "processes", "utilization_samples", "instances", "gpm", "events"}
        if self.mig_mode == 1:
            special |= {"utilization_gpu_percent", "utilization_memory_percent"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in special or field.name.startswith("energy_") or value is None:
                continue
            lines.append(f"{field.name} {escape(value) if isinstance(value, (str, bytes)) else value}")
        if self.energy_mj is not None:
            lines.append(f"energy_mj {self.energy_mj} {self.energy_growth_mj_per_s} {self.energy_since_ns}")
        lines += _process_lines(self.processes)
        lines += [sample.line() for sample in self.utilization_samples]
        lines += _gpm_lines(self.gpm)
        if self.gpm is None and any(instance.gpm is not None for instance in self.instances):
            lines.append("gpm_support 1")
        lines += [f"event {e.at_ns} {e.type} {e.data} {e.gpu_instance}" for e in self.events]
        for position, instance in enumerate(self.instances):
            lines += instance.lines(position)
        return lines


@dataclass(frozen=True)
class Scenario:
    """A node: its driver, its devices, and what goes wrong. By default two idle H100s."""

    gpus: tuple[Gpu, ...] = (Gpu(), Gpu())
    faults: tuple[Fault, ...] = ()
    driver_version: str | bytes = "580.95.05"
    nvml_version: str = "13.580.95.05"
    cuda_version: int = 13000
    process_names: tuple[tuple[int, str | bytes], ...] = ()
    """What nvmlSystemGetProcessName answers, by PID."""
    kernel_library: str | None = None
    """The name of the only library file that the kernel driver takes; another one is a version mismatch."""

    def render(self) -> str:
        """Return the text of the scenario file."""
        lines = [
            f"driver_version {escape(self.driver_version)}",
            f"nvml_version {escape(self.nvml_version)}",
            f"cuda_version {self.cuda_version}",
            *(f"process_name {pid} {escape(name)}" for pid, name in self.process_names),
        ]
        if self.kernel_library is not None:
            lines.append(f"kernel_library {escape(self.kernel_library)}")
        for index, gpu in enumerate(self.gpus):
            lines += gpu.lines(index)
        for fault in self.faults:
            gpu_index = "-" if fault.gpu is None else str(fault.gpu)
            lines.append(
                f"fault {fault.function} {gpu_index} {fault.code} {fault.delay_ms} {fault.after_calls}"
            )
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the file in one step: a process that reads it meanwhile sees the old or the new node."""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(self.render())
        Path(name).replace(path)


def environment(library: Path, scenario: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which a new process sees the double in `library` answer from `scenario`."""
    env = dict(os.environ if base is None else base)
    others = env.get("LD_LIBRARY_PATH")
    env["LD_LIBRARY_PATH"] = f"{library}:{others}" if others else str(library)
    env[SCENARIO_VARIABLE] = str(scenario)
    return env
