"""`gpuidle doctor` as a user runs it, on the double of the driver, and its two forms of output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.doubles.dcgm_exporter import DcgmExporter, DcgmScenario, Device, Level
from tests.doubles.http_server import FakeVllm
from tests.doubles.nvml import Fault, Gpu, Process, Scenario, environment
from tests.doubles.proc_tree import HOST_PID, ProcTree

from gpuidle.agent.commands.doctor import exit_code, render, to_json
from gpuidle.agent.model import Check

DATA = Path(__file__).parents[2] / "data" / "doctor"
PAGE = next((Path(__file__).parents[2] / "data" / "vllm").glob("metrics_4_*.txt"))
UUID_0, UUID_1 = (f"GPU-00000000-0000-4000-8000-{index:012x}" for index in (0, 1))
CONFIG = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
)

CHECKS = (
    Check(id="node.work", status="ok", found="1 GPU, 1 engine"),
    Check(
        id="node.rights",
        status="limited",
        found="user 1000, no capability: processes of another user cannot be read",
        remedy="run gpuidle as the engine's user or with CAP_SYS_PTRACE, or name the endpoint with "
        "--engine-url",
    ),
    Check(id="gpu.device", subject=UUID_0, status="ok", found="GPU 0: NVIDIA H100 80GB HBM3, 80 GiB, cc 9.0"),
    Check(
        id="gpu.counters",
        subject=UUID_0,
        status="broken",
        found="nvml only: a GPU's busy share, no tensor and no DRAM counter (dcgm: refused)",
        remedy="restart dcgm-exporter; see its log and `dmesg` for Xid lines",
    ),
    Check(
        id="engine.model-config",
        subject="vllm-Llama-3.1-8B-Instruct-1a2b3c4d",
        status="ok",
        found="the configuration of /models/x\x1b[31m\n is read",
    ),
)


def golden(name: str, text: str) -> None:
    """Compare with the file; GPUIDLE_GOLDEN=1 writes it."""
    path = DATA / name
    if os.environ.get("GPUIDLE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def doctor(
    *arguments: str, env: dict[str, str] | None = None, proc: Path | None = None
) -> tuple[int, dict[tuple[str, str], Check], str]:
    """Run it; return the exit code, the checks by id and subject, and what it wrote to stderr."""
    place = ["--no-discover"] if proc is None else ["--proc", str(proc)]
    done = subprocess.run(
        [sys.executable, "-m", "gpuidle", "doctor", "--json", "--prometheus", "none", *place, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=env if env is not None else without_library(),
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert told["version"] == 1
    assert told["exit_code"] == done.returncode
    checks = [Check(**row) for row in told["checks"]]
    return done.returncode, {(check.id, check.subject): check for check in checks}, done.stderr


def without_library() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}


def ids(checks: dict[tuple[str, str], Check], status: str) -> set[str]:
    return {check.id for check in checks.values() if check.status == status}


def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path / "proc")


# --------------------------------------------------------------------------------------------------------
# Output


def test_text_is_what_stands_in_the_file_and_fits_80_columns() -> None:
    text = render(CHECKS)
    golden("checks.txt", text + "\n")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text


def test_ascii_text_has_no_other_characters() -> None:
    assert render(CHECKS, unicode=False).isascii()


def test_the_status_is_a_word_and_colour_only_repeats_it() -> None:
    coloured = render(CHECKS, colour=True)
    assert "\x1b[31m" in coloured
    plain = render(CHECKS)
    for check in CHECKS:
        assert any(check.status in line and check.id in line for line in plain.splitlines())


def test_json_is_what_stands_in_the_file() -> None:
    golden("checks.json", to_json(CHECKS) + "\n")


@pytest.mark.parametrize(
    ("statuses", "code"), [((), 0), (("ok",), 0), (("ok", "limited"), 1), (("limited", "broken", "ok"), 2)]
)
def test_the_worst_check_decides_the_exit_code(statuses: Sequence[str], code: int) -> None:
    assert exit_code([Check(id="x", status=s, found="") for s in statuses]) == code  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------------
# The driver


def test_no_gpu_and_no_engine_is_a_clear_outcome(tmp_path: Path) -> None:
    tree(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "gpuidle", "doctor", "--prometheus", "none", "--proc", str(tmp_path / "proc")],
        capture_output=True,
        text=True,
        timeout=120,
        env=without_library(),
        check=False,
    )
    assert done.returncode == 2
    assert "nothing to" in done.stdout
    assert "gpuidle watch --demo" in done.stdout
    assert "--engine-url" in done.stdout
    assert done.stderr == ""


def healthy_node(tmp_path: Path, url: str) -> ProcTree:
    """A proc folder with a vLLM that answers at `url`, whose model can be read."""
    files = tmp_path / "files"
    (files / "models/tiny-llama").mkdir(parents=True)
    (files / "models/tiny-llama/config.json").write_text(CONFIG)
    node = tree(tmp_path)
    port = int(url.rpartition(":")[2])
    words = ["python", "/opt/venv/bin/vllm", "serve", "/models/tiny-llama", "--port", str(port)]
    node.add(10, words, listen=[("127.0.0.1", port)], files=files)
    return node


def test_a_healthy_node_is_all_ok_but_for_what_could_be_better(nvml_library: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "node.txt"
    Scenario(gpus=(Gpu(processes=(Process(10, 2**30),)),)).write(scenario)
    level = (Level(0.0, gr=0.9, sm=0.8, tensor=0.1, dram=0.6),)
    exporter = DcgmExporter(DcgmScenario((Device(UUID_0, level),), interval_s=0.5))
    with FakeVllm(PAGE.read_text()).serving() as url, exporter.serving() as dcgm:
        node = healthy_node(tmp_path, url)
        env = environment(nvml_library, scenario)
        code, checks, _ = doctor("--dcgm-url", dcgm, "--no-steps", env=env, proc=node.root)
    (engine,) = {subject for name, subject in checks if name == "engine.process"}
    assert checks["engine.endpoint", engine].found == url
    assert checks["gpu.counters", UUID_0].status == "ok"
    assert {check.id: check.found for check in checks.values() if check.status != "ok"} == {}
    assert code == 0
    assert {name for name, _ in checks} == {
        "node.work",
        "node.rights",
        "node.pid-namespace",
        "node.clock",
        "nvml.library",
        "nvml.version",
        "nvml.binding",
        "nvml.access",
        "nvml.profiling",
        "dcgm.exporter",
        "dcgm.profiling",
        "dcgm.interval",
        "gpu.device",
        "gpu.counters",
        "gpu.peaks",
        "engine.process",
        "engine.endpoint",
        "engine.stats",
        "engine.filter",
        "engine.model-config",
        "engine.flop-basis",
    }


def test_a_driver_of_another_version_is_broken_and_says_reboot(nvml_library: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "node.txt"
    Scenario(faults=(Fault("nvmlInit*", "LIB_RM_VERSION_MISMATCH"),)).write(scenario)
    code, checks, _ = doctor(env=environment(nvml_library, scenario))
    assert code == 2
    assert checks["nvml.version", ""].status == "broken"
    assert "reboot" in checks["nvml.version", ""].remedy


def test_a_library_that_is_missing_where_a_driver_is_loaded_is_broken(tmp_path: Path) -> None:
    node = tree(tmp_path)
    (node.root / "driver/nvidia").mkdir(parents=True)
    (node.root / "driver/nvidia/version").write_text("NVRM version: 580.95.05\n")
    code, checks, _ = doctor(proc=node.root)
    assert code == 2
    assert checks["nvml.library", ""].status == "broken"
    assert "utility" in checks["nvml.library", ""].remedy


def test_refused_access_names_the_device_files(nvml_library: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "node.txt"
    Scenario(faults=(Fault("nvmlInit*", "NO_PERMISSION"),)).write(scenario)
    code, checks, _ = doctor(env=environment(nvml_library, scenario))
    assert code == 2
    assert checks["nvml.access", ""].status == "broken"
    assert "/dev/nvidia" in checks["nvml.access", ""].remedy


def test_one_lost_gpu_is_broken_and_the_others_are_told(nvml_library: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "node.txt"
    Scenario(faults=(Fault("nvmlDevice*", "GPU_IS_LOST", gpu=1),)).write(scenario)
    code, checks, _ = doctor(env=environment(nvml_library, scenario))
    assert code == 2
    assert checks["gpu.device", UUID_0].status == "ok"
    lost = [check for check in checks.values() if check.id == "gpu.device" and check.status == "broken"]
    assert len(lost) == 1
    assert "dmesg" in lost[0].remedy


def test_a_driver_that_hangs_does_not_hang_doctor(nvml_library: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "node.txt"
    Scenario(faults=(Fault("nvmlInit*", delay_ms=600_000),)).write(scenario)
    code, checks, _ = doctor(env=environment(nvml_library, scenario))
    assert code == 2
    assert checks["nvml.library", ""].status == "broken"
    assert "has not answered" in checks["nvml.library", ""].found


# --------------------------------------------------------------------------------------------------------
# Engines and namespaces


def test_an_endpoint_that_refuses_is_broken() -> None:
    code, checks, _ = doctor("--engine-url", "http://127.0.0.1:1")
    assert code == 2
    check = checks["engine.endpoint", "http://127.0.0.1:1"]
    assert check.status == "broken"
    assert "refused" in check.found


def test_what_an_engine_was_told_not_to_count_is_limited(tmp_path: Path) -> None:
    node = tree(tmp_path)
    node.add(10, ["python", "/v/bin/vllm", "serve", "org/model", "--disable-log-stats"])
    far = ["python", "/v/bin/vllm", "serve", "org/other", "--port", "8001"]
    node.add(20, far, listen=[("0.0.0.0", 8001)], net="net:[7]")
    with FakeVllm(PAGE.read_text(), filters=False).serving() as url:
        port = int(url.rpartition(":")[2])
        words = ["python", "/v/bin/vllm", "serve", "org/third", "--port", str(port)]
        node.add(30, words, listen=[("127.0.0.1", port)])
        code, checks, _ = doctor(proc=node.root)
    by_id = {check.id: check for check in checks.values() if check.status == "limited"}
    assert "--disable-log-stats" in by_id["engine.stats"].remedy
    assert "--engine-url" in by_id["engine.endpoint"].remedy
    assert "network namespace" in by_id["engine.endpoint"].found
    assert "--api-server-count 1" in by_id["engine.filter"].remedy
    assert "config.json" in by_id["engine.model-config"].remedy
    assert "GPUIDLE_STEPS=1" in by_id["engine.steps"].remedy
    assert ids(checks, "broken") == set()
    assert code == 1


def test_a_pid_namespace_of_its_own_says_host_pid(nvml_library: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "node.txt"
    Scenario(gpus=(Gpu(processes=(Process(4_000_001, 2**30),)),)).write(scenario)
    node = ProcTree(tmp_path / "proc", own_pid="pid:[4026532178]")
    assert HOST_PID != "pid:[4026532178]"
    code, checks, _ = doctor(env=environment(nvml_library, scenario), proc=node.root)
    assert code == 1
    assert checks["node.pid-namespace", ""].status == "limited"
    assert "hostPID" in checks["node.pid-namespace", ""].remedy


@pytest.mark.parametrize(
    ("words", "named"), [(["--jsn"], "--json"), (["--dcgm-url", "node:9400"], "node:9400")]
)
def test_bad_usage_ends_with_2_and_names_the_culprit(words: list[str], named: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuidle", "doctor", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert words[-1] in done.stderr
