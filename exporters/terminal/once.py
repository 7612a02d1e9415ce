"""The report of `gpuidle watch --once`: one frame in full, as text or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from msgspec.structs import replace

from gpuidle.agent.codec import encode_frame
from gpuidle.agent.model import Frame

from .consoles import PLAIN_WIDTH, OutputClosedError, has_colour, make_console, silence, wants_ascii
from .options import ScreenOptions
from .screen import render


def print_once(history: Sequence[Frame], options: ScreenOptions, stream: IO[str]) -> None:
    """Write everything known of the newest frame of `history`, which holds one at least, to `stream`.

    A terminal gives its width; a pipe or a file gets 80 columns and no escape sequences.

    Raises:
        OutputClosedError: the reader has gone.
    """
    terminal = stream.isatty()
    console = make_console(stream, width=None if terminal else PLAIN_WIDTH)
    options = replace(
        options,
        ascii=options.ascii or wants_ascii(stream),
        colour=options.colour and has_colour(console),
        keys=False,
    )
    lines = render(history, options, console.width)
    if has_colour(console):
        console.print(lines, crop=False, no_wrap=True, end="")
        return
    _write(stream, lines.plain())


def print_json(frame: Frame, stream: IO[str]) -> None:
    """Write one frame as one line of JSON.

    Raises:
        OutputClosedError: the reader has gone.
    """
    _write(stream, encode_frame(frame).decode() + "\n")


def _write(stream: IO[str], text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        silence(stream)
        raise OutputClosedError from None
