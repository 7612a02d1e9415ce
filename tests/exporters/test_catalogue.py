"""The catalogue: identity, absence, and what may never be published."""

from __future__ import annotations

import math

import msgspec
import pytest
from tests.exporters.frames import AGENT, engine, figure, frame, gpu

from gpuidle.agent.model import CAUSES, ESTIMABLE, PHASES, RUNGS, EngineFrame, Frame, GpuFrame, Node
from gpuidle.exporters.catalogue import CATALOGUE, agent_points, points
from gpuidle.exporters.feeds import Attributes, Number

ENGINE_LABELS = {"gpuidle.engine.id", "gpuidle.engine.name", "gpuidle.model", "gpuidle.role"}


def values(of: Frame) -> dict[str, dict[Attributes, Number]]:
    return {entry.metric.name: dict(entry.points) for entry in points(of)}


def test_every_row_is_described_and_named_once() -> None:
    rows = CATALOGUE
    assert len({row.name for row in rows}) == len({row.prometheus for row in rows}) == len(rows)
    for row in rows:
        assert row.description.endswith(".")
        assert not row.name.endswith("_total")
        assert "%" not in row.unit
        if row.name.endswith("info"):
            assert row.unit == ""
        if row.kind == "gauge" and row.unit == "1":
            assert row.prometheus.endswith("_ratio")
        if row.kind == "counter":
            assert row.prometheus.endswith("_total")


def test_points_carry_the_attributes_their_row_names() -> None:
    mig = gpu(2, parent="GPU-1")
    for entry in [*points(frame(gpus=(gpu(0), gpu(1), mig))), *agent_points(AGENT)]:
        for attributes, _ in entry.points:
            names = tuple(name for name, _ in attributes)
            expected = entry.metric.attributes
            assert names in {expected, tuple(name for name in expected if name != "hw.parent")}


def test_a_gpu_series_never_names_an_engine_and_an_engine_series_never_a_gpu() -> None:
    for entry in points(frame()):
        for attributes, _ in entry.points:
            names = {name for name, _ in attributes}
            if entry.metric.name != "gpuidle.gpu.engine.info":
                assert not ("hw.id" in names and names & ENGINE_LABELS)
            assert not names & {"pid", "process.pid", "server.port"}


def test_tokens_of_a_tensor_parallel_engine_are_counted_once() -> None:
    tokens = values(frame())["gpuidle.engine.tokens"]
    assert sum(tokens.values()) == 3000


def test_every_cause_phase_and_rung_is_always_there_and_the_ledger_sums() -> None:
    first = gpu(0)
    found = values(frame(gpus=(msgspec.structs.replace(first, causes_total_ns={"useful": 7 * 10**9}),)))
    causes = {
        dict(attributes)["gpuidle.cause"]: value
        for attributes, value in found["gpuidle.compute.time"].items()
    }
    assert tuple(causes) == CAUSES
    assert sum(causes.values()) == causes["useful"] == 7.0
    assert {dict(a)["gpuidle.phase"] for a in found["gpuidle.phase.time"]} == set(PHASES)
    rungs = {dict(a)["gpuidle.rung"]: value for a, value in found["gpuidle.evidence.source"].items()}
    assert rungs == {rung: int(rung == "nvml_gpm") for rung in RUNGS}


def test_what_is_unknown_gives_no_point() -> None:
    bare = GpuFrame(
        hw_id="GPU-9",
        index=9,
        name="x",
        rung="engine",
        window_ns=0,
        causes_ns={},
        causes_total_ns={},
        phases=gpu(0).phases,
        phases_total_ns={},
    )
    silent = EngineFrame(
        engine_id="e",
        engine="vllm",
        model="m",
        role="unified",
        state="unobserved",
        evidence="unknown",
        phases=gpu(0).phases,
    )
    found = values(frame(gpus=(bare,), engines=(silent,)))
    assert {name for name in found if not name.startswith("gpuidle.agent.")} == {
        "gpuidle.compute.time",
        "gpuidle.phase.time",
        "gpuidle.evidence.source",
        "gpuidle.gpu.engine.info",
    }


def test_a_figure_without_evidence_gives_no_point() -> None:
    unknown = msgspec.structs.replace(figure(0.0), evidence="unknown")
    blind = msgspec.structs.replace(gpu(0), idle={"flops": unknown}, tensor_active=unknown, busy=unknown)
    found = values(frame(gpus=(blind,)))
    assert not {"gpuidle.compute.idle_ratio", "gpuidle.tensor.active_ratio", "hw.gpu.utilization"} & set(
        found
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_is_none_is_published(value: float) -> None:
    broken = msgspec.structs.replace(gpu(0), power_watts=value, energy_joules=value)
    found = values(frame(gpus=(broken,)))
    assert "hw.power" not in found
    assert "hw.energy" not in found


def test_a_counter_below_zero_is_not_published() -> None:
    broken = msgspec.structs.replace(gpu(0), energy_joules=-1.0)
    assert "hw.energy" not in values(frame(gpus=(broken,)))


def test_an_engines_series_wait_until_its_model_is_known_and_then_keep_their_labels() -> None:
    early = values(frame(engines=(engine(model=None),)))
    assert not {name for name in early if name.startswith("gpuidle.engine.")}
    first = values(frame(engines=(engine(tokens=1),)))
    later = values(frame(engines=(engine(tokens=2),)))
    assert set(first["gpuidle.engine.tokens"]) == set(later["gpuidle.engine.tokens"])


def info(of: Frame) -> dict[str, str]:
    found = [dict(attributes) for attributes in values(of)["gpuidle.gpu.engine.info"]]
    joined = {labels["hw.id"]: labels["gpuidle.engine.id"] for labels in found}
    assert len(joined) == len(found) == len(of.gpus), "exactly one per hw.id"
    return joined


def test_each_gpu_has_exactly_one_info_series() -> None:
    both = (engine(), engine("ollama/qwen/0"))
    gpus = (
        gpu(0),
        gpu(1, engine_ids=("ollama/qwen/0", "vllm/llama/0")),
        gpu(2, engine_ids=()),
        gpu(3, engine_ids=("not yet seen",)),
    )
    assert info(frame(gpus=gpus, engines=both)) == {
        "GPU-0": "vllm/llama/0",
        "GPU-1": "shared",
        "GPU-2": "none",
        "GPU-3": "unknown",
    }


def test_an_engine_that_is_being_identified_is_unknown_and_never_none() -> None:
    assert info(frame(engines=(engine(model=None),))) == {"GPU-0": "unknown", "GPU-1": "unknown"}


def test_a_split_gpu_leaves_the_ledger_to_its_instances() -> None:
    parent = gpu(0, engine_ids=())
    found = values(frame(gpus=(parent, gpu(1, parent="GPU-0"), gpu(2, parent="GPU-0", engine_ids=()))))
    with_parent = {
        name for name, of in found.items() for attributes in of if dict(attributes).get("hw.id") == "GPU-0"
    }
    assert {name for name in with_parent if name.startswith("gpuidle.")} == {"gpuidle.gpu.engine.info"}
    assert "hw.power" in with_parent
    labels = next(iter(found["gpuidle.tensor.active_ratio"]))
    assert dict(labels)["hw.parent"] == "GPU-0"


def test_a_split_gpu_names_the_engine_of_its_instances() -> None:
    joined = info(frame(gpus=(gpu(0, engine_ids=()), gpu(1, parent="GPU-0"))))
    assert joined == {"GPU-0": "vllm/llama/0", "GPU-1": "vllm/llama/0"}


def test_a_second_point_of_the_same_series_is_left_out() -> None:
    twice = msgspec.structs.replace(gpu(0), power_watts=1.0)
    found = [entry for entry in points(frame(gpus=(gpu(0), twice))) if entry.metric.name == "hw.power"]
    assert [value for _, value in found[0].points] == [412.5]


def test_label_values_are_valid_and_bounded_whatever_the_engine_says() -> None:
    hostile = engine(model="a\udcf8b" + "x" * 10_000)
    attributes = next(iter(values(frame(engines=(hostile,)))["gpuidle.engine.tokens"]))
    model = dict(attributes)["gpuidle.model"]
    assert model.startswith("a?b")
    assert len(model) == 256


def test_outlets_are_told_by_result() -> None:
    found = {entry.metric.name: dict(entry.points) for entry in agent_points(AGENT)}
    assert {dict(a)["gpuidle.result"]: v for a, v in found["gpuidle.agent.outlet.frames"].items()} == {
        "delivered": 10,
        "dropped": 2,
        "failed": 1,
    }


def test_a_simulated_node_says_so() -> None:
    simulated = msgspec.structs.replace(frame(), node=Node(hostname="demo", simulated=True))
    assert values(frame())["gpuidle.agent.simulated"] == {(): 0}
    assert values(simulated)["gpuidle.agent.simulated"] == {(): 1}


def test_errors_are_counted_by_kind_and_a_gpu_that_reports_none_has_no_zero() -> None:
    found = values(frame(gpus=(gpu(0), gpu(1))))["hw.errors"]
    told = {(dict(key)["hw.id"], dict(key)["error.type"]): value for key, value in found.items()}
    assert told == {("GPU-0", "ecc_double_bit"): 0, ("GPU-0", "xid_79"): 2}


def test_the_estimated_part_of_a_cause_is_never_more_than_the_cause() -> None:
    found = values(frame())
    causes = found["gpuidle.compute.time"]
    estimated = found["gpuidle.compute.estimated.time"]
    assert {dict(attributes)["gpuidle.cause"] for attributes in estimated} == set(ESTIMABLE)
    assert all(0 <= value <= causes[attributes] for attributes, value in estimated.items())
