from __future__ import annotations

from typing import get_args

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
    communication_ns=st.none() | st.floats(0, 1e9),
    clock_ratio=st.floats(0.1, 1.2),
    idle_because=st.sampled_from(get_args(IdleBecause)),
    host_gap_ns=st.none() | st.floats(0, 3e9),
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


def test_an_unknown_shape_is_no_useful_work_and_no_idle_either() -> None:
    booked = ledger(
        Evidence(window_ns=T, observed_ns=T, active_ns=0.8 * T, idle_because="host_gap")
    ).causes_ns
    assert booked["useful"] == 0
    assert booked["unattributed"] == 0.8 * T
    assert booked["host_gap"] == 0.2 * T


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
