"""The program as a user runs it: in a process of its own, with good and bad input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.doubles.nvml import Gpu, Process, Scenario, environment

import gpuidle
from gpuidle.agent.codec import decode_frame
from gpuidle.agent.commands.run import free_name

GPUIDLE = [sys.executable, "-m", "gpuidle"]
LOCAL = ["--no-discover"]


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GPUIDLE, *arguments], capture_output=True, text=True, timeout=120, env=env, check=False
    )


def test_the_version_needs_nothing_heavy() -> None:
    assert run("--version").stdout.split() == ["gpuidle,", "version", gpuidle.__version__]
    code = (
        "import sys; from gpuidle.agent.cli import group; "
        "print([m for m in ('numpy', 'rich', 'asyncio', 'opentelemetry', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["wacth"], ["wacth", "Did you mean 'watch'"]),
        (["watch", "--intervall", "2"], ["--intervall", "--interval"]),
        (["watch", "--interval", "0"], ["--interval", "0"]),
        (["watch", "--engine-url", "localhost:8000"], ["localhost:8000", "http://HOST:PORT"]),
        (["watch", "--price", "cheap"], ["cheap", "AMOUNT"]),
        (["watch", "--demo", "--replay", "x"], ["--demo", "--replay"]),
        (["watch", "--replay", "/nowhere/x"], ["/nowhere/x"]),
        (["run", "--prometheus", "nonsense"], ["--prometheus", "nonsense"]),
        (["run", "--prometheus", "127.0.0.1:\u00b2"], ["--prometheus", "host:port"]),
        (["run", "--prometheus", "none"], ["nothing to export to"]),
        (["record", "--keep", "3"], ["--keep", "--max-megabytes"]),
        (["watch", "--proc", "/nowhere"], ["--proc", "/nowhere"]),
    ],
)
def test_bad_usage_exits_2_and_names_the_culprit(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_configuration_keys_exit_2(tmp_path: Path) -> None:
    path = tmp_path / "gpuidle.toml"
    path.write_text("[run]\nintervall = 2\n")
    done = run("--config", str(path), "run")
    assert done.returncode == 2
    assert "intervall" in done.stderr
    assert "interval" in done.stderr
    path.write_text("[run]\ninterval = 'often'\n")
    done = run("--config", str(path), "run")
    assert done.returncode == 2
    assert "often" in done.stderr


def test_option_beats_environment_beats_file(tmp_path: Path) -> None:
    path = tmp_path / "gpuidle.toml"
    path.write_text("[run]\nprometheus = 'from-file'\n")
    env = {**os.environ, "GPUIDLE_CONFIG": str(path)}
    assert "from-file" in run("run", env=env).stderr
    env["GPUIDLE_RUN_PROMETHEUS"] = "from-env"
    assert "from-env" in run("run", env=env).stderr
    assert "from-option" in run("run", "--prometheus", "from-option", env=env).stderr


def test_environment_and_file_name_options_as_the_command_line_does(tmp_path: Path) -> None:
    for name, value, option in (
        ("PRICE", "cheap", "--price"),
        ("ENGINE_URL", "http://127.0.0.1:1 nowhere", "--engine-url"),
        ("RECORD", "/nowhere/session", "/nowhere/session"),
    ):
        done = run("run", "--prometheus", "127.0.0.1:0", env={**os.environ, f"GPUIDLE_RUN_{name}": value})
        assert done.returncode != 0, name
        assert option in done.stderr
    path = tmp_path / "gpuidle.toml"
    path.write_text("[run]\nprice = ['H100=cheap']\n")
    done = run("--config", str(path), "run")
    assert done.returncode == 2
    assert "H100=cheap" in done.stderr
    assert "--price" in done.stderr


@pytest.mark.parametrize("written", ["2.5", '["2.5", "Some GPU=3"]'])
def test_an_option_that_may_be_repeated_needs_no_list_in_the_file(tmp_path: Path, written: str) -> None:
    path = tmp_path / "gpuidle.toml"
    path.write_text(f"[watch]\nprice = {written}\n")
    done = run("--config", str(path), "watch", "--demo", "--once", "--json")
    assert done.returncode == 0, done.stderr
    assert decode_frame(done.stdout.encode()).gpus[0].price_per_hour == 2.5


def test_two_agents_on_one_port_are_told_apart() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("run", "--prometheus", address)
    assert done.returncode == 2
    assert address in done.stderr


def test_no_gpu_and_no_engine_says_what_was_looked_for(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = run("watch", "--once", *LOCAL, "--interval", "0.1", env=env)
    assert done.returncode == 1
    for word in ("NVML", "--demo", "--engine-url"):
        assert word in done.stdout


def test_json_once_is_one_frame() -> None:
    done = run("watch", "--demo", "--once", "--json")
    frame = decode_frame(done.stdout.encode())
    assert frame.node.simulated
    assert {gpu.name for gpu in frame.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert done.returncode == 0


def test_a_pipe_gets_lines_of_json_until_its_reader_leaves() -> None:
    process = subprocess.Popen([*GPUIDLE, "watch", "--demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    frames = [json.loads(process.stdout.readline()) for _ in range(5)]
    assert [frame["sequence"] for frame in frames] == [0, 1, 2, 3, 4]
    process.stdout.close()
    assert process.wait(30) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_what_the_driver_says_is_what_is_shown(nvml_library: Path, tmp_path: Path) -> None:
    scenario = tmp_path / "node.txt"
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        Scenario(
            gpus=(Gpu(utilization_gpu_percent=73, processes=(Process(holder.pid, 2**30),)), Gpu())
        ).write(scenario)
        env = environment(nvml_library, scenario)
        done = run("watch", "--once", "--json", *LOCAL, "--interval", "0.5", env=env)
    finally:
        holder.communicate(b"\n")
    frame = decode_frame(done.stdout.encode())
    first, second = frame.gpus
    assert first.busy is not None
    assert first.busy.value == pytest.approx(0.73)
    assert first.causes_ns["foreign"] == first.window_ns > 0
    assert second.causes_ns["unallocated"] == second.window_ns
    assert done.returncode == 0


def test_record_then_replay_tells_the_same_frames(nvml_library: Path, tmp_path: Path) -> None:
    session, scenario = tmp_path / "s.gpuidle.mcap", tmp_path / "node.txt"
    Scenario(gpus=(Gpu(utilization_gpu_percent=40), Gpu())).write(scenario)
    env = environment(nvml_library, scenario)
    process = subprocess.Popen(
        [*GPUIDLE, "record", "-o", str(session), "--duration", "3", "--interval", "0.2", *LOCAL],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert str(session) in said
    first = run("watch", "--replay", str(session), "--speed", "0")
    second = run("watch", "--replay", str(session), "--speed", "0")
    assert first.stdout == second.stdout
    frames = [decode_frame(line.encode()) for line in first.stdout.splitlines()]
    assert len(frames) >= 5
    assert frames[-1].gpus[0].phases.window_ns > 0
    assert run("record", "-o", str(session), *LOCAL).returncode == 1


def test_a_recording_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gpuidle.mcap"
    path.write_bytes(b"not a session")
    done = run("watch", "--replay", str(path))
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recording_that_cannot_go_on_ends_at_once_with_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "s.gpuidle.mcap"
    record = ["record", "--demo", "--interval", "0.1", "-o", str(path)]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 20; exec "$@"', "-", *GPUIDLE, *record],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"cannot record to {path}: file too large" in done.stderr
    assert run("watch", "--once", "--json", "--replay", str(path)).returncode == 0


def test_a_service_that_starts_again_records_beside_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "s.gpuidle.mcap"
    assert free_name(path, 0) == path
    path.write_bytes(b"what was recorded before")
    assert free_name(path, 0) == tmp_path / "s-session-19700101T000000Z.gpuidle.mcap"
    assert free_name(tmp_path, 0) == tmp_path / "session-19700101T000000Z.gpuidle.mcap"


def test_a_terminal_without_our_characters_gets_others_in_their_place() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [
        *GPUIDLE,
        "plan",
        "Llama-2-70b-hf",
        "--gpu",
        "H100 SXM",
        "--price",
        "2",
        "--currency",
        "\u20ac",
    ]
    done = subprocess.run(command, capture_output=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert b"ridge" in done.stdout
    assert b"\xe2" not in done.stdout


def test_standard_output_may_be_closed() -> None:
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" >&- <&-', "-", *GPUIDLE, "watch", "--demo", "--once"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_service_ends_on_a_signal_with_exit_code_0(number: int) -> None:
    process = subprocess.Popen(
        [*GPUIDLE, "run", "--demo", "--prometheus", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "Prometheus endpoint" in process.stderr.readline()
    time.sleep(1)
    process.send_signal(number)
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
