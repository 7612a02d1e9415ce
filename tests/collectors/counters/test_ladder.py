"""The ladder over made-up rungs under a clock of the test's own, and a dead counter on the double."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.collectors.counters.ladder_process import LadderProcess, ladder_process, rows
from tests.doubles.nvml import GpmMetric, Gpu, Scenario

from gpuidle.agent.model import RATIO_STEP, CounterSeries, GpuReading, Problem, Reading, Rung, column
from gpuidle.collectors.counters.ladder import LadderCollector
from gpuidle.collectors.counters.rung import RungReading, RungState, RungStatus

SECOND = 10**9
A, B = "GPU-a", "GPU-b"


class Devices:
    """A collector of devices that are busy and draw power as they are told."""

    name = "nvml"

    def __init__(self, *hw_ids: str) -> None:
        self.gpus: list[GpuReading] | None = [gpu(hw_id) for hw_id in hw_ids]
        self.busy: float | None = 0.99
        self.watts = 400.0
        self.closed = False

    def read(self, now_ns: int) -> Reading:
        if self.gpus is None:
            return Reading(problems=(Problem(source="nvml", kind="unknown_error", message="gone"),))
        return Reading(gpus=tuple(_now(each, now_ns, self.busy, self.watts) for each in self.gpus))

    def close(self) -> None:
        self.closed = True


def gpu(hw_id: str, parent: str | None = None) -> GpuReading:
    return GpuReading(hw_id=hw_id, index=0, name="NVIDIA H100 80GB HBM3", read_ns=0, parent_hw_id=parent)


def _now(reading: GpuReading, now_ns: int, busy: float | None, watts: float) -> GpuReading:
    return GpuReading(
        hw_id=reading.hw_id,
        index=0,
        name=reading.name,
        read_ns=now_ns,
        parent_hw_id=reading.parent_hw_id,
        busy_ratio=busy,
        power_watts=watts,
        power_limit_watts=700.0,
    )


class FakeRung:
    """A rung whose state, values and errors are told, by device or for all."""

    def __init__(self, name: Rung, window_ns: int = SECOND) -> None:
        self.name = name
        self.window_ns = window_ns
        self.state: dict[str, RungState] = {}
        self.sm: dict[str, float] = {}
        self.gr = 0.0
        self.silent = False
        self.error: Exception | None = None
        self.asked: list[str] = []
        self.closed = False

    def read(self, now_ns: int, devices: Sequence[GpuReading]) -> RungReading:
        if self.error is not None:
            raise self.error
        self.asked = [device.hw_id for device in devices]
        status, series = [], []
        for hw_id in self.asked:
            state = self.state.get(hw_id, "serving")
            status.append(
                RungStatus(rung=self.name, hw_id=hw_id, state=state, message=f"{state}!", remedy="do")
            )
            if state == "serving" and not self.silent:
                series.append(
                    CounterSeries(
                        hw_id=hw_id,
                        rung=self.name,
                        end_ns=column([now_ns], "i8"),
                        width_ns=column([self.window_ns], "i8"),
                        gr_active=column([round(self.gr / RATIO_STEP)], "u2"),
                        sm_active=column([round(self.sm.get(hw_id, 0.5) / RATIO_STEP)], "u2"),
                    )
                )
        return RungReading(series=tuple(series), status=tuple(status))

    def close(self) -> None:
        self.closed = True


class Node:
    """Two GPUs and two rungs; a tick is a second."""

    def __init__(self) -> None:
        self.devices = Devices(A, B)
        self.best, self.next = FakeRung("nvml_gpm"), FakeRung("dcgm")
        self.ladder = LadderCollector(self.devices, [self.best, self.next])
        self.now_s = 100
        self.last = Reading()

    def tick(self, count: int = 1) -> dict[str, str | None]:
        """Return the rung that served each device in the last tick."""
        for _ in range(count):
            self.now_s += 1
            self.last = self.ladder.read(self.now_s * SECOND)
        served: dict[str, str | None] = {device.hw_id: None for device in self.last.gpus or ()}
        return served | {series.hw_id: series.rung for series in self.last.counters}

    def said(self) -> dict[str, str]:
        return {problem.kind: problem.subject for problem in self.last.problems}


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_best_rung_serves_and_is_the_only_one_handed_on(node: Node) -> None:
    assert node.tick() == {A: "nvml_gpm", B: "nvml_gpm"}
    assert len(node.last.counters) == 2
    assert node.last.problems == ()


def test_each_device_has_its_own_best_rung_and_says_why_not_better(node: Node) -> None:
    node.best.state[A] = "refused"
    assert node.tick() == {A: "dcgm", B: "nvml_gpm"}
    (problem,) = node.last.problems
    assert (problem.source, problem.kind, problem.subject) == ("counters", "rung_refused", A)
    assert problem.message == "nvml_gpm does not serve, dcgm does: refused!"
    assert problem.remedy == "do"


def test_one_reason_for_all_is_told_once(node: Node) -> None:
    node.best.state.update({A: "busy", B: "busy"})
    assert node.tick() == {A: "dcgm", B: "dcgm"}
    (problem,) = node.last.problems
    assert problem.message == "nvml_gpm does not serve, dcgm does: busy!"


def test_what_the_hardware_does_not_have_is_told_only_where_nothing_serves(node: Node) -> None:
    node.best.state.update({A: "unsupported", B: "unsupported"})
    node.tick()
    assert node.said() == {}
    node.next.state[B] = "lost"
    assert node.tick() == {A: "dcgm", B: None}
    assert node.said() == {"rung_unsupported": B, "rung_lost": B}


@pytest.mark.parametrize("state", ["busy", "lost", "refused", "failed", "starting"])
def test_a_rung_that_goes_is_replaced_at_once_and_taken_up_again(node: Node, state: RungState) -> None:
    node.tick()
    node.best.state[A] = state
    assert node.tick() == {A: "dcgm", B: "nvml_gpm"}
    del node.best.state[A]
    assert node.tick() == {A: "nvml_gpm", B: "nvml_gpm"}


def test_a_rung_that_says_it_serves_and_is_silent_is_replaced(node: Node) -> None:
    node.tick()
    node.best.silent = True
    assert node.tick(3) == {A: None, B: None}  # it may be late
    assert node.tick() == {A: "dcgm", B: "dcgm"}
    assert "it has given no sample for some time" in node.last.problems[0].message
    node.best.silent = False
    assert node.tick() == {A: "nvml_gpm", B: "nvml_gpm"}


def test_a_slow_rung_may_be_silent_for_two_of_its_windows(node: Node) -> None:
    node.best.window_ns = 30 * SECOND
    node.tick()
    node.best.silent = True
    node.tick(59)
    assert node.said() == {}
    assert node.tick(2) == {A: "dcgm", B: "dcgm"}


def test_a_rung_that_breaks_costs_itself_only(node: Node) -> None:
    node.best.error = RuntimeError("boom")
    assert node.tick() == {A: "dcgm", B: "dcgm"}
    assert "RuntimeError: boom" in node.last.problems[0].message


def test_a_counter_that_reads_0_on_a_busy_gpu_is_dead_and_never_idle(node: Node) -> None:
    node.tick(3)
    node.best.sm[A] = 0.0
    for tick in range(10):
        assert node.tick() == {A: "dcgm", B: "nvml_gpm"}, tick  # from the first tick on
    (problem,) = node.last.problems
    assert (problem.kind, problem.subject) == ("rung_dead", A)
    assert "a dead counter, not an idle GPU" in problem.message


def test_a_doubt_does_not_hide_why_a_rung_fell_silent(node: Node) -> None:
    node.tick(3)
    node.best.sm[A] = 0.0
    node.tick()
    node.best.state[A] = "lost"
    assert node.tick() == {A: "dcgm", B: "nvml_gpm"}
    assert node.said() == {"rung_lost": A}


def test_a_dead_counter_is_trusted_again_when_it_moves(node: Node) -> None:
    node.tick(3)
    node.best.sm[A] = 0.0
    node.tick(10)
    node.devices.busy = 0.0  # idle: 0 fits, and proves nothing
    assert node.tick(5) == {A: "dcgm", B: "nvml_gpm"}
    node.devices.busy, node.best.sm[A] = 0.99, 0.4
    assert node.tick() == {A: "dcgm", B: "nvml_gpm"}
    assert node.tick() == {A: "nvml_gpm", B: "nvml_gpm"}
    assert node.last.problems == ()


def test_both_rungs_dead_leave_the_driver(node: Node) -> None:
    node.tick(3)
    node.best.sm[A] = node.next.sm[A] = 0.0
    assert node.tick(5) == {A: None, B: "nvml_gpm"}
    assert [p.message.split(":")[0] for p in node.last.problems] == [
        "nvml_gpm does not serve, nvml does",
        "dcgm does not serve, nvml does",
    ]


def test_an_active_gpu_without_an_active_sm_contradicts_itself(node: Node) -> None:
    node.devices.busy = None  # as the driver says of an instance
    node.best.gr, node.best.sm[A] = 1.0, 0.0
    assert node.tick(5) == {A: "dcgm", B: "nvml_gpm"}
    assert node.said() == {"rung_dead": A}


def test_an_idle_gpu_is_not_a_dead_counter(node: Node) -> None:
    node.devices.busy, node.best.sm[A] = 0.0, 0.0
    assert node.tick(20) == {A: "nvml_gpm", B: "nvml_gpm"}
    assert node.last.problems == ()


def test_the_edge_of_a_load_contradicts_nobody(node: Node) -> None:
    for _ in range(5):
        node.devices.busy, node.best.sm[A] = 0.0, 0.0
        assert node.tick(2)[A] == "nvml_gpm"
        node.devices.busy = 0.99  # the driver is a tick ahead
        assert node.tick()[A] == "nvml_gpm"
        node.best.sm[A] = 0.4
        assert node.tick(2)[A] == "nvml_gpm"
    assert node.last.problems == ()


def test_a_gpu_that_draws_little_is_not_believed_to_be_busy(node: Node) -> None:
    node.devices.watts, node.best.sm[A] = 90.0, 0.0
    assert node.tick(10)[A] == "nvml_gpm"


def test_one_warp_on_one_sm_is_a_sign_of_life(node: Node) -> None:
    node.best.sm[A] = 1 / 132
    assert node.tick(10)[A] == "nvml_gpm"


def test_instances_are_asked_for_and_their_gpu_is_not(node: Node) -> None:
    node.devices.gpus = [gpu(A), gpu("MIG-1", A), gpu("MIG-2", A), gpu(B)]
    served = node.tick()
    assert node.best.asked == ["MIG-1", "MIG-2", B]
    assert served == {A: None, "MIG-1": "nvml_gpm", "MIG-2": "nvml_gpm", B: "nvml_gpm"}


def test_without_the_driver_the_others_go_on_for_a_while(node: Node) -> None:
    node.tick()
    node.devices.gpus = None
    node.best.state.update({A: "lost", B: "lost"})
    assert node.tick() == {A: "dcgm", B: "dcgm"}
    assert node.last.gpus is None
    assert "unknown_error" in node.said()
    assert node.tick(10) == {}
    node.devices.gpus = [gpu(A), gpu(B)]
    node.best.state.clear()
    assert node.tick() == {A: "nvml_gpm", B: "nvml_gpm"}


def test_an_instance_that_is_gone_is_not_asked_for_any_more(node: Node) -> None:
    node.devices.gpus = [gpu(A), gpu("MIG-1", A)]
    node.tick()
    node.devices.gpus = [gpu(A), gpu("MIG-2", A)]
    node.tick()
    assert node.best.asked == ["MIG-2"]


def test_close_closes_everything(node: Node) -> None:
    node.ladder.close()
    assert (node.best.closed, node.next.closed, node.devices.closed) == (True, True, True)


# --- on the double


UUID_0, UUID_1 = (f"GPU-00000000-0000-4000-8000-{index:012x}" for index in (0, 1))


@pytest.fixture
def real(nvml_library: Path, tmp_path: Path) -> Iterator[LadderProcess]:
    write(tmp_path / "scenario", 0, dies_ns=None)
    with ladder_process(nvml_library, tmp_path, "gpm") as started:
        yield started


def write(path: Path, lives_ns: int, dies_ns: int | None) -> None:
    steps: tuple[tuple[int, float], ...] = ((lives_ns, 50.0),)
    if dies_ns is not None:
        steps = ((0, 50.0), (dies_ns, 0.0))
    metrics = tuple(GpmMetric(id_, steps) for id_ in (1, 2, 5))
    busy = Gpu(gpm=metrics, utilization_gpu_percent=99, power_mw=420_000)
    Scenario(gpus=(busy, Gpu(gpm=(GpmMetric(2, 0.0),)))).write(path)


def test_gpm_that_sticks_at_0_after_an_xid_is_dead_until_it_moves(
    real: LadderProcess, tmp_path: Path
) -> None:
    real.until(lambda tick: bool(rows([tick], UUID_0, "sm_active")))
    died_ns = time.monotonic_ns()
    write(tmp_path / "scenario", 0, died_ns)
    real.until(lambda tick: ("rung_dead", UUID_0) in tick.kinds())
    assert not any(
        mean == 0.0 and end - begin > 0 and begin > died_ns + 100_000_000
        for begin, end, mean in rows(real.ticks, UUID_0, "sm_active")
    )
    assert all(mean == 0.0 for _, _, mean in rows(real.ticks, UUID_1, "sm_active"))  # that one is idle
    assert rows(real.ticks[-3:], UUID_1, "sm_active")
    write(tmp_path / "scenario", 0, None)
    back = real.until(lambda tick: bool(rows([tick], UUID_0, "sm_active")))
    assert ("rung_dead", UUID_0) not in back.kinds()
