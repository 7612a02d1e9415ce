"""Splitting integers so that the parts sum exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def split(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` >= 0 in proportion to `weights` >= 0 by largest remainder; the parts sum to `total`.

    All weights 0: everything goes to the last part.
    """
    if total < 0:
        raise ValueError(f"cannot split a negative total: {total}")
    largest = max(weights)
    if largest <= 0:
        return [0] * (len(weights) - 1) + [total]
    # Integers from here on: in floats a large total would lose or gain units.
    scaled = [int(weight / largest * (1 << 53)) for weight in weights]
    whole = sum(scaled)
    parts = [total * weight // whole for weight in scaled]
    order = sorted(range(len(parts)), key=lambda i: (-(total * scaled[i] % whole), i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts


def clip_to(total: int, wanted: Mapping[str, float], rest: str) -> dict[str, int]:
    """Return `wanted` (in order of precedence) as integers that sum to `total`; `rest` takes what is left.

    A term is clipped at 0 and at what is left after the terms before it.
    """
    parts: dict[str, int] = {}
    left = total
    for name, value in wanted.items():
        part = round(value)
        if part < 0:
            part = 0
        elif part > left:
            part = left
        parts[name] = parts.get(name, 0) + part
        left -= part
    parts[rest] = parts.get(rest, 0) + left
    return parts
