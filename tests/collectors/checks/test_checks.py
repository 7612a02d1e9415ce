"""The checks on made-up findings: no process, no driver."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.doubles.dcgm_exporter import CURRENT, LEGACY, Counter, DcgmScenario, Device, Level
from tests.doubles.dcgm_exporter import Fault as DcgmFault
from tests.doubles.proc_tree import HOST_PID, ProcTree

from gpuidle.agent.model import Check, EngineCounters, EngineReading, GpuReading, Problem, Reading
from gpuidle.collectors.checks.observe import Seen
from gpuidle.collectors.checks.rights import Rights, read_rights
from gpuidle.collectors.checks.table import checks_of
from gpuidle.collectors.counters.dcgm_page import read_page
from gpuidle.collectors.counters.dcgm_status import Standing
from gpuidle.collectors.counters.rung import RungState, RungStatus
from gpuidle.collectors.steps.sources import step_sources

UUID = "GPU-0"
ROOT = Rights(0, frozenset({"CAP_SYS_PTRACE"}), HOST_PID, "0")
USER = Rights(1000, frozenset(), HOST_PID, "0")
GPU = GpuReading(
    hw_id=UUID,
    index=0,
    name="NVIDIA H100 80GB HBM3",
    read_ns=0,
    driver_version="580.1",
    memory_total_bytes=85_520_809_984,
    compute_capability="9.0",
)
BUSY = (Level(0.0, gr=0.9, sm=0.8, tensor=0.1, dram=0.5),)
SECOND = 10**9


def status(rung: str, state: RungState, message: str = "", remedy: str = "") -> RungStatus:
    return RungStatus(rung=rung, hw_id=UUID, state=state, message=message, remedy=remedy)  # type: ignore[arg-type]


def seen(**changes: object) -> Seen:
    found = Seen(
        rights=ROOT,
        gpus=Reading(gpus=(GPU,)),
        engines=Reading(),
        binding="13.580.1",
        statuses=(status("dcgm", "serving"),),
        dcgm=standing(DcgmScenario((Device(UUID, BUSY),))),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def standing(scenario: DcgmScenario, interval_ns: int | None = SECOND) -> Standing:
    page = read_page(scenario.page(100.0))
    return Standing(url="http://127.0.0.1:9400", page=page, interval_ns=interval_ns, served=True)


def by_id(found: Seen) -> dict[str, Check]:
    return {check.id: check for check in checks_of(found)}


# --------------------------------------------------------------------------------------------------------
# dcgm-exporter


@pytest.mark.parametrize("names", [LEGACY, CURRENT])
def test_an_exporter_with_all_counters_each_second_is_ok(names: Mapping[Counter, str]) -> None:
    scenario = DcgmScenario((Device(UUID, BUSY),), names=names)
    checks = by_id(seen(dcgm=standing(scenario)))
    assert [checks[f"dcgm.{name}"].status for name in ("exporter", "profiling", "interval")] == ["ok"] * 3
    assert "dcgm.values" not in checks


def test_missing_profiling_counters_name_the_capability_and_geforce() -> None:
    checks = by_id(
        seen(
            dcgm=standing(DcgmScenario((Device(UUID, BUSY),), faults=(DcgmFault("missing"),))),
            statuses=(status("dcgm", "refused", "no profiling counters", "give it SYS_ADMIN"),),
        )
    )
    assert checks["dcgm.profiling"].status == "limited"
    assert "SYS_ADMIN" in checks["dcgm.profiling"].remedy
    assert "GeForce" in checks["dcgm.profiling"].remedy
    assert checks["gpu.counters"].status == "limited"
    assert "nvml only" in checks["gpu.counters"].found


def test_counters_that_are_off_by_default_are_named() -> None:
    scenario = DcgmScenario((Device(UUID, BUSY),), counters=("gr", "tensor", "dram"))
    check = by_id(seen(dcgm=standing(scenario)))["dcgm.profiling"]
    assert check.status == "limited"
    assert "DCGM_FI_PROF_SM_ACTIVE" in check.remedy


@pytest.mark.parametrize("text", ["N/A", "[Not Supported]", "140737488355328.0", "9223372036854775794"])
def test_values_that_cannot_be_are_told(text: str) -> None:
    fault = DcgmFault("value", counter="tensor", text=text)
    checks = by_id(seen(dcgm=standing(DcgmScenario((Device(UUID, BUSY),), faults=(fault,)))))
    assert checks["dcgm.values"].status == "limited"
    assert "PIPE_TENSOR_ACTIVE" in checks["dcgm.profiling"].found
    assert checks["dcgm.profiling"].status == "limited"


@pytest.mark.parametrize("interval_ns", [None, 30 * SECOND])
def test_a_slow_exporter_is_told_how_to_be_faster(interval_ns: int | None) -> None:
    check = by_id(seen(dcgm=standing(DcgmScenario((Device(UUID, BUSY),)), interval_ns)))["dcgm.interval"]
    assert check.status == "limited"
    assert "-c 1000" in check.remedy


def test_a_named_exporter_that_does_not_answer_is_broken() -> None:
    silent = Standing(url="http://127.0.0.1:1", failure="connection refused", remedy="see it")
    assert by_id(seen(dcgm=silent))["dcgm.exporter"].status == "broken"


# --------------------------------------------------------------------------------------------------------
# The ladder


@pytest.mark.parametrize(
    ("statuses", "level", "words"),
    [
        ([("nvml_gpm", "serving"), ("dcgm", "refused")], "ok", "nvml_gpm serves"),
        ([("nvml_gpm", "unsupported"), ("dcgm", "serving")], "ok", "dcgm serves"),
        ([("nvml_gpm", "busy"), ("dcgm", "serving")], "limited", "dcgm serves"),
        ([("nvml_gpm", "unsupported"), ("dcgm", "dead")], "limited", "nvml only"),
        ([("nvml_gpm", "unsupported"), ("dcgm", "starting")], "ok", "first interval"),
        ([], "limited", "nvml only"),
    ],
)
def test_the_counters_of_a_gpu_say_which_rung_and_why_no_better(
    statuses: list[tuple[str, RungState]], level: str, words: str
) -> None:
    rows = tuple(status(rung, state, f"{rung} is {state}", f"mend {rung}") for rung, state in statuses)
    check = by_id(seen(statuses=rows))["gpu.counters"]
    assert check.status == level
    assert words in check.found
    assert bool(check.remedy) == (level == "limited" and bool(statuses))


def test_mig_instances_are_devices_and_their_parent_has_no_counters() -> None:
    instance = GpuReading(
        hw_id="MIG-1", index=0, name=f"{GPU.name} MIG 1g.10gb", read_ns=0, parent_hw_id=UUID, instance_id=1
    )
    rows = (RungStatus(rung="nvml_gpm", hw_id="MIG-1", state="serving"),)
    checks = checks_of(seen(gpus=Reading(gpus=(GPU, instance)), statuses=rows))
    of = {(check.id, check.subject): check for check in checks}
    assert "1 MIG instance:" in of["gpu.mig", UUID].found
    assert ("gpu.counters", UUID) not in of
    assert of["gpu.counters", "MIG-1"].status == "ok"
    assert of["gpu.peaks", "MIG-1"].status == "ok"
    assert "1 GPU, 1 MIG instance" in of["node.work", ""].found


# --------------------------------------------------------------------------------------------------------
# The driver


@pytest.mark.parametrize(
    ("kind", "check", "level"),
    [
        ("library_missing", "nvml.library", "limited"),
        ("driver_not_loaded", "nvml.library", "limited"),
        ("version_mismatch", "nvml.version", "broken"),
        ("no_permission", "nvml.access", "broken"),
        ("unknown_error", "nvml.library", "broken"),
        ("driver_hanging", "nvml.library", "broken"),
        ("failed", "nvml.library", "broken"),
    ],
)
def test_each_way_in_which_nvml_fails_is_one_check(kind: str, check: str, level: str) -> None:
    problem = Problem(source="nvml", kind=kind, message="it fails", remedy="mend it")
    checks = by_id(seen(gpus=Reading(problems=(problem,)), statuses=(), dcgm=Standing()))
    assert checks[check].status == level
    assert checks[check].remedy == "mend it"
    assert checks["node.work"].status == "broken"


@pytest.mark.parametrize(
    ("rights", "is_open", "words"),
    [
        (ROOT, False, "would need CAP_PERFMON"),
        (replace(ROOT, capabilities=frozenset({"CAP_PERFMON"})), False, "allowed by CAP_PERFMON"),
        (USER, True, "allowed by the driver option"),
    ],
)
def test_pm_sampling_says_what_it_would_need_and_is_never_missed(
    rights: Rights, is_open: bool, words: str
) -> None:
    check = by_id(seen(rights=rights, profiling_open=is_open))["nvml.profiling"]
    assert check.status == "ok"
    assert words in check.found


def test_garbled_process_lists_name_the_binding() -> None:
    problem = Problem(
        source="nvml", kind="garbled_processes", message="PIDs (nvidia-ml-py 1.2)", remedy="x", subject=UUID
    )
    check = by_id(seen(gpus=Reading(gpus=(GPU,), problems=(problem,))))["nvml.binding"]
    assert check.status == "limited"
    assert "nvidia-ml-py" in check.found


def test_a_field_that_cannot_be_read_is_limited_and_told_once() -> None:
    problems = tuple(
        Problem(source="nvml", kind="bad_reading", message=f"field {k}", subject=UUID) for k in range(3)
    )
    check = by_id(seen(gpus=Reading(gpus=(GPU,), problems=problems)))["gpu.fields"]
    assert check.found == "field 0 (and 2 more)"


# --------------------------------------------------------------------------------------------------------
# Engines and rights

ENGINE = EngineReading(
    engine_id="vllm-m-1",
    engine="vllm",
    state="serving",
    read_ns=0,
    url="http://127.0.0.1:8000",
    root_pid=7,
    pids=(7,),
    counters=(EngineCounters(rank="0", read_ns=0),),
)


def engines(*problems: Problem, engine: EngineReading = ENGINE) -> Seen:
    return seen(engines=Reading(engines=(engine,), problems=problems))


def problem(kind: str, subject: str = ENGINE.engine_id) -> Problem:
    return Problem(source="x", kind=kind, message=f"it is {kind}", remedy=f"mend {kind}", subject=subject)


def test_an_engine_that_starts_is_limited_and_no_fault() -> None:
    starting = EngineReading(engine_id="vllm-m-1", engine="vllm", state="starting", read_ns=0, root_pid=7)
    assert by_id(engines(engine=starting))["engine.endpoint"].status == "limited"


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("refused", "broken"),
        ("timeout", "broken"),
        ("not_an_engine", "broken"),
        ("foreign_network_namespace", "limited"),
        ("no_tcp_port", "limited"),
    ],
)
def test_a_silent_endpoint_is_broken_and_one_out_of_reach_is_limited(kind: str, level: str) -> None:
    silent = EngineReading(engine_id="vllm-m-1", engine="vllm", state="unobserved", read_ns=0, root_pid=7)
    check = by_id(engines(problem(kind), engine=silent))["engine.endpoint"]
    assert (check.status, check.remedy) == (level, f"mend {kind}")


@pytest.mark.parametrize(
    ("working", "level", "words"),
    [
        ("plugin", "ok", "every step"),
        ("fpm", "ok", "every step"),
        ("mmap", "limited", "steps that gave a token"),
        ("counters", "limited", "no steps"),
    ],
)
def test_the_best_source_of_steps_is_told_and_what_a_better_one_needs(
    tmp_path: Path, working: str, level: str, words: str
) -> None:
    rows = tuple(
        replace(row, state="works" if row.source == working else "possible")
        for row in step_sources([ENGINE], proc=tmp_path)
    )
    check = by_id(seen(engines=Reading(engines=(ENGINE,)), steps=rows))["engine.steps"]
    assert check.status == level
    assert words in check.found
    assert ("GPUIDLE_STEPS=1" in check.remedy) == (level == "limited")


def test_what_nobody_asked_about_is_told_as_a_note() -> None:
    check = by_id(engines(problem("model_overridden")))["engine.note"]
    assert (check.status, check.found) == ("limited", "it is model_overridden")


def test_an_unknown_architecture_has_no_flop_basis() -> None:
    engine = msgspec.structs.replace(ENGINE, model_text="k", model="m")
    found = seen(engines=Reading(engines=(engine,), texts={"k": '{"architectures":["Nope"]}'}))
    checks = by_id(found)
    assert checks["engine.model-config"].status == "ok"
    assert checks["engine.flop-basis"].status == "limited"


def test_another_users_process_shows_in_the_rights_of_the_node() -> None:
    check = by_id(replace(engines(problem("permission")), rights=USER))["node.rights"]
    assert check.status == "limited"
    assert check.found.startswith("user 1000, no capability")


def test_rights_are_read_from_proc(tmp_path: Path) -> None:
    ProcTree(tmp_path)
    (tmp_path / "self/status").write_text("Name:\tx\nCapEff:\t0000004000080000\n")
    mounts = f"30 1 0:5 / {tmp_path} rw,nosuid - proc proc rw,gid=7,hidepid=invisible\n"
    (tmp_path / "self/mountinfo").write_text(mounts)
    rights = read_rights(tmp_path)
    assert rights.capabilities == frozenset({"CAP_SYS_PTRACE", "CAP_PERFMON"})
    assert rights.hidepid == "invisible"
    assert not rights.contained


@pytest.mark.parametrize(
    ("pids", "level", "words"),
    [("7", "limited", "a PID namespace of its own"), ("4242\t7", "ok", "with the host's /proc")],
)
def test_in_a_container_the_hosts_proc_is_enough(tmp_path: Path, pids: str, level: str, words: str) -> None:
    ProcTree(tmp_path, own_pid="pid:[4026532178]")
    (tmp_path / "self/status").write_text(f"Name:\tx\nNSpid:\t{pids}\n")
    check = by_id(seen(rights=read_rights(tmp_path)))["node.pid-namespace"]
    assert check.status == level
    assert words in check.found


def test_rights_of_a_proc_that_tells_nothing(tmp_path: Path) -> None:
    rights = read_rights(tmp_path)
    assert (rights.capabilities, rights.pid_namespace, rights.hidepid) == (None, None, None)
    checks = by_id(seen(rights=rights))
    assert checks["node.pid-namespace"].status == "limited"
    assert "node.hidepid" not in checks


def test_every_check_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    folders = [Path(__file__).parents[3] / name for name in ("collectors/checks", "exporters")]
    ids = {
        found
        for folder in folders
        for path in folder.glob("*.py")
        for found in re.findall(r'"((?:node|nvml|dcgm|gpu|engine|export)\.[a-z-]+)"', path.read_text())
        if "Check" in path.read_text()
    }
    assert {"gpu.counters", "engine.filter", "export.prometheus"} <= ids
    assert {found for found in ids if f"`{found}`" not in page} == set()
