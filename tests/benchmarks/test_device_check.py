"""Every section of the check for the first GPU, rehearsed on the doubles: it must work at once on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALWAYS = ("facts,uprobes,steps",)
IN_FULL = ("exports,rights", "context,together,gpm", "known", "cost")
"""Half a minute of waiting and starting of processes: for the full stage (GPUIDLE_REHEARSE=1)."""
full = pytest.mark.skipif(os.environ.get("GPUIDLE_REHEARSE") != "1", reason="set GPUIDLE_REHEARSE=1")


@pytest.mark.parametrize("sections", [*ALWAYS, *(pytest.param(each, marks=full) for each in IN_FULL)])
def test_a_section_works_on_the_doubles(sections: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device_check", "--rehearse", "--scale", "0.05"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--only", sections],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / ".editable"), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "failed or off" in done.stdout, done.stderr
    assert " 0 failed or off" in done.stdout, done.stdout + logs
    for name in sections.split(","):
        assert json.loads((tmp_path / f"{name}.json").read_bytes())
    if sections == "steps":
        truth = [json.loads(line) for line in (tmp_path / "steps.truth.jsonl").read_text().splitlines()]
        assert {step["phase"] for step in truth} == {"decode", "prefill"}
        assert (tmp_path / "steps.gpuidle.mcap").stat().st_size > 1000


def test_every_section_is_rehearsed() -> None:
    listed = {name for group in (*ALWAYS, *IN_FULL) for name in group.split(",")}
    help_text = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_check", "--only", "nonsense"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / ".editable"), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    ).stderr
    known = help_text.rpartition("known: ")[2].strip().split(", ")
    assert listed == set(known)
