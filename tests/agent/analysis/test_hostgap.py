"""Host gaps from sums: what tells that a request was there, and what windows with rests teach."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from gpuidle.agent.analysis.hostgap import USUAL_RATIO, HostGap, request_throughout
from gpuidle.agent.analysis.rates import Sums

SECOND = 10**9
MS = 10**6
STEP = 10 * MS


def sums(running: tuple[int | None, int | None], firsts: int | None, at: int = 0) -> Sums:
    return Sums(
        start_ns=at * SECOND,
        end_ns=(at + 1) * SECOND,
        prefill_tokens=None,
        prefill_exact=False,
        generated_tokens=None,
        first_tokens=firsts,
        time_to_first_token_s=None,
        counted_steps=None,
        running=running,
    )


def test_who_runs_and_did_not_begin_here_was_there_all_the_time() -> None:
    assert request_throughout(sums((3, 4), 2), sums((4, 4), 1, 1))
    assert not request_throughout(sums((3, 4), 2), sums((4, 4), 2, 1))


@pytest.mark.parametrize(
    ("window", "following"),
    [
        (sums((0, 9), 2), sums((9, 9), 0, 1)),
        (sums((3, None), 0), sums((3, 3), 0, 1)),
        (sums((3, 3), None), sums((3, 3), 0, 1)),
        (sums((3, 3), 0), None),
        (sums((3, 3), 0), sums((3, 3), 0, 2)),
        (sums((3, 3), 0), replace(sums((3, 3), 0, 1), chunk_steps=2.0)),
        (replace(sums((3, 3), 0), reset=True), sums((3, 3), 0, 1)),
    ],
    ids=["began at rest", "no gauge", "no first tokens", "last", "a hole", "a long prompt", "restart"],
)
def test_without_all_of_the_evidence_nothing_is_claimed(window: Sums, following: Sums | None) -> None:
    assert not request_throughout(window, following)


def test_windows_with_a_request_throughout_tell_the_gap_whatever_the_others_show() -> None:
    gap = HostGap()
    gap.learn(50, 700e6, STEP, running=1, throughout=False)
    gap.learn(60, 60 * 6e6, STEP, running=1, throughout=True)
    gap.learn(3, 900e6, STEP, running=1, throughout=True)
    assert gap.told_ns() == pytest.approx(6e6)


def test_no_window_no_gap() -> None:
    assert HostGap().told_ns() is None


def test_rests_are_never_taken_for_gaps() -> None:
    gap, chance = HostGap(), Random(3)
    for _ in range(200):
        busy = chance.uniform(0.1, 0.6)
        steps = round(busy * SECOND / STEP)
        gap.learn(steps, (1 - busy) * SECOND, STEP, running=3, throughout=False)
        told = gap.told_ns()
        assert told is None or told <= USUAL_RATIO * STEP


def test_a_window_without_a_rest_shows_what_the_others_held() -> None:
    gap = HostGap()
    for inactive_ms in (500, 300, 20, 400):
        gap.learn(50, inactive_ms * 1e6, STEP, running=1, throughout=False)
    assert gap.told_ns() == pytest.approx(20e6 / 50)


@pytest.mark.parametrize(("running", "told"), [(3, 8e6), (1, USUAL_RATIO * STEP)], ids=["several", "one"])
def test_windows_that_are_alike_tell_a_slow_host_if_several_requests_run(running: int, told: float) -> None:
    gap, chance = HostGap(), Random(3)
    for _ in range(20):
        gap.learn(50, 50 * chance.gauss(8e6, 0.2e6), STEP, running=running, throughout=False)
    assert gap.told_ns() == pytest.approx(told, rel=0.06)


def test_what_is_old_is_forgotten() -> None:
    gap = HostGap()
    gap.learn(50, 5e6, STEP, running=1, throughout=False)
    for _ in range(100):
        gap.learn(50, 40e6, STEP, running=1, throughout=False)
    assert gap.told_ns() == pytest.approx(40e6 / 50)
