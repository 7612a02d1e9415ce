"""Asks the node what `watch` would ask, for a few seconds, and keeps the answers for the checks to judge.

Everything that can hang (a driver, a file system) runs in a thread with a time limit: `doctor` is called
when something is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpuidle.agent.model import EngineReading, GpuReading, Problem, Reading, Rung
from gpuidle.collectors.checks.rights import Rights, read_rights
from gpuidle.collectors.counters.dcgm import DcgmRung
from gpuidle.collectors.counters.dcgm_status import Standing
from gpuidle.collectors.counters.gpm import GpmRung
from gpuidle.collectors.counters.ladder import LadderCollector
from gpuidle.collectors.counters.nvml import NvmlCollector
from gpuidle.collectors.counters.rung import CounterRung, RungReading, RungStatus
from gpuidle.collectors.engines.collector import EnginesCollector
from gpuidle.collectors.engines.rule import EngineKind
from gpuidle.collectors.engines.track import NamedEndpoint
from gpuidle.collectors.steps.sources import SourceStatus, step_sources

DRIVER_S = 5.0
"""How long the driver may take to answer the first time: initialising it takes a second or two."""
RUNGS_S = 4.0
"""How long the rungs may take: enough for a renewal each second, and to catch a counter that is stuck."""
FIRST_RUNGS_S = 1.0
MUTE_KINDS = (
    "foreign_network_namespace",
    "no_api_process",
    "no_http",
    "no_tcp_port",
    "stats_disabled",
)
"""Reasons for which an engine will not answer, however long one waits."""
DEAD = "it reads 0 while the driver shows the GPU busy: a dead counter, not an idle GPU"
DEAD_REMEDY = "restart dcgm-exporter, or end the other profiler; after an Xid reset the GPU"
ENGINES_S = 4.0
_ROUND_S = 0.2
_DISCOVERY_NS = 6_000_000_000


@dataclass(frozen=True)
class Place:
    """What is looked at, and how."""

    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    kinds: tuple[EngineKind, ...] = ()
    endpoints: tuple[NamedEndpoint, ...] = ()
    discover: bool = True
    dcgm_url: str | None = None
    steps: bool = True
    """Whether sources of steps are looked for."""
    fpm: tuple[str | None, ...] = ()
    """Engines that an endpoint of ForwardPassMetrics was named for; None: the only one."""


@dataclass(frozen=True)
class Seen:
    """What was found. Readings are the last ones; the driver's is None where it hung."""

    rights: Rights
    gpus: Reading | None
    engines: Reading
    binding: str
    """Version of nvidia-ml-py."""
    driver_traces: tuple[str, ...] = ()
    """Files that only a loaded NVIDIA driver makes."""
    profiling_open: bool = False
    """Whether the driver lets every user profile (RmProfilingAdminOnly: 0)."""
    statuses: tuple[RungStatus, ...] = ()
    steps: tuple[SourceStatus, ...] = ()
    dcgm: Standing = field(default_factory=Standing)
    dcgm_lag_ns: int | None = None
    clock_resolution_s: float = 0.0
    suspended_s: float = 0.0

    @property
    def devices(self) -> tuple[GpuReading, ...]:
        """The GPUs and MIG instances that answer."""
        return () if self.gpus is None else self.gpus.gpus or ()


def observe(place: Place) -> Seen:
    """Look at the node; takes as long as a driver, an exporter and engines need to answer, 15 s at most."""
    driver = NvmlCollector(place.proc)
    gpus = _within(DRIVER_S, "nvml", lambda: _read_gpus(driver))
    devices = () if gpus is None else gpus.gpus or ()
    dcgm = DcgmRung(place.dcgm_url, proc=place.proc, timeout_s=2.0)
    statuses: tuple[RungStatus, ...] = ()
    if devices or place.dcgm_url is not None:
        statuses = _climb(driver, (_Kept(GpmRung()), _Kept(dcgm)), dcgm)
    engines = _within(3 * ENGINES_S, "engines", lambda: _read_engines(place, devices)) or Reading()
    asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return Seen(
        rights=read_rights(place.proc),
        gpus=gpus,
        engines=engines,
        binding=_binding(),
        driver_traces=tuple(
            str(path)
            for path in (place.proc / "driver/nvidia/version", place.dev / "nvidiactl")
            if path.exists()
        ),
        profiling_open=_profiling_open(place.proc),
        statuses=statuses,
        steps=_steps(place, engines.engines),
        dcgm=dcgm.standing,
        dcgm_lag_ns=dcgm.lag_ns,
        clock_resolution_s=time.get_clock_info("monotonic").resolution,
        suspended_s=max(0.0, asleep_ns / 1e9),
    )


def measured(devices: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """Return the devices that counters are read of: MIG instances instead of the GPU that they are of."""
    split = {device.parent_hw_id for device in devices if device.parent_hw_id is not None}
    return tuple(device for device in devices if device.hw_id not in split)


def _within(limit_s: float, source: str, call: Callable[[], Reading]) -> Reading | None:
    """Return `call()`, or None when it takes longer: its thread is left behind and ends with the program."""
    answers: list[Reading] = []

    def work() -> None:
        try:
            answers.append(call())
        except Exception as error:  # noqa: BLE001  # doctor is called when something is wrong
            answers.append(Reading(problems=(_fault(source, error),)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None


def _fault(source: str, error: Exception) -> Problem:
    return Problem(
        source=source,
        kind="failed",
        message=f"{type(error).__name__}: {error}",
        remedy="this is a fault of gpuidle: please report it with this message",
    )


def _read_gpus(driver: NvmlCollector) -> Reading:
    """Read the driver until it answers as a whole; a device that hangs is left out after a few rounds."""
    end_s = time.monotonic() + DRIVER_S - 1.0
    while True:
        reading = driver.read(time.monotonic_ns())
        waits = any(problem.kind in ("driver_hanging", "gpu_hanging") for problem in reading.problems)
        if not waits or time.monotonic() > end_s:
            # Not closed: shutting down a driver that hangs would hang too, and the program ends soon.
            return reading


class _Kept:
    """A rung that keeps what it said last, for the checks; the ladder keeps only its choice."""

    def __init__(self, rung: CounterRung) -> None:
        self._rung = rung
        self.status: tuple[RungStatus, ...] = ()

    @property
    def name(self) -> Rung:
        return self._rung.name

    def read(self, now_ns: int, devices: Sequence[GpuReading]) -> RungReading:
        reading = self._rung.read(now_ns, devices)
        self.status = reading.status
        return reading

    def close(self) -> None:
        self._rung.close()


def _climb(driver: NvmlCollector, rungs: Sequence[_Kept], dcgm: DcgmRung) -> tuple[RungStatus, ...]:
    """Let the ladder choose for `RUNGS_S`; return how each rung stands with each device."""
    ladder = LadderCollector(driver, rungs)
    start_s = time.monotonic()
    handed: set[tuple[str, Rung]] = set()
    while True:
        reading = ladder.read(time.monotonic_ns())
        handed |= {(series.hw_id, series.rung) for series in reading.counters}
        statuses = [status for rung in rungs for status in rung.status]
        asked = dcgm.standing.page is not None or dcgm.standing.failure is not None
        doubted = _doubted(statuses, handed)
        settled = asked and not doubted and all(status.state != "starting" for status in statuses)
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > RUNGS_S or (settled and elapsed_s > FIRST_RUNGS_S):
            break
        time.sleep(_ROUND_S)
    for rung in rungs:
        rung.close()
    return tuple(
        msgspec.structs.replace(status, state="dead", message=DEAD, remedy=DEAD_REMEDY)
        if (status.hw_id, status.rung) in doubted
        else status
        for status in statuses
    )


def _doubted(statuses: Sequence[RungStatus], handed: set[tuple[str, Rung]]) -> set[tuple[str, Rung]]:
    """Return the rungs that serve by their own word, and of which the ladder handed on nothing.

    Where a better rung was handed on, the ladder had no use for it.
    """
    served = {hw_id for hw_id, _ in handed}
    serving = {(status.hw_id, status.rung) for status in statuses if status.state == "serving"}
    return {key for key in serving - handed if key[0] not in served}


def _read_engines(place: Place, devices: Sequence[GpuReading]) -> Reading:
    held = {gpu.hw_id: tuple(process.pid for process in gpu.processes or ()) for gpu in devices}
    collector = EnginesCollector(
        place.kinds,
        proc_root=str(place.proc),
        endpoints=place.endpoints,
        gpu_processes=lambda: held,
        discover=place.discover,
        timeout_s=2.0,
        patience_s=2.5,
    )
    end_s = time.monotonic() + ENGINES_S
    start_ns = time.monotonic_ns()
    rounds = 0
    while True:
        # Each round is far enough from the last for the processes to be listed again: what is missing only
        # once may just have ended.
        reading = collector.read(start_ns + rounds * _DISCOVERY_NS)
        rounds += 1
        mute = {problem.subject for problem in reading.problems if problem.kind in MUTE_KINDS}
        silent = any(e.counters is None and e.engine_id not in mute for e in reading.engines)
        if rounds > 1 and (not silent or time.monotonic() > end_s):
            break
        time.sleep(_ROUND_S)
    collector.close()
    return reading


def _steps(place: Place, engines: Sequence[EngineReading]) -> tuple[SourceStatus, ...]:
    if not place.steps:
        return ()
    only = engines[0].engine_id if len(engines) == 1 else None
    named = [
        engine.engine_id
        for engine in engines
        if {engine.engine_id, engine.model} & set(place.fpm) - {None}
        or (None in place.fpm and engine.engine_id == only)
    ]
    return step_sources(engines, proc=place.proc, fpm=named)


def _profiling_open(proc: Path) -> bool:
    try:
        text = (proc / "driver/nvidia/params").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "RmProfilingAdminOnly: 0" in text.splitlines()


def _binding() -> str:
    from gpuidle.collectors.counters.nvml_binding import version

    return version()
