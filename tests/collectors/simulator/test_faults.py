"""What is wrong shows in what is read, and the truth stays what it was."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from tests.collectors.simulator.nodes import asked, counters_of, node

from gpuidle.agent.model import Snapshot
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import START, Visible, simulate
from gpuidle.collectors.simulator.options import (
    BadCounter,
    CounterClock,
    Fault,
    LateTokens,
    LostSteps,
    MissingSamples,
    Restart,
)
from gpuidle.collectors.simulator.scenario import SECOND_NS, ClosedLoop, Request, ScenarioError, Sizes
from gpuidle.collectors.simulator.truth import Truth

BUSY = asked(*(Request(i * SECOND_NS // 4, 700, 30) for i in range(28)))
FAST = Visible(counters=Sampling("cupti_pm", 100.0))


def run(*faults: Fault, seconds: float = 7.0, seed: int = 1) -> tuple[list[Snapshot], list[Truth]]:
    scenario = replace(node(BUSY, seconds=seconds, seed=seed), faults=faults)
    pairs = list(simulate(scenario, visible=FAST))
    return [snapshot for snapshot, _ in pairs], [truth for _, truth in pairs]


def tensor(snapshots: list[Snapshot]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    parts = [series.tensor_active for snapshot in snapshots for series in snapshot.counters]
    return np.concatenate([part.astype(np.int64) for part in parts if part is not None])


def test_faults_of_what_is_read_leave_the_truth_alone() -> None:
    _, healthy = run()
    _, broken = run(
        BadCounter(),
        MissingSamples(0.5),
        CounterClock(3_000_000, 50.0),
        LostSteps(0.3),
        LateTokens(50_000_000),
    )
    assert broken == healthy


def test_a_dead_counter_reads_zero_and_the_others_go_on() -> None:
    healthy, _ = run()
    broken, _ = run(BadCounter(start_ns=2 * SECOND_NS, stop_ns=4 * SECOND_NS))
    seen, true = tensor(broken), tensor(healthy)
    assert not seen[200:400].any()
    assert true[200:400].any()
    assert seen[:200].tolist() == true[:200].tolist()
    assert seen[400:].tolist() == true[400:].tolist()
    for one, other in zip(broken[1:], healthy[1:], strict=True):
        assert one.counters[0].gr_active is not None
        assert other.counters[0].gr_active is not None
        assert one.counters[0].gr_active.tolist() == other.counters[0].gr_active.tolist()


def test_a_frozen_counter_repeats_its_last_value() -> None:
    healthy, _ = run()
    broken, _ = run(BadCounter("frozen", start_ns=2 * SECOND_NS + 300_000_000, stop_ns=4 * SECOND_NS))
    seen, true = tensor(broken), tensor(healthy)
    assert set(seen[230:400].tolist()) == {int(true[229])}
    assert seen[:230].tolist() == true[:230].tolist()
    assert seen[400:].tolist() == true[400:].tolist()


def test_samples_are_missing_by_chance_or_all_of_them() -> None:
    some, _ = run(MissingSamples(0.3))
    assert 0.6 < len(tensor(some)) / 700 < 0.8
    hole, _ = run(MissingSamples(1.0, start_ns=2 * SECOND_NS, stop_ns=4 * SECOND_NS))
    assert [len(snapshot.counters) for snapshot in hole] == [0, 1, 1, 0, 0, 1, 1, 1]


def test_the_clock_of_the_counters_lags_and_drifts() -> None:
    healthy, _ = run()
    broken, _ = run(CounterClock(lag_ns=5_000_000, drift_ppm=200.0))
    ends = [np.concatenate([c.end_ns for s in each for c in s.counters]) for each in (broken, healthy)]
    off = ends[0] - ends[1]
    elapsed = ends[1] - START.monotonic_ns
    assert off.tolist() == (5_000_000 + np.rint(elapsed * 200e-6)).astype(np.int64).tolist()
    assert tensor(broken).tolist() == tensor(healthy).tolist()


@pytest.mark.parametrize("told", [True, False])
def test_steps_are_lost_and_counted_where_the_reader_knows(told: bool) -> None:
    healthy, _ = run()
    broken, _ = run(LostSteps(0.25, told=told))
    all_steps, seen = (
        sum(len(series) for snapshot in each for series in snapshot.steps) for each in (healthy, broken)
    )
    assert 0.65 < seen / all_steps < 0.85
    lost = sum(series.lost for snapshot in broken for series in snapshot.steps)
    assert lost == (all_steps - seen if told else 0)


def test_late_tokens_are_those_of_a_moment_ago() -> None:
    late_ns = 400_000_000
    scenario = node(BUSY, seconds=4.0)
    ticks = SECOND_NS // 10
    now = [counters_of(s).generated_tokens for s, _ in simulate(scenario, tick_ns=ticks)]
    behind = replace(scenario, faults=(LateTokens(late_ns),))
    then = [counters_of(s).generated_tokens for s, _ in simulate(behind, tick_ns=ticks)]
    assert then[4:] == now[:-4]
    assert then[:4] == [0] * 4


def test_a_restart_loses_all_requests_and_comes_back_as_another_process() -> None:
    at_ns = 2 * SECOND_NS + 512_000_000
    spec = replace(BUSY, arrivals=(ClosedLoop(4, (Sizes((300, 600), (50, 90)),)),))
    restart = Restart("small", at_ns, gone_ns=2 * SECOND_NS, loading_ns=3 * SECOND_NS)
    scenario = replace(node(spec, seconds=12.0), faults=(restart,))
    pairs = list(simulate(scenario, visible=FAST))
    states = [[engine.state for engine in snapshot.engines] for snapshot, _ in pairs]
    assert states == [["serving"]] * 3 + [[]] * 2 + [["starting"]] * 3 + [["serving"]] * 5
    before, after = pairs[2][0].engines[0], pairs[-1][0].engines[0]
    assert before.engine_id == after.engine_id
    assert before.root_pid != after.root_pid
    assert after.root_start_ns == START.boottime_ns + at_ns + 2 * SECOND_NS
    assert (counters_of(pairs[8][0]).generated_tokens or 0) < (counters_of(pairs[2][0]).generated_tokens or 0)
    total = pairs[-1][1].gpus[0].total.causes_ns
    assert (total["unallocated"], total["starting"]) == (2 * SECOND_NS, 3 * SECOND_NS)
    assert sum(total.values()) == 12 * SECOND_NS
    gone = (pairs[3][0].gpus or ())[0]
    assert (gone.processes, gone.memory_used_bytes) == ((), 0)
    loading = (pairs[6][0].gpus or ())[0]
    assert loading.processes
    assert pairs[-1][1].engines[0].window.decode_tokens > 0
    last = max(int(series.end_ns[-1]) for s, _ in pairs[:6] for series in s.steps if len(series))
    assert last <= START.monotonic_ns + at_ns


def test_the_step_that_an_engine_dies_in_is_executed_and_not_useful() -> None:
    at_ns = 2_001_000_000
    scenario = replace(node(BUSY, seconds=2.5), faults=(Restart("small", at_ns),))
    whole, cut = ([t for _, t in simulate(s)][-1] for s in (replace(scenario, faults=()), scenario))
    assert cut.engines[0].total.executed_flops < whole.engines[0].total.executed_flops
    assert cut.engines[0].total.useful_flops < whole.engines[0].total.useful_flops
    assert cut.gpus[0].total.causes_ns["unallocated"] == int(2.5 * SECOND_NS) - at_ns


def test_faults_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(ScenarioError, match="engine that is not there"):
        run(LateTokens(1, engine="nobody"))
    with pytest.raises(ScenarioError, match="GPU that is not there"):
        run(MissingSamples(0.5, gpu=3))
    with pytest.raises(ScenarioError, match="before it is back"):
        run(Restart("small", SECOND_NS), Restart("small", 2 * SECOND_NS))
