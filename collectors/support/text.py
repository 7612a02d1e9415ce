"""Words that came from elsewhere, made fit to be kept and shown."""

from __future__ import annotations


def clean(text: str, length: int = 400) -> str:
    """Return the printable characters of `text`, `length` at most.

    Control characters would reach a terminal, and a lone surrogate (JSON can hold one) cannot be encoded.
    """
    return "".join(c for c in text[: 4 * length] if c.isprintable())[:length]
