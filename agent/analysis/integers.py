"""Splitting integers so that the parts sum exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def split(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` >= 0 in proportion to `weights` >= 0 by largest remainder; the parts sum to `total`.

    All weights 0: everything goes to the last part.
    """
    if total < 0:
        raise ValueError(f"cannot split a negative total: {total}")
    whole = sum(weights)
    if whole <= 0:
        return [0] * (len(weights) - 1) + [total]
    exact = [total * (weight / whole) for weight in weights]
    parts = [int(value) for value in exact]
    left = total - sum(parts)
    # Rounding of huge totals can leave more than one unit a part, or overshoot by one.
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in range(abs(left)):
        parts[order[i % len(order)] if left > 0 else order[-1 - i % len(order)]] += 1 if left > 0 else -1
    return parts


def clip_to(total: int, wanted: Mapping[str, float], rest: str) -> dict[str, int]:
    """Return `wanted` (in order of precedence) as integers that sum to `total`; `rest` takes what is left.

    A term is clipped at 0 and at what is left after the terms before it.
    """
    parts: dict[str, int] = {}
    left = total
    for name, value in wanted.items():
        part = min(left, max(0, round(value)))
        parts[name] = parts.get(name, 0) + part
        left -= part
    parts[rest] = parts.get(rest, 0) + left
    return parts
