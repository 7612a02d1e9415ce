"""Numbers as people read them.

An absent number is an em dash. An estimate has a leading "~". Bounds are rounded outwards, so that the
range printed contains the range known; a share that is not quite 0 or 1 is never printed as such.
"""

from __future__ import annotations

import math

from gpuidle.agent.model import Evidence, Figure

DASH = "\N{EM DASH}"
RANGE = "\N{EN DASH}"
GIB = 1 << 30


_ABSURD = 1e9
"""No share is larger: what is, is no number, as NaN and the infinities are none."""


def is_share(ratio: float) -> bool:
    """Return whether a ratio can be printed as a share."""
    return math.isfinite(ratio) and abs(ratio) < _ABSURD


def share(ratio: float | None) -> str:
    """Return a ratio in per cent with one decimal, without the sign."""
    if ratio is None or not is_share(ratio):
        return DASH
    text = f"{100 * ratio:.1f}"
    if ratio > 0 and text == "0.0":
        return "<0.1"
    if ratio < 1 and text == "100.0":
        return ">99.9"
    return "0.0" if text == "-0.0" else text


def percent(ratio: float | None) -> str:
    """Return a ratio as "99.6 %"."""
    text = share(ratio)
    return text if text == DASH else f"{text} %"


def figure(value: Figure | None) -> Figure | None:
    """Return the figure if it says anything: one without evidence or without a number does not."""
    if value is None or value.evidence == "unknown" or not is_share(value.value):
        return None
    return value


def figure_percent(value: Figure | None, *, bounds: bool = True) -> str:
    """Return a figure as "~99.6 % (99.4-99.8)"; the bounds only where they differ as printed."""
    value = figure(value)
    if value is None:
        return DASH
    text = ("~" if value.evidence == "estimated" else "") + percent(value.value)
    return f"{text} {between(value.low, value.high)}".rstrip() if bounds else text


def between(low: float, high: float) -> str:
    """Return "(99.4-99.8)" in per cent, rounded outwards; "" where both are the same as printed."""
    if not (is_share(low) and is_share(high)) or share(low) == share(high):
        return ""
    # A hair inwards first: 0.994 * 1000 is 994.0000000000001.
    outer_low = math.floor(1000 * low + 1e-6) / 10
    outer_high = math.ceil(1000 * high - 1e-6) / 10
    return f"({outer_low:.1f}{RANGE}{outer_high:.1f})"


def about(evidence: Evidence) -> str:
    """Return the mark of an estimate."""
    return "~" if evidence == "estimated" else ""


def count(value: int | None) -> str:
    """Return a whole number as "12,345"."""
    if value is None:
        return DASH
    return f"{value:,}" if abs(value) < 10**9 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """Return a rate per second as "12,345", "12.3" or "<0.1"."""
    if value is None or not math.isfinite(value):
        return DASH
    if abs(value) >= 1e9:
        return f"{value:.3g}"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:.1f}" if value else "0"


def whole(value: float | None) -> str:
    """Return a measured value rounded to a whole number, without a unit."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"


def of(used: str, total: str, unit: str) -> str:
    """Return "412/700 W", "412 W" where the total is not known, or a dash."""
    if used == DASH and total == DASH:
        return DASH
    return f"{used} {unit}" if total == DASH else f"{used}/{total} {unit}"


def gib(value: int | None) -> str:
    """Return bytes in GiB, without the unit."""
    if value is None:
        return DASH
    return f"{value / GIB:,.1f}" if abs(value) < 10**15 else f"{value / GIB:.3g}"


def mhz(value: int | None) -> str:
    """Return Hz in MHz, without the unit."""
    return DASH if value is None else whole(value / 1e6)


def money(value: float | None, currency: str) -> str:
    """Return a price as "3.20 USD/h"."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{value:,.2f}" if abs(value) < 1e9 else f"{value:.3g}"
    return f"{'<0.01' if value > 0 and text == '0.00' else text} {currency}/h"


def duration(ns: int) -> str:
    """Return nanoseconds as "120 ms", "1.0 s", "2 min 31 s" or "3 h 02 min"."""
    seconds = ns / 1e9
    if seconds < 0.9995:
        return f"{ns / 1e6:.0f} ms" if ns >= 500_000 or ns <= 0 else "<1 ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 100:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"


def position(ns: int) -> str:
    """Return nanoseconds as the "1:02:03" or "02:03" of a player."""
    seconds = max(0, ns) // 1_000_000_000
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes:02d}:{seconds % 60:02d}"
