"""The part of the screen about engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpuidle.agent.model import PHASES, EngineFrame, Frame

from .layout import EMPTY, Line, clean, crop, crop_text, fit, flow, join, line_width, rule, span
from .numbers import DASH, about, between, count, percent, rate
from .palette import PHASE_LOOKS, QUIET, STRONG, WARNING

Detail = Literal["full", "line"]

_LABEL = 11


def engine_section(frame: Frame, width: int, detail: Detail, room: int | None = None) -> list[Line]:
    """Return all engines of a frame.

    `room` bounds the lines of detail "line" alone: what is left out is counted.
    """
    if detail == "full":
        return [line for engine in frame.engines for line in _block(frame, engine, width)]
    lines = [_row(engine, width) for engine in frame.engines]
    if room is None or len(lines) <= room:
        return lines
    left_out = len(lines) - max(0, room - 1)
    return [*lines[: max(0, room - 1)], span(f"+{left_out} more of {len(lines)} engines", QUIET)][
        : max(0, room)
    ]


def short_model(model: str | None) -> str:
    """Return the last part of a model's name or path."""
    if not model:
        return DASH
    return clean(model).rstrip("/").rpartition("/")[2] or clean(model)


def _state(engine: EngineFrame) -> Line:
    return span(engine.state, "" if engine.state == "serving" else WARNING)


def _block(frame: Frame, engine: EngineFrame, width: int) -> list[Line]:
    model = clean(engine.model) if engine.model else DASH
    if width < 100:
        model = short_model(engine.model)
    parallel = engine.parallelism
    groups = [
        text
        for text, size in (("TP", parallel.tensor), ("PP", parallel.pipeline), ("DP", parallel.data))
        if size > 1
        for text in (f"{text} {size}",)
    ]
    where = _devices(frame, engine)
    title = fit(
        [
            (9, span(clean(engine.engine), STRONG)),
            (8, span(crop_text(model, max(12, width // 2)), STRONG)),
            (7, _state(engine)),
            (6, span(engine.role) if engine.role != "unified" or width >= 100 else EMPTY),
            (5, span(" ".join([*groups, *(["EP"] if parallel.expert else [])]))),
            (4, span(where)),
        ],
        max(8, width - 6),
    )
    right = span(clean(engine.version)) if engine.version else EMPTY
    lines = [rule(title, right, width)]
    if engine.state == "unobserved":
        lines.append(_labelled("tokens", span(f"{DASH}  not observed: see problems", QUIET)))
        return [crop(line, width) for line in lines]
    lines += flow(_rates(engine), width, label=span("tokens/s", QUIET), indent=_LABEL)
    lines += flow(_shares(engine), width, label=span("phases", QUIET), indent=_LABEL)
    return lines


def _labelled(label: str, body: Line) -> Line:
    return ((f"{label:<{_LABEL}}", QUIET), *body)


def _pair(label: str, value: str) -> Line:
    return join([span(label, QUIET), span(value)], " ")


def _rates(engine: EngineFrame) -> list[Line]:
    return [
        join([span("prefill", QUIET), span(rate(engine.prefill_tokens_per_s), STRONG)], " "),
        join([span("decode", QUIET), span(rate(engine.decode_tokens_per_s), STRONG)], " "),
        _pair("running", count(engine.requests_running)),
        _pair("waiting", count(engine.requests_waiting)),
        _pair("KV", percent(engine.kv_usage_ratio)),
        _pair("prefix hits", percent(engine.prefix_hit_ratio)),
    ]


def _shares(engine: EngineFrame) -> list[Line]:
    """Return the shares of the last settled window, and the bounds of what contains prefill."""
    shares = engine.phases
    if shares.window_ns <= 0:
        return [span(DASH)]
    sign = about(shares.evidence)
    items: list[Line] = []
    for phase in PHASES:
        if shares.of(phase) > 0:
            look = PHASE_LOOKS[phase]
            value = percent(shares.of(phase) / shares.window_ns)
            items.append(((look.letter, look.style), (f" {look.label} {sign}{value}", "")))
    bounds = between(shares.prefill_low_ns / shares.window_ns, shares.prefill_high_ns / shares.window_ns)
    if bounds:
        items.append(span(f"with prefill {bounds[1:-1]} %", QUIET))
    return items or [span(DASH)]


def _devices(frame: Frame, engine: EngineFrame) -> str:
    # Instances of one GPU share its number.
    indices = sorted({gpu.index for gpu in frame.gpus if gpu.hw_id in engine.hw_ids})
    if not indices:
        return ""
    return f"on GPU {numbers_together(indices)}"


def numbers_together(numbers: Sequence[int]) -> str:
    """Return sorted numbers as "0-3,6"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def _row(engine: EngineFrame, width: int) -> Line:
    name = join([span(clean(engine.engine), STRONG), span(short_model(engine.model), STRONG)], " ")
    figures = fit(
        [
            (9, span(f"prefill {rate(engine.prefill_tokens_per_s)}")),
            (9, span(f"decode {rate(engine.decode_tokens_per_s)} tok/s")),
            (7, span(f"run {count(engine.requests_running)}")),
            (7, span(f"wait {count(engine.requests_waiting)}")),
            (6, span(f"KV {percent(engine.kv_usage_ratio)}")),
        ],
        max(20, width - 24),
    )
    if engine.state != "serving":
        figures = _state(engine)
    room = width - line_width(figures) - 2
    if room < 8:  # half a number is worse than none
        return crop(name, width)
    return join([crop(name, room), figures])
