from __future__ import annotations

from typing import Any

from tests.agent.analysis.builders import LLAMA_8B, SECOND, counters, engine, gpu, snapshot

from gpuidle.agent.analysis.analyzer import Analyzer, Settings
from gpuidle.agent.codec import decode_snapshot, encode_frame, encode_snapshot
from gpuidle.agent.model import (
    CAUSES,
    ESTIMABLE,
    CounterSeries,
    EngineLimits,
    Frame,
    GpuProcess,
    Parallelism,
    Snapshot,
    column,
)


def feed(snapshots: list[Snapshot], **settings: Any) -> list[Frame]:
    analyzer = Analyzer(Settings(**settings))
    return [analyzer.feed(each) for each in snapshots]


def decoding(seconds: int, busy: float = 1.0, **engine_values: Any) -> list[Snapshot]:
    """60 steps a second at batch 8 on one H100 from an 8B model."""
    values = {
        "model_text": "llama",
        "limits": EngineLimits(max_batched_tokens=8192, kv_capacity_tokens=400_000),
        **engine_values,
    }
    out = []
    for t in range(seconds):
        row = counters(
            t,
            generated_tokens=480 * t,
            counted_steps=60 * t,
            requests_running=8,
            kv_usage_ratio=8 * 1000 / 400_000,
        )
        out.append(
            snapshot(t, gpus=(gpu(t, busy),), engines=(engine(t, row, **values),), texts={"llama": LLAMA_8B})
        )
    return out


def test_a_busy_decode_is_almost_all_idle_compute() -> None:
    frame = feed(decoding(10))[-1]
    card = frame.gpus[0]
    assert card.busy is not None
    assert card.busy.value == 1.0
    idle = card.idle["flops"]
    # 480 tokens/s x 2 x 7.5e9 FLOPs of 989e12.
    assert 0.992 < idle.low <= idle.value <= idle.high < 0.994
    assert idle.evidence == "estimated"
    assert "tensor_pipe" not in card.idle
    assert card.causes_ns["useful"] < 0.01 * SECOND
    assert 0.25 * SECOND < card.causes_ns["memory_bound"] < 0.5 * SECOND
    assert card.causes_ns["no_request"] == 0
    assert sum(card.causes_ns.values()) == card.window_ns == SECOND
    assert frame.engines[0].phases.decode_ns == SECOND
    assert frame.engines[0].decode_tokens_total == 9 * 480


def test_totals_are_the_sum_of_settled_windows_and_never_fall() -> None:
    frames = feed(decoding(12))
    past: dict[str, int] = dict.fromkeys(CAUSES, 0)
    for frame in frames:
        totals = frame.gpus[0].causes_total_ns
        assert all(totals[cause] >= past[cause] for cause in CAUSES)
        past = totals
    assert sum(past.values()) == sum(frames[-1].gpus[0].phases_total_ns.values()) == 9 * SECOND


def test_what_was_estimated_is_added_up_beside_the_ledger() -> None:
    frames = feed(decoding(12))
    past: dict[str, int] = dict.fromkeys(ESTIMABLE, 0)
    for frame in frames:
        card = frame.gpus[0]
        assert card.estimated_total_ns is not None
        grown = {cause: card.estimated_total_ns[cause] - past[cause] for cause in ESTIMABLE}
        past = card.estimated_total_ns
        if card.window_ns:
            assert grown == {
                cause: card.causes_ns[cause] if cause in card.estimated_causes else 0 for cause in ESTIMABLE
            }
    assert past["memory_bound"] > 0


def test_an_idle_engine_is_no_request_and_an_empty_gpu_unallocated() -> None:
    rest = [
        snapshot(
            t,
            gpus=(gpu(t, 0.0), gpu(t, 0.0, hw_id="GPU-1", index=1, processes=())),
            engines=(engine(t, counters(t)),),
        )
        for t in range(6)
    ]
    first, second = feed(rest)[-1].gpus
    assert first.causes_ns["no_request"] == SECOND
    assert second.causes_ns["unallocated"] == SECOND
    assert second.idle["flops"].value == 1.0
    assert first.engine_ids == ("vllm-tiny-1",)


def test_a_first_long_prefill_is_not_no_request() -> None:
    def at(t: int) -> Snapshot:
        done = t >= 6
        row = counters(
            t,
            computed_prompt_tokens=6000 if done else 0,
            prompt_tokens=6000 if done else 0,
            generated_tokens=1 if done else 0,
            first_tokens=1 if done else 0,
            time_to_first_token_s=5.0 if done else 0.0,
        )
        busy = 1.0 if 1 < t <= 6 else 0.0
        return snapshot(t, gpus=(gpu(t, busy),), engines=(engine(t, row),))

    frames = feed([at(t) for t in range(12)])
    totals = frames[-1].gpus[0].causes_total_ns
    assert totals["no_request"] <= 4 * SECOND  # 0-1 and after the prompt; never the busy seconds
    assert totals["unattributed"] >= 5 * SECOND  # no model text: no FLOP basis
    assert frames[-1].engines[0].prefill_tokens_total == 6000


def test_an_engine_that_gives_no_counters_is_unobserved_never_no_request() -> None:
    blind = [snapshot(t, gpus=(gpu(t, 0.0),), engines=(engine(t, state="unobserved"),)) for t in range(6)]
    frame = feed(blind)[-1]
    assert frame.gpus[0].causes_ns["unobserved"] == SECOND
    assert frame.gpus[0].causes_ns["no_request"] == 0
    assert frame.engines[0].evidence == "unknown"
    assert frame.engines[0].decode_tokens_total is None


def test_a_restarted_engine_never_counts_backwards() -> None:
    before = [snapshot(t, engines=(engine(t, counters(t, generated_tokens=1000 + t)),)) for t in range(3)]
    after = [
        snapshot(t, engines=(engine(t, counters(t, generated_tokens=t), root_pid=77),)) for t in range(3, 8)
    ]
    totals = [f.engines[0].decode_tokens_total for f in feed(before + after)]
    assert totals == [0, 1, 2, 5, 6, 7, 8, 9]


def test_an_engine_born_while_we_watch_is_counted_from_its_birth() -> None:
    born = engine(2, counters(2, generated_tokens=9, first_tokens=2), root_start_ns=round(1.5 * SECOND))
    frames = feed([snapshot(0), snapshot(1), snapshot(2, engines=(born,))])
    assert frames[-1].engines[0].decode_tokens_total == 7


def test_a_lost_gpu_is_unobserved_and_the_other_goes_on() -> None:
    both = [snapshot(t, gpus=(gpu(t, 0.5), gpu(t, 0.5, hw_id="GPU-1", index=1))) for t in range(3)]
    one = [snapshot(t, gpus=(gpu(t, 0.5),)) for t in range(3, 9)]
    first, second = feed(both + one)[-1].gpus
    assert first.causes_ns["unobserved"] == 0
    assert second.causes_ns["unobserved"] == SECOND
    assert second.power_watts is None
    assert second.busy is None or second.busy.window_ns <= 3 * SECOND


def test_an_engine_that_misses_a_scrape_does_not_make_its_gpu_foreign() -> None:
    def at(t: int) -> Snapshot:
        row = counters(t, generated_tokens=100 * t, counted_steps=50 * t, requests_running=2)
        found = (engine(t, row),) if t not in (0, 4, 5) else ()
        return snapshot(t, gpus=(gpu(t, 0.9),), engines=found)

    totals = feed([at(t) for t in range(12)])[-1].gpus[0].causes_total_ns
    assert totals["foreign"] == 0
    assert totals["unobserved"] == 0  # the sums of the next scrape span the missed ones
    assert totals["unattributed"] > 7 * SECOND


def test_an_engine_that_tells_every_ten_seconds_is_waited_for() -> None:
    def at(t: int) -> Snapshot:
        row = counters(t, generated_tokens=100 * t, counted_steps=50 * t, requests_running=2)
        told = (row,) if t % 10 == 0 else ()
        return snapshot(t, gpus=(gpu(t, 0.9),), engines=(engine(t, *told),))

    frames = feed([at(t) for t in range(60)])
    later = {
        cause: value - frames[29].gpus[0].causes_total_ns[cause]
        for cause, value in frames[-1].gpus[0].causes_total_ns.items()
    }
    assert later["unobserved"] == 0
    assert sum(later.values()) >= 20 * SECOND


def test_a_process_that_no_engine_claims_is_foreign() -> None:
    frames = feed([snapshot(t, gpus=(gpu(t, 0.9),)) for t in range(6)])
    assert frames[-1].gpus[0].causes_ns["foreign"] == SECOND
    assert "flops" not in frames[-1].gpus[0].idle


def test_no_driver_is_not_no_gpu() -> None:
    assert not feed([snapshot(0, gpus=None)])[-1].gpu_source
    assert feed([snapshot(0, gpus=())])[-1].gpu_source


def test_missed_ticks_are_a_gap_not_a_stretched_gauge() -> None:
    frames = feed(
        [
            snapshot(0, gpus=(gpu(0, 1.0, processes=()),)),
            snapshot(1, gpus=(gpu(1, 1.0, processes=()),)),
            snapshot(11, gpus=(gpu(11, 0.0, processes=()),), missed_ticks=9),
            *(snapshot(t, gpus=(gpu(t, 0.0, processes=()),)) for t in range(12, 16)),
        ]
    )
    totals = frames[-1].gpus[0].causes_total_ns
    assert totals["unobserved"] == 9 * SECOND
    assert frames[-1].missed_ticks_total == 9


def test_a_wall_clock_step_and_a_suspend_make_no_negative_window() -> None:
    frames = feed(
        [
            snapshot(0, gpus=(gpu(0, 0.0),)),
            snapshot(1, gpus=(gpu(1, 0.0),), wall_ns=5),
            snapshot(2, gpus=(gpu(2, 0.0),), boottime_ns=3602 * SECOND),
            snapshot(3, gpus=(gpu(3, 0.0),), boottime_ns=3603 * SECOND),
        ]
    )
    assert [f.interval_ns for f in frames] == [0, SECOND, SECOND, SECOND]
    assert [p.kind for p in frames[2].problems] == ["suspended"]
    assert sum(frames[-1].gpus[0].causes_total_ns.values()) <= 3 * SECOND


def test_snapshots_out_of_order_are_named_and_give_no_window() -> None:
    frames = feed([snapshot(5), snapshot(3), snapshot(4)])
    assert frames[1].interval_ns == 0
    assert frames[1].problems[0].kind == "time_went_back"
    assert frames[2].interval_ns == SECOND


def test_several_front_ends_never_inflate_steps() -> None:
    def at(t: int) -> Snapshot:
        row = counters(
            t,
            generated_tokens=300 * t,
            counted_steps=500 * t,
            first_tokens=t,
            computed_prompt_tokens=50 * t,
            requests_running=3,
        )
        return snapshot(t, gpus=(gpu(t, 0.9),), engines=(engine(t, row, steps_reliable=False),))

    frame = feed([at(t) for t in range(8)])[-1]
    assert frame.engines[0].steps_total == {}
    assert frame.engines[0].phases.unknown_ns == 0.9 * SECOND


def test_a_tensor_parallel_engine_counts_its_tokens_once_and_its_flops_per_gpu() -> None:
    snapshots = []
    for each in decoding(8, parallelism=Parallelism(tensor=2)):
        at_s = each.monotonic_ns / SECOND
        other = gpu(at_s, 1.0, hw_id="GPU-1", index=1, processes=(GpuProcess(pid=11),))
        snapshots.append(
            snapshot(at_s, gpus=(*(each.gpus or ()), other), engines=each.engines, texts=each.texts)
        )
    frame = feed(snapshots)[-1]
    assert len(frame.engines) == 1
    assert frame.engines[0].hw_ids == ("GPU-0", "GPU-1")
    alone = feed(decoding(8))[-1].gpus[0].idle["flops"].value
    shared = frame.gpus[0].idle["flops"].value
    assert abs((1 - shared) - (1 - alone) / 2) < 0.05 * (1 - alone)


def test_replay_of_encoded_snapshots_equals_live_byte_for_byte() -> None:
    live = [encode_frame(frame) for frame in feed(decoding(9))]
    again = feed([decode_snapshot(encode_snapshot(s)) for s in decoding(9)])
    assert [encode_frame(frame) for frame in again] == live


def test_an_unknown_architecture_has_no_flop_basis_and_says_so() -> None:
    odd = [
        snapshot(t, gpus=(gpu(t, 1.0),), engines=(engine(t, counters(t), model_text="x"),),
                 texts={"x": '{"architectures": ["NoSuchForCausalLM"], "model_type": "nosuch"}'})
        for t in range(5)
    ]  # fmt: skip
    frame = feed(odd)[-1]
    assert any(p.kind == "no_flop_basis" and "NoSuch" in p.message for p in frame.problems)


def test_forgotten_devices_and_engines_leave_no_state() -> None:
    analyzer = Analyzer()
    for t in range(0, 100_000, 50):
        analyzer.feed(
            snapshot(
                t, gpus=(gpu(t, 0.5, hw_id=f"GPU-{t}"),), engines=(engine(t, counters(t), engine_id=f"e{t}"),)
            )
        )
    assert len(analyzer._gpus) <= 13
    assert len(analyzer._engines) <= 13


def sample(end_s: int, width_s: int, tensor: float) -> CounterSeries:
    return CounterSeries(
        hw_id="GPU-0",
        rung="dcgm",
        end_ns=column([end_s * SECOND], "i8"),
        width_ns=column([width_s * SECOND], "i8"),
        gr_active=column([round(0.9 / 2e-5)], "u2"),
        tensor_active=column([round(tensor / 2e-5)], "u2"),
    )


def test_a_window_waits_for_a_counter_that_is_slower_than_the_tick() -> None:
    snapshots = []
    for t in range(100):
        late = (sample(t, 30, 0.3),) if t and t % 30 == 0 else ()
        snapshots.append(snapshot(t, gpus=(gpu(t, 1.0),), engines=(engine(t, counters(t)),), counters=late))
    frames = feed(snapshots)
    settled = [frame.gpus[0] for frame in frames if frame.gpus[0].window_ns]
    assert settled[-1].rung == "dcgm"
    # The first sample tells that there is such a counter; from then on no window is booked without it.
    assert {f.rung for f in settled[30:]} == {"dcgm"}
    assert settled[-1].tensor_active is not None


def test_a_counter_that_died_holds_no_window_back() -> None:
    snapshots = [
        snapshot(t, gpus=(gpu(t, 1.0),), counters=(sample(t, 1, 0.3),) if 0 < t < 10 else ())
        for t in range(40)
    ]
    totals = feed(snapshots)[-1].gpus[0].causes_total_ns
    assert sum(totals.values()) >= 36 * SECOND


def test_between_two_whole_pages_the_engines_last_word_stands() -> None:
    def told(t: int, **values: Any) -> Snapshot:
        rows = (counters(t, generated_tokens=50 * t, requests_running=7),) if t % 10 == 0 else ()
        return snapshot(t, engines=(engine(t, *rows, steps_reliable=False, **values),))

    frames = feed([told(t) for t in range(40)])
    assert [frame.engines[0].requests_running for frame in frames[11:]] == [7] * 29
    assert {frame.engines[0].decode_tokens_per_s for frame in frames[11:]} == {50.0}
    # It should have told again at 40 s.
    late = feed([*(told(t) for t in range(40)), *(snapshot(t, engines=(engine(t),)) for t in range(40, 50))])
    assert [frame.engines[0].requests_running for frame in late[44:48]] == [7, 7, None, None]
    gone = feed([*(told(t) for t in range(35)), told(35, state="unobserved")])
    assert gone[-1].engines[0].requests_running is None
