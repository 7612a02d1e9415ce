"""The counter sets, proved with NVIDIA's own library where one is installed. Needs no driver and no GPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuidle.collectors.counters.cupti.check import check_library, discrete
from gpuidle.collectors.counters.cupti.chips import metric_set
from gpuidle.collectors.counters.cupti.find import find_libraries

TOO_MANY = """
import sys
from gpuidle.collectors.counters.cupti.library import Cupti, HostConfig
from gpuidle.collectors.counters.cupti.chips import metric_set
names = metric_set("GH100").names + tuple(sys.argv[2:])
print(HostConfig(Cupti(sys.argv[1]), "GH100", names).passes)
"""


def libraries() -> list[str]:
    """Return every libcupti at hand, from variable GPUIDLE_CUPTI_LIBRARIES, packages or a toolkit."""
    named = [each for each in os.environ.get("GPUIDLE_CUPTI_LIBRARIES", "").split(os.pathsep) if each]
    for package in ("nvidia-cuda-cupti", "nvidia-cuda-cupti-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        named += [str(file.locate()) for file in files if file.name.startswith("libcupti.so.1")]
    return list(dict.fromkeys([*named, *find_libraries(search_path="")]))


@pytest.mark.parametrize("library", libraries())
def test_every_discrete_chip_has_a_set_of_one_pass(library: str) -> None:
    found = check_library(library)
    assert {chip: why for chip, why in found.items() if why} == {}
    assert {"TU102", "GA100", "GA102", "AD102", "GH100", "GB100", "GB202"} <= set(found)


@pytest.mark.parametrize("library", libraries()[:1])
def test_the_check_would_see_a_second_pass_and_an_unknown_name(library: str) -> None:
    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", TOO_MANY, library, name]
        env = {**os.environ, "LD_LIBRARY_PATH": str(Path(library).parent)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert int(run("sm__warps_active.avg.pct_of_peak_sustained_active").stdout) > 1
    assert "cuptiProfilerHostConfigAddMetrics" in run("sm__no_such_counter.sum").stderr


def test_chips_of_boards_with_shared_memory_are_left_out() -> None:
    assert discrete(("GV100", "TU102", "GA10B", "GB20B", "GB202")) == ("TU102", "GB202")


@pytest.mark.parametrize(
    ("chip", "tensor", "read", "by_time"),
    [
        ("TU104", "sm__pipe_shared_cycles_active_realtime", "dram__bytes_read", False),
        ("GA100", "sm__pipe_tensor_cycles_active_realtime", "dram__bytes_read", False),
        ("GA102", "sm__pipe_tensor_cycles_active_realtime", "dram__bytes_read", True),
        ("AD102", "sm__pipe_tensor_cycles_active_realtime_v2", "dram__bytes_read", True),
        ("GH100", "sm__pipe_tensor_cycles_active_realtime", "dram__bytes_read", True),
        ("GB202", "sm__pipe_tensor_cycles_active_realtime", "dram__bytes_op_read", True),
    ],
)
def test_names_differ_by_family(chip: str, tensor: str, read: str, by_time: bool) -> None:
    chosen = metric_set(chip)
    assert chosen is not None
    named = dict(zip(chosen.columns, chosen.names, strict=True))
    assert named["tensor_active"].split(".")[0] == tensor
    assert named["dram_read_bytes_per_s"] == read + ".sum.per_second"
    assert chosen.time_trigger is by_time


def test_a_chip_that_is_not_known_has_no_set() -> None:
    assert metric_set("GV100") is None
    assert metric_set("") is None
