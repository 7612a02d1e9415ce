"""How causes and phases look: a label, a letter that is read without colour, and a colour.

Colours are those of Okabe and Ito, told apart by colour-blind eyes and on dark and light grounds. What is
unknown is a pattern, not a colour: it must not look like something that was measured.
"""

from __future__ import annotations

from typing import NamedTuple

from gpuidle.agent.model import Phase

from .layout import clean

GREEN = "#009e73"
ORANGE = "#e69f00"
SKY = "#56b4e9"
BLUE = "#0072b2"
YELLOW = "#f0e442"
VERMILLION = "#d55e00"
PURPLE = "#cc79a7"
GREY = "#8a8a8a"

STRONG = "bold"
QUIET = "dim"
WARNING = f"bold {VERMILLION}"
MARK = "bold reverse"
"""For what must not be overlooked: SIMULATED, REPLAY, FROZEN. Seen without colour too."""


class Look(NamedTuple):
    """How one cause or phase is drawn."""

    label: str
    letter: str
    style: str
    """Of a solid block, or of the letter where `solid` is false."""
    solid: bool = True


CAUSES: dict[str, Look] = {
    "useful": Look("useful", "U", GREEN),
    "padding": Look("padding", "P", PURPLE),
    "throttled_power": Look("throttled by power", "W", VERMILLION),
    "throttled_thermal": Look("throttled by heat", "H", VERMILLION),
    "throttled_other": Look("throttled", "T", VERMILLION),
    "memory_bound": Look("memory-bound", "M", ORANGE),
    "communication": Look("communication", "C", SKY),
    "latency": Look("latency", "L", YELLOW),
    "host_gap": Look("host gap", "G", VERMILLION),
    "no_request": Look("no request", "N", GREY),
    "waiting_peer": Look("waiting for peer", "R", BLUE),
    "unallocated": Look("unallocated", "A", GREY),
    "starting": Look("starting", "S", SKY),
    "suspended": Look("suspended", "Z", GREY),
    "foreign": Look("foreign", "F", PURPLE),
    "unattributed": Look("unattributed", "?", QUIET, solid=False),
    "unobserved": Look("unobserved", "x", QUIET, solid=False),
}
"""In the order of the ledger, which is the order of the bar."""

PHASE_LOOKS: dict[Phase, Look] = {
    "prefill": Look("prefill", "p", f"bold white on {BLUE}"),
    "decode": Look("decode", "d", f"black on {ORANGE}"),
    "mixed": Look("mixed", "m", f"black on {PURPLE}"),
    "idle": Look("idle", "·", QUIET),
    "unknown": Look("unknown", "?", QUIET),
}

SPARKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"


def cause_look(cause: str) -> Look:
    """Return the look of a cause; of one that a newer agent named, its name."""
    return CAUSES.get(cause) or Look(clean(cause).replace("_", " "), "+", GREY)


def ordered(causes: dict[str, int]) -> list[str]:
    """Return the causes with time in them, in the order of the ledger, unheard-of ones last."""
    known = [cause for cause in CAUSES if causes.get(cause, 0) > 0]
    return known + sorted(cause for cause, ns in causes.items() if ns > 0 and cause not in CAUSES)
