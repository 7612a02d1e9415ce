"""The unit and its drop-ins under systemd's own checks, which start nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuidle.agent.commands.run import command

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "gpuidle.service"
DROP_INS = sorted((SYSTEMD / "drop-ins").glob("*.conf"))
EXPOSURE_LIMIT = 2.5


def analyze_version() -> int:
    if shutil.which("systemd-analyze") is None:
        return 0
    done = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[1])


needs_analyze = pytest.mark.skipif(
    analyze_version() < 250, reason="no systemd-analyze with `security --offline` here"
)


def install(folder: Path, *drop_ins: Path) -> Path:
    """Lay the unit down as a node has it, with a program that exists."""
    unit = folder / "gpuidle.service"
    text = UNIT.read_text()
    assert text.count("/opt/gpuidle/bin/gpuidle") == 1
    unit.write_text(text.replace("/opt/gpuidle/bin/gpuidle", sys.executable))
    (folder / "gpuidle.service.d").mkdir()
    for drop_in in drop_ins:
        shutil.copy(drop_in, folder / "gpuidle.service.d")
    return unit


def verify(unit: Path) -> str:
    """Return what `systemd-analyze verify` says: it exits 0 on unknown keys and bad values."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    return f"{done.stdout}{done.stderr}{done.returncode or ''}"


def security(unit: Path) -> tuple[float, str]:
    """Return the exposure, and the table."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0"},
    )
    found = re.search(r"Overall exposure level for gpuidle.service: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1]), done.stdout


@needs_analyze
@pytest.mark.parametrize("drop_in", [None, *DROP_INS], ids=lambda path: path.stem if path else "unit")
def test_systemd_finds_nothing_to_say_and_little_exposed(tmp_path: Path, drop_in: Path | None) -> None:
    unit = install(tmp_path, *([drop_in] if drop_in else []))
    assert verify(unit) == ""
    assert security(unit)[0] <= EXPOSURE_LIMIT


@needs_analyze
def test_a_drop_in_adds_its_capabilities_and_no_other(tmp_path: Path) -> None:
    def refused(table: str) -> set[str]:
        return {
            name
            for line in re.findall(r"^ *✗ CapabilityBoundingSet=~(\S+)", table, re.MULTILINE)
            for name in re.findall(r"(?:CAP_)?([A-Z_]+)", line)
            if name != "CAP_"
        }

    for name, capabilities in {"other-users": {"SYS_PTRACE"}, "uprobes": {"SYS_PTRACE", "BPF"}}.items():
        folder = tmp_path / name
        folder.mkdir()
        _, table = security(install(folder, SYSTEMD / "drop-ins" / f"{name}.conf"))
        assert refused(table) == capabilities
    (tmp_path / "plain").mkdir()
    assert refused(security(install(tmp_path / "plain"))[1]) == set()


@needs_analyze
@pytest.mark.parametrize(
    ("right", "wrong"), [("WatchdogSec=60", "WatchdogSecs=60"), ("DevicePolicy=closed", "DevicePolicy=shut")]
)
def test_a_wrong_key_or_value_would_be_seen(tmp_path: Path, right: str, wrong: str) -> None:
    unit = install(tmp_path)
    unit.write_text(unit.read_text().replace(right, wrong))
    assert wrong.split("=")[wrong.startswith("Device")] in verify(unit)


def test_the_gpus_are_reached_under_the_names_of_old_and_new_drivers() -> None:
    text = UNIT.read_text()
    for wanted in ("char-nvidia rw", "char-nvidia-frontend rw"):
        assert f"\nDeviceAllow={wanted}\n" in text
    assert "\nPrivateDevices=no\n" in text
    assert "\nProtectProc=default\n" in text


def test_every_setting_of_the_environment_file_is_an_option_of_run() -> None:
    options = {max(parameter.opts, key=len) for parameter in command.params}
    names = re.findall(r"^#?GPUIDLE_RUN_(\w+)=", (SYSTEMD / "gpuidle.env").read_text(), re.MULTILINE)
    assert names
    assert {f"--{name.lower().replace('_', '-')}" for name in names} <= options
