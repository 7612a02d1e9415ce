"""The ladder: for each device the best counter rung that works, why not a better one, and when to change.

The driver's own reading (NVML) is the lowest rung and lists the devices. Every other rung is asked each tick,
so that the next one is warm when the one above it fails; only the best one that is believed is handed on. A
rung is left when it says so itself (stolen, lost, refused), when it has been silent for a while, or when the
driver contradicts it (see `contradiction`); it is taken up again as soon as it serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from gpuidle.agent.model import CounterSeries, GpuReading, Problem, Reading, Rung
from gpuidle.agent.ports import Collector
from gpuidle.collectors.counters.contradiction import History, Trust
from gpuidle.collectors.counters.rung import CounterRung, RungReading, RungState, RungStatus

SOURCE = "counters"
SILENT_NS = 3 * 10**9
"""A rung that gives nothing for longer than this, and than two of its windows, does not serve."""
REMEMBER_NS = 10 * 10**9
"""How long the rungs are still asked for devices that the driver does not list any more."""


class LadderCollector:
    """A Collector of the devices and of their best counters.

    `gpus` reads the devices; `rungs` stand in order, the best first.
    """

    def __init__(self, gpus: Collector, rungs: Sequence[CounterRung]) -> None:
        self._gpus = gpus
        self._rungs = tuple(rungs)
        self._trust: dict[tuple[str, Rung], Trust] = {}
        self._given: dict[tuple[str, Rung], tuple[int, int]] = {}
        """When a rung last gave a series of a device, and how long its last window was."""
        self._seen: dict[str, tuple[int, GpuReading]] = {}
        self._history: dict[str, History] = {}

    @property
    def name(self) -> str:
        """The name of the collector of the devices: without any rung this is what is left."""
        return self._gpus.name

    def read(self, now_ns: int) -> Reading:
        """Return the devices, the counters of the best rung of each, and why there is no better one."""
        reading = self._gpus.read(now_ns)
        devices = self._devices(reading.gpus, now_ns)
        status: dict[tuple[str, Rung], RungStatus] = {}
        believed: dict[tuple[str, Rung], CounterSeries] = {}
        problems = list(reading.problems)
        for rung in self._rungs:
            answer = _ask(rung, now_ns, devices)
            problems += answer.problems
            status.update({(row.hw_id, rung.name): row for row in answer.status})
            for series in answer.series:
                if self._believes(series, now_ns):
                    believed[series.hw_id, rung.name] = series
        counters: list[CounterSeries] = []
        chosen: dict[str, Rung] = {}
        refused: list[RungStatus] = []
        for device in devices:
            for rung in self._rungs:
                key = (device.hw_id, rung.name)
                why = self._why_not(key, status.get(key), now_ns)
                if why is None:
                    chosen[device.hw_id] = rung.name
                    counters += [believed[key]] if key in believed else []
                    break
                refused.append(why)
        problems += _explain(refused, chosen, len(devices))
        return msgspec.structs.replace(reading, counters=tuple(counters), problems=tuple(problems))

    def close(self) -> None:
        """Close the rungs and the collector of the devices."""
        for rung in self._rungs:
            rung.close()
        self._gpus.close()

    def _devices(self, gpus: Sequence[GpuReading] | None, now_ns: int) -> list[GpuReading]:
        """Return the devices to ask for: those listed, less GPUs that are split, and for a while lost ones.

        A rung that does not need the driver goes on while the driver is silent. Instances of a GPU that is
        there are as the driver lists them.
        """
        listed = {gpu.hw_id: gpu for gpu in gpus or ()}
        split = {gpu.parent_hw_id for gpu in listed.values()}
        self._seen = {
            hw_id: (seen_ns, gpu)
            for hw_id, (seen_ns, gpu) in self._seen.items()
            if (gpu.parent_hw_id or hw_id) not in listed and now_ns - seen_ns < REMEMBER_NS
        } | {hw_id: (now_ns, gpu) for hw_id, gpu in listed.items() if hw_id not in split}
        self._trust = {key: trust for key, trust in self._trust.items() if key[0] in self._seen}
        self._given = {key: given for key, given in self._given.items() if key[0] in self._seen}
        self._history = {hw_id: self._history.get(hw_id, History()) for hw_id in self._seen}
        for hw_id, gpu in listed.items():
            if hw_id in self._history:
                self._history[hw_id].add(gpu)
        return [gpu for _, gpu in self._seen.values()]

    def _believes(self, series: CounterSeries, now_ns: int) -> bool:
        if series.hw_id not in self._history or not len(series):
            return False
        key = (series.hw_id, series.rung)
        self._given[key] = (now_ns, int(series.width_ns[-1]))
        return self._trust.setdefault(key, Trust()).judge(series, self._history[series.hw_id])

    def _why_not(self, key: tuple[str, Rung], said: RungStatus | None, now_ns: int) -> RungStatus | None:
        """Return None where the rung serves the device, else why it does not."""
        hw_id, rung = key
        if said is None:
            return RungStatus(rung=rung, hw_id=hw_id, state="starting")
        trust = self._trust.get(key)
        # A doubt that silence leaves open must not hide why there is silence.
        if trust is not None and (trust.dead or (trust.contradicted_ns and said.state == "serving")):
            return _dead(key, trust)
        given = self._given.get(key)
        if said.state != "serving" or given is None:
            return said if said.state != "serving" else msgspec.structs.replace(said, state="starting")
        if now_ns - given[0] <= max(SILENT_NS, 2 * given[1]):
            return None
        return msgspec.structs.replace(said, state="lost", message="it has given no sample for some time")


def _ask(rung: CounterRung, now_ns: int, devices: Sequence[GpuReading]) -> RungReading:
    try:
        return rung.read(now_ns, devices)
    except Exception as error:  # noqa: BLE001  # one rung's fault must not cost the devices
        message = f"{type(error).__name__}: {error}"
        return RungReading(
            status=tuple(
                RungStatus(rung=rung.name, hw_id=device.hw_id, state="failed", message=message)
                for device in devices
            )
        )


def _dead(key: tuple[str, Rung], trust: Trust) -> RungStatus:
    state: RungState = "dead" if trust.dead else "starting"
    return RungStatus(
        rung=key[1],
        hw_id=key[0],
        state=state,
        message=f"it read 0 for {trust.contradicted_ns / 1e9:.0f} s while the driver shows the GPU busy: "
        "a dead counter, not an idle GPU",
        remedy="Counters can stick after an Xid or another profiler: restart that one, or reset the GPU. "
        "They are used again when they move.",
    )


def _explain(refused: Sequence[RungStatus], chosen: dict[str, Rung], devices: int) -> list[Problem]:
    """Return why no better rung serves, each reason once.

    A rung that the hardware does not have is told only where nothing but the driver's basics is left: there
    is nothing to mend where another one serves.
    """
    groups: dict[tuple[Rung, RungState, str, str], list[str]] = defaultdict(list)
    for row in refused:
        if row.state == "starting" or (row.state == "unsupported" and row.hw_id in chosen):
            continue
        # Seconds that pass are not another reason.
        key = (row.rung, row.state, row.message if row.state != "dead" else "", row.remedy)
        groups[key].append(row.hw_id)
    said = {(row.rung, row.state, row.hw_id): row.message for row in refused}
    problems = []
    for (rung, state, _, remedy), hw_ids in groups.items():
        of_all = len(hw_ids) == devices
        where = f"{len(hw_ids)} of {devices} devices: " if len(hw_ids) > 1 and not of_all else ""
        served = sorted({chosen.get(hw_id, "nvml") for hw_id in hw_ids})
        problems.append(
            Problem(
                source=SOURCE,
                kind=f"rung_{state}",
                message=f"{where}{rung} does not serve, {' and '.join(served)} does: "
                f"{said[rung, state, hw_ids[0]]}",
                remedy=remedy,
                subject=hw_ids[0] if len(hw_ids) == 1 else "",
            )
        )
    return problems
