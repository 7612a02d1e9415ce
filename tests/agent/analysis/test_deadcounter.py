"""A tensor counter that dies under a load is told in seconds and taken for absent, never for an idle pipe."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

import numpy as np
import pytest
from msgspec.structs import replace
from tests.agent.analysis.cases import CASES, EVIDENCE, PM_100_HZ

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.zeros import Zeros
from gpuidle.agent.model import CounterSeries, Frame, Rung, column
from gpuidle.collectors.simulator.demos import named
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.options import BadCounter
from gpuidle.collectors.simulator.scenario import Burst, ClosedLoop, Cycle, Scenario, Sizes
from gpuidle.collectors.simulator.truth import Truth

SECOND = 10**9
DIES, LIVES, END = 10, 30, 40
FAULT = BadCounter(start_ns=DIES * SECOND, stop_ns=LIVES * SECOND, gpu=0)
SEEN = {**EVIDENCE, "steps and PM": Visible(counters=PM_100_HZ)}
WAYS = ("sums", "steps", "steps and PM")


def run(scenario: Scenario, evidence: str, seconds: int = END) -> list[tuple[Frame, Truth]]:
    analyzer = Analyzer()
    told = islice(simulate(scenario, visible=SEEN[evidence]), seconds)
    return [(analyzer.feed(snapshot), now) for snapshot, now in told]


@lru_cache(maxsize=8)
def dying(evidence: str) -> list[tuple[Frame, Truth]]:
    return run(replace(named("plain", [], seed=7), faults=(FAULT,)), evidence)


def dead(frame: Frame) -> bool:
    return any(p.kind == "dead_counter" and "it is taken for absent" in p.message for p in frame.problems)


def errors(found: list[tuple[Frame, Truth]], first: int, last: int) -> dict[str, float]:
    """Return ours less the truth in points, over the settled windows that end in (first, last]."""
    ours: dict[str, int] = {}
    theirs: dict[str, int] = {}
    settled = 2
    for at in range(first, last):
        for cause, ns in found[at + 1 + settled][0].gpus[0].causes_ns.items():
            ours[cause] = ours.get(cause, 0) + ns
        for cause, ns in found[at + 1][1].gpus[0].window.causes_ns.items():
            theirs[cause] = theirs.get(cause, 0) + ns
    assert sum(ours.values()) == sum(theirs.values()) == (last - first) * SECOND
    return {cause: 100 * (ns - theirs.get(cause, 0)) / (last - first) / SECOND for cause, ns in ours.items()}


@pytest.mark.parametrize("evidence", WAYS)
def test_it_is_told_within_seconds_and_no_longer_than_it_lasts(evidence: str) -> None:
    told = [at for at, (frame, _) in enumerate(dying(evidence)) if dead(frame)]
    assert told[0] <= DIES + 4
    assert told == list(range(told[0], told[-1] + 1))
    assert LIVES - 1 <= told[-1] <= LIVES + 3


@pytest.mark.parametrize("evidence", WAYS)
def test_no_other_liar_is_named(evidence: str) -> None:
    kinds = {p.kind for frame, _ in dying(evidence) for p in frame.problems if p.source == "referee"}
    assert kinds == {"dead_counter"}


@pytest.mark.parametrize("evidence", WAYS)
def test_useful_time_is_not_lost_and_nobody_is_waited_for(evidence: str) -> None:
    found = errors(dying(evidence), DIES + 1, LIVES - 1)
    assert abs(found["useful"]) <= 1.0
    assert abs(found["waiting_peer"]) <= 0.5
    assert abs(found["padding"]) <= 2.0
    assert max(map(abs, found.values())) <= 5.0


@pytest.mark.parametrize("evidence", WAYS)
def test_a_pipe_that_nobody_saw_is_not_idle(evidence: str) -> None:
    found = dying(evidence)
    before, during = (found[at][0].gpus[0].tensor_active for at in (DIES + 1, LIVES))
    assert before is not None
    assert during is not None
    assert during.value >= 0.7 * before.value
    assert during.window_ns <= (DIES + 1) * SECOND


@pytest.mark.parametrize("evidence", WAYS)
def test_it_is_believed_again_when_it_lives(evidence: str) -> None:
    last = dying(evidence)[-1][0].gpus[0].tensor_active
    assert last is not None
    assert last.window_ns >= (DIES + END - LIVES - 5) * SECOND
    assert abs(errors(dying(evidence), LIVES + 1, END - 3)["useful"]) <= 1.0


def test_a_counter_that_never_lived_is_dead_by_the_model() -> None:
    always = replace(named("plain", [], seed=7), faults=(replace(FAULT, start_ns=0),))
    assert any(dead(frame) for frame, _ in run(always, "sums", 8))


@pytest.mark.parametrize("evidence", ["sums", "steps"])
@pytest.mark.parametrize("case", ["chats", "roles", "first long prefill"])
def test_live_counters_are_never_called_dead(case: str, evidence: str) -> None:
    assert not any(dead(frame) for frame, _ in run(CASES[case], evidence))


def one_user(*, prompt: int) -> Scenario:
    plain = CASES["chats"]
    users = ClosedLoop(users=1, mix=(Sizes(prompt=(prompt, prompt), output=(400, 400)),))
    engine = replace(plain.engines[0], arrivals=(users,))
    return replace(plain, engines=(engine,), faults=(replace(FAULT, stop_ns=None),))


@pytest.mark.parametrize(("prompt", "sure"), [(8, False), (600, True)])
def test_steps_of_few_rows_may_do_without_the_pipe(prompt: int, sure: bool) -> None:
    found = run(one_user(prompt=prompt), "steps", 24)
    assert any(dead(frame) for frame, _ in found) is sure


def test_a_device_at_rest_is_not_dead() -> None:
    plain = CASES["chats"]
    bursts = Cycle(
        period_ns=12 * SECOND, parts=(Burst(at_ns=0, count=8, mix=(Sizes((500, 800), (30, 60)),)),)
    )
    engine = replace(plain.engines[0], arrivals=(bursts,))
    assert not any(dead(frame) for frame, _ in run(replace(plain, engines=(engine,)), "sums", 36))


# --------------------------------------------------------------------------------------------------------
# Runs of zeros


def samples(first_s: int, *values: int, rung: Rung = "nvml_gpm") -> CounterSeries:
    count = len(values)
    return CounterSeries(
        hw_id="GPU-a",
        rung=rung,
        end_ns=column(np.arange(first_s + 1, first_s + count + 1) * SECOND, "i8"),
        width_ns=column(np.full(count, SECOND), "i8"),
        tensor_active=column(np.array(values), "u2"),
    )


def test_a_run_begins_after_the_last_sign_of_life_and_ends_at_the_next() -> None:
    zeros = Zeros()
    for series in (samples(0, 5, 0), samples(2, 0, 0), samples(4, 0, 7)):
        zeros.add(series)
    (run,) = zeros.runs
    assert (run.start_ns, run.end_ns, run.lived, run.over) == (SECOND, 5 * SECOND, True, True)


def test_each_rung_has_runs_of_its_own_and_what_is_over_is_let_go() -> None:
    zeros = Zeros()
    zeros.add(samples(0, 0, 0))
    zeros.add(samples(0, 3, 3, rung="cupti_pm"))
    assert [(run.rung, run.lived) for run in zeros.runs] == [("nvml_gpm", False)]
    zeros.add(samples(2, 4, 4))
    zeros.prune(2 * SECOND)
    assert zeros.runs == []
