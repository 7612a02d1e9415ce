"""A double of NVIDIA's libnvidia-ml.so.1, answered from a scenario file.

`build()` compiles it from the real header; a process that starts with its folder in LD_LIBRARY_PATH and
`GPUIDLE_NVML_SCENARIO` naming a file that `Scenario.write` wrote sees that node, and sees it change when
the file is written again.
"""

from __future__ import annotations

from tests.doubles.nvml.library import BuildError, build
from tests.doubles.nvml.scenario import (
    EVENT_TYPES,
    SCENARIO_VARIABLE,
    Event,
    Fault,
    GpmMetric,
    Gpu,
    MigInstance,
    Process,
    ProcessUtilization,
    Scenario,
    environment,
)

__all__ = [
    "EVENT_TYPES",
    "SCENARIO_VARIABLE",
    "BuildError",
    "Event",
    "Fault",
    "GpmMetric",
    "Gpu",
    "MigInstance",
    "Process",
    "ProcessUtilization",
    "Scenario",
    "build",
    "environment",
]
