"""The referee: each liar leaves its trace and is named; nodes that are well raise nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuidle.agent.analysis import enginewindow
from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.referee import Case, Claims, referee
from gpuidle.agent.model import CounterSeries, EngineReading, Problem, Snapshot, column, rate_column
from gpuidle.agent.physics.peaks import DevicePeaks, find_peaks
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    Burst,
    ClosedLoop,
    Cycle,
    EngineSpec,
    GpuSpec,
    Poisson,
    Scenario,
    Sizes,
)

SECOND = 10**9
SECONDS = 32
PM = Visible(counters=Sampling("cupti_pm", 100.0))
GPM = Visible(steps=False)

# --------------------------------------------------------------------------------------------------------
# Nodes that are well


def node(name: str, *arrivals: object, **spec: object) -> Scenario:
    known = {"kv_blocks": 24_000, "max_batched_tokens": 8192, **spec}
    engine = EngineSpec(name=name, config=LLAMA_3_8B, gpus=(0,), arrivals=arrivals, **known)  # type: ignore[arg-type]
    return Scenario(seed=5, gpus=(GpuSpec(),), engines=(engine,))


NODES = {
    "mixed": node("mixed", Poisson(per_second=4.0, mix=(Sizes(prompt=(50, 2000), output=(50, 300)),))),
    "decode": node("decode", ClosedLoop(users=64, mix=(Sizes(prompt=(50, 100), output=(2000, 3000)),))),
    "prompts": node("prompts", ClosedLoop(users=6, mix=(Sizes(prompt=(6000, 8000), output=(1, 1)),))),
    "one user": node("one user", ClosedLoop(users=1, mix=(Sizes(prompt=(50, 100), output=(300, 500)),))),
    "bursts": node(
        "bursts",
        Cycle(
            period_ns=10 * SECOND,
            parts=(Burst(at_ns=0, count=20, mix=(Sizes(prompt=(3000, 7000), output=(1, 20)),)),),
        ),
    ),
}


@lru_cache(maxsize=16)
def recorded(name: str, visible: Visible = PM) -> tuple[Snapshot, ...]:
    told = []
    for snapshot, _ in simulate(NODES[name], visible=visible):
        told.append(snapshot)
        if len(told) == SECONDS:
            break
    return tuple(told)


Change = Callable[[Snapshot], Snapshot]


def verdicts(snapshots: Sequence[Snapshot], change: Change = lambda snapshot: snapshot) -> set[str]:
    """Return the kinds of all verdicts of the session, each of which has a remedy and names the GPU."""
    analyzer, kinds = Analyzer(), set()
    for snapshot in snapshots:
        for problem in analyzer.feed(change(snapshot)).problems:
            if problem.source == "referee":
                assert problem.remedy
                assert problem.subject.startswith("GPU-")
                kinds.add(problem.kind)
    return kinds


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("visible", [PM, GPM], ids=["steps and PM", "sums and GPM"])
def test_a_node_that_is_well_raises_nothing(name: str, visible: Visible) -> None:
    assert verdicts(recorded(name, visible)) == set()


# --------------------------------------------------------------------------------------------------------
# Each liar


def counters(change: Callable[[CounterSeries], CounterSeries]) -> Change:
    def changed(snapshot: Snapshot) -> Snapshot:
        return msgspec.structs.replace(snapshot, counters=tuple(change(each) for each in snapshot.counters))

    return changed


def engines(change: Callable[[EngineReading], EngineReading]) -> Change:
    def changed(snapshot: Snapshot) -> Snapshot:
        return msgspec.structs.replace(snapshot, engines=tuple(change(each) for each in snapshot.engines))

    return changed


def scaled(each: CounterSeries, *, tensor: float = 1.0, dram: float = 1.0) -> CounterSeries:
    from dataclasses import replace

    assert each.tensor_active is not None
    assert each.dram_read_bytes_per_s is not None
    return replace(
        each,
        tensor_active=column(np.rint(np.minimum(each.tensor_active * tensor, 65_000)), "u2"),
        dram_read_bytes_per_s=rate_column(each.dram_read_bytes_per_s * dram),
    )


@pytest.mark.parametrize("visible", [PM, GPM], ids=["steps and PM", "sums and GPM"])
def test_a_tensor_counter_that_stands_at_0_is_dead(visible: Visible) -> None:
    assert verdicts(recorded("mixed", visible), counters(lambda c: scaled(c, tensor=0.0))) == {"dead_counter"}


@pytest.mark.parametrize("column_of", ["tensor", "dram"])
def test_a_counter_that_dies_under_load_is_never_taken_for_a_narrower_dtype(column_of: str) -> None:
    snapshots = recorded("mixed" if column_of == "tensor" else "one user", GPM)

    def dying(snapshot: Snapshot) -> Snapshot:
        if snapshot.sequence < 8:
            return snapshot
        return counters(lambda c: scaled(c, **{column_of: 0.0}))(snapshot)

    assert verdicts(snapshots, dying) == {"dead_counter"}


def test_a_tensor_counter_that_is_stuck_is_dead() -> None:
    def stuck(each: CounterSeries) -> CounterSeries:
        from dataclasses import replace

        return replace(each, tensor_active=column(np.full(len(each), 12_345), "u2"))

    assert verdicts(recorded("mixed"), counters(stuck)) == {"dead_counter"}


def test_a_dram_counter_that_stands_at_0_is_dead() -> None:
    assert verdicts(recorded("decode"), counters(lambda c: scaled(c, dram=0.0))) == {"dead_counter"}


def test_an_activity_counter_that_stands_at_0_beside_steps_is_dead() -> None:
    def idle(each: CounterSeries) -> CounterSeries:
        from dataclasses import replace

        return replace(each, gr_active=column(np.zeros(len(each)), "u2"))

    assert verdicts(recorded("decode"), counters(idle)) == {"dead_counter"}


def with_peaks(monkeypatch: pytest.MonkeyPatch, change: Callable[[DevicePeaks], DevicePeaks]) -> None:
    """Let the analysis take other peaks for the device."""

    def changed(name: str, memory_bytes: int | None) -> DevicePeaks | None:
        peaks = find_peaks(name, memory_bytes)
        return None if peaks is None else change(peaks)

    monkeypatch.setattr(enginewindow, "_peaks", changed)


@pytest.mark.parametrize("name", ["prompts", "bursts"])
def test_a_sparse_peak_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with_peaks(monkeypatch, lambda p: p.override(bf16_flops_per_s=2 * p.rate("bf16")))
    assert verdicts(recorded(name)) == {"sparse_peak"}


def test_products_in_a_narrower_dtype_than_configured_are_named() -> None:
    # FP8 takes half of the pipe's time and of the weights' bytes; the configuration says bf16.
    narrow = counters(lambda c: scaled(c, tensor=0.5))
    assert verdicts(recorded("prompts"), narrow) == {"unknown_quantisation"}


def test_weights_stored_narrower_than_configured_are_named() -> None:
    # One user's context is next to nothing beside the weights.
    assert verdicts(recorded("one user"), counters(lambda c: scaled(c, dram=0.5))) == {"unknown_quantisation"}


def test_products_in_16_bits_of_weights_said_to_be_fp8_are_named() -> None:
    def said(each: EngineReading) -> EngineReading:
        return msgspec.structs.replace(each, limits=msgspec.structs.replace(each.limits, quantization="fp8"))

    assert "unknown_quantisation" in verdicts(recorded("prompts"), engines(said))


def test_a_small_model_that_stays_in_l2_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_peaks(monkeypatch, lambda p: msgspec.structs.replace(p, l2_bytes=32e9))
    kinds = verdicts(recorded("decode"), counters(lambda c: scaled(c, dram=0.1)))
    assert kinds == {"weights_in_l2"}


def test_a_clock_beyond_the_devices_own_is_named() -> None:
    def fast(each: CounterSeries) -> CounterSeries:
        from dataclasses import replace

        assert each.sm_clock_hz is not None
        return replace(each, sm_clock_hz=rate_column(each.sm_clock_hz * 1.5))

    assert verdicts(recorded("decode"), counters(fast)) == {"wrong_clock"}


def test_a_clock_that_was_read_while_idle_is_named() -> None:
    def slow(each: CounterSeries) -> CounterSeries:
        from dataclasses import replace

        assert each.sm_clock_hz is not None
        return replace(each, sm_clock_hz=rate_column(each.sm_clock_hz * 0.2))

    assert verdicts(recorded("prompts"), counters(slow)) == {"wrong_clock"}


@pytest.mark.parametrize("late_s", [0.05, 3.0])
def test_counters_on_another_time_base_are_named(late_s: float) -> None:
    def late(each: CounterSeries) -> CounterSeries:
        from dataclasses import replace

        return replace(each, end_ns=column(each.end_ns + round(late_s * SECOND), "i8"))

    assert verdicts(recorded("bursts"), counters(late)) == {"wrong_clock"}


def test_verified_drafts_booked_as_prefill_are_named() -> None:
    def speculating(snapshot: Snapshot) -> Snapshot:
        from dataclasses import replace

        steps = tuple(
            replace(each, prefill_tokens=column(each.prefill_tokens + 4 * each.decode_tokens, "i8"))
            for each in snapshot.steps
            if each.prefill_tokens is not None and each.decode_tokens is not None
        )
        told = tuple(
            msgspec.structs.replace(each, limits=msgspec.structs.replace(each.limits, speculative=True))
            for each in snapshot.engines
        )
        return msgspec.structs.replace(snapshot, steps=steps, engines=told)

    assert "speculation_as_prefill" in verdicts(recorded("decode"), speculating)
    # Speculation that is booked as it should be is well.
    assert (
        verdicts(
            recorded("decode"),
            engines(
                lambda e: msgspec.structs.replace(
                    e, limits=msgspec.structs.replace(e.limits, speculative=True)
                )
            ),
        )
        == set()
    )


@pytest.mark.parametrize(("times", "kinds"), [(1.0, set()), (1.3, set()), (3.0, {"estimates_disagree"})])
def test_an_engines_estimate_far_from_the_work_model_is_named(times: float, kinds: set[str]) -> None:
    """The engine tells it with every tenth page, as a total per GPU."""
    analyzer = Analyzer()
    flops = [analyzer.feed(each).engines[0].useful_flops_total or 0.0 for each in recorded("mixed", GPM)]

    def telling(snapshot: Snapshot) -> Snapshot:
        at = snapshot.sequence
        if at % 10 or at + 3 >= len(flops):
            return snapshot
        rows = tuple(
            msgspec.structs.replace(row, estimated_flops_per_gpu=times * flops[at + 3])
            for row in snapshot.engines[0].counters or ()
        )
        told = msgspec.structs.replace(snapshot.engines[0], counters=rows)
        return msgspec.structs.replace(snapshot, engines=(told,))

    assert verdicts(recorded("mixed", GPM), telling) == kinds


# --------------------------------------------------------------------------------------------------------
# The rule alone

CASE = Case(
    subject="GPU-0", device="card", peak_bytes_per_s=3.35e12, faster=2.0, weight_bytes=15e9, l2_bytes=50e6
)


def windows(**values: object) -> list[Claims]:
    known: dict[str, object] = {"window_ns": SECOND, "observed_ns": SECOND, **values}
    return [Claims(end_ns=(i + 1) * SECOND, **known) for i in range(30)]  # type: ignore[arg-type]


def kinds(claims: Sequence[Claims], case: Case = CASE) -> list[str]:
    return [problem.kind for problem in referee(claims, case)]


def test_too_short_a_time_and_windows_not_wholly_seen_are_not_judged() -> None:
    dead = windows(pipe_ns=0.0, work_ns=(5e8, 5e8, 5e8), rows=8000.0, steps=8.0)
    assert kinds(dead) == ["dead_counter"]
    assert kinds(dead[:15]) == []
    assert kinds([msgspec.structs.replace(each, observed_ns=SECOND // 2) for each in dead]) == []


def test_kernels_of_one_row_may_leave_the_pipe_alone() -> None:
    assert kinds(windows(pipe_ns=0.0, work_ns=(2e7, 2e7, 2e7), rows=70.0, steps=70.0)) == []


def test_the_second_witness_says_whether_pipe_or_model_is_wrong() -> None:
    claims = windows(pipe_ns=4e8, work_ns=(7.6e8, 8e8, 8.4e8), rows=20_000.0, steps=8.0, exact=True)
    assert kinds(claims) == ["unknown_quantisation"]
    [problem] = referee(claims, msgspec.structs.replace(CASE, engine_ratio=(0.45, 0.5)))
    assert problem.kind == "estimates_disagree"
    assert "work model" in problem.message
    # Nothing on this device is faster than the dtype of the model.
    assert kinds(claims, msgspec.structs.replace(CASE, faster=1.0)) == ["estimates_disagree"]
    assert kinds(claims, msgspec.structs.replace(CASE, faster=1.0, accumulates_twice=True)) == []


def test_padding_and_rejected_drafts_are_no_sparse_peak() -> None:
    busy = {"pipe_ns": 8e8, "work_ns": (3.8e8, 4e8, 4.2e8), "exact": True}
    assert kinds(windows(rows=20_000.0, steps=8.0, **busy)) == ["sparse_peak"]
    assert kinds(windows(rows=200.0, steps=8.0, **busy)) == []
    assert kinds(windows(rows=20_000.0, steps=8.0, draft_tokens=900, **busy)) == []
    assert kinds(windows(rows=20_000.0, steps=8.0, **busy), msgspec.structs.replace(CASE, latent=True)) == []


@settings(max_examples=100)
@given(
    st.floats(0.02, 0.9),
    st.floats(1.0, 1.6),
    st.floats(1.0, 1.8),
    st.floats(0.7, 1.08),
    st.floats(2000.0, 20_000.0),
    st.lists(st.floats(-0.5, 0.5), min_size=30, max_size=30),
    st.booleans(),
)
def test_within_the_error_bars_nothing_is_said(
    used: float, padding: float, more_bytes: float, clock: float, rows: float, late: list[float], exact: bool
) -> None:
    """Tokens booked in the next window, tiles that are not full, activations in DRAM, a clock that sinks."""
    carried, claims = 0.0, []
    padding = min(padding, 1.2) if exact else padding
    for number, part in enumerate(late):
        true_ns = used * SECOND
        moved = 0.0 if exact else part * true_ns
        told, carried = true_ns + moved + carried, -moved
        claims.append(
            Claims(
                end_ns=(number + 1) * SECOND,
                window_ns=SECOND,
                observed_ns=SECOND,
                active_ns=0.95 * SECOND,
                stepping_ns=0.95 * SECOND,
                pipe_ns=min(SECOND, true_ns * padding / clock) * (1 + 1e-4 * part),
                clock_ratio=clock,
                dram_bytes=1.0e12 * more_bytes,
                work_ns=(0.95 * told, told, 1.05 * told),
                weight_bytes=1.0e12,
                rows=rows,
                steps=4.0,
                exact=exact,
            )
        )
    found: tuple[Problem, ...] = () if used * padding / clock > 1 else referee(claims, CASE)
    assert found == ()
