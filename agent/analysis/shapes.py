"""Models of engines as they are served: each read once from its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gpuidle.agent.model import EngineReading, Problem
from gpuidle.agent.physics.served import served_shape
from gpuidle.agent.physics.shapes import ModelShape, UnknownArchitecture

_Key: TypeAlias = "tuple[str, str | None, str | None, str | None]"
"""Key of the model's text, then how it is served: dtype, dtype of the cache, quantisation."""


class Shapes:
    """The shapes, and the Problems of those that cannot be told."""

    def __init__(self) -> None:
        self._known: dict[_Key, ModelShape | Problem] = {}

    def read(self, reading: EngineReading, texts: Mapping[str, str]) -> Problem | None:
        """Read the model's shape as it is served, unless that was done; a Problem where it cannot be told."""
        key, limits = _key(reading), reading.limits
        if key is None:
            return None
        if key not in self._known:
            text = texts.get(key[0])
            if text is None:
                return None
            try:
                self._known[key] = served_shape(
                    json.loads(text),
                    dtype=limits.dtype,
                    kv_dtype=limits.kv_dtype,
                    quantization=limits.quantization,
                )
            except UnknownArchitecture as error:
                self._known[key] = _no_shape(reading, str(error))
            except (ValueError, TypeError, KeyError) as error:
                self._known[key] = _no_shape(reading, f"model configuration of {key[0]}: {error}")
        found = self._known[key]
        return found if isinstance(found, Problem) else None

    def of(self, reading: EngineReading) -> ModelShape | None:
        """Return the shape of the engine's model; None while it is not known."""
        key = _key(reading)
        shape = None if key is None else self._known.get(key)
        return shape if isinstance(shape, ModelShape) else None

    def keep(self, readings: Iterable[EngineReading]) -> None:
        """Let go of the models that none of these engines serves."""
        used = {_key(reading) for reading in readings}
        self._known = {key: shape for key, shape in self._known.items() if key in used}


def _key(reading: EngineReading) -> _Key | None:
    limits = reading.limits
    if reading.model_text is None:
        return None
    return reading.model_text, limits.dtype, limits.kv_dtype, limits.quantization


def _no_shape(reading: EngineReading, message: str) -> Problem:
    return Problem(
        source="physics",
        kind="no_flop_basis",
        message=message,
        remedy="phases and counters are not affected; the FLOP basis needs a model gpuidle knows",
        subject=reading.engine_id,
    )
