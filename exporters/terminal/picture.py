"""A picture of the screen from recorded frames: `python -m gpuidle.exporters.terminal.picture IN OUT`.

IN is what `gpuidle watch` writes into a pipe (one frame a line); OUT is an SVG.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Sequence
from datetime import timezone
from pathlib import Path

from gpuidle.agent.codec import decode_frame
from gpuidle.agent.model import Frame

from .history import HISTORY_FRAMES
from .options import ScreenOptions
from .screen import render


def picture(history: Sequence[Frame], width: int, height: int, title: str) -> str:
    """Return an SVG of the screen that a terminal of `width` by `height` shows after `history`, in UTC."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        height=height,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        no_color=False,
        highlight=False,
        markup=False,
    )
    options = ScreenOptions(keys=True, timezone=timezone.utc)
    console.print(render(history, options, width, height), crop=False, no_wrap=True, end="")
    svg = console.export_svg(title=title, unique_id="gpuidle")
    # A picture in a README must not make its readers' browsers ask a third party for a font.
    return re.sub(r"@font-face\s*\{[^}]*\}\s*", "", svg)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m gpuidle.exporters.terminal.picture", description=__doc__)
    parser.add_argument("frames", type=Path, help="frames, one JSON object a line")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--height", type=int, default=30)
    parser.add_argument("--title", default="gpuidle watch")
    given = parser.parse_args(arguments)
    lines = given.frames.read_bytes().splitlines()
    history = [decode_frame(line) for line in lines if line.strip()][-HISTORY_FRAMES:]
    given.picture.write_text(picture(history, given.width, given.height, given.title), encoding="utf-8")


if __name__ == "__main__":
    main()
