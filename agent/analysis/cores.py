"""Data-parallel cores of one engine: each has steps and counters of its own, and GPUs of its own.

Their timelines are never laid over one another: each core is settled as an engine by itself, and a GPU gets
the window of the core that it belongs to. Nothing read on a node names that core, so it is told by the order
in which engines deal out devices (core by core, in order of index), and held against the GPU's own counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from gpuidle.agent.analysis.activity import Activity
from gpuidle.agent.analysis.durations import together
from gpuidle.agent.analysis.enginewindow import EngineWindow, Made, device_peaks, settle_engine, with_told
from gpuidle.agent.analysis.frames import mean_known
from gpuidle.agent.analysis.integers import split
from gpuidle.agent.analysis.peers import group_of, waits
from gpuidle.agent.analysis.pipeclue import pipe_of
from gpuidle.agent.analysis.tracks import EngineTrack, GpuTrack, Pending
from gpuidle.agent.model import EngineReading, Evidence, GpuReading, Phase, Shares, StepSeries
from gpuidle.agent.physics.shapes import ModelShape

BUSY_RATIO, REST_RATIO = 0.5, 0.1
"""A GPU that is active this much of a window in which its core made steps for that little, or the reverse, is
not that core's, or does work that its steps do not tell (dummy steps of expert parallelism)."""


def cores_of(track: EngineTrack) -> dict[str, EngineTrack]:
    """Return the track of each core, with the steps that were read dealt out; empty: there is one core."""
    place = track.reading.parallelism
    told = {row.rank for row in track.counted.counters or ()} if track.counted is not None else set()
    track.step_ranks |= {steps.rank for steps in track.steps}
    names = told | track.step_ranks
    if not names or (place.data < 2 and len(told) < 2 and len(track.step_ranks) < 2):
        return {}
    for name in sorted(names - track.cores.keys(), key=_order):
        track.cores[name] = EngineTrack(
            reading=core_reading(track.reading, name), last_seen_ns=track.last_seen_ns
        )
    while track.steps:
        steps = track.steps.popleft()
        track.cores[steps.rank].steps.append(steps)
    return track.cores


def told_of_engines(
    tracks: Mapping[str, EngineTrack],
    readings: Mapping[str, EngineReading],
    window: Pending,
    shape_of: Callable[[EngineReading], ModelShape | None],
) -> dict[str, list[Made]]:
    """Return each engine of `readings` and then its cores, with what sums and steps say of a window."""
    asked: dict[str, list[Made]] = {}
    for key, reading in readings.items():
        cores = cores_of(tracks[key])
        asked[key] = [Made(tracks[key], reading, shape_of(reading))]
        for rank, core in cores.items():
            own = core_reading(reading, rank)
            asked[key].append(Made(core, own, shape_of(own), rank))
    made = iter(with_told([each for those in asked.values() for each in those], window))
    return {key: [next(made) for _ in those] for key, those in asked.items()}


def settle_cores(
    engine: Made,
    cores: Sequence[Made],
    window: Pending,
    seen: Mapping[str, Activity],
    gpus: Mapping[str, GpuReading],
    tracks: Mapping[str, GpuTrack],
) -> dict[str, EngineWindow]:
    """Settle one engine with its cores and return its window as each device that it holds sees it.

    `seen` are the devices that it holds, `gpus` all that were read at the window's end.
    """
    whole = _settled(engine, window, seen, tracks)
    if not cores:
        return with_waits(dict.fromkeys(seen, whole), [list(seen)], tracks, window)
    ranks = [core.rank for core in cores if core.rank is not None]
    placed = place(engine.reading, ranks, list(seen), gpus)
    done: dict[str, EngineWindow] = {}
    for rank, core in zip(ranks, cores, strict=True):
        mine = {hw_id: seen[hw_id] for hw_id, name in placed.items() if name == rank}
        done[rank] = _settled(core, window, mine, tracks)
    whole = joined(engine.track, whole, list(done.values()))
    window_ns = window.end_ns - window.start_ns
    views = {
        hw_id: on_device(whole, done.get(placed.get(hw_id, "")), each, window_ns)
        for hw_id, each in seen.items()
    }
    groups = [[hw_id for hw_id, name in placed.items() if name == rank] for rank in ranks]
    return with_waits(views, groups, tracks, window)


def _settled(
    made: Made, window: Pending, seen: Mapping[str, Activity], tracks: Mapping[str, GpuTrack]
) -> EngineWindow:
    """Settle an engine, or a core, by the mean of what its devices did."""
    devices, place = list(seen.values()), made.reading.parallelism
    pipe = None
    # Stages take turns, and cores have steps of their own.
    if made.steps is None and devices and place.pipeline == place.data == 1:
        peaks = device_peaks(tracks[next(iter(seen))].reading)
        pipe = pipe_of(devices, peaks, window.end_ns - window.start_ns)
    return settle_engine(made, window, mean_known([each.active_ns for each in devices]), pipe)


def core_reading(reading: EngineReading, rank: str) -> EngineReading:
    """Return the reading of one core as that of an engine of its own.

    With expert parallelism the experts are spread over all cores, so that a core's tokens do not tell what
    its GPUs compute: its model is left out, and the engine's mean stands for its work.
    """
    place = reading.parallelism
    rows = tuple(row for row in reading.counters or () if row.rank == rank)
    shared = place.expert and place.data > 1
    return msgspec.structs.replace(
        reading,
        counters=rows or None,
        parallelism=place if shared else msgspec.structs.replace(place, data=1),
        model_text=None if shared else reading.model_text,
    )


def place(
    reading: EngineReading, ranks: Iterable[str], held: Sequence[str], gpus: Mapping[str, GpuReading]
) -> dict[str, str]:
    """Return the core of each device of `held`; empty where the numbers do not match: it is not known."""
    spread = reading.parallelism
    each = spread.tensor * spread.pipeline
    names = sorted(ranks, key=_order)
    every = [str(number) for number in range(spread.data)]
    if len(held) == each * len(every) and set(names) <= set(every):
        names = every
    if len(held) != each * len(names):
        return {}
    ordered = sorted(held, key=lambda hw_id: gpus[hw_id].index)
    return {hw_id: names[number // each] for number, hw_id in enumerate(ordered)}


def on_device(whole: EngineWindow, core: EngineWindow | None, seen: Activity, window_ns: int) -> EngineWindow:
    """Return the engine's window as one device sees it: its core's; without a core, phases are unknown.

    Work and causes of an unplaced device rest on the mean of the cores, which is an estimate.
    """
    if core is not None and not contradicts(core, seen, window_ns):
        steps = core.steps
        if steps is not None:
            # By the order of devices, which no reading confirms.
            placed = msgspec.structs.replace(steps.shares, evidence=_doubt(steps.shares.evidence))
            steps = msgspec.structs.replace(steps, shares=placed)
        shares = core.shares if steps is None else steps.shares
        if core.shape is None:
            # The experts are everybody's: work and sums are the engine's mean, the timeline is the core's.
            unplaced = steps is None and whole.shape is not None
            return msgspec.structs.replace(
                whole, steps=steps, shares=shares, clues=core.clues, unplaced=unplaced
            )
        return msgspec.structs.replace(core, steps=steps, shares=shares)
    return msgspec.structs.replace(whole, steps=None, priced=None, decode=None, lent=None, unplaced=True)


def contradicts(core: EngineWindow, seen: Activity, window_ns: int) -> bool:
    """Whether a device's counters say that its work was not this core's."""
    if core.steps is None or seen.active_ns is None or seen.observed_ns < 0.9 * window_ns:
        return False
    stepping = 1 - core.steps.shares.idle_ns / window_ns
    active = seen.active_ns / seen.observed_ns
    low, high = sorted((stepping, active))
    return low < REST_RATIO and high > BUSY_RATIO


def joined(track: EngineTrack, whole: EngineWindow, cores: Sequence[EngineWindow]) -> EngineWindow:
    """Return the engine's window with the mean phases of its cores; its totals are the sums of theirs."""
    shares = mean_shares([core.shares for core in cores])
    track.shares = shares
    track.steps_total, track.step_durations = {}, {}
    for core in track.cores.values():
        for phase, count in core.steps_total.items():
            track.steps_total[phase] = track.steps_total.get(phase, 0) + count
        for phase, durations in core.step_durations.items():
            past = track.step_durations.get(phase)
            track.step_durations[phase] = durations if past is None else together(past, durations)
    if whole.work is None and all(core.work is not None for core in cores):
        gpus = whole.reading.parallelism.tensor * whole.reading.parallelism.pipeline
        done = sum(core.work.flops for core in cores if core.work is not None)
        track.flops_total = (track.flops_total or 0.0) + done * gpus
    return msgspec.structs.replace(whole, shares=shares)


def with_waits(
    views: Mapping[str, EngineWindow],
    groups: Sequence[Sequence[str]],
    tracks: Mapping[str, GpuTrack],
    window: Pending,
) -> dict[str, EngineWindow]:
    """Return the views of an engine's devices with what each waited for the others of its group."""
    found = dict(views)
    for devices in groups:
        if not devices:
            continue
        place = views[devices[0]].reading.parallelism
        group = group_of(place, {hw_id: tracks[hw_id].reading.index for hw_id in devices})
        if not group:
            continue
        peaks = device_peaks(tracks[group[0]].reading)
        waited = waits(
            [list(tracks[hw_id].counters) for hw_id in group],
            window.start_ns,
            window.end_ns,
            tensor_parallel=place.tensor,
            peak_bytes_per_s=None if peaks is None else peaks.memory_bytes_per_s,
        )
        for hw_id, each in zip(group, waited or (), strict=False):
            found[hw_id] = msgspec.structs.replace(found[hw_id], waits=each)
    return found


def mean_shares(shares: Sequence[Shares]) -> Shares:
    """Return the mean of the phases of windows of one length, in integers that sum to it."""
    window_ns = shares[0].window_ns
    names: tuple[Phase, ...] = ("prefill", "decode", "mixed", "idle", "unknown")
    totals = [sum(each.of(name) for each in shares) for name in names]
    parts = split(window_ns, totals)
    containing = parts[0] + parts[2]
    order: tuple[Evidence, ...] = ("measured", "estimated", "unknown")
    return Shares(
        window_ns=window_ns,
        prefill_ns=parts[0],
        decode_ns=parts[1],
        mixed_ns=parts[2],
        idle_ns=parts[3],
        unknown_ns=parts[4],
        prefill_low_ns=min(containing, sum(each.prefill_low_ns for each in shares) // len(shares)),
        prefill_high_ns=max(containing, sum(each.prefill_high_ns for each in shares) // len(shares)),
        evidence=max((each.evidence for each in shares), key=order.index),
    )


def prune_steps(track: EngineTrack, until_ns: int) -> None:
    """Let go of steps before `until_ns`, but the last ones: the step before a gap is needed as well."""
    for each in (track, *track.cores.values()):
        steps: Sequence[StepSeries] = each.steps
        while len(steps) > 1 and int(steps[1].end_ns[0]) <= until_ns:
            each.steps.popleft()


def _order(rank: str) -> tuple[int, str]:
    return len(rank), rank


def _doubt(evidence: Evidence) -> Evidence:
    return "estimated" if evidence == "measured" else evidence
