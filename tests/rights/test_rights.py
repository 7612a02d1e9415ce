"""docs/rights.md with two users and with namespaces of their own: needs root, and a Python for all users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.doubles.nvml import Gpu, Process, Scenario, environment

from gpuidle.agent.model import Check

ROOT = Path(__file__).parents[2]
PAGE = next((ROOT / "tests" / "data" / "vllm").glob("metrics_4_*.txt"))
PYTHON = "/usr/bin/python3"
"""One that any user may run; the tests' own may stand in root's home."""
NOBODY, OTHER = 65534, 65533
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
}

# A first run as root imports everything: the interpreter's files may not be readable afterwards.
DOCTOR_AS = """
import os, sys
from functools import partial
from pathlib import Path
import msgspec
from gpuidle.agent.commands.doctor import find
uid = int(sys.argv[1])
urls = tuple((None, url) for url in sys.argv[2:])
look = partial(find, prometheus="none", engine_urls=urls, discover=True, dcgm_url=None, proc=Path("/proc"))
if uid:
    look()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
print(msgspec.json.encode(look()).decode())
"""


def can_unshare(*flags: str) -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode == 0


two_users = pytest.mark.skipif(
    os.geteuid() != 0 or not Path(PYTHON).exists(), reason="needs root, to become two other users"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter: pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        script = path / "vllm" / "entrypoints" / "openai" / "api_server.py"
        script.parent.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("engine.py"), script)
        shutil.copy(PAGE, path / "page.txt")
        (path / "model").mkdir()
        (path / "model" / "config.json").write_text(json.dumps(CONFIG))
        yield path


@contextmanager
def engine(
    folder: Path, uid: int, *, prefix: tuple[str, ...] = (), port: int = 0
) -> Iterator[tuple[int, str]]:
    """Run an engine as a user; yield its process and its URL."""
    script = folder / "vllm" / "entrypoints" / "openai" / "api_server.py"
    words = ["--port", str(free_port()), "--model", str(folder / "model")]
    command = [*prefix, PYTHON, str(script), *words, "--page", str(folder / "page.txt")]
    with subprocess.Popen(
        command,
        user=uid,
        group=uid,
        extra_groups=[],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
        env={"PATH": "/usr/bin:/bin"},
    ) as process:
        try:
            assert process.stdout is not None
            yield process.pid, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port: int = link.getsockname()[1]
        return port


def doctor_as(
    uid: int, *urls: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> list[Check]:
    base = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", DOCTOR_AS, str(uid), *urls],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**(base if env is None else env), "PYTHONPATH": str(ROOT / ".editable")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Check(**row) for row in json.loads(done.stdout)]


def of(checks: list[Check], url: str) -> dict[str, Check]:
    """Return the checks of the engine at an address, by id; others may run on this machine."""
    subject = next(c.subject for c in checks if c.id == "engine.endpoint" and c.found == url)
    return {check.id: check for check in checks if check.subject == subject}


@two_users
def test_a_user_without_rights_reads_all_of_its_own_engine(folder: Path) -> None:
    with engine(folder, NOBODY) as (pid, url):
        found = of(doctor_as(NOBODY), url)
    assert "GPUIDLE_STEPS=1" in found.pop("engine.steps").remedy  # its maps could be read: nothing is there
    assert {name: check.status for name, check in found.items()} == {
        "engine.process": "ok",
        "engine.endpoint": "ok",
        "engine.stats": "ok",
        "engine.filter": "ok",
        "engine.model-config": "ok",
        "engine.flop-basis": "ok",
    }
    assert str(pid) in found["engine.process"].found


@two_users
def test_another_users_engine_gives_tokens_and_no_files_and_says_cap_sys_ptrace(folder: Path) -> None:
    with engine(folder, OTHER) as (_, url):
        checks = doctor_as(NOBODY)
        found = of(checks, url)
    assert found["engine.stats"].status == "ok"  # by the port of its command line
    assert found["engine.process"].status == "limited"
    assert "CAP_SYS_PTRACE" in found["engine.process"].remedy
    assert found["engine.model-config"].status == "limited"
    assert "engine.flop-basis" not in found
    assert "CAP_SYS_PTRACE" in found["engine.steps"].remedy
    rights = next(check for check in checks if check.id == "node.rights")
    assert rights.status == "limited"
    assert f"user {NOBODY}, no capability" in rights.found


@two_users
def test_root_reads_every_users_engine(folder: Path) -> None:
    with engine(folder, OTHER) as (_, url):
        found = of(doctor_as(0), url)
    assert found["engine.process"].status == "ok"
    assert found["engine.flop-basis"].status == "ok"


@two_users
@pytest.mark.skipif(not can_unshare("--net"), reason="needs network namespaces")
def test_an_engine_in_its_own_network_namespace_has_to_be_named(folder: Path) -> None:
    with ExitStack() as stack:
        pid, url = stack.enter_context(
            engine(folder, 0, prefix=("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"))
        )
        checks = doctor_as(0)
    far = next(c for c in checks if c.id == "engine.endpoint" and f"process {pid}" in c.found)
    assert far.status == "limited"
    assert "network namespace" in far.found
    assert "--engine-url" in far.remedy
    assert not [check for check in checks if check.found == url]


@two_users
@pytest.mark.skipif(not can_unshare("--pid", "--fork", "--mount-proc"), reason="needs PID namespaces")
def test_in_a_pid_namespace_of_its_own_the_remedy_is_host_pid(folder: Path, nvml_library: Path) -> None:
    scenario = folder / "node.txt"
    Scenario(gpus=(Gpu(processes=(Process(os.getpid(), 2**30),)),)).write(scenario)
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    checks = doctor_as(0, prefix=prefix, env=environment(nvml_library, scenario))
    (check,) = [check for check in checks if check.id == "node.pid-namespace"]
    assert check.status == "limited"
    assert "hostPID" in check.remedy


@two_users
@pytest.mark.skipif(not can_unshare("--pid", "--fork", "--mount-proc"), reason="needs PID namespaces")
def test_from_a_pid_namespace_of_its_own_an_endpoint_still_gives_tokens(folder: Path) -> None:
    with engine(folder, OTHER) as (_, url):
        found = of(doctor_as(0, url, prefix=("unshare", "--pid", "--fork", "--mount-proc")), url)
    assert found["engine.stats"].status == "ok"
    assert found["engine.process"].status == "limited"


@two_users
@pytest.mark.skipif(not can_unshare("--mount"), reason="needs mount namespaces")
def test_hidepid_is_named(folder: Path) -> None:
    mount = 'mount -t proc -o hidepid=2 proc /proc; exec "$@"'
    with engine(folder, OTHER) as (pid, _):
        checks = doctor_as(NOBODY, prefix=("unshare", "--mount", "sh", "-c", mount, "sh"))
    (check,) = [check for check in checks if check.id == "node.hidepid"]
    assert check.status == "limited"
    assert "hidepid" in check.found
    assert not [each for each in checks if f"process {pid}" in each.found]
