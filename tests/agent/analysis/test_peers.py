"""What GPUs of one group wait for each other: counters of the whole group, and the frames they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.agent.analysis.builders import LLAMA_8B, SECOND, counters, engine, gpu, snapshot

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.peers import Waits, group_of, idle_wait, waits
from gpuidle.agent.model import (
    CounterSeries,
    Frame,
    GpuProcess,
    Parallelism,
    StepSeries,
    column,
    rate_column,
)
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.options import ClockSpell, Straggler
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    EngineSpec,
    GpuSpec,
    Poisson,
    Scenario,
    Sizes,
)

PEAK = 3.35e12
MS = 1_000_000
Floats = NDArray[np.float64]


def series(
    active: Floats, tensor: Floats | None = None, dram: Floats | None = None, *, hw_id: str = "GPU-0",
    begin_ns: int = 0, width_ns: int = MS, seed: int = 0,
) -> CounterSeries:  # fmt: skip
    """Samples of `width_ns` from `begin_ns` on, with 2 % of noise on tensor and DRAM."""
    noise = np.random.default_rng(seed).normal(1.0, 0.02, (2, len(active)))
    return CounterSeries(
        hw_id=hw_id,
        rung="cupti_pm",
        end_ns=column(begin_ns + width_ns * np.arange(1, len(active) + 1), "i8"),
        width_ns=column(np.full(len(active), width_ns), "i8"),
        gr_active=column(np.rint(active / 2e-5), "u2"),
        tensor_active=None if tensor is None else column(np.rint(tensor * noise[0] / 2e-5), "u2"),
        dram_read_bytes_per_s=None if dram is None else rate_column(dram * noise[1] * PEAK),
        dram_write_bytes_per_s=None if dram is None else rate_column(np.zeros(len(active))),
    )


def found(
    group: Sequence[CounterSeries], *, tensor_parallel: int, end_ns: int = SECOND
) -> tuple[Waits, ...] | None:
    return waits(
        [[each] for each in group], 0, end_ns, tensor_parallel=tensor_parallel, peak_bytes_per_s=PEAK
    )


def straggling(
    ranks: int = 4, stall: slice = slice(300, 420), *, absent: bool = False
) -> list[CounterSeries]:
    """Decode at 60 % of DRAM on all ranks; in `stall` only the last one works, or is not even active."""
    group = []
    for rank in range(ranks):
        active, tensor, dram = np.ones(1000), np.full(1000, 0.1), np.full(1000, 0.6)
        if rank < ranks - 1:
            tensor[stall], dram[stall] = 0.0, 0.002
        elif absent:
            active[stall] = tensor[stall] = dram[stall] = 0.0
        group.append(series(active, tensor, dram, hw_id=f"GPU-{rank}", seed=rank))
    return group


@pytest.mark.parametrize("absent", [False, True])
def test_ranks_that_spin_for_a_straggler_wait_and_the_straggler_does_not(absent: bool) -> None:
    told = found(straggling(absent=absent), tensor_parallel=4)
    assert told is not None
    for each in told[:3]:
        assert each.spinning_ns == pytest.approx(120 * MS, rel=0.02)
    assert told[3] == Waits()


def test_a_collective_of_all_ranks_and_a_launch_bound_spell_are_no_wait() -> None:
    group = []
    for rank in range(4):
        tensor, dram = np.full(1000, 0.5), np.full(1000, 0.3)
        tensor[200:500], dram[200:500] = 0.01, 0.01  # all of them talk
        dram[600:700] = tensor[600:700] = 0.0  # all of them launch
        group.append(series(np.ones(1000), tensor, dram, seed=rank))
    told = found(group, tensor_parallel=4)
    assert told == (Waits(),) * 4


def test_one_active_rank_of_two_may_have_work_of_its_own() -> None:
    assert found(straggling(ranks=2, absent=True), tensor_parallel=2) == (Waits(),) * 2
    assert found(straggling(ranks=2), tensor_parallel=2) != (Waits(),) * 2


def test_phases_that_change_at_samples_cut_elsewhere_are_no_wait() -> None:
    # The second GPU's samples lie half a millisecond off, so that each edge of a step is cut differently.
    prefill = np.tile(np.repeat([1.0, 0.0], 10), 51)[:1001]
    tensor, dram = 0.6 * prefill + 0.05, 0.6 - 0.5 * prefill
    group = [
        series(np.ones(1001), tensor, dram, begin_ns=-MS // 2, seed=1),
        series(np.ones(1001), tensor, dram, begin_ns=-MS, seed=2),
    ]
    assert found(group, tensor_parallel=2, end_ns=1000 * MS) == (Waits(),) * 2


@pytest.mark.parametrize("width_ms", [1, 100])
def test_stages_that_take_turns_wait_for_each_other(width_ms: int) -> None:
    fine = np.tile(np.repeat([1.0, 0.0], 10), 50)
    first = fine.reshape(-1, width_ms).mean(axis=1)
    second = (1 - fine).reshape(-1, width_ms).mean(axis=1)
    told = found([series(each, width_ns=width_ms * MS) for each in (first, second)], tensor_parallel=1)
    assert told is not None
    for each in told:
        assert each.idle_high_ns == pytest.approx(SECOND / 2, rel=0.01)
        # Slow samples alone cannot tell whether the stages overlapped.
        assert each.idle_low_ns == pytest.approx(SECOND / 2 if width_ms == 1 else 0.0, abs=MS)
    # Steps of the group can.
    waited, certain = idle_wait(told[0], SECOND / 2, float(SECOND), SECOND)
    assert waited == pytest.approx(SECOND / 2, rel=0.01)
    assert certain == (width_ms == 1)


def unequal(first: float, second: float, column_of: str) -> list[CounterSeries]:
    """Two ranks that differ in one counter, on windows of a second."""
    out = []
    for value in (first, second):
        told, whole = (
            column(np.full(10, round(value / 2e-5)), "u2"),
            series(np.full(10, 0.9), width_ns=100 * MS),
        )
        if column_of == "tensor_active":
            out.append(replace(whole, tensor_active=told))
        else:
            out.append(replace(whole, sm_active=told))
    return out


@pytest.mark.parametrize("column_of", ["tensor_active", "sm_active"])
def test_a_peer_that_needs_longer_for_the_same_work_is_waited_for(column_of: str) -> None:
    told = found(unequal(0.40, 0.55, column_of), tensor_parallel=2)
    assert told is not None
    assert told[0].spinning_ns == pytest.approx(150 * MS, rel=0.01)
    assert told[1].spinning_ns == 0
    # What two counters differ by anyway is none, and stages of a pipeline have work of their own.
    assert found(unequal(0.40, 0.41, column_of), tensor_parallel=2) == (Waits(),) * 2
    apart = found(unequal(0.40, 0.55, column_of), tensor_parallel=1)
    assert apart is not None
    assert apart[0].spinning_ns == 0


def test_a_rank_that_was_active_for_longer_did_something_else() -> None:
    slow, busy = unequal(0.40, 0.55, "sm_active")
    longer = replace(busy, gr_active=column(np.full(10, 50_000), "u2"))
    assert found([slow, longer], tensor_parallel=2) == (Waits(),) * 2


def test_a_group_that_is_not_wholly_seen_tells_nothing() -> None:
    whole = straggling()
    assert waits([[s] for s in whole[:3]] + [[]], 0, SECOND, tensor_parallel=4, peak_bytes_per_s=PEAK) is None
    assert found(whole, tensor_parallel=4, end_ns=2 * SECOND) is None
    place = Parallelism(tensor=2, pipeline=2)
    assert group_of(place, {"a": 3, "b": 2, "c": 1, "d": 0}) == ("d", "c", "b", "a")
    assert group_of(place, {"a": 0, "b": 1}) == ()


@settings(max_examples=30)
@given(
    st.integers(2, 4),
    st.sampled_from([1, 2]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([MS, 20 * MS]),
)
def test_waits_never_exceed_the_time_they_are_of(stages: int, ranks: int, seed: int, width_ns: int) -> None:
    rng = np.random.default_rng(seed)
    group = [
        series(*np.clip(rng.normal(0.4, 0.5, (3, 50)), 0, 1), width_ns=width_ns, seed=rank)
        for rank in range(stages * ranks)
    ]
    told = found(group, tensor_parallel=ranks, end_ns=50 * width_ns)
    assert told is not None
    for each, told_of in zip(group, told, strict=True):
        assert each.gr_active is not None
        active = float(each.gr_active.sum()) * 2e-5 * width_ns
        assert 0 <= told_of.idle_low_ns <= told_of.idle_high_ns + 1
        assert told_of.idle_high_ns <= 50 * width_ns - active + 1
        assert 0 <= told_of.spinning_ns <= active + 1


# --------------------------------------------------------------------------------------------------------
# Through the analyzer


def run(
    group: Sequence[CounterSeries], place: Parallelism, *, step_ns: int | None = None, **reading: Any
) -> Frame:
    """Feed each second the same counters, and steps of the group back to back if they are known."""
    analyzer = Analyzer()
    for t in range(8):
        row = counters(t, generated_tokens=400 * t, counted_steps=50 * t, requests_running=8)
        told = [
            CounterSeries(
                **{
                    **{name: getattr(each, name) for name in each.__dataclass_fields__},
                    "hw_id": f"GPU-{i}",
                    "end_ns": column(each.end_ns + (t - 1) * SECOND, "i8"),
                }
            )
            for i, each in enumerate(group)
        ]
        made: tuple[StepSeries, ...] = ()
        if step_ns is not None and t:
            end = (t - 1) * SECOND + step_ns * np.arange(1, SECOND // step_ns + 1)
            full = [column(np.full(len(end), value), "i8") for value in (0, 8, 8, 8, 8000)]
            made = (
                StepSeries(
                    "vllm-tiny-1", "plugin", True, 0, column(end - step_ns, "i8"), column(end, "i8"), *full
                ),
            )
        frame = analyzer.feed(
            snapshot(
                t,
                gpus=tuple(
                    gpu(t, hw_id=f"GPU-{i}", index=i, processes=(GpuProcess(pid=20 + i),))
                    for i in range(len(group))
                ),
                engines=(
                    engine(
                        t,
                        row,
                        pids=tuple(20 + i for i in range(len(group))),
                        parallelism=place,
                        model_text="llama",
                        **reading,
                    ),
                ),
                counters=tuple(told) if t else (),
                steps=made,
                texts={"llama": LLAMA_8B},
            )
        )
    for card in frame.gpus:
        assert sum(card.causes_ns.values()) == card.window_ns == SECOND
        assert min(card.causes_ns.values()) >= 0
    return frame


@pytest.mark.parametrize("step_ns", [None, 20 * MS])
def test_the_ledger_books_a_spin_as_waiting_and_as_an_estimate(step_ns: int | None) -> None:
    frame = run(straggling(), Parallelism(tensor=4), step_ns=step_ns)
    for card in frame.gpus[:3]:
        assert card.causes_ns["waiting_peer"] == pytest.approx(120 * MS, rel=0.02)
        assert "waiting_peer" in card.estimated_causes
    assert frame.gpus[3].causes_ns["waiting_peer"] == 0


def test_a_bubble_is_measured_by_fast_counters_and_is_no_host_gap() -> None:
    turn = np.tile(np.repeat([1.0, 0.0], 10), 50)
    frame = run([series(turn), series(1 - turn)], Parallelism(pipeline=2), step_ns=20 * MS)
    for card in frame.gpus:
        assert card.causes_ns["waiting_peer"] == pytest.approx(500 * MS, rel=0.01)
        assert card.causes_ns["host_gap"] + card.causes_ns["no_request"] <= MS
        assert "waiting_peer" not in card.estimated_causes


def test_slow_counters_without_steps_leave_turns_of_stages_unattributed() -> None:
    # 60 and 30 % active: at least 30 % of the second one's time it waited; the rest may be overlap.
    halves = [series(np.full(10, 0.6), width_ns=100 * MS), series(np.full(10, 0.3), width_ns=100 * MS)]
    second = run(halves, Parallelism(pipeline=2)).gpus[1]
    assert second.causes_ns["waiting_peer"] == pytest.approx(300 * MS, rel=0.01)
    assert second.causes_ns["host_gap"] == pytest.approx(100 * MS, rel=0.02)  # nobody was at work
    assert second.causes_ns["unattributed"] >= 300 * MS - MS


def test_a_late_host_within_a_step_of_a_tensor_parallel_group_is_a_host_gap() -> None:
    late = np.tile(np.repeat([1.0, 0.0], [15, 5]), 50)
    card = run([series(late), series(late)], Parallelism(tensor=2), step_ns=20 * MS).gpus[0]
    assert card.causes_ns["host_gap"] == pytest.approx(250 * MS, rel=0.01)
    assert card.causes_ns["waiting_peer"] == 0


def test_a_decode_engine_with_requests_and_none_running_waits_for_their_cache() -> None:
    def causes(role: str, waiting: int) -> dict[str, int]:
        analyzer = Analyzer()
        for t in range(6):
            row = counters(t, requests_waiting=waiting)
            frame = analyzer.feed(snapshot(t, gpus=(gpu(t, 0.0),), engines=(engine(t, row, role=role),)))
        assert ("waiting_peer" in frame.gpus[0].estimated_causes) == (
            frame.gpus[0].causes_ns["waiting_peer"] > 0
        )
        return frame.gpus[0].causes_ns

    assert causes("decode", 3)["waiting_peer"] == SECOND
    assert causes("unified", 3)["waiting_peer"] == 0
    assert causes("decode", 0)["no_request"] == SECOND


# --------------------------------------------------------------------------------------------------------
# Against the simulator's truth

LOAD = (Poisson(per_second=4.0, mix=(Sizes(prompt=(800, 2500), output=(20, 80)),)),)
TWO = EngineSpec(
    name="8b", config=LLAMA_3_8B, gpus=(0, 1), kv_blocks=20_000, max_batched_tokens=8192, arrivals=LOAD
)
GROUPS = {
    "alike": Scenario(seed=3, gpus=(GpuSpec(),) * 2, engines=(TWO,)),
    "slow kernels": Scenario(
        seed=3,
        gpus=(GpuSpec(),) * 2,
        engines=(msgspec.structs.replace(TWO, straggler=Straggler(rank=1, slower=1.4)),),
    ),
    "a low clock": Scenario(
        seed=3, gpus=(GpuSpec(),) * 2, engines=(TWO,), clocks=(ClockSpell(1, clock_ratio=0.7),)
    ),
    "two stages": Scenario(
        seed=3, gpus=(GpuSpec(),) * 2, engines=(msgspec.structs.replace(TWO, pipeline_stages=2),)
    ),
}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("hz", [10.0, 1000.0])
def test_waiting_is_what_really_was_waited(name: str, hz: float) -> None:
    analyzer = Analyzer()
    real: list[dict[str, int]] = [{}, {}]
    sampling = Sampling("cupti_pm" if hz > 100 else "nvml_gpm", hz)
    told = list(islice(simulate(GROUPS[name], visible=Visible(counters=sampling)), 15))
    for read, _ in told:
        frame = analyzer.feed(read)
    assert frame.gpus[0].window_ns == SECOND
    settled = sum(frame.gpus[0].causes_total_ns.values()) // SECOND
    for _, truth in told[1 : settled + 1]:
        for index, gpu_truth in enumerate(truth.gpus):
            for cause, ns in gpu_truth.window.causes_ns.items():
                real[index][cause] = real[index].get(cause, 0) + ns
    for card, theirs in zip(frame.gpus, real, strict=True):
        waited = theirs.get("waiting_peer", 0) / settled
        assert card.causes_total_ns["waiting_peer"] / settled == pytest.approx(waited, abs=0.015 * SECOND)
        assert card.causes_total_ns["host_gap"] / settled == pytest.approx(
            theirs["host_gap"] / settled, abs=0.01 * SECOND
        )
    if name != "alike":
        assert real[0]["waiting_peer"] > 0.02 * settled * SECOND  # a bar that no wait would pass is no bar
