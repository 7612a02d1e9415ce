"""The part of the screen about devices: cards of three sizes, and a table for many GPUs in little room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from gpuidle.agent.model import Figure, Frame, GpuFrame

from .bars import (
    gauge,
    labelled,
    ledger_bar,
    legend,
    mark,
    phase_legend,
    phase_strip,
    used_gauge,
    used_sparks,
)
from .history import Ledger, Track
from .layout import (
    EMPTY,
    Line,
    beside,
    clean,
    crop,
    fit,
    flow,
    join,
    line_width,
    pad,
    plain,
    rule,
    span,
    text_width,
)
from .numbers import (
    DASH,
    about,
    count,
    duration,
    figure,
    figure_percent,
    gib,
    mhz,
    money,
    of,
    percent,
    share,
    whole,
)
from .options import ScreenOptions
from .palette import CAUSES, GREY, QUIET, STRONG, ordered

Detail = Literal["tall", "full", "short", "line"]

_GAP = 2
_PERCENT = len("~100.0 %")
_BOUNDED = len("~99.6 % (99.4-99.8)")
_SHORTEST_BAR = 4
_NARROWEST: dict[Detail, int] = {"tall": 78, "full": 78, "short": 58, "line": 20}
"""Cards stand side by side only where each has this many cells."""
_PHASES_IN_TABLE = 12


def gpu_section(
    frame: Frame,
    seen: Mapping[str, Track],
    options: ScreenOptions,
    width: int,
    detail: Detail,
    room: int | None = None,
) -> list[Line]:
    """Return all devices of the newest frame at one level of detail.

    `seen` has the track of each. `room` bounds the lines of the table (detail "line") alone: what is left
    out is counted.
    """
    gpus = frame.gpus
    if not gpus:
        return []
    if detail == "line":
        return _table(gpus, seen, options, width, room)
    columns = _side_by_side(len(gpus), width, detail)
    each = (width - _GAP * (columns - 1)) // columns
    lines: list[Line] = []
    for start in range(0, len(gpus), columns):
        cards = [_card(gpu, seen[gpu.hw_id], options, each, detail) for gpu in gpus[start : start + columns]]
        lines += beside(cards, each, _GAP)
    return lines


def _label(width: int) -> int:
    """Return the cells of the labels at the left of a card."""
    return 11 if width >= 70 else 8


def least_lines(gpus: int, width: int, detail: Detail) -> int:
    """Return the lines that `gpus` devices take at least: what is too high is refused without a layout."""
    if detail == "line":
        return 0
    least = {"tall": 6, "full": 5, "short": 3}[detail]  # before the first settled window
    return -(-gpus // _side_by_side(gpus, width, detail)) * least


def _side_by_side(gpus: int, width: int, detail: Detail) -> int:
    return max(1, min(gpus, (width + _GAP) // (_NARROWEST[detail] + _GAP)))


def short_id(hw_id: str) -> str:
    """Return as much of a UUID as tells devices of one node apart: "GPU-4f2a91c0"."""
    return clean(hw_id)[:12]


def headline(gpu: GpuFrame) -> tuple[str, Figure | None]:
    """Return the idle-compute ratio that is told first, and its basis: FLOPs before the tensor pipe."""
    for basis in ("flops", "tensor_pipe"):
        known = figure(gpu.idle.get(basis))
        if known is not None:
            return basis, known
    return "", None


def _card(gpu: GpuFrame, track: Track, options: ScreenOptions, width: int, detail: Detail) -> list[Line]:
    lines = [_title(gpu, width, detail), _message(gpu, width)]
    if detail != "short":
        lines += _ratios(gpu, width, detail)
        lines += flow(_vitals(gpu, detail), width, label=span("device", QUIET), indent=_label(width))
    summed = track.ledger
    if summed is None:
        why = "split into instances: theirs" if track.split else "no settled window yet"
        return [*lines, labelled("ledger", span(why, QUIET), _label(width))]
    bar_width = width - _label(width)
    steps = track.steps
    over = _over(summed, width)
    items = legend(summed, options)
    reclaimable = _reclaimable(gpu, summed.reclaimable_ns, summed.window_ns)
    lines.append(labelled("ledger", ledger_bar(summed, bar_width, options), _label(width)))
    lines += flow([*items, *reclaimable], width, label=over, indent=_label(width))
    lines.append(labelled("phases", phase_strip(steps, bar_width), _label(width)))
    if detail == "tall":
        lines += flow(
            phase_legend(summed),
            width,
            label=_over(summed, width),
            indent=_label(width),
        )
        sparks = used_sparks(steps, bar_width)
        lines += [labelled("useful", sparks, _label(width))] if plain(sparks).strip() else []
        lines.append(EMPTY)
    return [crop(line, width) for line in lines]


def _over(summed: Ledger, width: int) -> Line:
    """Return what the shares of a legend are shares of."""
    return span(f"{'% of' if width >= 70 else '%'} {duration(summed.window_ns)}", QUIET)


def _title(gpu: GpuFrame, width: int, detail: Detail) -> Line:
    price = span(money(gpu.price_per_hour, clean(gpu.currency))) if gpu.price_per_hour is not None else EMPTY
    if detail == "short":
        facts = [(7, span(f"{_memory(gpu)}  {_power(gpu)}")), (6, price)]
    else:
        facts = [(6, price), (7, span(f"counters {gpu.rung}"))]
    index = span(f"GPU {gpu.index}", STRONG)
    name = clean(gpu.name) if width >= 100 else clean(gpu.name).removeprefix("NVIDIA ")
    name_width = text_width(name)
    right = fit(facts, max(width // 3, width - line_width(index) - name_width - 12))
    left = fit(
        [
            (9, index),
            (8, span(name, STRONG)),
            (5, span(short_id(gpu.hw_id))),
            (6, span(f"part of {short_id(gpu.parent_hw_id)}") if gpu.parent_hw_id else EMPTY),
        ],
        max(8, width - line_width(right) - 10),
    )
    return rule(left, right, width)


def _message(gpu: GpuFrame, width: int) -> Line:
    """Return what the product is about: how busy the GPU looks, against how much of it stands idle.

    The two bars are of one length, so that they are compared by eye.
    """
    busy, (_, idle) = figure(gpu.busy), headline(gpu)
    left = join(
        [span(f"{'busy':<{_label(width)}}", QUIET), span(figure_percent(gpu.busy, bounds=False), STRONG)], ""
    )
    left = pad(left, max(_label(width) + _PERCENT + 1, line_width(left)))
    for bounds in (True, False):
        text = f"{figure_percent(idle, bounds=bounds):<{_BOUNDED if bounds else _PERCENT}} "
        right = join([span("compute idle ", QUIET), span(text, STRONG)], "")
        bar = (width - line_width(left) - line_width(right) - _GAP) // 2
        if bar >= _SHORTEST_BAR:
            busy_bar = gauge(busy.low, busy.high, bar, GREY) if busy else EMPTY
            return join([left, pad(busy_bar, bar + _GAP), right, used_gauge(idle, bar)], "")
    return join([left, right], "")


def _ratios(gpu: GpuFrame, width: int, detail: Detail) -> list[Line]:
    """Return both bases of the idle ratio, and what is used; the two must not be read as one."""
    idle = [
        _pair("flops", figure_percent(gpu.idle.get("flops"))),
        _pair("tensor pipe", figure_percent(gpu.idle.get("tensor_pipe"))),
    ]
    dram = figure_percent(gpu.dram_bandwidth)
    if detail != "tall":
        idle.append(_pair("DRAM used", dram))
        return flow(idle, width, label=span("idle by", QUIET), indent=_label(width))
    used = [
        _pair("DRAM bandwidth", dram),
        _pair("tensor pipe", figure_percent(gpu.tensor_active)),
        _pair("SM", figure_percent(gpu.sm_active)),
        _pair("of the roofline", figure_percent(gpu.roofline_attained)),
    ]
    return [
        *flow(idle, width, label=span("idle by", QUIET), indent=_label(width)),
        *flow(used, width, label=span("used", QUIET), indent=_label(width)),
    ]


def _pair(label: str, value: str) -> Line:
    return join([span(label, QUIET), span(value)], " ")


def _memory(gpu: GpuFrame) -> str:
    return of(gib(gpu.memory_used_bytes), gib(gpu.memory_total_bytes), "GiB")


def _power(gpu: GpuFrame) -> str:
    return of(whole(gpu.power_watts), whole(gpu.power_limit_watts), "W")


def _vitals(gpu: GpuFrame, detail: Detail) -> list[Line]:
    celsius = whole(gpu.temperature_celsius)
    items = [
        _pair("memory", _memory(gpu)),
        _pair("power", _power(gpu)),
        _pair("temp", DASH) if celsius == DASH else span(f"{celsius}°C"),
        _pair("SM", of(mhz(gpu.sm_clock_hz), mhz(gpu.sm_clock_max_hz), "MHz")),
    ]
    if gpu.clock_events:
        items.append(span(clean(", ".join(gpu.clock_events)).replace("_", " ")))
    if gpu.process_count is not None and (detail == "tall" or gpu.foreign_process_count):
        foreign = f" ({count(gpu.foreign_process_count)} foreign)" if gpu.foreign_process_count else ""
        items.append(_pair("processes", count(gpu.process_count) + foreign))
    return items


def _reclaimable(gpu: GpuFrame, reclaimable_ns: int | None, window_ns: int) -> list[Line]:
    """Return what of the idle compute could be had back; nothing is said where it is not known."""
    if reclaimable_ns is None or reclaimable_ns < 0:
        return []
    ratio = reclaimable_ns / window_ns
    text = f"reclaimable {percent(ratio)}"
    if gpu.price_per_hour is not None:
        text += f" = {money(ratio * gpu.price_per_hour, clean(gpu.currency))}"
    return [span(text, STRONG)]


def _table(
    gpus: Sequence[GpuFrame],
    seen: Mapping[str, Track],
    options: ScreenOptions,
    width: int,
    room: int | None,
) -> list[Line]:
    """Return one line a GPU under a heading, and the marks of the bars at the end."""
    ledgers = [seen[gpu.hw_id].ledger for gpu in gpus]
    causes = {cause for summed in ledgers if summed for cause in ordered(summed.causes_ns)}
    marks = [mark(cause, options) for cause in [*CAUSES, *sorted(causes - set(CAUSES))] if cause in causes]
    key = flow(marks, width)
    rows = [_row(gpu, seen[gpu.hw_id], options, width) for gpu in gpus]
    lines = [_heading(width), *rows, *key]
    if room is None or len(lines) <= room:
        return lines
    if len(rows) + 1 <= room:
        return lines[: len(rows) + 1]
    fitting = max(0, room - 2)
    left_out = len(rows) - fitting
    return [*lines[: fitting + 1], span(f"+{left_out} more of {len(rows)} GPUs", QUIET)][: max(0, room)]


class _Columns(NamedTuple):
    """Cells of the table's columns that depend on the width; 0 is a column left out."""

    idle: int
    vitals: bool
    bar: int
    phases: int


def _columns(width: int) -> _Columns:
    idle = 15 if width >= 44 else 7
    vitals = width >= 64
    left = max(0, width - 13 - idle - (17 if vitals else 0))
    phases = max(_PHASES_IN_TABLE, left // 3) if left >= 18 else 0
    return _Columns(idle, vitals, left - phases - 1 if phases else left, phases)


def _heading(width: int) -> Line:
    columns = _columns(width)
    text = f"{'GPU':<4}{'busy %':>7}{'compute idle %' if columns.idle == 15 else 'idle %':>{columns.idle}}  "
    if columns.vitals:
        text += f"{'mem GiB':>9}{'W':>6}  "
    if columns.bar >= 6:
        text += f"{'ledger':<{columns.bar}}"
    if columns.phases:
        text += " phases"
    return crop(span(text, QUIET), width)


def _row(gpu: GpuFrame, track: Track, options: ScreenOptions, width: int) -> Line:
    columns = _columns(width)
    busy = figure(gpu.busy)
    _, idle = headline(gpu)
    busy_text, idle_text = _bare_share(busy), _bare_share(idle)
    line: Line = (
        (f"{gpu.index:<4}", STRONG),
        (f"{busy_text:>7}", ""),
        (f"{idle_text:>{columns.idle}}", STRONG),
        ("  ", ""),
    )
    if columns.vitals:
        line = (*line, (f"{gib(gpu.memory_used_bytes):>9}{whole(gpu.power_watts):>6}  ", ""))
    summed = track.ledger
    if summed is None:
        return crop((*line, (DASH, QUIET)), width)
    line = (*line, *pad(ledger_bar(summed, columns.bar, options), columns.bar))
    if columns.phases:
        line = (*line, (" ", ""), *phase_strip(track.steps, columns.phases))
    return crop(line, width)


def _bare_share(value: Figure | None) -> str:
    """Return a figure in per cent without its sign, for a column that names the unit."""
    return DASH if value is None else about(value.evidence) + share(value.value)
