"""What `calibrate` saved comes back beside the driver's readings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.agent.analysis.builders import gpu

from gpuidle.agent.commands.calibrated import Calibrated, calibration_folder
from gpuidle.agent.model import Reading
from gpuidle.agent.physics.calibration import Calibration, to_table

SAVED = Calibration(
    device="NVIDIA H200",
    hw_id="GPU-0",
    flops_per_s={"bf16": 7e14},
    copy_bytes_per_s=4.4e12,
    wall_ns=10**18,
    tool="torch 2.13.0",
    missing={},
)


class Driver:
    name = "nvml"
    closed = False

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def read(self, now_ns: int) -> Reading:
        return self._reading

    def close(self) -> None:
        self.closed = True


def save(folder: Path, calibration: Calibration) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{calibration.hw_id}.json").write_text(json.dumps(to_table(calibration)))


def test_each_device_gets_its_own_figure_and_no_other(tmp_path: Path) -> None:
    save(tmp_path, SAVED)
    save(tmp_path, replace(SAVED, hw_id="GPU-9", copy_bytes_per_s=1e12))
    driver = Driver(Reading(gpus=(gpu(1.0), gpu(1.0, hw_id="GPU-1"))))
    calibrated = Calibrated(driver, tmp_path)
    found = calibrated.read(0)
    assert found.gpus is not None
    assert [card.copy_bytes_per_s for card in found.gpus] == [4.4e12, None]
    assert not found.problems
    calibrated.close()
    assert calibrated.name == "nvml"
    assert driver.closed


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', '{"version": 99}'])
def test_a_damaged_file_is_told_and_the_others_hold(tmp_path: Path, text: str) -> None:
    save(tmp_path, SAVED)
    (tmp_path / "GPU-1.json").write_text(text)
    found = Calibrated(Driver(Reading(gpus=(gpu(1.0), gpu(1.0, hw_id="GPU-1")))), tmp_path).read(0)
    assert found.gpus is not None
    assert [card.copy_bytes_per_s for card in found.gpus] == [4.4e12, None]
    assert [(problem.source, problem.subject) for problem in found.problems] == [("calibration", "GPU-1")]


def test_a_driver_that_is_silent_stays_silent(tmp_path: Path) -> None:
    save(tmp_path, SAVED)
    assert Calibrated(Driver(Reading(gpus=None)), tmp_path).read(0).gpus is None


def test_without_a_calibration_readings_pass_as_they_are(tmp_path: Path) -> None:
    reading = Reading(gpus=(gpu(1.0),))
    assert Calibrated(Driver(reading), tmp_path / "none").read(0) is reading


def test_a_service_keeps_them_in_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert calibration_folder() == tmp_path / "gpuidle" / "calibration"
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/gpuidle:/var/lib/other")
    assert calibration_folder() == Path("/var/lib/gpuidle/calibration")


def test_a_user_without_a_home_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_uid: int) -> None:
        raise KeyError(_uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert calibration_folder() == Path("/var/lib/gpuidle/calibration")
