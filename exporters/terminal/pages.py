"""The pages of the screen that are not about one device or engine: head, foot, help, and a bare node."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from gpuidle.agent.model import Frame

from .layout import EMPTY, Line, clean, crop, ends, fit, flow, line_width, span, wrap
from .numbers import DASH, duration, position
from .options import Replay, ScreenOptions
from .palette import CAUSES, MARK, PHASE_LOOKS, QUIET, STRONG, WARNING


def header(frame: Frame, options: ScreenOptions, width: int) -> Line:
    """Return who is watched, when, and whatever makes this other than a live node."""
    marks: list[tuple[int, Line]] = []
    if frame.node.simulated:
        marks.append((10, span(" SIMULATED ", MARK)))
    if options.replay is not None:
        marks.append((8, span(_replay(frame, options.replay), MARK)))
        marks.append((2, span(clean(options.replay.name))))
    if options.frozen:
        marks.append((7, span(" FROZEN ", MARK)))
    left = fit(
        [
            (9, span("gpuidle", STRONG)),
            (1, span(clean(frame.node.gpuidle_version), QUIET)),
            *marks,
            (5, span(crop_host(clean(frame.node.hostname), width), STRONG)),
        ],
        max(18, width - 10),
        " ",
    )
    late = f"late {duration(frame.lateness_ns)}" if frame.lateness_ns >= 1_000_000 else ""
    missed = f"{frame.missed_ticks_total:,} missed" if frame.missed_ticks_total > 0 else ""
    every = f"every {duration(frame.interval_ns)}" if frame.interval_ns > 0 else ""
    right = fit(
        [
            (4, span(missed, WARNING) if missed else EMPTY),
            (3, span(late, WARNING) if late else EMPTY),
            (2, span(every, QUIET) if every else EMPTY),
            (6, span(clock_time(frame.wall_ns, options, with_date=width >= 110))),
        ],
        max(8, width - line_width(left) - 2),
    )
    return ends(left, right, width)


def crop_host(hostname: str, width: int) -> str:
    """Return the host's own name where the whole of it would take more than a third of the line."""
    return hostname if len(hostname) <= width // 3 else hostname.partition(".")[0]


def clock_time(wall_ns: int, options: ScreenOptions, *, with_date: bool) -> str:
    """Return a moment as the watcher's clock shows it; a dash for one that no calendar has."""
    try:
        moment = datetime.fromtimestamp(wall_ns / 1e9, timezone.utc).astimezone(options.timezone)
    except (ValueError, OverflowError, OSError):
        return DASH
    return moment.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S")


def _replay(frame: Frame, replay: Replay) -> str:
    text = " REPLAY"
    if replay.start_ns is not None:
        text += f" {position(frame.monotonic_ns - replay.start_ns)}"
        if replay.end_ns is not None:
            text += f" of {position(replay.end_ns - replay.start_ns)}"
    return text + " "


def footer(options: ScreenOptions, width: int) -> Line:
    """Return the keys."""
    keys: tuple[tuple[str, str], ...]
    if options.view == "problems":
        keys = (("p", "back"), ("j k", "scroll"), ("q", "quit"))
    elif options.view == "help":
        keys = (("?", "back"), ("q", "quit"))
    else:
        keys = (
            ("q", "quit"),
            ("space", "go on" if options.frozen else "freeze"),
            ("p", "problems"),
            ("?", "help"),
        )
    items = [(9 - rank, ((key, STRONG), (f" {word}", QUIET))) for rank, (key, word) in enumerate(keys)]
    return fit(items, width, "   ")


def help_page(options: ScreenOptions, width: int) -> list[Line]:
    """Return what the words and marks on screen mean."""
    lines: list[Line] = []
    paragraphs = (
        ("busy", "share of time with any work on the GPU. It is not load."),
        (
            "compute idle",
            "1 - useful FLOPs over the dense peak (flops), or 1 - active tensor cycles (tensor pipe).",
        ),
        ("ledger", "where each GPU-second went. High idle alone is physics: decode waits for memory."),
        (
            "reclaimable",
            "idle compute that more rows a step could use. This, host gaps and no request are waste.",
        ),
        ("~", "an estimate; (a-b) are its bounds."),
        (DASH, "not known. The problems say why, and what would mend it."),
    )
    for word, meaning in paragraphs:
        for number, text in enumerate(wrap(meaning, max(8, width - 14))):
            lines.append(((f"{word if number == 0 else '':<14}", STRONG), (text, "")))
    lines.append(EMPTY)
    phases: list[Line] = [
        ((look.letter, look.style), (f" {look.label}", "")) for look in PHASE_LOOKS.values()
    ]
    lines += flow(phases, width, label=span("phases", STRONG), indent=14)
    blocks = options.colour and not options.ascii
    causes: list[Line] = [
        (((("■" if look.solid else "░") if blocks else look.letter), look.style), (f" {look.label}", ""))
        for look in CAUSES.values()
    ]
    lines += flow(causes, width, label=span("ledger", STRONG), indent=14)
    lines.append(EMPTY)
    keys: list[Line] = [
        ((key, STRONG), (f" {word}", ""))
        for key, word in (
            ("q", "quit"),
            ("space", "freeze, go on"),
            ("p", "problems in full"),
            ("j k", "scroll them"),
            ("?", "this help"),
        )
    ]
    lines += flow(keys, width, label=span("keys", STRONG), indent=14)
    return [crop(line, width) for line in lines]


def bare_node(frame: Frame, options: ScreenOptions, width: int) -> list[Line]:
    """Return the page of a node on which neither a GPU nor an engine was found."""
    lines: list[Line] = [EMPTY, span("Nothing to measure was found on this node.", STRONG), EMPTY]
    found = "a GPU driver answered, and it has no GPU" if frame.gpu_source else "no GPU driver answered"
    lines += _listed("Looked for", options.looked_for, width)
    lines += _listed("Found", (found, "no engine"), width)
    failed = [run.collector for run in frame.runs if not run.ok]
    if failed:
        lines += _listed("Failed", tuple(clean(name) for name in failed), width)
    lines.append(EMPTY)
    lines += _commands(
        (
            ("gpuidle watch --demo", "shows a simulated node"),
            ("gpuidle watch --engine-url http://HOST:PORT", "names an engine by hand"),
        ),
        width,
    )
    lines.append(EMPTY)
    return [crop(line, width) for line in lines]


def _listed(label: str, items: Sequence[str], width: int) -> list[Line]:
    lines: list[Line] = []
    for item in items:
        for text in wrap(item, max(8, width - 12)):
            lines.append(((f"{'' if lines else label:<12}", QUIET), (text, "")))
    return lines


def _commands(commands: Sequence[tuple[str, str]], width: int) -> list[Line]:
    column = max(len(command) for command, _ in commands) + 2
    lines: list[Line] = []
    for command, meaning in commands:
        if column + len(meaning) <= width:
            lines.append(((f"{command:<{column}}", STRONG), (meaning, "")))
        else:
            lines += [((command, STRONG),), (("  " + meaning, ""),)]
    return lines
