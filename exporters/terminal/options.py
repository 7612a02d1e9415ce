"""What may be asked of the screen."""

from __future__ import annotations

from datetime import tzinfo
from typing import Literal

import msgspec

View = Literal["main", "problems", "help"]


class Replay(msgspec.Struct, frozen=True):
    """A recording that is played; the ends are CLOCK_MONOTONIC of the recorded node, None if not known."""

    name: str
    start_ns: int | None = None
    end_ns: int | None = None


class ScreenOptions(msgspec.Struct, frozen=True):
    """How a screen is drawn; everything that is not in the frames."""

    colour: bool = True
    """Whether blocks may differ by colour alone; False draws letters instead."""
    ascii: bool = False
    keys: bool = False
    """Whether keys are read, and so are named at the foot."""
    frozen: bool = False
    view: View = "main"
    skip_problems: int = 0
    """How many problems are scrolled past in the view of problems."""
    replay: Replay | None = None
    timezone: tzinfo | None = None
    """None: that of this machine."""
    looked_for: tuple[str, ...] = (
        "GPUs: NVIDIA's, through their driver (NVML, libnvidia-ml.so.1)",
        "engines: vLLM among this node's processes, and any address named by --engine-url",
    )
    """Said on the screen of a node on which nothing was found."""
