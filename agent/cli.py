"""The command line. Commands are imported when they are used: `gpuidle --version` imports click only."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from gpuidle import __version__

# name -> (module under agent.commands, one line of help)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "watch": ("watch", "Show live what the GPUs of this node do and why compute stands idle."),
    "run": ("run", "Run as a service that exports metrics."),
    "record": ("record", "Write what is read to a session file."),
    "check": ("check", "Judge wasted compute for a monitoring system: exit 0, 1, 2 or 3."),
    "doctor": ("doctor", "Say what this node can measure, why not more, and the remedy."),
    "plan": ("plan", "Say what a model can do on a GPU at best: time of a step, idle compute, cost."),
    "calibrate": ("calibrate", "Measure what this device reaches in matrix products and copies."),
}


class _LazyGroup(click.Group):
    """A group that knows its commands' names and help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gpuidle.agent.commands.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        for option in command.params:
            if isinstance(option, click.Option) and option.envvar is None:
                option.envvar = f"GPUIDLE_{cmd_name}_{_written(option)}".upper()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, COMMANDS[name][1]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


def _written(parameter: click.Parameter) -> str:
    """Return an option's name as the user writes it, with underscores: "price" for the parameter `prices`."""
    return max(parameter.opts, key=len).lstrip("-").replace("-", "_")


def _load_config(ctx: click.Context, path: Path | None) -> None:
    """Make the file's values the commands' defaults; an unknown key ends with exit code 2."""
    from gpuidle.agent.config import DEFAULT_PATHS, ConfigError, check_keys, find_config, read_config

    group = ctx.command
    assert isinstance(group, click.Group)
    try:
        path = path or find_config(DEFAULT_PATHS)
        if path is None:
            return
        tables = read_config(path)
        known: dict[str, dict[str, click.Parameter]] = {}
        for name in COMMANDS:
            command = group.get_command(ctx, name) if name in tables else None
            known[name] = {_written(p): p for p in command.params} if command else {}
        check_keys(path, tables, known)
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from error
    defaults: dict[str, Any] = {
        name: {known[name][key].name: _default(known[name][key], value) for key, value in table.items()}
        for name, table in tables.items()
    }
    ctx.default_map = defaults


def _default(parameter: click.Parameter, value: object) -> object:
    """Return a value of the file; one for an option that may be repeated may stand alone."""
    return [value] if getattr(parameter, "multiple", False) and not isinstance(value, list) else value


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="gpuidle")
@click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="GPUIDLE_CONFIG",
    help="TOML file with a table for each command [default: /etc/gpuidle/gpuidle.toml if there].",
)
@click.pass_context
def group(ctx: click.Context, config: Path | None) -> None:
    """Measure how much GPU compute stands idle beside LLM inference engines, why, and at what cost.

    Attaches to engines that are already running. Start with: gpuidle watch
    (no GPU here? gpuidle watch --demo).
    """
    _load_config(ctx, config)


def main() -> None:
    """Entry point of the `gpuidle` program."""
    _prepare_streams()
    # Nothing here multiplies matrices: OpenBLAS need not start a thread a core when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # until everything is imported, and none of it is garbage: `run_until_signalled` enables it
    group(prog_name="gpuidle", auto_envvar_prefix="GPUIDLE")


def _prepare_streams() -> None:
    """Open what the caller has closed, and let no character that a terminal lacks end the program."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # what is opened next must not take its place
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
