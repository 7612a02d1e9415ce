"""Data-parallel cores: two timelines of one engine on two GPUs, never one laid over the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.agent.analysis.builders import LLAMA_8B, SECOND, counters, engine, gpu, snapshot

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.analysis.cores import place
from gpuidle.agent.model import (
    CounterSeries,
    EngineLimits,
    Frame,
    GpuProcess,
    Parallelism,
    StepSeries,
    column,
)

STEP_NS = 20_000_000
LIMITS = EngineLimits(max_batched_tokens=2048, kv_capacity_tokens=400_000)


def steps(at_s: int, rank: str, *, prompt: int = 0, decodes: int = 8) -> StepSeries:
    """The steps of the second that ends at `at_s`, one after another."""
    end = (at_s - 1) * SECOND + STEP_NS * np.arange(1, SECOND // STEP_NS + 1)
    many = len(end)

    def full(value: int) -> Any:
        return column(np.full(many, value), "i8")

    return StepSeries(
        engine_id="vllm-tiny-1",
        source="plugin",
        exact=True,
        lost=0,
        start_ns=column(end - STEP_NS, "i8"),
        end_ns=column(end, "i8"),
        prefill_tokens=full(prompt),
        decode_tokens=full(decodes),
        delivered_tokens=full(decodes + bool(prompt)),
        sequences=full(decodes + bool(prompt)),
        kv_tokens=full(1000 * decodes),
        rank=rank,
    )


def active(at_s: int, index: int, ratio: float) -> CounterSeries:
    return CounterSeries(
        hw_id=f"GPU-{index}",
        rung="nvml_gpm",
        end_ns=column([at_s * SECOND], "i8"),
        width_ns=column([SECOND], "i8"),
        gr_active=column([round(ratio / 2e-5)], "u2"),
    )


def run(
    seconds: int = 10,
    *,
    gpus: int = 2,
    busy: tuple[float, ...] = (1.0, 0.0),
    first: dict[str, int] | None = None,
    second: dict[str, int] | None = None,
    spread: Parallelism = Parallelism(data=2),  # noqa: B008  # frozen
) -> Frame:
    """Core 0 makes the steps `first`, core 1 `second` (None: it makes none, once it was seen)."""
    analyzer = Analyzer()
    for t in range(seconds):
        rows = []
        for _rank, made in (("0", first or {}), ("1", second)):
            works = made is not None
            prompts = 50 * t * (made or {}).get("prompt", 0)
            rows.append(
                counters(
                    t,
                    computed_prompt_tokens=prompts,
                    prompt_tokens=prompts,
                    first_tokens=50 * t * bool(prompts),
                    generated_tokens=50 * t * ((made or {}).get("decodes", 8) + bool(prompts)) * works,
                    counted_steps=50 * t * works,
                    requests_running=8 * works,
                )
            )
        rows[1] = type(rows[1])(
            **{**{f: getattr(rows[1], f) for f in rows[1].__struct_fields__}, "rank": "1"}
        )
        made_steps = [steps(t, "0", **(first or {}))] if t else []
        if second is not None and t:
            made_steps.append(steps(t, "1", **second))
        frame = analyzer.feed(
            snapshot(
                t,
                gpus=tuple(
                    gpu(t, hw_id=f"GPU-{i}", index=i, processes=(GpuProcess(pid=11 + i),))
                    for i in range(gpus)
                ),
                engines=(
                    engine(
                        t,
                        *rows,
                        pids=(10, 11, 12, 13),
                        model_text="llama",
                        limits=LIMITS,
                        parallelism=spread,
                    ),
                ),
                steps=tuple(made_steps),
                counters=tuple(active(t, i, busy[i]) for i in range(gpus)) if t else (),
                texts={"llama": LLAMA_8B},
            )
        )
    return frame


def test_a_core_that_works_and_one_that_rests_keep_their_own_gpus() -> None:
    frame = run()
    works, rests = frame.gpus
    assert works.phases.decode_ns == SECOND
    assert rests.phases.idle_ns == SECOND
    assert rests.causes_ns["no_request"] == SECOND
    assert rests.causes_ns["host_gap"] == works.causes_ns["no_request"] == 0
    assert works.causes_ns["useful"] > 0
    assert rests.causes_ns["useful"] == 0
    assert frame.engines[0].phases.decode_ns == SECOND // 2
    assert frame.engines[0].steps_total == {"decode": 7 * 50}


def test_each_gpu_has_the_phases_of_its_own_core() -> None:
    frame = run(busy=(1.0, 1.0), first={}, second={"prompt": 1000, "decodes": 0})
    first, second = frame.gpus
    assert first.phases.decode_ns == SECOND
    assert second.phases.prefill_ns == SECOND
    # By the order of devices: that is no measurement.
    assert first.phases.evidence == second.phases.evidence == "estimated"
    assert second.causes_ns["useful"] > 50 * first.causes_ns["useful"]
    engine_frame = frame.engines[0]
    assert (engine_frame.phases.decode_ns, engine_frame.phases.prefill_ns) == (SECOND // 2, SECOND // 2)
    assert engine_frame.steps_total == {"decode": 350, "prefill": 350}
    assert set(engine_frame.step_durations) == {"decode", "prefill"}


def test_devices_that_do_not_add_up_to_the_cores_have_unknown_phases() -> None:
    frame = run(gpus=3, busy=(1.0, 1.0, 1.0), second={"prompt": 1000, "decodes": 0})
    for card in frame.gpus:
        assert card.phases.unknown_ns == SECOND
        assert sum(card.causes_ns.values()) == SECOND
        assert card.causes_ns["host_gap"] == card.causes_ns["no_request"] == 0
    assert frame.engines[0].phases.decode_ns == SECOND // 2


def test_a_gpu_whose_counters_contradict_its_core_is_unknown() -> None:
    # CUDA_VISIBLE_DEVICES may turn the order round: the core at rest would be given the GPU at work.
    for card in run(busy=(0.0, 1.0)).gpus:
        assert card.phases.decode_ns == 0
        assert card.causes_ns["no_request"] == 0
    assert run(busy=(0.0, 1.0)).gpus[1].phases.unknown_ns == SECOND


def test_cores_of_several_gpus_take_them_in_order() -> None:
    reading = engine(0, parallelism=Parallelism(tensor=2, data=2))
    cards = {f"GPU-{i}": gpu(0, hw_id=f"GPU-{i}", index=3 - i) for i in range(4)}
    assert place(reading, ["0", "1"], list(cards), cards) == {
        "GPU-3": "0",
        "GPU-2": "0",
        "GPU-1": "1",
        "GPU-0": "1",
    }
    assert place(reading, ["0", "1"], list(cards)[:3], cards) == {}
    # The second core was never heard of: its devices are not the first one's.
    assert place(reading, ["0"], list(cards), cards)["GPU-0"] == "1"
    # Only one of the cores is on this node.
    assert set(place(reading, ["5"], list(cards)[:2], cards).values()) == {"5"}


def test_experts_that_all_cores_share_give_each_gpu_the_mean_work() -> None:
    frame = run(second=None, busy=(1.0, 1.0), spread=Parallelism(data=2, expert=True))
    works, dummy = frame.gpus
    assert works.phases.decode_ns == SECOND
    assert dummy.phases.unknown_ns == SECOND  # it computes, but not for steps of its core
    assert works.causes_ns["useful"] == pytest.approx(dummy.causes_ns["useful"], rel=0.1)
