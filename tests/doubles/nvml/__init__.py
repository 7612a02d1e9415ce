"""A double of NVIDIA's libnvidia-ml.so.1, answered from a scenario file.

`build()` compiles it from the real header; a process that starts with its folder in LD_LIBRARY_PATH and
`GPUIDLE_NVML_SCENARIO` naming a file that `Scenario.write` wrote sees that node, and sees it change when
the file is written again.
"""

from __future__ import annotations

from tests.doubles.nvml.library import BuildError, build
from tests.doubles.nvml.scenario import (
    SCENARIO_VARIABLE,
    Fault,
    Gpu,
    Process,
    ProcessUtilization,
    Scenario,
    environment,
)

__all__ = [
    "SCENARIO_VARIABLE",
    "BuildError",
    "Fault",
    "Gpu",
    "Process",
    "ProcessUtilization",
    "Scenario",
    "build",
    "environment",
]
