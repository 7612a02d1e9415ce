"""The text part of a configuration: a vision-language model wraps a language model, which alone counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from gpuidle.agent.physics.families import FAMILIES, WRAPPERS
from gpuidle.agent.physics.parts import UnknownArchitecture


class TextPart(msgspec.Struct, frozen=True):
    """The text part, the file around it, and where a key stands in both, the text part wins."""

    values: Mapping[str, object]
    outer: Mapping[str, object]

    def get(self, key: str) -> object:
        """Return the key's value in the text part, else in the file around it, else None."""
        value = self.values.get(key)
        return self.outer.get(key) if value is None else value


def text_part(config: Mapping[str, object]) -> TextPart:
    """Return the language model of a configuration. Raises UnknownArchitecture for a wrapper without one."""
    model_type = str(config.get("model_type", ""))
    if model_type in WRAPPERS:
        key, default = WRAPPERS[model_type]
        inner = config.get(key)
        if isinstance(inner, Mapping):
            values = dict(cast("Mapping[str, object]", inner))
            values.setdefault("model_type", default)
            return TextPart(values, config)
        if model_type not in FAMILIES:
            raise UnknownArchitecture(f"{model_type} configuration lacks {key}: FLOP basis absent")
    return TextPart(config, config)


def architecture_of(config: Mapping[str, object]) -> str:
    """Return the name that a message should give: of the class, else of the model type."""
    architectures = config.get("architectures")
    if isinstance(architectures, Sequence) and architectures and not isinstance(architectures, str):
        return str(architectures[0])
    return str(config.get("model_type") or "(unnamed)")


def check_head(config: Mapping[str, object]) -> None:
    """Refuse heads other than a language model's: a classifier has no lm_head."""
    architectures = config.get("architectures")
    if not isinstance(architectures, (list, tuple)) or not architectures:
        return
    head = str(architectures[0])
    if not head.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatModel")):
        raise UnknownArchitecture(f"unknown architecture {head}: FLOP basis absent")
