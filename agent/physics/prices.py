"""What a GPU-hour costs, by the names that people give to GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuidle.agent.physics.peaks import find_peaks, instance_ratio, whole_name


def price_of(name: str, memory_total_bytes: int | None, prices: Mapping[str, float]) -> float | None:
    """Return the price of an hour of the device with this name, in the currency of `prices`; None: not told.

    A price may be named as the driver calls the device, as `gpuidle plan --gpu` takes it ("H100 SXM"), or by
    any words of the driver's name ("H100"), the longest such name first; "" is any device. A MIG instance
    costs the part of its GPU that its compute slices are, so that instances never cost more than their GPU.
    """
    device = whole_name(name)
    told = _named(device, memory_total_bytes if device == name else None, prices)
    return None if told is None else told * instance_ratio(name)


def _named(device: str, memory_total_bytes: int | None, prices: Mapping[str, float]) -> float | None:
    if device in prices:
        return prices[device]
    here = find_peaks(device, memory_total_bytes)
    words = _words(device)
    for name in sorted(filter(None, prices), key=lambda name: (-len(_words(name)), name)):
        there = find_peaks(name, None)
        same = here is not None and there is not None and here.name == there.name
        if same or (_words(name) and _words(name) <= words):
            return prices[name]
    return prices.get("")


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia"}
