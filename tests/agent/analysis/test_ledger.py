from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuidle.agent.analysis.ledger import Evidence, IdleBecause, ledger
from gpuidle.agent.model import CAUSES

T = 10**9
NS = st.none() | st.floats(-1e9, 5e9)
EVIDENCE = st.builds(
    Evidence,
    window_ns=st.integers(0, 2 * T),
    observed_ns=st.integers(0, 3 * T),
    active_ns=NS,
    active_measured=st.booleans(),
    tensor_ns=NS,
    useful_ns=NS,
    memory_ns=NS,
    memory_measured=st.booleans(),
    memory_excess_ns=NS,
    padding_ns=NS,
    split_rest=st.booleans(),
    communication_ns=st.none() | st.floats(0, 1e9),
    clock_ratio=st.floats(0.1, 1.2),
    idle_because=st.sampled_from(get_args(IdleBecause)),
    host_gap_ns=st.none() | st.floats(0, 3e9),
    waiting_idle_ns=st.floats(-1e9, 3e9),
    waiting_active_ns=st.floats(-1e9, 3e9),
    waiting_measured=st.booleans(),
    owner=st.sampled_from(["engine", "foreign", "starting", "suspended", "unallocated"]),
)


@given(EVIDENCE)
def test_causes_sum_to_the_window_whatever_the_evidence(evidence: Evidence) -> None:
    booked = ledger(evidence)
    assert sum(booked.causes_ns.values()) == evidence.window_ns
    assert tuple(booked.causes_ns) == CAUSES
    assert min(booked.causes_ns.values()) >= 0


def test_full_evidence_books_every_term_of_the_design() -> None:
    booked = ledger(
        Evidence(
            window_ns=T,
            observed_ns=T,
            active_ns=0.9 * T,
            active_measured=True,
            tensor_ns=0.30 * T,
            useful_ns=0.10 * T,
            memory_ns=0.70 * T,
            memory_measured=True,
            communication_ns=0.05 * T,
            clock_ratio=0.9,
            throttle="throttled_power",
            idle_because="host_gap",
        )
    ).causes_ns
    assert booked["useful"] == 0.10 * T
    assert booked["throttled_power"] == 0.03 * T
    assert booked["padding"] == 0.17 * T
    assert booked["memory_bound"] == 0.40 * T
    assert booked["communication"] == 0.05 * T
    assert booked["latency"] == 0.15 * T
    assert booked["host_gap"] == 0.10 * T


def test_parts_of_a_window_that_differ_are_booked_apart() -> None:
    # Half of the window decodes (pipe 0.1, DRAM 0.9 of it), half computes (pipe 0.9, DRAM 0.1 of it): the
    # means say that nothing is memory-bound, the parts say 0.4.
    known = Evidence(
        window_ns=T,
        observed_ns=T,
        active_ns=1.0 * T,
        active_measured=True,
        tensor_ns=0.5 * T,
        useful_ns=0.5 * T,
        memory_ns=0.5 * T,
        memory_measured=True,
    )
    assert ledger(known).causes_ns["memory_bound"] == 0
    apart = msgspec.structs.replace(known, memory_excess_ns=0.4 * T)
    assert ledger(apart).causes_ns["memory_bound"] == 0.4 * T


def test_the_work_models_word_splits_the_rest_as_an_estimate() -> None:
    booked = ledger(
        Evidence(
            window_ns=T,
            observed_ns=T,
            active_ns=0.9 * T,
            useful_ns=0.05 * T,
            padding_ns=0.1 * T,
            memory_ns=0.6 * T,
            communication_ns=0.1 * T,
            split_rest=True,
            idle_because="host_gap",
        )
    )
    assert booked.causes_ns["padding"] == 0.1 * T
    assert booked.causes_ns["memory_bound"] == pytest.approx(0.45 * T)
    assert booked.causes_ns["communication"] == 0.1 * T
    assert booked.causes_ns["latency"] == pytest.approx(0.2 * T)
    assert {"padding", "memory_bound", "communication", "latency"} <= set(booked.estimated)


def test_an_unknown_shape_is_no_useful_work_and_no_idle_either() -> None:
    booked = ledger(
        Evidence(window_ns=T, observed_ns=T, active_ns=0.8 * T, idle_because="host_gap")
    ).causes_ns
    assert booked["useful"] == 0
    assert booked["unattributed"] == 0.8 * T
    assert booked["host_gap"] == 0.2 * T


def test_what_a_model_or_habit_tells_is_no_measurement() -> None:
    known = Evidence(
        window_ns=T,
        observed_ns=T,
        active_ns=0.8 * T,
        active_measured=True,
        tensor_ns=0.2 * T,
        useful_ns=0.1 * T,
        memory_ns=0.4 * T,
        memory_measured=True,
        bandwidth_measured=True,
        idle_because="no_request",
        host_gap_ns=0.05 * T,
        host_gap_measured=True,
    )
    assert not {"memory_bound", "latency", "host_gap", "no_request"} & set(ledger(known).estimated)
    by_habit = ledger(msgspec.structs.replace(known, host_gap_measured=False)).estimated
    assert {"host_gap", "no_request"} <= set(by_habit)
    by_model = ledger(msgspec.structs.replace(known, memory_excess_ns=0.3 * T)).estimated
    assert {"memory_bound", "latency"} <= set(by_model)
    by_others = ledger(msgspec.structs.replace(known, bandwidth_measured=False)).estimated
    assert {"memory_bound", "latency"} <= set(by_others)


def test_without_a_counter_only_rest_is_known() -> None:
    rest = ledger(Evidence(window_ns=T, observed_ns=T, idle_because="no_request"))
    assert rest.causes_ns["no_request"] == T
    assert rest.estimated == ("no_request",)
    busy = ledger(Evidence(window_ns=T, observed_ns=T, idle_because="host_gap"))
    assert busy.causes_ns["unattributed"] == T


def test_what_nobody_looked_at_is_unobserved() -> None:
    booked = ledger(
        Evidence(window_ns=10 * T, observed_ns=T, active_ns=0.0, idle_because="no_request")
    ).causes_ns
    assert booked["unobserved"] == 9 * T
    assert booked["no_request"] == T


def test_work_on_a_gpu_without_a_process_is_nobodys_idle_time() -> None:
    booked = ledger(Evidence(window_ns=T, observed_ns=T, active_ns=0.5 * T, owner="unallocated")).causes_ns
    assert booked["unallocated"] == 0.5 * T
    assert booked["unattributed"] == 0.5 * T


def test_what_was_waited_for_a_peer_is_taken_out_of_idle_and_of_active_time_once() -> None:
    known = Evidence(
        window_ns=T,
        observed_ns=T,
        active_ns=0.8 * T,
        active_measured=True,
        tensor_ns=0.2 * T,
        useful_ns=0.2 * T,
        memory_ns=0.5 * T,
        memory_measured=True,
        idle_because="no_request",
        host_gap_ns=0.05 * T,
        host_gap_measured=True,
        waiting_idle_ns=0.1 * T,
        waiting_measured=True,
    )
    booked = ledger(known)
    assert booked.causes_ns["waiting_peer"] == 0.1 * T
    assert booked.causes_ns["host_gap"] == pytest.approx(0.05 * T, abs=1)
    assert booked.causes_ns["no_request"] == pytest.approx(0.05 * T, abs=1)
    assert "waiting_peer" not in booked.estimated
    spun = ledger(msgspec.structs.replace(known, waiting_active_ns=0.25 * T))
    assert spun.causes_ns["waiting_peer"] == pytest.approx(0.35 * T, abs=1)
    assert spun.causes_ns["memory_bound"] == booked.causes_ns["memory_bound"]
    assert booked.causes_ns["latency"] - spun.causes_ns["latency"] == pytest.approx(0.25 * T, abs=1)
    assert "waiting_peer" in spun.estimated
