"""Bars, strips and sparklines of known width."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuidle.agent.model import PHASES, Figure, GpuFrame

from .history import Ledger, cells, main_phase
from .layout import EMPTY, Line, pad, span
from .numbers import figure, share
from .options import ScreenOptions
from .palette import EIGHTHS, GREEN, PHASE_LOOKS, QUIET, SPARKS, cause_look, ordered

TRACK = "░"


def gauge(low: float, high: float, width: int, style: str) -> Line:
    """Return a bar of 0 to 1 that is full up to `low` and hatched up to `high`; both are clamped."""
    if width <= 0 or not (math.isfinite(low) and math.isfinite(high)):
        return EMPTY
    low, high = min(1.0, max(0.0, low)), min(1.0, max(0.0, high))
    eighths = math.ceil(low * width * 8) if low < 0.5 else math.floor(low * width * 8)
    full, part = divmod(eighths, 8)
    text = "█" * full + (EIGHTHS[part] if part else "")
    doubt = max(0, round(high * width) - len(text))
    hatched = "▒" * min(doubt, width - len(text))
    track = TRACK * (width - len(text) - len(hatched))
    return ((text, style), (hatched, style), (track, QUIET))


def used_gauge(idle: Figure | None, width: int) -> Line:
    """Return the bar of the compute that an idle ratio leaves."""
    known = figure(idle)
    if known is None or width < 4:
        return EMPTY
    return gauge(1 - known.high, 1 - known.low, width, GREEN)


def ledger_bar(ledger: Ledger, width: int, options: ScreenOptions) -> Line:
    """Return the stacked bar of the causes: blocks where colour tells them apart, else letters."""
    causes = ordered(ledger.causes_ns)
    sizes = cells([ledger.causes_ns[cause] for cause in causes], width)
    bar: list[tuple[str, str]] = []
    for cause, size in zip(causes, sizes, strict=True):
        look = cause_look(cause)
        blocks = options.colour and not options.ascii
        glyph = ("▇" if look.solid else "░") if blocks else look.letter
        bar.append((glyph * size, look.style))
    return tuple(bar)


def legend(ledger: Ledger, options: ScreenOptions) -> list[Line]:
    """Return one item a cause: its mark, name and share of the time in per cent."""
    items: list[Line] = []
    for cause in ordered(ledger.causes_ns):
        about = "~" if cause in ledger.estimated else ""
        value = share(ledger.causes_ns[cause] / ledger.window_ns)
        items.append((*mark(cause, options), (f" {about}{value}", "")))
    return items


def mark(cause: str, options: ScreenOptions) -> Line:
    """Return what a cause looks like in a bar, and its name."""
    look = cause_look(cause)
    blocks = options.colour and not options.ascii
    glyph = ("■" if look.solid else "░") if blocks else look.letter
    return ((glyph, look.style), (" " + look.label, ""))


def phase_strip(trail: Sequence[GpuFrame | None], width: int) -> Line:
    """Return the phase of the last windows, one cell each, the newest on the right."""
    shown = trail[-width:] if width > 0 else []
    line: list[tuple[str, str]] = [(" " * (width - len(shown)), "")] if width > len(shown) else []
    for gpu in shown:
        if gpu is None:
            line.append((" ", ""))
            continue
        look = PHASE_LOOKS[main_phase(gpu)]
        line.append((look.letter, look.style))
    return _merge(line)


def phase_legend(ledger: Ledger) -> list[Line]:
    """Return one item a phase with time in it: its letter, name and share in per cent."""
    total = sum(ns for ns in ledger.phases_ns.values() if ns > 0)
    about = "~" if ledger.phases_estimated else ""
    items: list[Line] = []
    for phase in PHASES:
        if ledger.phases_ns[phase] > 0:
            look = PHASE_LOOKS[phase]
            value = share(ledger.phases_ns[phase] / total)
            items.append(((look.letter, look.style), (f" {look.label} {about}{value}", "")))
    return items


def used_sparks(trail: Sequence[GpuFrame | None], width: int) -> Line:
    """Return the useful share of the last windows on a scale of 0 to 1; blank where it is not known.

    Time that is `unattributed` or `unobserved` in full says nothing about the use: blank, not empty.
    """
    text = ""
    for gpu in trail[-width:] if width > 0 else []:
        known = 0
        if gpu is not None:
            known = gpu.window_ns - gpu.causes_ns.get("unattributed", 0) - gpu.causes_ns.get("unobserved", 0)
        if gpu is None or known <= 0:
            text += " "
            continue
        ratio = min(1.0, max(0.0, gpu.causes_ns.get("useful", 0) / gpu.window_ns))
        text += SPARKS[min(len(SPARKS) - 1, int(ratio * len(SPARKS)))]
    return (*span(" " * (width - len(text))), (text, GREEN))


def labelled(label: str, body: Line, indent: int) -> Line:
    """Return `body` behind a quiet label of `indent` cells."""
    return (*pad(span(label, QUIET), indent), *body)


def _merge(line: list[tuple[str, str]]) -> Line:
    """Return the spans with neighbours of one style put together: a tenth of the escapes."""
    merged: list[tuple[str, str]] = []
    for text, style in line:
        if merged and merged[-1][1] == style:
            merged[-1] = (merged[-1][0] + text, style)
        else:
            merged.append((text, style))
    return tuple(merged)
