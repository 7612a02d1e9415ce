"""The whole screen: a pure function of the last frames, the options and the size."""

from __future__ import annotations

from collections.abc import Sequence

from gpuidle.agent.model import Frame

from . import engines, gpus
from .engines import engine_section, short_model
from .gpus import gpu_section, headline, least_lines
from .history import tracks
from .layout import EMPTY, Line, Lines, clean, crop, span, to_ascii
from .numbers import duration, figure_percent
from .options import Replay, ScreenOptions, View
from .pages import bare_node, footer, header, help_page
from .palette import QUIET
from .problems import problem_section, ranked

__all__ = ["Replay", "ScreenOptions", "View", "render", "summary"]

_LEVELS: tuple[tuple[gpus.Detail, engines.Detail], ...] = (
    ("tall", "full"),
    ("full", "full"),
    ("short", "full"),
    ("short", "line"),
    ("line", "full"),
    ("line", "line"),
)
"""From the most told to the least: the first that fits is drawn."""


def render(history: Sequence[Frame], options: ScreenOptions, width: int, height: int | None = None) -> Lines:
    """Return the screen of the newest frame of `history` (oldest first).

    Never wider than `width`; exactly `height` lines, or as many as everything needs where it is None.
    """
    width = max(1, width)
    if not history:
        body: list[Line] = [span("waiting for the first frame", QUIET)]
    else:
        body = _body(history, options, width, None if height is None else max(0, height - 1 - options.keys))
        body = [header(history[-1], options, width), *body]
    if height is not None:
        room = max(0, height - options.keys)
        body = [*body[:room], *([EMPTY] * (room - len(body)))]
    if options.keys:
        body.append(footer(options, width))
    body = [crop(line, width) for line in body]
    if options.ascii:
        body = [to_ascii(line) for line in body]
    return Lines(tuple(body if height is None else body[:height]))


def _body(history: Sequence[Frame], options: ScreenOptions, width: int, room: int | None) -> list[Line]:
    frame = history[-1]
    if options.view == "help":
        return [EMPTY, *help_page(options, width)]
    if options.view == "problems":
        page = problem_section(frame, width, None) or [span("no problem is known", QUIET)]
        return [page[0], *page[1 + min(options.skip_problems, max(0, len(page) - 2)) :]]
    if not frame.gpus and not frame.engines:
        page = bare_node(frame, options, width)
        left = None if room is None else room - len(page)
        return [*page, *problem_section(frame, width, left, _hint(options))]
    top = _devices_and_engines(history, options, width, room)
    left = None if room is None else room - len(top)
    return [*top, *problem_section(frame, width, left, _hint(options))]


def _hint(options: ScreenOptions) -> str:
    return ": press p" if options.keys else ""


def _devices_and_engines(
    history: Sequence[Frame], options: ScreenOptions, width: int, room: int | None
) -> list[Line]:
    frame = history[-1]
    notes = _missing(frame)
    seen = tracks(history)
    if room is not None:
        room -= len(notes)
    kept = _reserve(frame, width, room)
    for gpu_detail, engine_detail in _LEVELS:
        if room is not None and least_lines(len(frame.gpus), width, gpu_detail) + kept > room:
            continue
        top = [
            *gpu_section(frame, seen, options, width, gpu_detail),
            *notes,
            *engine_section(frame, width, engine_detail),
            *([EMPTY] if gpu_detail == "tall" and frame.problems else []),
        ]
        if room is None or len(top) - len(notes) + kept <= room:
            return top
    kept = min(kept, 1)
    for_engines = min(len(frame.engines), max(1, (room - kept) // 3)) if room is not None else None
    for_gpus = max(0, room - kept - (for_engines or 0)) if room is not None else None
    table = gpu_section(frame, seen, options, width, "line", for_gpus)
    for_engines = max(0, room - kept - len(table)) if room is not None else None
    return [*table, *notes, *engine_section(frame, width, "line", for_engines)]


def _reserve(frame: Frame, width: int, room: int | None) -> int:
    """Return the lines kept for problems: all of them where they are few, else the first and a count."""
    if not frame.problems or room is None:
        return 0
    needed = len(problem_section(frame, width, None))
    first = len(problem_section(frame, width, None)) if len(ranked(frame)) == 1 else 4
    return min(needed, max(first, 3), max(1, room // 4))


def _missing(frame: Frame) -> list[Line]:
    """Return a line about the half of the node that is not there: GPUs, or engines."""
    if not frame.gpus:
        text = "a GPU driver answered, and it has no GPU" if frame.gpu_source else "no GPU driver answered"
        return [span(f"{text}: what follows rests on the engines' own counters", QUIET)]
    if not frame.engines:
        return [span("no engine was found on these GPUs", QUIET)]
    return []


def summary(history: Sequence[Frame]) -> str:
    """Return one line for the scrollback after the screen is gone; "" where there was no frame."""
    if not history:
        return ""
    first, last = history[0], history[-1]
    simulated = ", simulated" if last.node.simulated else ""
    watched = duration(last.monotonic_ns - first.monotonic_ns)
    parts = [f"gpuidle: {clean(last.node.hostname)}{simulated}, last {watched}"]
    for gpu in last.gpus[:8]:
        busy = figure_percent(gpu.busy, bounds=False)
        idle = figure_percent(headline(gpu)[1], bounds=False)
        parts.append(f"GPU {gpu.index} busy {busy}, compute idle {idle}")
    parts += [f"{clean(engine.engine)} {short_model(engine.model)}" for engine in last.engines[:4]]
    return "; ".join(parts)
