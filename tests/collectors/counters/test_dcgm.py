"""The dcgm rung against a scripted exporter, under a clock of the test's own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.dcgm_exporter import CURRENT, DcgmExporter, DcgmScenario, Device, Fault, Level
from tests.doubles.http_server import answer, raw_server, read_request
from tests.doubles.proc_tree import ProcTree

from gpuidle.agent.clock import Instant
from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuReading
from gpuidle.collectors.counters.dcgm import DcgmRung
from gpuidle.collectors.counters.dcgm_cadence import Cadence
from gpuidle.collectors.counters.dcgm_page import DeviceKey, read_page
from gpuidle.collectors.counters.rung import RungReading

SECOND = 1_000_000_000
A, B = (f"GPU-00000000-0000-4000-8000-{index:012x}" for index in (0, 1))
BUSY = (Level(0.0, gr=0.9, sm=0.8, tensor=0.03, dram=0.7),)
H100_BYTES = 85_520_809_984
H100_BANDWIDTH = 3352e9


class FakeClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.s = 1_000.0

    def now(self) -> Instant:
        ns = round(self.s * 1e9)
        return Instant(ns, ns, ns + 1_700_000_000 * SECOND)

    async def sleep_until(self, monotonic_ns: int) -> None:
        raise AssertionError("nobody sleeps here")


class Bench:
    """A rung, an exporter and NVML's view of the devices, on one clock; a tick is a second."""

    def __init__(
        self, scenario: DcgmScenario, stack: ExitStack, devices: tuple[GpuReading, ...] = ()
    ) -> None:
        self.clock = FakeClock()
        self.exporter = DcgmExporter(scenario, lambda: self.clock.s)
        self.url = stack.enter_context(self.exporter.serving())
        self.rung = DcgmRung(self.url, clock=self.clock, threaded=False)
        stack.callback(self.rung.close)
        self.devices = devices or tuple(gpu(d.uuid) for d in scenario.devices)
        self.last = RungReading()
        self.series: dict[str, list[CounterSeries]] = {}

    def run(self, seconds: float) -> None:
        """Poll as the rung wishes, and read every second."""
        end_s = self.clock.s + seconds
        poll_s, tick_s = self.clock.s, self.clock.s
        while self.clock.s < end_s:
            if poll_s <= self.clock.s:
                poll_s = self.clock.s + self.rung.poll()
            if tick_s <= self.clock.s:
                self.read()
                tick_s += 1.0
            self.clock.s = min(poll_s, tick_s, end_s)

    def read(self) -> None:
        devices = []
        for device in self.devices:
            truth = next((d for d in self.exporter.scenario.devices if d.uuid == device.hw_id), None)
            joules = None if truth is None else truth.energy_at(self.clock.s)
            ns = round(self.clock.s * 1e9)
            devices.append(gpu(device.hw_id, device, energy=joules, read_ns=ns))
        self.last = self.rung.read(round(self.clock.s * 1e9), devices)
        for series in self.last.series:
            self.series.setdefault(series.hw_id, []).append(series)

    def column(self, name: str, uuid: str = A) -> list[float]:
        """Return all samples of a column so far."""
        rows = [getattr(series, name) for series in self.series.get(uuid, [])]
        assert all(row is not None for row in rows), name
        return [float(value) for row in rows for value in row]

    def ratios(self, name: str, uuid: str = A) -> list[float]:
        return [round(value * RATIO_STEP, 4) for value in self.column(name, uuid)]

    def spans_s(self, uuid: str = A) -> list[tuple[float, float]]:
        ends, widths = self.column("end_ns", uuid), self.column("width_ns", uuid)
        return [((end - width) / 1e9, end / 1e9) for end, width in zip(ends, widths, strict=True)]

    def state(self, uuid: str = A) -> str:
        return next(status.state for status in self.last.status if status.hw_id == uuid)

    def words(self, uuid: str = A) -> str:
        status = next(status for status in self.last.status if status.hw_id == uuid)
        return f"{status.message} | {status.remedy}"


def gpu(
    hw_id: str, like: GpuReading | None = None, *, energy: float | None = None, read_ns: int = 0
) -> GpuReading:
    return GpuReading(
        hw_id=hw_id,
        index=0,
        name=like.name if like is not None else "NVIDIA H100 80GB HBM3",
        read_ns=read_ns,
        parent_hw_id=like.parent_hw_id if like is not None else None,
        instance_id=like.instance_id if like is not None else None,
        memory_total_bytes=like.memory_total_bytes if like is not None else H100_BYTES,
        energy_joules=energy,
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


# --------------------------------------------------------------------------------------------------------
# The interval


@pytest.mark.parametrize("interval_s", [0.1, 0.5, 1.0, 2.5, 15.0, 30.0])
def test_the_interval_is_found_from_the_data(stack: ExitStack, interval_s: float) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), interval_s=interval_s, phase_s=0.037), stack)
    bench.run(max(10.0, 4 * interval_s + 2))
    assert bench.rung.standing.interval_ns == round(interval_s * 1e9)
    assert bench.state() == "serving"
    widths = bench.column("width_ns")
    assert widths
    # Clipped where two seem to overlap, never longer.
    assert all(0.5 * interval_s * 1e9 < width <= 1.13 * interval_s * 1e9 for width in widths)


@pytest.mark.parametrize("interval_s", [1.0, 5.0])
def test_samples_follow_each_other_without_overlap_or_stretch(stack: ExitStack, interval_s: float) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), interval_s=interval_s, phase_s=0.3), stack)
    bench.run(20 * interval_s)
    spans = bench.spans_s()
    assert len(spans) >= 14
    for (_, end), (begin, _) in pairwise(spans):
        assert begin >= end
    assert all(end - begin <= interval_s * 1.000001 for begin, end in spans)
    covered = sum(end - begin for begin, end in spans)
    assert covered == pytest.approx(spans[-1][1] - spans[0][0], rel=0.02)


def test_each_value_is_given_once_with_the_mean_that_was_true(stack: ExitStack) -> None:
    levels = tuple(Level(1_000.0 + 2.0 * k, gr=0.1 * (k % 10), tensor=0.05 * (k % 10)) for k in range(30))
    bench = Bench(DcgmScenario((Device(A, levels),), interval_s=2.0), stack)
    bench.run(40)
    device = bench.exporter.scenario.devices[0]
    got = bench.ratios("gr_active")
    assert len(got) >= 15
    for (begin, end), value in zip(bench.spans_s(), got, strict=True):
        middle = (begin + end) / 2
        k = int((middle - 1_000.0) // 2.0)
        assert value == pytest.approx(device.mean("gr", 1_000.0 + 2 * k, 1_002.0 + 2 * k), abs=1e-4)
    assert got == sorted(got, key=lambda value: value) or len(set(got)) > 5


def test_faster_polls_find_an_interval_shorter_than_a_poll(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), interval_s=0.2), stack)
    bench.run(10)
    assert bench.rung.standing.interval_ns == SECOND // 5
    assert sum(bench.column("width_ns")) > 0.7 * 8 * SECOND


def test_an_exporter_that_restarts_with_another_interval_is_followed(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), interval_s=5.0), stack)
    bench.run(30)
    bench.exporter.scenario = replace(bench.exporter.scenario, interval_s=2.0)
    bench.run(30)
    assert bench.rung.standing.interval_ns == 2 * SECOND


def test_a_constant_counter_is_given_every_interval_while_the_page_lives(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A),), interval_s=2.0), stack)
    bench.run(40)
    assert set(bench.ratios("gr_active")) == {0.0}
    covered = sum(bench.column("width_ns"))
    assert 0.75 * 34 * SECOND < covered <= 40 * SECOND


def test_zeros_alone_on_a_page_that_never_changes_are_no_idle_gpu(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A),), interval_s=1.0, device_fields=False), stack)
    bench.run(100)
    assert bench.series == {}
    assert bench.state() == "lost"


@pytest.mark.parametrize("skew_s", [0.03, 0.3])
def test_gpus_that_are_renewed_one_after_another_keep_their_own_values(
    stack: ExitStack, skew_s: float
) -> None:
    levels = [
        tuple(Level(990.0 + 0.25 * k, gr=((7 * k + 3 * gpu) % 40) / 40) for k in range(400)) for gpu in (0, 1)
    ]
    devices = (Device(A, levels[0]), Device(B, levels[1], gpu=1))
    bench = Bench(DcgmScenario(devices, interval_s=1.0, phase_s=0.11, skew_s=skew_s), stack)
    bench.run(40)
    for gpu_index, uuid in enumerate((A, B)):
        got = bench.ratios("gr_active", uuid)
        truth = [
            round(devices[gpu_index].mean("gr", begin, begin + 1.0), 4)
            for begin in (999.11 + gpu_index * skew_s + k for k in range(40))
        ]
        # Every mean once and in order; those before the interval was known are missing.
        assert len(got) >= 30
        at = truth.index(got[0])
        assert got == pytest.approx(truth[at : at + len(got)], abs=2e-4)


def test_device_fields_of_another_phase_do_not_disturb(stack: ExitStack) -> None:
    levels = tuple(Level(990.0 + 0.7 * k, gr=(k % 7) / 7) for k in range(90))
    scenario = DcgmScenario((Device(A, levels),), interval_s=1.0, device_phase_s=0.45, lag_s=0.3)
    bench = Bench(scenario, stack)
    bench.run(40)
    spans = bench.spans_s()
    assert len(spans) >= 30
    assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(spans))
    assert bench.rung.lag_ns == pytest.approx(0.3e9, abs=0.13e9)


def test_labels_of_pods_that_come_and_go_are_no_renewal(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), interval_s=5.0), stack)
    for second in range(40):
        pod = (("pod", f"vllm-{second}"), ("namespace", "llm"))
        device = replace(bench.exporter.scenario.devices[0], labels=pod if second % 2 else ())
        bench.exporter.scenario = replace(bench.exporter.scenario, devices=(device,))
        bench.run(1)
    assert bench.rung.standing.interval_ns == 5 * SECOND


@settings(max_examples=40, deadline=None)
@given(st.integers(100, 40_000), st.floats(0, 1), st.floats(0.26, 0.9))
def test_the_cadence_of_any_interval_lies_within_its_bounds(
    period_ms: int, phase: float, part: float
) -> None:
    period = period_ms * 1_000_000
    poll = int(period * part * 0.5)
    cadence = Cadence()
    before = None
    for k in range(80):
        renewal = (k * poll - int(phase * period)) // period
        cadence.poll(k * poll, k * poll, changed=before is not None and renewal != before)
        before = renewal
    assert cadence.interval_ns is not None
    assert cadence.interval_ns == pytest.approx(period, rel=0.15)


# --------------------------------------------------------------------------------------------------------
# Lag


def test_the_lag_is_found_by_the_energy_counter(stack: ExitStack) -> None:
    levels = (Level(0.0, gr=0.2), Level(1_020.0, gr=0.9))
    bench = Bench(DcgmScenario((Device(A, levels),), interval_s=1.0, phase_s=0.4, lag_s=0.7), stack)
    bench.run(40)
    assert bench.rung.lag_ns == pytest.approx(0.7e9, abs=0.15e9)
    first_high = next(
        (begin, end)
        for (begin, end), value in zip(bench.spans_s(), bench.ratios("gr_active"), strict=True)
        if value > 0.5
    )
    assert first_high[0] == pytest.approx(1_020.0, abs=0.45)  # without the lag it would begin at 1020.7


def test_without_energy_on_the_page_no_lag_is_claimed(stack: ExitStack) -> None:
    scenario = DcgmScenario(
        (Device(A, (Level(0.0, gr=0.1), Level(1_005.5, gr=0.7), Level(1_011.3, gr=0.3))),),
        lag_s=0.5,
        device_fields=False,
    )
    bench = Bench(scenario, stack)
    bench.run(20)
    assert bench.rung.lag_ns is None


def test_time_stamps_give_the_end_itself(stack: ExitStack) -> None:
    bench = Bench(
        DcgmScenario((Device(A, BUSY),), interval_s=1.0, phase_s=0.25, lag_s=0.6, timestamps=True), stack
    )
    bench.run(15)
    ends = [end for _, end in bench.spans_s()]
    assert len(ends) >= 8
    # Refreshed at x.25, of a span that ended 0.6 s before.
    assert all(end % 1.0 == pytest.approx(0.65, abs=0.002) for end in ends)


# --------------------------------------------------------------------------------------------------------
# Columns and labels


@pytest.mark.parametrize(
    "scenario",
    [
        DcgmScenario((Device(A, BUSY),)),
        DcgmScenario((Device(A, BUSY),), names=CURRENT, host_label="hostname"),
        DcgmScenario((Device(A, BUSY),), uuid_label="uuid", host_label=None),
        DcgmScenario((Device(A, BUSY, labels=(("pod", 'a\\"b\\\\{}'), ("namespace", "llm"))),)),
    ],
    ids=["legacy", "since-4.9", "old-uuid", "pod"],
)
def test_every_spelling_of_labels_and_names_reads_the_same(stack: ExitStack, scenario: DcgmScenario) -> None:
    bench = Bench(scenario, stack)
    bench.run(6)
    assert set(bench.ratios("gr_active")) == {0.9}
    assert set(bench.ratios("sm_active")) == {0.8}
    assert set(bench.ratios("tensor_active")) == {0.03}
    assert bench.column("dram_bytes_per_s")[0] == pytest.approx(0.7 * H100_BANDWIDTH, rel=0.005)


def test_a_device_of_unknown_bandwidth_has_no_bytes(stack: ExitStack) -> None:
    other = GpuReading(hw_id=A, index=0, name="NVIDIA Unheard Of", read_ns=0, memory_total_bytes=2**30)
    bench = Bench(DcgmScenario((Device(A, BUSY),)), stack, (other,))
    bench.run(6)
    assert all(series.dram_bytes_per_s is None for series in bench.series[A])
    assert set(bench.ratios("gr_active")) == {0.9}


def test_sm_active_is_off_by_default_and_then_absent(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), counters=("gr", "tensor", "dram")), stack)
    bench.run(6)
    assert all(series.sm_active is None for series in bench.series[A])
    assert bench.state() == "serving"


def test_mig_instances_are_joined_by_parent_and_instance(stack: ExitStack) -> None:
    low, high = (Level(0.0, gr=0.1),), (Level(0.0, gr=0.6),)
    scenario = DcgmScenario(
        (Device(A, low, instance=(13, "1g.10gb")), Device(A, high, instance=(5, "3g.40gb")))
    )
    devices = tuple(
        GpuReading(
            hw_id=f"MIG-{instance}",
            index=0,
            name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            read_ns=0,
            parent_hw_id=A,
            instance_id=instance,
        )
        for instance in (5, 13, 7)
    )
    bench = Bench(scenario, stack, devices)
    bench.run(6)
    assert set(bench.ratios("gr_active", "MIG-5")) == {0.6}
    assert set(bench.ratios("gr_active", "MIG-13")) == {0.1}
    assert "MIG-7" not in bench.series
    assert bench.state("MIG-7") == "failed"


def test_a_page_of_the_oldest_form_is_read() -> None:
    """No pci_bus_id and no modelName; a line with an instance's id beside lines without."""
    page = read_page(
        f'DCGM_FI_PROF_GR_ENGINE_ACTIVE{{gpu="0",UUID="{A}",device="nvidia0",Hostname="n"}} 0.912345\n'
        f'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{gpu="0",UUID="{A}",device="nvidia0",Hostname="n"}} 0.823456\n'
        f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{A}",GPU_I_PROFILE="1g.5gb",GPU_I_ID="13"}} 40\n'
    )
    assert page.devices[DeviceKey(A)].ratios == {"gr_active": 0.912345, "tensor_active": 0.823456}
    assert page.devices[DeviceKey(A, 13)].ratios == {}


# --------------------------------------------------------------------------------------------------------
# Faults

SENTINELS = (
    "140737488355328.0",
    "2147483632",
    "4294967295",
    "9223372036854775794",
    "18446744073709551615",
    "200000",
    "-1",
    "NaN",
    "+Inf",
    "-Inf",
)
TOKENS = ("N/A", "[N/A]", "[Not Supported]", "-", "", "ERR!")


@pytest.mark.parametrize("text", [*SENTINELS, *TOKENS])
def test_what_is_no_ratio_never_leaves_the_rung(stack: ExitStack, text: str) -> None:
    scenario = DcgmScenario(
        (Device(A, BUSY), Device(B, BUSY, gpu=1)),
        faults=(Fault("value", counter="tensor", uuid=A, text=text),),
    )
    bench = Bench(scenario, stack)
    bench.run(6)
    assert all(series.tensor_active is None for series in bench.series[A])
    assert set(bench.ratios("gr_active", A)) == {0.9}
    assert set(bench.ratios("tensor_active", B)) == {0.03}
    assert [problem.kind for problem in bench.last.problems] == ["bad_reading"]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=400) | st.floats().map(lambda v: f'DCGM_FI_PROF_SM_ACTIVE{{UUID="GPU-a"}} {v}\n'))
def test_any_page_gives_ratios_from_0_to_1_or_none(text: str) -> None:
    for row in read_page(text).devices.values():
        assert all(0 <= value <= 1 for value in row.ratios.values())


def test_without_profiling_fields_the_rung_is_refused_with_a_remedy(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), faults=(Fault("missing"),)), stack)
    bench.run(6)
    assert bench.series == {}
    assert bench.state() == "refused"
    assert "SYS_ADMIN" in bench.words()
    assert "GeForce" in bench.words()


@pytest.mark.parametrize("kind", ["missing", "value"])
def test_counters_that_another_tool_takes_are_busy_and_come_back(stack: ExitStack, kind: str) -> None:
    fault = Fault(kind, from_s=1_010.0, to_s=1_030.0)  # type: ignore[arg-type]
    bench = Bench(DcgmScenario((Device(A, BUSY),), faults=(fault,)), stack)
    bench.run(9)
    assert bench.state() == "serving"
    before = len(bench.column("gr_active"))
    bench.run(15)
    assert bench.state() == "busy"
    assert "another profiler" in bench.words()
    assert len(bench.column("gr_active")) <= before + 3
    bench.run(16)
    assert bench.state() == "serving"
    assert set(bench.ratios("gr_active")) == {0.9}
    lost = [end for begin, end in bench.spans_s() if 1_011.5 < begin < 1_029.5]
    assert lost == []


def test_stuck_zeros_stay_what_they_are_for_the_ladder_to_judge(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), faults=(Fault("zero", from_s=1_010.0),)), stack)
    bench.run(30)
    assert bench.ratios("gr_active")[-1] == 0.0
    assert bench.ratios("tensor_active")[-1] == 0.0


def test_a_page_that_stands_still_is_lost_and_its_last_value_is_not_repeated(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), faults=(Fault("frozen", 1_010.0, 1_040.0),)), stack)
    bench.run(30)
    assert bench.state() == "lost"
    assert "has not changed" in bench.words()
    assert max(end for _, end in bench.spans_s()) < 1_012.0
    bench.run(25)
    assert bench.state() == "serving"


def test_an_exporter_that_dies_and_comes_back(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), faults=(Fault("error", 1_010.0, 1_020.0),)), stack)
    bench.run(15)
    assert bench.state() == "lost"
    assert "500" in bench.words()
    bench.run(40)
    assert bench.state() == "serving"
    assert not [1 for begin, end in bench.spans_s() if begin < 1_019.0 and end > 1_011.5]


def test_an_empty_page_and_another_server_are_named(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),), faults=(Fault("empty"),)), stack)
    bench.run(3)
    assert bench.state() == "failed"
    assert "no dcgm-exporter" in bench.words()


def test_a_gpu_that_the_exporter_does_not_list_is_named(stack: ExitStack) -> None:
    bench = Bench(DcgmScenario((Device(A, BUSY),)), stack, (gpu(A), gpu(B)))
    bench.run(6)
    assert bench.state(A) == "serving"
    assert bench.state(B) == "failed"
    assert "does not list" in bench.words(B)


def test_a_slow_exporter_costs_the_reading_thread_nothing(stack: ExitStack) -> None:
    """The thread hangs in its request; `read` answers at once all the same."""

    def hang(link: socket.socket) -> None:
        while link.recv(65536):
            pass

    hanging = stack.enter_context(raw_server(hang))
    rung = DcgmRung(hanging, timeout_s=0.5)
    reading = rung.read(SECOND, [gpu(A)])
    assert [status.state for status in reading.status] == ["starting"]
    rung.close()


def test_a_flood_of_a_page_is_refused(stack: ExitStack) -> None:
    def flood(link: socket.socket) -> None:
        read_request(link)
        link.sendall(answer(b"DCGM_FI_PROF_SM_ACTIVE 1\n" * 800_000))

    url = stack.enter_context(raw_server(flood))
    rung = DcgmRung(url, clock=FakeClock(), threaded=False)
    rung.poll()
    reading = rung.read(SECOND, [gpu(A)])
    assert reading.status[0].state == "failed"
    rung.close()


def test_the_thread_polls_and_ends_on_its_own(stack: ExitStack) -> None:
    exporter = DcgmExporter(DcgmScenario((Device(A, BUSY),), interval_s=0.5))
    url = stack.enter_context(exporter.serving())
    rung = DcgmRung(url)
    deadline = time.monotonic() + 60
    series: tuple[CounterSeries, ...] = ()
    while not series and time.monotonic() < deadline:
        series = rung.read(time.monotonic_ns(), [gpu(A)]).series
        time.sleep(0.05)
    rung.close()
    assert series
    assert np.all(series[0].width_ns <= 5 * 10**8)
    assert rung._thread is not None
    rung._thread.join(10)
    assert not rung._thread.is_alive()


# --------------------------------------------------------------------------------------------------------
# Finding it


def find(root: Path) -> DcgmRung:
    return DcgmRung(proc=root, clock=FakeClock(), threaded=False, timeout_s=2.0)


def test_no_exporter_on_the_node_says_so(tmp_path: Path) -> None:
    ProcTree(tmp_path)
    rung = find(tmp_path)
    rung.poll()
    status = rung.read(0, [gpu(A)]).status[0]
    assert status.state == "refused"
    assert "--dcgm-url" in status.remedy


@pytest.mark.parametrize("words", [["/usr/bin/dcgm-exporter", "-a", ":{}"], ["dcgm-exporter"]])
def test_a_process_of_the_node_is_found_by_its_name(
    tmp_path: Path, stack: ExitStack, words: list[str]
) -> None:
    url = stack.enter_context(DcgmExporter(DcgmScenario((Device(A, BUSY),))).serving())
    port = int(url.rpartition(":")[2])
    tree = ProcTree(tmp_path)
    command = [word.format(port) for word in words]
    tree.add(77, command, comm=b"dcgm-exporter", listen=[("0.0.0.0", port)])
    rung = find(tmp_path)
    rung.poll()
    assert rung.standing.url == url
    assert rung.standing.page is not None
    rung.close()


def test_an_exporter_in_a_pod_has_to_be_named(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(77, ["dcgm-exporter"], comm=b"dcgm-exporter", listen=[("0.0.0.0", 9400)], net="net:[1]")
    rung = find(tmp_path)
    rung.poll()
    status = rung.read(0, [gpu(A)]).status[0]
    assert "network namespace" in status.message
    assert "--dcgm-url http://ADDRESS:9400" in status.remedy
