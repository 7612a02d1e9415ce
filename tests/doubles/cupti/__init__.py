"""A double of libcupti (PM sampling, profiler host) and of the few driver calls that the sampler makes."""

from __future__ import annotations

from tests.doubles.cupti.library import INCLUDE_VARIABLE, BuildError, build
from tests.doubles.cupti.scenario import Scenario, environment

__all__ = ["INCLUDE_VARIABLE", "BuildError", "Scenario", "build", "environment"]
