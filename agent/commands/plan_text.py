"""`gpuidle plan` as text: headline, table, roofline plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuidle.agent.physics.plan import Plan, PlanPoint

_WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def plan_lines(plan: Plan, *, currency: str = "USD") -> list[str]:
    """Return the whole report, line by line."""
    lines = [*_head(plan), ""]
    lines += [_headline(point, plan) for point in plan.points[:1]]
    lines += ["", *_table(plan, currency), "", *_limits(plan), ""]
    lines += roofline_plot(plan)
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    return lines


def _head(plan: Plan) -> list[str]:
    active = ""
    if plan.active_parameters < 0.9 * plan.parameters:
        active = f", {plan.active_parameters / 1e9:.2f} B active"
    lines = [
        (
            f"{plan.model}: {plan.parameters / 1e9:.2f} B parameters{active}, "
            f"{plan.stored_bytes / 1e9:.1f} GB, computes in {plan.compute_dtype}"
        ),
        (
            f"{plan.device}: {plan.flops_per_s / 1e12:,.4g} TFLOP/s dense {plan.compute_dtype}, "
            f"{plan.memory_bytes_per_s / 1e9:,.0f} GB/s, {plan.memory_bytes / 1e9:.0f} GB, "
            f"ridge {plan.ridge:.0f} FLOP/byte ({plan.device_source})"
        ),
    ]
    if plan.gpus > 1:
        p = plan.parallel
        kind = ", experts dealt out" if p.expert else ""
        lines.append(f"{plan.gpus} GPUs: tensor {p.tensor} x pipeline {p.pipeline} x data {p.data}{kind}")
    if plan.cards_needed > 1:
        lines.append(
            f"The weights need {_number(plan.cards_needed)} cards: {plan.stored_bytes / 1e9:.1f} GB, "
            f"and one holds {plan.memory_bytes / 1e9:.0f} GB."
        )
    if plan.weights_held_bytes > plan.memory_bytes:
        lines.append(
            "As planned they do not fit; the figures hold for one card as if they did "
            f"(see --tp {1 << (plan.cards_needed - 1).bit_length()})."
        )
    return lines


def _headline(point: PlanPoint, plan: Plan) -> str:
    each = " per GPU" if plan.gpus > 1 else ""
    return (
        f"batch {point.batch}, context {plan.context_tokens:,}: at most {_short(point.tokens_per_s)} tok/s, "
        f"{_figures(point.flops_per_s / 1e12)} TFLOP/s{each}, {point.used_ratio:.2%} used, "
        f"{point.idle_ratio:.2%} idle; bound by {point.limiter}"
    ).replace("%", " %")


def _table(plan: Plan, currency: str) -> list[str]:
    priced = plan.points[0].cost_per_million_tokens is not None
    head = f"{'batch':>7} {'step ms':>9} {'tok/s':>10} {'TFLOP/s':>9} {'used %':>8} {'idle %':>8}  bound by"
    lines = [head + (f" {currency + ' per M tok':>15}" if priced else "") + "  fits"]
    for point in plan.points:
        cost = ""
        if point.cost_per_million_tokens is not None:
            cost = f" {_figures(point.cost_per_million_tokens):>15}"
        fits = {True: "yes", False: "no", None: "?"}[point.fits]
        lines.append(
            f"{point.batch:>7,} {point.step_s * 1e3:>9.3f} {_short(point.tokens_per_s):>10} "
            f"{_figures(point.flops_per_s / 1e12):>9} {point.used_ratio * 100:>8.2f} "
            f"{point.idle_ratio * 100:>8.2f}  {point.limiter:<8}{cost}  {fits}"
        )
    return lines


def _limits(plan: Plan) -> list[str]:
    at = plan.compute_bound_batch
    turns = "never: each row brings more cache to read than it computes" if at is None else f"batch {at:,}"
    lines = [f"bound by compute from: {turns}"]
    if plan.kv_limited_batch is None:
        lines.append("KV-limited batch: unknown without a context (--context)")
    else:
        lines.append(
            f"KV-limited batch: {plan.kv_limited_batch:,} sequences of {plan.context_tokens:,} tokens "
            f"({plan.kv_bytes_per_token / 1e3:,.1f} kB a token)"
        )
    return lines


def roofline_plot(plan: Plan, *, width: int = 72, height: int = 12) -> list[str]:
    """Return attainable TFLOP/s over intensity, both logarithmic, with a digit a point in its order."""
    points = plan.points[:9]
    x_low, x_high = _decades([plan.ridge, *(p.intensity for p in points)])
    top = plan.flops_per_s
    y_low, y_high = _decades(
        [min(x_low * plan.memory_bytes_per_s, top), top, *(p.flops_per_s for p in points)]
    )
    grid = [[" "] * width for _ in range(height)]

    def column(intensity: float) -> int:
        return round(math.log(intensity / x_low) / math.log(x_high / x_low) * (width - 1))

    def row(rate: float) -> int:
        at = math.log(max(rate, y_low) / y_low) / math.log(y_high / y_low)
        return height - 1 - round(min(at, 1.0) * (height - 1))

    for x in range(width):
        intensity = x_low * (x_high / x_low) ** (x / (width - 1))
        flat = intensity >= plan.ridge
        grid[row(min(intensity * plan.memory_bytes_per_s, top))][x] = "─" if flat else "╱"
    for number, point in enumerate(points, start=1):
        if point.intensity > 0:
            grid[row(point.flops_per_s)][column(point.intensity)] = str(number)
    lines = [f"{_figures(y_high / 1e12):>9} TFLOP/s"]
    lines += [f"{'':>9} │{''.join(cells).rstrip()}" for cells in grid]
    lines.append(f"{_figures(y_low / 1e12):>9} └{'─' * width}")
    left, right = f"{_figures(x_low)} FLOP/byte", _figures(x_high)
    lines.append(f"{'':>11}{left}{right:>{width - len(left)}}")
    named = ", ".join(f"{number} = batch {point.batch}" for number, point in enumerate(points, start=1))
    lines.append(f"{'':>11}{named}")
    return lines


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten around the positive values, at least one decade apart."""
    positive = [value for value in values if value > 0]
    low = 10.0 ** math.floor(math.log10(min(positive)))
    high = 10.0 ** math.ceil(math.log10(max(positive)))
    return low, max(high, low * 10)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else _figures(value)


def _figures(value: float) -> str:
    """Three significant figures, without an exponent."""
    if value <= 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f}" if digits else f"{float(f'{value:.3g}'):,.0f}"


def _number(value: int) -> str:
    return _WORDS[value] if value < len(_WORDS) else str(value)
