from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpuidle.agent.commands.calibrate import command
from gpuidle.agent.physics.calibration import BadCalibration, Calibration, compare, from_table, to_table
from gpuidle.agent.physics.peaks import find_peaks

MEASURED = Calibration(
    device="NVIDIA H200",
    hw_id="GPU-1",
    flops_per_s={"bf16": 700e12, "fp8": 1300e12},
    copy_bytes_per_s=4.2e12,
    wall_ns=1,
    tool="torch 2.13.0",
    missing={"int8": "not implemented"},
)


class FakeTensor:
    """Does no arithmetic: products cost what the test's clock says."""

    def to(self, _dtype: object) -> FakeTensor:
        return self

    def t(self) -> FakeTensor:
        return self

    def copy_(self, _other: FakeTensor) -> None:
        return

    def __matmul__(self, _other: FakeTensor) -> FakeTensor:
        return self


def fake_torch(*, gpus: int, free: int = 100, total: int = 100) -> Any:
    torch = types.ModuleType("torch")

    def tensor(*_args: object, **_kwargs: object) -> FakeTensor:
        return FakeTensor()

    def device(name: str) -> types.SimpleNamespace:
        kind, _, index = name.partition(":")
        if kind not in {"cpu", "cuda", "mps"}:
            raise RuntimeError("Expected one of cpu, cuda")
        return types.SimpleNamespace(type=kind, index=int(index) if index else None)

    cuda = types.SimpleNamespace(
        is_available=lambda: gpus > 0,
        device_count=lambda: gpus,
        mem_get_info=lambda _device: (free, total),
        synchronize=lambda _device: None,
        get_device_properties=lambda _device: types.SimpleNamespace(name="NVIDIA H200", uuid="1234"),
    )
    facts: dict[str, object] = {
        "__version__": "9.9",
        "device": device,
        "cuda": cuda,
        "bfloat16": "bf16",
        "float32": "fp32",
        "float8_e4m3fn": "fp8",
        "int8": "int8",
        "uint8": "uint8",
        "_scaled_mm": lambda *_args, **_kwargs: None,
    }
    for name in ("randn", "randint", "ones", "empty_like"):
        facts[name] = tensor
    for name, value in facts.items():
        setattr(torch, name, value)
    return torch


def run(tmp_path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        command, ["--seconds", "0.001", *arguments], env={"XDG_STATE_HOME": str(tmp_path)}
    )


def test_without_torch_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert 'pip install "gpuidle[torch]"' in result.output


def test_it_saves_what_it_measured_and_says_what_it_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpus=1))
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    saved = from_table(json.loads((tmp_path / "gpuidle" / "calibration" / "GPU-1234.json").read_text()))
    assert set(saved.flops_per_s) == {"bf16", "fp8", "fp32"}
    assert "_int_mm" in saved.missing["int8"]
    assert "989.4" in result.output
    assert "4,800" in result.output


def test_a_gpu_in_use_is_refused_unless_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpus=1, free=50))
    refused = run(tmp_path)
    assert refused.exit_code == 1
    assert "--force" in refused.output
    assert not (tmp_path / "gpuidle").exists()
    assert run(tmp_path, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("gpus", "device", "said"),
    [
        (0, "cuda:0", "--device cpu"),
        (1, "cuda:3", "torch finds 1 GPUs"),
        (1, "mps", "not known"),
        (1, "x", "no device"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpus=gpus))
    result = run(tmp_path, "--device", device)
    assert result.exit_code == 1
    assert said in result.output


def test_measured_figures_stand_beside_the_sheets() -> None:
    rows = {row.what: row for row in compare(MEASURED, find_peaks("NVIDIA H200", None))}
    assert rows["bf16"].share == pytest.approx(700 / 989.4)
    assert rows["copy"].share == pytest.approx(4.2 / 4.8)
    assert rows["int8"].share is None
    assert all(row.share is None for row in compare(MEASURED, None))


def test_a_saved_calibration_reads_back_and_a_damaged_one_does_not() -> None:
    table = json.loads(json.dumps(to_table(MEASURED)))
    assert from_table(table) == MEASURED
    for change in (
        {"version": 2},
        {"flops_per_s": None},
        {"copy_bytes_per_s": 0},
        {"copy_bytes_per_s": True},
        {"copy_bytes_per_s": float("nan")},
        {"wall_ns": "now"},
    ):
        with pytest.raises(BadCalibration, match="calibration"):
            from_table({**table, **change})
