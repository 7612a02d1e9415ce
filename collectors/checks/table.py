"""All checks, in the order in which they are told. A newcomer is one function and one row."""

from __future__ import annotations

from collections.abc import Callable

from gpuidle.agent.model import Check
from gpuidle.collectors.checks.dcgm import dcgm_checks
from gpuidle.collectors.checks.engines import engine_checks
from gpuidle.collectors.checks.gpus import driver_checks, gpu_checks
from gpuidle.collectors.checks.node import node_checks
from gpuidle.collectors.checks.observe import Seen

CHECKS: tuple[Callable[[Seen], tuple[Check, ...]], ...] = (
    node_checks,
    driver_checks,
    dcgm_checks,
    gpu_checks,
    engine_checks,
)


def checks_of(seen: Seen) -> tuple[Check, ...]:
    """Return everything that was found."""
    return tuple(check for judge in CHECKS for check in judge(seen))
