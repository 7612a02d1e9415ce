"""The options of the simulated node."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from gpuidle.agent.commands.record import command as record
from gpuidle.agent.commands.run import command as run
from gpuidle.agent.commands.watch import command as watch

COMMANDS = {"watch": watch, "record": record, "run": run}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--demo-fault", "restart"], ["--demo-fault", "--demo"]),
        (["--demo-node", "shared"], ["--demo-node", "--demo"]),
        (["--demo", "--demo-fault", "gremlins"], ["gremlins", "dead-counter"]),
        (["--demo", "--demo-node", "shared", "--demo-fault", "restart"], ["shared GPUs"]),
    ],
)
def test_a_node_or_fault_that_cannot_be_exits_2(
    name: str, arguments: list[str], words: list[str], tmp_path: object
) -> None:
    more = ["--output", f"{tmp_path}/x"] if name == "record" else []
    done = CliRunner().invoke(COMMANDS[name], [*arguments, *more])
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.output


def test_the_plain_demo_needs_no_word_more() -> None:
    text = CliRunner().invoke(watch, ["--help"]).output
    assert "--demo-node" in text
    assert "[default: plain]" in text
