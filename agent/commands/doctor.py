"""`gpuidle doctor`: what this node can measure, what not, why, and what would mend it.

The checks are the collectors' and the exporters'; here they are only put in order and drawn.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gpuidle.agent.commands.session import source_options
from gpuidle.agent.model import Check, CheckStatus

EXIT_CODES: dict[CheckStatus, int] = {"ok": 0, "limited": 1, "broken": 2}
_COLOURS: dict[CheckStatus, str] = {"ok": "green", "limited": "yellow", "broken": "red"}
_WIDTH = 80
_INDENT = 32
"""Columns before the text: status and id stand there."""


@click.command()
@source_options
@click.option(
    "--prometheus",
    default="127.0.0.1:9405",
    show_default=True,
    metavar="HOST:PORT",
    help="Where `run` would serve its metrics; 'none' leaves that out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def command(ctx: click.Context, /, prometheus: str, as_json: bool, **live: Any) -> None:
    """Say what can be measured on this node, what not, why, and the remedy.

    Ends with 0 when all is as good as it gets here, with 1 when a right, a setting or a place keeps
    something better away, and with 2 when something is broken, or there is nothing to measure.
    """
    checks = find(
        dcgm_url=live["dcgm_url"],
        prometheus=prometheus,
        engine_urls=live["engine_urls"],
        discover=live["discover"],
        proc=live["proc"],
        steps=live["steps"],
        steps_fpm=live["steps_fpm"],
    )
    code = exit_code(checks)
    if as_json:
        click.echo(to_json(checks))
    else:
        click.echo(render(checks, unicode=_can_draw(), colour=sys.stdout.isatty()))
    ctx.exit(code)


def find(
    *,
    dcgm_url: str | None,
    prometheus: str,
    engine_urls: tuple[tuple[str | None, str], ...],
    discover: bool,
    proc: Path,
    steps: bool = True,
    steps_fpm: tuple[tuple[str | None, str], ...] = (),
) -> tuple[Check, ...]:
    """Look at this node and return all checks."""
    from gpuidle.collectors.checks.observe import Place, observe
    from gpuidle.collectors.checks.table import checks_of
    from gpuidle.collectors.engines.track import NamedEndpoint
    from gpuidle.collectors.table import ENGINES
    from gpuidle.exporters.checks import prometheus_check

    place = Place(
        proc=proc,
        kinds=ENGINES,
        endpoints=tuple(NamedEndpoint(url=url, name=name) for name, url in engine_urls),
        discover=discover,
        dcgm_url=dcgm_url,
        steps=steps,
        fpm=tuple(name for name, _ in steps_fpm),
    )
    exports = () if prometheus == "none" else (prometheus_check(prometheus),)
    return (*checks_of(observe(place)), *exports)


def exit_code(checks: Sequence[Check]) -> int:
    """Return the code of the worst check."""
    return max((EXIT_CODES[check.status] for check in checks), default=0)


def to_json(checks: Sequence[Check]) -> str:
    """Return the checks as one JSON object; its form is described in docs/doctor.md."""
    import msgspec

    told = {"version": 1, "exit_code": exit_code(checks), "checks": list(checks)}
    return msgspec.json.format(msgspec.json.encode(told, order="deterministic"), indent=2).decode()


def render(checks: Sequence[Check], *, unicode: bool = True, colour: bool = False) -> str:
    """Return the checks as text of 80 columns, grouped by subject; colour only repeats the word."""
    arrow = "→" if unicode else "->"
    lines: list[str] = []
    for subject in dict.fromkeys(check.subject for check in checks):
        lines += ["", _cut(subject) if subject else "This node"]
        for check in checks:
            if check.subject == subject:
                lines += _lines(check, arrow, colour=colour)
    code = exit_code(checks)
    counts = {status: sum(check.status == status for check in checks) for status in EXIT_CODES}
    lines += [
        "",
        f"{counts['ok']} ok, {counts['limited']} limited, {counts['broken']} broken: exit code {code}",
    ]
    text = "\n".join(lines[1:])
    return text if unicode else text.encode("ascii", "replace").decode("ascii")


def _lines(check: Check, arrow: str, *, colour: bool) -> list[str]:
    status = f"{check.status:<9}"
    shown = click.style(status, fg=_COLOURS[check.status]) if colour else status
    found = _wrap(check.found, "") or [""]
    body = found + (_wrap(check.remedy, f"{arrow} ") if check.remedy and check.status != "ok" else [])
    head = f"  {shown}{check.id:<{_INDENT - 12}} {body[0]}"
    return [head, *(" " * _INDENT + line for line in body[1:])]


def _wrap(text: str, lead: str) -> list[str]:
    clean = "".join(character if character.isprintable() else " " for character in text)
    return textwrap.wrap(
        clean,
        _WIDTH - _INDENT,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
    )


def _cut(text: str) -> str:
    clean = "".join(character for character in text if character.isprintable())
    return clean if len(clean) <= _WIDTH else clean[: _WIDTH - 3] + "..."


def _can_draw() -> bool:
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return encoding.startswith("utf")
