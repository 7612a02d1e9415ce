"""The simulated node of `--demo`, and the options that say which one and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from gpuidle.agent.ports import Source

Command = TypeVar("Command", bound=Callable[..., Any])

NODES = (
    "plain",
    "speculation",
    "pipeline",
    "async",
    "straggler",
    "power-cap",
    "hot",
    "roles",
    "shared",
)
FAULTS = (
    "dead-counter",
    "frozen-counter",
    "missing-samples",
    "counter-clock",
    "lost-steps",
    "late-tokens",
    "restart",
)
# Written out, as the simulator's own tables take their time to load; a test holds them equal.


def demo_options(purpose: str) -> Callable[[Command], Command]:
    """Add --demo, which serves `purpose`, and what goes with it."""

    def added(command: Command) -> Command:
        for option in reversed(
            (
                click.option("--demo", is_flag=True, help=purpose),
                click.option(
                    "--demo-node",
                    type=click.Choice(NODES),
                    default="plain",
                    show_default=True,
                    help="Which simulated node (docs/simulator.md).",
                ),
                click.option(
                    "--demo-fault",
                    "demo_faults",
                    multiple=True,
                    type=click.Choice(FAULTS),
                    help="Something wrong with it, from its 30th second on. Can be repeated.",
                ),
            )
        ):
            command = option(command)
        return command

    return added


def check_demo(demo: bool, node: str, faults: tuple[str, ...]) -> None:
    """Raise click.UsageError where a node or fault is named without --demo."""
    if not demo and (node != "plain" or faults):
        raise click.UsageError("--demo-node and --demo-fault go with --demo")


def demo_source(node: str, faults: tuple[str, ...], *, tick_ns: int = 10**9, warm_up_ns: int = 0) -> Source:
    """Return the simulated node as a source, paced by the clock.

    Raises:
        click.UsageError: the fault and the node do not go together.
    """
    from gpuidle.agent.clock import SystemClock
    from gpuidle.collectors.simulator.demos import named
    from gpuidle.collectors.simulator.scenario import ScenarioError
    from gpuidle.collectors.simulator.source import SimulatorSource

    try:
        scenario = named(node, faults)
    except ScenarioError as error:
        raise click.UsageError(str(error)) from None
    return SimulatorSource(scenario, SystemClock(), tick_ns=tick_ns, warm_up_ns=warm_up_ns)
