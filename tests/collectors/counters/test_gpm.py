"""The rung nvml_gpm through the real pynvml on the double, and its rules on made-up devices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.collectors.counters.ladder_process import LadderProcess, Tick, ladder_process, rows
from tests.doubles.nvml import EVENT_TYPES, Event, Fault, GpmMetric, Gpu, MigInstance, Scenario
from tests.doubles.nvml.library import header, return_codes

from gpuidle.collectors.counters import gpm_calls, gpm_thread
from gpuidle.collectors.counters.gpm_calls import Means, mean_ratio
from gpuidle.collectors.counters.gpm_thread import Target
from gpuidle.collectors.counters.nvml_binding import nvml

SECOND = 10**9
REFRESH_NS = 100_000_000
UUIDS = [f"GPU-00000000-0000-4000-8000-{index:012x}" for index in range(64)]
BLANK = 140737488355328.0
SPIKE_NS = 300_000_000


def metrics(
    gr: float = 100.0, sm: float = 50.0, tensor: float = 25.0, dram: float = 40.0
) -> tuple[GpmMetric, ...]:
    return GpmMetric(1, gr), GpmMetric(2, sm), GpmMetric(5, tensor), GpmMetric(10, dram)


@dataclass(frozen=True)
class Run:
    """A node watched for some seconds."""

    ticks: list[Tick]
    change_ns: int
    spike: tuple[int, int]


@pytest.fixture(scope="module")
def watched(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One node whose GPUs differ, watched once for all tests that only look."""
    folder = tmp_path_factory.mktemp("gpm")
    varied(change_ns=2**62).write(folder / "scenario")
    with ladder_process(nvml_library, folder, "gpm") as node:
        node.tick()
        node.until(
            lambda tick: all(rows([tick], uuid, "gr_active") for uuid in (UUIDS[0], UUIDS[7], "MIG-b"))
        )
        change_ns = time.monotonic_ns() + SECOND
        varied(change_ns).write(folder / "scenario")
        while time.monotonic_ns() < change_ns + SPIKE_NS + SECOND:
            node.run(1)
        node.until(
            lambda tick: any(
                begin > change_ns + SPIKE_NS for begin, _, _ in rows([tick], UUIDS[7], "sm_active")
            )
        )
        yield Run(node.ticks, change_ns, (change_ns, change_ns + SPIKE_NS))


def varied(change_ns: int) -> Scenario:
    """Return a node on which GPU 1 changes, and GPU 7 has a spike, from `change_ns` on."""
    spikes = ((0, 50.0), (change_ns, 4294967295.0), (change_ns + SPIKE_NS, 50.0))
    instances = (
        MigInstance("MIG-a", 9, gpm=metrics(sm=10)),
        MigInstance("MIG-b", 11, gpm=metrics(sm=70)),
        MigInstance("MIG-c", 13, 0, gpm=metrics()),
        MigInstance("MIG-d", 13, 1, gpm=metrics()),
    )
    gpus = (
        Gpu(gpm=metrics()),
        Gpu(gpm=(GpmMetric(1, 100.0), GpmMetric(2, ((0, 20.0), (change_ns, 80.0))), GpmMetric(5, 3.0))),
        Gpu(gpm=metrics(tensor=BLANK, dram=math.nan)),
        Gpu(
            gpm=(
                *metrics()[:1],
                GpmMetric(2, 50.0, code=999),
                GpmMetric(5, 25.0),
                GpmMetric(10, 40.0, code=3),
            )
        ),
        Gpu(mig_mode=1, instances=instances),
        Gpu(),
        Gpu(name="NVIDIA Z9000", gpm=metrics()),
        Gpu(gpm=(GpmMetric(1, 100.0), GpmMetric(2, spikes), GpmMetric(5, 25.0))),
    )
    return Scenario(gpus=gpus)


def test_nothing_is_emitted_before_a_window_is_whole(watched: Run) -> None:
    first = watched.ticks[0]
    assert (first.counters, first.state(UUIDS[0])) == ((), "starting")
    assert watched.ticks[-1].state(UUIDS[0]) == "serving"


@pytest.mark.parametrize(
    ("column", "value"), [("gr_active", 1.0), ("sm_active", 0.5), ("tensor_active", 0.25)]
)
def test_means_are_the_scenarios(watched: Run, column: str, value: float) -> None:
    found = rows(watched.ticks, UUIDS[0], column)
    assert len(found) >= 5
    assert {round(mean, 5) for _, _, mean in found} == {value}


def test_dram_bytes_are_the_share_of_the_sheets_bandwidth_where_it_is_known(watched: Run) -> None:
    found = rows(watched.ticks, UUIDS[0], "dram_bytes_per_s")
    assert found
    assert all(value == pytest.approx(0.4 * 3352e9, rel=1e-4) for _, _, value in found)
    assert rows(watched.ticks, UUIDS[6], "dram_bytes_per_s") == []  # an unknown GPU has no sheet
    assert rows(watched.ticks, UUIDS[6], "sm_active")
    assert rows(watched.ticks, "MIG-a", "dram_bytes_per_s") == []  # share of what, is not documented
    assert rows(watched.ticks, "MIG-a", "sm_active")


def test_a_change_is_seen_within_a_refresh_of_the_driver(watched: Run) -> None:
    found = rows(watched.ticks, UUIDS[1], "sm_active")
    before = [mean for begin, end, mean in found if end <= watched.change_ns]
    after = [mean for begin, end, mean in found if begin >= watched.change_ns + REFRESH_NS]
    between = [mean for _, _, mean in found if not (mean in before or mean in after)]
    assert {round(mean, 4) for mean in before} == {0.2}
    assert {round(mean, 4) for mean in after} == {0.8}
    assert len(between) <= 2
    assert all(0.2 < mean < 0.8 for mean in between)


def test_windows_do_not_overlap_and_are_as_long_as_the_driver_allows(watched: Run) -> None:
    for uuid in (UUIDS[0], "MIG-b"):
        found = rows(watched.ticks, uuid, "sm_active")
        assert all(begin >= end for (_, end, _), (begin, _, _) in pairwise(found))
        assert all(end - begin > REFRESH_NS for begin, end, _ in found)


def test_a_blank_in_one_metric_costs_that_metric_and_is_counted(watched: Run) -> None:
    assert rows(watched.ticks, UUIDS[2], "tensor_active") == []
    assert rows(watched.ticks, UUIDS[2], "dram_bytes_per_s") == []
    assert {round(mean, 5) for _, _, mean in rows(watched.ticks, UUIDS[2], "sm_active")} == {0.5}
    assert any(("bad_reading", UUIDS[2]) in tick.kinds() for tick in watched.ticks)


def test_each_metric_has_its_own_return(watched: Run) -> None:
    assert (
        rows(watched.ticks, UUIDS[3], "sm_active") == rows(watched.ticks, UUIDS[3], "dram_bytes_per_s") == []
    )
    assert {round(mean, 5) for _, _, mean in rows(watched.ticks, UUIDS[3], "tensor_active")} == {0.25}
    assert not any(("bad_reading", UUIDS[3]) in tick.kinds() for tick in watched.ticks)


def test_a_spike_costs_its_own_rows(watched: Run) -> None:
    found = rows(watched.ticks, UUIDS[7], "sm_active")
    assert {round(mean, 5) for begin, end, mean in found if end < watched.spike[0]} == {0.5}
    assert all(mean <= 1.0 for _, _, mean in found)
    assert any(begin > watched.spike[1] for begin, _, _ in found)
    assert any(("bad_reading", UUIDS[7]) in tick.kinds() for tick in watched.ticks)


def test_instances_are_measured_and_their_gpu_is_not(watched: Run) -> None:
    assert {round(mean, 5) for _, _, mean in rows(watched.ticks, "MIG-a", "sm_active")} == {0.1}
    assert {round(mean, 5) for _, _, mean in rows(watched.ticks, "MIG-b", "sm_active")} == {0.7}
    last = watched.ticks[-1]
    assert last.state(UUIDS[4]) is None
    assert (last.state("MIG-c"), last.state("MIG-d")) == ("unsupported", "unsupported")
    assert any("several compute instances share" in problem.message for problem in last.problems)


def test_a_gpu_without_gpm_says_what_it_needs(watched: Run) -> None:
    last = watched.ticks[-1]
    assert last.state(UUIDS[5]) == "unsupported"
    assert any(
        problem.kind == "rung_unsupported" and "Hopper" in problem.message for problem in last.problems
    )


# --- what happens under way


@pytest.fixture
def node(nvml_library: Path, tmp_path: Path) -> Iterator[LadderProcess]:
    Scenario(gpus=(Gpu(gpm=metrics()), Gpu(gpm=metrics()))).write(tmp_path / "scenario")
    with ladder_process(nvml_library, tmp_path, "gpm") as started:
        yield started


def test_a_hanging_sample_costs_its_own_gpu_and_comes_back(node: LadderProcess) -> None:
    both = (Gpu(gpm=metrics()), Gpu(gpm=metrics()))
    node.until(lambda tick: tick.state(UUIDS[1]) == "serving")
    threads = node.ticks[-1].threads
    node.write(Scenario(gpus=both, faults=(Fault("nvmlGpmSampleGet", gpu=1, delay_ms=3_600_000),)))
    lost = node.until(lambda tick: tick.state(UUIDS[1]) == "lost")
    assert lost.gpus is not None
    assert len(lost.gpus) == 2  # the basics are read by others
    node.until(lambda tick: bool(rows([tick], UUIDS[0], "sm_active")))
    assert all(tick.state(UUIDS[0]) == "serving" for tick in node.run(3))
    assert {tick.threads for tick in node.run(3)} == {threads + 1}  # one took the others over, and no more
    node.write(Scenario(gpus=both))
    node.until(lambda tick: rows([tick], UUIDS[1], "sm_active") != [])
    assert {round(mean, 5) for _, _, mean in rows(node.ticks, UUIDS[1], "sm_active")} == {0.5}
    assert node.ticks[-1].threads == threads + 1


def test_a_tick_without_a_window_is_no_loss(node: LadderProcess) -> None:
    node.until(lambda tick: bool(rows([tick], UUIDS[0], "sm_active")))
    quick = node.run(12, pause_s=0.04)  # five a second are sampled
    assert any(not tick.raw for tick in quick)
    assert {tick.state(UUIDS[0]) for tick in quick} == {"serving"}


def test_a_driver_that_was_gone_is_found_again(node: LadderProcess) -> None:
    both = (Gpu(gpm=metrics()), Gpu(gpm=metrics(sm=80)))
    node.until(lambda tick: tick.state(UUIDS[1]) == "serving")
    node.write(Scenario(gpus=both, faults=(Fault("*", "UNKNOWN"),)))
    node.until(lambda tick: tick.gpus is None and tick.counters == ())
    node.write(Scenario(gpus=both))
    found = node.until(lambda tick: tick.gpus is not None and rows([tick], UUIDS[1], "sm_active") != [])
    assert [gpu.hw_id for gpu in found.gpus or ()] == UUIDS[:2]
    assert round(rows([found], UUIDS[1], "sm_active")[-1][2], 5) == 0.8


@pytest.mark.parametrize("told_by", ["event", "size"])
def test_a_pair_across_a_recreated_instance_is_thrown_away(
    nvml_library: Path, tmp_path: Path, told_by: str
) -> None:
    """The same UUID and id: the double then gives a plausible number that means nothing, with success."""
    now = time.monotonic_ns()
    types = EVENT_TYPES if told_by == "event" else None

    def split(instance: MigInstance, events: tuple[Event, ...] = ()) -> Scenario:
        return Scenario(gpus=(Gpu(mig_mode=1, instances=(instance,), event_types=types, events=events),))

    old = MigInstance("MIG-a", 9, gpm=(GpmMetric(2, 10.0),), gpm_since_ns=now)
    split(old).write(tmp_path / "scenario")
    with ladder_process(nvml_library, tmp_path, "gpm") as node:
        node.until(lambda tick: rows([tick], "MIG-a", "sm_active") != [])
        now = time.monotonic_ns()
        new = replace(old, gpm=(GpmMetric(2, 90.0),), gpm_since_ns=now)
        if told_by == "size":
            new = replace(new, multiprocessors=32)
        node.write(split(new, (Event(now, type=0x100),) if told_by == "event" else ()))
        node.until(
            lambda tick: any(round(mean, 4) == 0.9 for _, _, mean in rows([tick], "MIG-a", "sm_active"))
        )
        assert {round(mean, 4) for _, _, mean in rows(node.ticks, "MIG-a", "sm_active")} == {0.1, 0.9}
        said = [p.message for tick in node.ticks for p in tick.problems if p.kind == "windows_thrown_away"]
        assert said == ["GPM windows left out as they cannot be trusted: 1 across a re-created instance"]


CODES = sorted(code for name, code in return_codes(header().read_text(encoding="utf-8")).items() if code)


def test_no_return_code_makes_a_number(nvml_library: Path, tmp_path: Path) -> None:
    """A GPU for each code: the even ones fail as a call, the odd ones in each metric."""
    count = min(len(CODES), 60)
    gpus = [Gpu(gpm=metrics())]
    faults = []
    for index, code in enumerate(CODES[:count], start=1):
        if index % 2:
            gpus.append(Gpu(gpm=tuple(replace(metric, code=code) for metric in metrics())))
        else:
            gpus.append(Gpu(gpm=metrics()))
            function = ("nvmlGpmSampleGet", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetHandleByUUID")[
                index // 2 % 3
            ]
            faults.append(Fault(function, code, gpu=index))
    Scenario(gpus=tuple(gpus), faults=tuple(faults)).write(tmp_path / "scenario")
    with ladder_process(nvml_library, tmp_path, "gpm") as node:
        node.until(lambda tick: tick.state(UUIDS[0]) == "serving")
        node.run(3)
        for index in range(1, count + 1):
            states = {tick.state(UUIDS[index]) for tick in node.ticks}
            found = {round(mean, 5) for _, _, mean in rows(node.ticks, UUIDS[index], "sm_active")}
            if index % 2:
                assert found == set(), CODES[index - 1]
            else:
                assert found <= {0.5}
                # A handle is asked for by UUID, which no fault of one GPU can catch.
                assert found == {0.5} or states & {"unsupported", "refused", "busy", "lost", "failed"}


# --- the rules, on devices that are made up


@given(
    code=st.sampled_from([0, 0, 1, 3, 15, 999]), percent=st.floats() | st.sampled_from([BLANK, 2**63 + 2.0])
)
def test_a_ratio_is_a_possible_one_or_absent(code: int, percent: float) -> None:
    ratio, bad = mean_ratio(code, percent)
    if code:
        assert (ratio, bad) == (None, False)
    elif 0 <= percent <= 101:
        assert (ratio, bad) == (min(1.0, percent / 100), False)
    else:
        assert (ratio, bad) == (None, True)


def test_buffers_are_freed_once_and_by_the_library_that_gave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[object] = []
    monkeypatch.setattr(nvml, "nvmlGpmSampleFree", freed.append)
    for library in (nvml.nvmlLib, object()):
        device = gpm_calls.GpmDevice.__new__(gpm_calls.GpmDevice)
        device._library, device._events, device._instance = library, None, None
        device._old, device._new = "old", "new"
        device.close()
        device.close()
    assert freed == ["old", "new"]
    device._library = object()  # the driver was upgraded: its handle is another library's
    with pytest.raises(nvml.NVMLError):
        device.sample()


class MadeUp:
    """A GpmDevice under a clock of the test's own."""

    def __init__(self) -> None:
        self.now_ns = SECOND
        self.call_ns = 0
        self.who: object = "first"

    def clock(self) -> int:
        return self.now_ns

    def sample(self) -> None:
        self.now_ns += self.call_ns

    def identity(self) -> object:
        return self.who

    def means(self) -> Means:
        return Means(1.0, 0.5, 0.25, None, 0)


@pytest.fixture
def made_up() -> MadeUp:
    return MadeUp()


@pytest.fixture
def track(made_up: MadeUp) -> Any:
    found = gpm_thread._Track(Target("GPU-a", "GPU-a", None, None))
    found.device = made_up  # type: ignore[assignment]
    return found


def window(track: Any, device: MadeUp, after_ns: int) -> tuple[Any, str | None]:
    device.now_ns += after_ns
    return gpm_thread._window(track, device.clock)


def test_a_window_is_between_two_samples(track: Any, made_up: MadeUp) -> None:
    assert window(track, made_up, 0) == (None, None)
    row, thrown = window(track, made_up, 200_000_000)
    assert (row.end_ns, row.width_ns, thrown) == (SECOND + 200_000_000, 200_000_000, None)


@pytest.mark.parametrize("length_ns", [1, 100_000_000, 109_000_000, 1_100_000_000, 3600 * SECOND])
def test_a_window_of_the_wrong_length_is_thrown_away_and_the_next_begins_there(
    track: Any, made_up: MadeUp, length_ns: int
) -> None:
    window(track, made_up, 0)
    assert window(track, made_up, length_ns) == (None, "of the wrong length")
    row, _ = window(track, made_up, 150_000_000)
    assert row.width_ns == 150_000_000


def test_a_sample_that_took_long_has_no_moment(track: Any, made_up: MadeUp) -> None:
    window(track, made_up, 0)
    made_up.call_ns = 60_000_000
    assert window(track, made_up, 200_000_000) == (None, "of a slow call")
    made_up.call_ns = 0
    assert window(track, made_up, 200_000_000) == (None, None)  # seeded anew
    assert window(track, made_up, 200_000_000)[0] is not None


def test_after_another_instance_the_sample_that_met_it_is_no_seed(track: Any, made_up: MadeUp) -> None:
    window(track, made_up, 0)
    made_up.who = "second"
    assert window(track, made_up, 200_000_000) == (None, "across a re-created instance")
    assert window(track, made_up, 200_000_000) == (None, None)
    assert window(track, made_up, 200_000_000)[0] is not None
