"""Phases against the simulator's truth where they are easily mistaken, with steps, token sums, fast counters.

Errors are points of the run's time. A label is wrong as far as there is more of it than in truth; what is
`unknown` is not wrong, and coverage stands beside.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.agent.analysis.cases import CASES, Outcome, outcome

from gpuidle.agent.model import Phase

ONES = ("async scheduling", "power cap", "hot", "straggler")
"""Cases of the ledger (`test_ledger_cases`) whose phases are those of "chats"."""
ONE_ENGINE = [case for case in CASES if case not in ("two engines on one GPU", *ONES)]
COUNTED = [case for case in ONE_ENGINE if not case.startswith(("pipeline", "speculation"))]
"""Cases whose busy time fast counters can label whole."""


def containing(shares: Mapping[Phase, float]) -> float:
    return shares["prefill"] + shares["mixed"]


def excess(found: Outcome, gpu: int) -> dict[str, float]:
    """Return by how many points each label is more than the truth of it."""
    ours, theirs = found.ours[gpu], found.theirs[gpu]
    return {
        "containing": 100 * (containing(ours) - containing(theirs)),
        "decode": 100 * (ours["decode"] - theirs["decode"]),
        "idle": 100 * (ours["idle"] - theirs["idle"]),
    }


def coverage(found: Outcome, gpu: int = 0) -> float:
    """Return the labelled part of the busy time."""
    return 1 - found.ours[gpu]["unknown"] / (1 - found.theirs[gpu]["idle"])


def gpus(case: str) -> range:
    return range(len(CASES[case].gpus))


@pytest.mark.parametrize("case", CASES)
def test_steps_with_tokens_give_every_phase_exactly(case: str) -> None:
    found = outcome(case, "steps")
    for gpu in gpus(case):
        for phase, share in found.theirs[gpu].items():
            assert found.ours[gpu][phase] == pytest.approx(share, abs=1e-6), (gpu, phase)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ONES])
def test_token_sums_label_nothing_that_was_not(case: str) -> None:
    found = outcome(case, "sums")
    for gpu in gpus(case):
        assert max(excess(found, gpu).values()) <= 1.5, gpu


@pytest.mark.parametrize(
    "case", ["chats", "chunked prefill", "preemption", "prefix hits", "speculation", "tensor parallel"]
)
def test_token_sums_label_most_of_a_load_of_half_a_minute(case: str) -> None:
    assert coverage(outcome(case, "sums")) >= 0.8


@pytest.mark.parametrize(
    ("case", "evidence"),
    [*((case, "PM alone") for case in CASES if case not in ONES), ("chunked prefill", "PM at 100 Hz alone")],
)
def test_fast_counters_alone_label_nothing_that_was_not(case: str, evidence: str) -> None:
    found = outcome(case, evidence)
    for gpu in gpus(case):
        limit = 2.5 if (case, gpu) == ("roles", 1) else 1.5  # a prompt of one token is a decode to them
        assert max(excess(found, gpu).values()) <= limit, gpu
        if case in COUNTED:
            assert coverage(found, gpu) >= 0.95, gpu


@pytest.mark.parametrize("case", ONE_ENGINE)
def test_fast_counters_tell_what_token_sums_leave_open(case: str) -> None:
    found = outcome(case, "sums and PM")
    for gpu in gpus(case):
        limit = 2.5 if (case, gpu) == ("roles", 1) else 1.5
        assert max(excess(found, gpu).values()) <= limit, gpu
        if case in COUNTED:
            assert coverage(found, gpu) >= 0.95, gpu
        elif case.startswith("speculation"):
            assert coverage(found, gpu) >= 0.8, gpu


# -------------------------------------------------------------------------------------- case by case


@pytest.mark.parametrize("evidence", ["sums", "sums and PM", "PM alone"])
def test_what_two_engines_do_on_one_gpu_is_not_told_without_their_steps(evidence: str) -> None:
    found = outcome("two engines on one GPU", evidence)
    ours, theirs = found.ours[0], found.theirs[0]
    assert ours["prefill"] == ours["mixed"] == 0
    assert ours["idle"] == pytest.approx(theirs["idle"], abs=0.01)
    assert ours["unknown"] > 0.5


def test_a_first_long_prefill_is_not_idle_though_nothing_is_running() -> None:
    found = outcome("first long prefill", "sums")
    assert found.ours[0]["idle"] == pytest.approx(found.theirs[0]["idle"], abs=0.002)
    assert found.theirs[0]["prefill"] > 0.03


def test_a_first_long_prefill_is_prefill_by_fast_counters_beside_token_sums() -> None:
    found = outcome("first long prefill", "sums and PM")
    for phase in ("prefill", "decode", "mixed"):
        assert found.ours[0][phase] == pytest.approx(found.theirs[0][phase], abs=0.005), phase


def test_what_is_computed_again_after_a_preemption_is_mixed_and_no_prompt_token() -> None:
    found = outcome("preemption", "steps")
    work = found.truth.engines[0].total
    engine = found.frame.engines[0]
    assert work.recomputed_tokens > 500
    assert engine.preemptions_total == work.preemptions > 0
    assert engine.prefill_tokens_total == work.prompt_tokens


@pytest.mark.parametrize("evidence", ["steps", "sums"])
def test_cached_prefixes_are_no_prefill_tokens(evidence: str) -> None:
    found = outcome("prefix hits", evidence)
    engine, work = found.frame.engines[0], found.truth.engines[0].total
    assert engine.prefill_tokens_total == work.prompt_tokens
    assert engine.prefix_hit_ratio == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize("evidence", ["steps", "sums", "sums and PM", "PM alone"])
@pytest.mark.parametrize("case", ["speculation without prompts", "speculation of a large batch"])
def test_verification_is_decode_and_never_prefill(case: str, evidence: str) -> None:
    found = outcome(case, evidence)
    busy = [kind for kind in found.kinds if kind["decode"] > 0]
    assert len(busy) >= 10
    # Prompts were there in the first seconds only.
    assert all(kind["prefill"] == kind["mixed"] == 0 for kind in busy[3:])
    if evidence != "PM alone":
        assert sum(kind["decode"] for kind in busy[3:]) > 0.97 * sum(
            kind["decode"] + kind["unknown"] for kind in busy[3:]
        )


@pytest.mark.parametrize("case", ["speculation", "speculation with a draft model"])
def test_drafts_are_counted_and_are_no_tokens(case: str) -> None:
    found = outcome(case, "sums")
    engine, work = found.frame.engines[0], found.truth.engines[0].total
    assert engine.decode_tokens_total == work.decode_tokens
    assert engine.draft_tokens_total == work.draft_tokens > work.decode_tokens
    assert engine.accepted_tokens_total == work.accepted_tokens


@pytest.mark.parametrize("evidence", ["steps", "sums", "PM alone"])
@pytest.mark.parametrize("case", ["tensor parallel", "experts"])
def test_the_ranks_of_a_group_have_the_same_phases(case: str, evidence: str) -> None:
    found = outcome(case, evidence)
    for shares in found.ours[1:]:
        for phase, share in shares.items():
            assert share == pytest.approx(found.ours[0][phase], abs=0.005), phase


@pytest.mark.parametrize("evidence", ["sums", "sums and PM", "PM alone"])
def test_the_bubble_of_a_pipeline_is_not_called_idle(evidence: str) -> None:
    found = outcome("pipeline", evidence)
    for gpu in gpus("pipeline"):
        assert found.ours[gpu]["idle"] == pytest.approx(found.theirs[gpu]["idle"], abs=0.01)
        assert found.ours[gpu]["unknown"] > 0.3


@pytest.mark.parametrize("evidence", ["steps", "sums", "sums and PM"])
def test_a_prefill_engine_never_decodes_and_its_decode_engine_hardly_prefills(evidence: str) -> None:
    found = outcome("roles", evidence)
    prefill, decode = found.ours
    assert prefill["decode"] == 0
    assert containing(prefill) == pytest.approx(found.theirs[0]["prefill"], abs=0.005)
    assert containing(decode) <= containing(found.theirs[1]) + 0.01
    assert [engine.role for engine in found.frame.engines] == ["decode", "prefill"]
