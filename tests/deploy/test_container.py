"""The Containerfile as far as it goes without an engine: its copies suffice, its health check tells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.agent.analysis.builders import snapshot

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.exporters.prometheus import PrometheusExporter

TOP = Path(__file__).parents[2]
CONTAINERFILE = TOP / "deploy" / "container" / "Containerfile"


def text() -> str:
    return CONTAINERFILE.read_text().replace("\\\n", " ")


def copies() -> list[tuple[list[str], str]]:
    """Return the sources and the destination of each COPY from the build context."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", text(), re.MULTILINE)
    return [(words[:-1], words[-1]) for words in map(str.split, lines)]


def test_the_wheel_builds_from_what_is_copied_and_holds_every_module(tmp_path: Path) -> None:
    for sources, to in copies():
        for source in sources:
            if (TOP / source).is_dir():
                skipped = shutil.ignore_patterns("__pycache__")
                shutil.copytree(TOP / source, tmp_path / to, ignore=skipped, symlinks=True)
            else:
                (tmp_path / to).mkdir(parents=True, exist_ok=True)
                shutil.copy(TOP / source, tmp_path / to)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("gpuidle-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = ("agent", "collectors", "exporters")
    modules = {path.relative_to(tmp_path) for top in tops for path in (tmp_path / top).rglob("*.py")}
    assert modules
    assert {f"gpuidle/{module}" for module in modules} <= names
    assert "gpuidle/__main__.py" in names


def test_the_build_sees_all_that_it_copies() -> None:
    ignored = (CONTAINERFILE.parent / "Containerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert {source.split("/")[0] for sources, _ in copies() for source in sources} == allowed


def test_the_last_stage_runs_as_nobody_and_compiles_nothing() -> None:
    last = text().split("\nFROM ")[-1]
    assert re.search(r"^USER (\d+)", last, re.MULTILINE)[1] != "0"  # type: ignore[index]
    assert not re.search(r"^RUN ", last, re.MULTILINE)


def health_check(port: str) -> int:
    found = re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", text(), re.MULTILINE)
    assert found is not None
    command = [word.replace("9405", port) for word in json.loads(found[1])]
    assert command[0] == "python"
    return subprocess.run([sys.executable, *command[1:]], capture_output=True, check=False).returncode


def test_the_health_check_waits_for_the_first_reading() -> None:
    exporter = PrometheusExporter("127.0.0.1:0")
    port = exporter.address.rpartition(":")[2]
    assert health_check(port) != 0
    exporter.publish(Analyzer().feed(snapshot(0)))
    assert health_check(port) == 0
    exporter.close()
    assert health_check(port) != 0


def test_a_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install '.[deploy]'")
    done = subprocess.run([hadolint, str(CONTAINERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
