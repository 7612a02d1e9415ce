"""What the terminal at hand can show, and a console that reports a closed output instead of exiting."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 80
"""Width of a report that goes into a pipe or a file."""


class OutputClosedError(Exception):
    """Whoever read the output has gone: a reason to stop, not a fault."""


def can_draw(stream: IO[str], environment: Mapping[str, str] | None = None) -> bool:
    """Return whether a live screen can be drawn on `stream`: a terminal that knows how to move its cursor."""
    env = os.environ if environment is None else environment
    try:
        terminal = stream.isatty()
    except (ValueError, OSError):  # closed
        return False
    return terminal and env.get("TERM", "").lower() not in ("", "dumb", "unknown")


def wants_ascii(stream: IO[str], environment: Mapping[str, str] | None = None) -> bool:
    """Return whether only ASCII may be written to `stream`.

    Python encodes as UTF-8 even under LC_ALL=C, so that the locale is asked as well. No locale at all is
    how containers start, on terminals that do know UTF-8: it does not count as C.
    """
    env = os.environ if environment is None else environment
    locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or ""
    name = locale.upper().replace("-", "")
    if name and "UTF8" not in name:
        return True
    try:
        "█—°".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def make_console(stream: IO[str], *, width: int | None = None, height: int | None = None) -> Console:
    """Return a rich console on `stream` that honours NO_COLOR and TERM and reads no markup.

    Writing to it raises OutputClosedError once the reader has gone.
    """
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            silence(stream)
            raise OutputClosedError

    return QuietConsole(
        file=stream, width=width, height=height, markup=False, highlight=False, emoji=False, soft_wrap=False
    )


def has_colour(console: Console) -> bool:
    """Return whether colours reach the reader."""
    return console.color_system is not None and not console.no_color


def silence(stream: IO[str]) -> None:
    """Lead the descriptor of a closed `stream` to nowhere, so that Python's own last flush does not fail."""
    try:
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):
        return
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)
