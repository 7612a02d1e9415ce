"""One name on both paths: OpenTelemetry names as the OTLP-to-Prometheus translation writes them.

The rules are those of "OTLP metric points to Prometheus" in the OpenTelemetry specification as Prometheus
applies them with suffixes on (its default): a backend that receives OTLP and one that scrapes our own
endpoint then hold the same series.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["counter", "updowncounter", "gauge", "histogram"]

_UNIT_WORDS = {
    "d": "days",
    "h": "hours",
    "min": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
    "By": "bytes",
    "J": "joules",
    "W": "watts",
    "V": "volts",
    "A": "amperes",
    "Cel": "celsius",
    "Hz": "hertz",
    "%": "percent",
    "1": "",
}
_PER_WORDS = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year"}
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9:]+")
_NOT_IN_A_LABEL = re.compile(r"[^a-zA-Z0-9_]")


def prometheus_name(name: str, unit: str, kind: Kind) -> str:
    """Return the Prometheus name of an OpenTelemetry metric.

    `unit` is UCUM; an annotation in braces adds nothing to the name. Counters end in `_total`, gauges of
    unit "1" in `_ratio`; a word that the name already holds is not said twice.
    """
    words = [word for word in _NOT_IN_A_NAME.split(name) if word]
    for suffix in _unit_suffixes(unit):
        if suffix not in words:
            words.append(suffix)
    ending = {"counter": "total", "gauge": "ratio" if unit == "1" else ""}.get(kind, "")
    if ending:
        words = [word for word in words if word != ending] + [ending]
    joined = "_".join(words)
    return f"_{joined}" if joined[:1].isdigit() else joined


def label_name(attribute: str) -> str:
    """Return the Prometheus label of an OpenTelemetry attribute: what is no letter or digit becomes `_`."""
    return _NOT_IN_A_LABEL.sub("_", attribute)


def _unit_suffixes(unit: str) -> list[str]:
    main, _, per = (part.strip() for part in unit.partition("/"))
    suffixes = []
    if main and "{" not in main:
        suffixes.append(_UNIT_WORDS.get(main, main))
    if per and "{" not in per:
        suffixes.append(f"per_{_PER_WORDS.get(per, per)}")
    return [_NOT_IN_A_NAME.sub("_", suffix).strip("_") for suffix in suffixes if suffix]
