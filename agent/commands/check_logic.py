"""What `gpuidle check` judges: waste between two readings of the counters, and the words for it. Pure.

The states and the line of output follow the guidelines for monitoring plug-ins: OK 0, WARNING 1, CRITICAL 2,
UNKNOWN 3, then performance data as `'label'=value[unit];warning;critical;minimum;maximum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from gpuidle.agent.model import Frame

UNUSED = ("no_request", "unallocated")
BLIND = ("unattributed", "unobserved")
BLIND_LIMIT = 0.5
"""Of the time of all GPUs: beyond it nothing that was seen says that all is well."""


class State(IntEnum):
    """Exit code of the plug-in."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


class CheckError(Exception):
    """There is nothing to judge; the message says why."""


class GpuTotals(NamedTuple):
    """Counters of one GPU, in seconds since the agent started, and its price."""

    causes_s: Mapping[str, float]
    reclaimable_s: float | None
    price_per_hour: float | None
    currency: str


Totals = Mapping[str, GpuTotals]
"""By `hw_id`."""


Sample = tuple[str, Mapping[str, str], float]
"""Name, labels and value of one line of a page."""


@dataclass(frozen=True)
class Waste:
    """What was wasted in one window; None is not known."""

    window_s: float
    """The time that the ledger covers, of the average GPU."""
    gpus: int
    unused_gpus: float
    """GPUs without a request, or without a process: 1.5 is one, and another one for half of the time."""
    host_gap: float
    """Share of the time of all GPUs."""
    blind: float
    """Share of the time of all GPUs."""
    reclaimable: float | None
    """Share of the time of the GPUs of which it is known."""
    cost_per_hour: float | None
    """Of unused GPUs, host gaps and what is reclaimable, on the GPUs that have a price."""
    currency: str


@dataclass(frozen=True)
class Limit:
    """From where on a value is a warning, and critical; None never is."""

    warning: float | None
    critical: float | None

    def state(self, value: float) -> State:
        """Judge a value."""
        if self.critical is not None and value >= self.critical:
            return State.CRITICAL
        return State.WARNING if self.warning is not None and value >= self.warning else State.OK


@dataclass(frozen=True)
class Limits:
    """What was asked for; None is not judged."""

    unused: Limit | None = None
    host_gap: Limit | None = None
    reclaimable: Limit | None = None
    cost: Limit | None = None


def totals_of_frame(frame: Frame) -> Totals:
    """Return the counters of a Frame; a GPU that is split is counted by its instances."""
    parents = {gpu.parent_hw_id for gpu in frame.gpus}
    return {
        gpu.hw_id: GpuTotals(
            {cause: ns / 1e9 for cause, ns in gpu.causes_total_ns.items()},
            None if gpu.reclaimable_total_ns is None else gpu.reclaimable_total_ns / 1e9,
            gpu.price_per_hour,
            gpu.currency,
        )
        for gpu in frame.gpus
        if gpu.hw_id not in parents
    }


def totals_of_page(samples: Iterable[Sample]) -> Totals:
    """Return the counters of an agent's page."""
    causes: dict[str, dict[str, float]] = {}
    reclaimable: dict[str, float] = {}
    prices: dict[str, tuple[float, str]] = {}
    for name, labels, value in samples:
        hw_id = labels.get("hw_id", "")
        if name == "gpuidle_compute_time_seconds_total":
            causes.setdefault(hw_id, {})[labels.get("gpuidle_cause", "")] = value
        elif name == "gpuidle_compute_reclaimable_time_seconds_total":
            reclaimable[hw_id] = value
        elif name == "gpuidle_gpu_price_per_hour":
            prices[hw_id] = (value, labels.get("gpuidle_currency", ""))
    unpriced: tuple[None, str] = (None, "")
    return {
        hw_id: GpuTotals(found, reclaimable.get(hw_id), *prices.get(hw_id, unpriced))
        for hw_id, found in causes.items()
    }


def waste(before: Totals, after: Totals) -> Waste:
    """Return what was wasted between two readings.

    Raises:
        CheckError: there is no GPU, the agent started anew in between, or nothing was measured.
    """
    if not after:
        raise CheckError("the agent knows no GPU")
    both = [(before[hw_id], now) for hw_id, now in after.items() if hw_id in before]
    grown = [_grown(then, now) for then, now in both]
    if any(seconds < 0 for gpu in grown for seconds in gpu.causes_s.values()):
        raise CheckError("the counters went back: the agent started anew in the window")
    total_s = sum(sum(gpu.causes_s.values()) for gpu in grown)
    if not total_s > 0:
        raise CheckError("nothing was measured in the window: the agent stalls, or the window is too short")
    known = [gpu for gpu in grown if gpu.reclaimable_s is not None]
    known_s = sum(sum(gpu.causes_s.values()) for gpu in known)
    costs = [cost for gpu in grown if (cost := _cost_per_hour(gpu)) is not None]
    currencies = {gpu.currency for gpu in grown if gpu.price_per_hour is not None}
    return Waste(
        window_s=total_s / len(grown),
        gpus=len(grown),
        unused_gpus=sum(_share(gpu, UNUSED) for gpu in grown),
        host_gap=_sum(grown, ("host_gap",)) / total_s,
        blind=_sum(grown, BLIND) / total_s,
        reclaimable=sum(gpu.reclaimable_s or 0.0 for gpu in known) / known_s if known_s else None,
        cost_per_hour=sum(costs) if costs and len(currencies) == 1 else None,
        currency=currencies.pop() if len(currencies) == 1 else "",
    )


def _grown(then: GpuTotals, now: GpuTotals) -> GpuTotals:
    reclaimable = None
    if then.reclaimable_s is not None and now.reclaimable_s is not None:
        reclaimable = now.reclaimable_s - then.reclaimable_s
    causes = {cause: seconds - then.causes_s.get(cause, 0.0) for cause, seconds in now.causes_s.items()}
    return GpuTotals(causes, reclaimable, now.price_per_hour, now.currency)


def _sum(gpus: Iterable[GpuTotals], causes: Iterable[str]) -> float:
    wanted = tuple(causes)
    return sum(gpu.causes_s.get(cause, 0.0) for gpu in gpus for cause in wanted)


def _share(gpu: GpuTotals, causes: Iterable[str]) -> float:
    total_s = sum(gpu.causes_s.values())
    return _sum((gpu,), causes) / total_s if total_s > 0 else 0.0


def _cost_per_hour(gpu: GpuTotals) -> float | None:
    total_s = sum(gpu.causes_s.values())
    if gpu.price_per_hour is None or not total_s > 0:
        return None
    lost_s = _sum((gpu,), (*UNUSED, "host_gap")) + (gpu.reclaimable_s or 0.0)
    return gpu.price_per_hour * lost_s / total_s


def verdict(found: Waste, limits: Limits) -> tuple[State, str]:
    """Return the state and the plug-in's line.

    What was asked for and is not known makes it UNKNOWN, as does a node that is mostly blind, unless
    something else is worse already.
    """
    known: list[State] = []
    words: list[str] = []
    performance: list[str] = []
    missing: list[str] = []

    def judge(name: str, value: float | None, limit: Limit | None, say: _Words) -> None:
        if value is None:
            missing.extend([name] if limit is not None else [])
            return
        performance.append(say.performance(name, value, limit))
        if limit is not None:
            known.append(limit.state(value))
            words.append(say.text(value) + ("" if known[-1] is State.OK else f" ({known[-1].name})"))

    judge("unused", found.unused_gpus, limits.unused, _Words(_unused_text(found.gpus), "", 1, found.gpus))
    judge("host_gap", found.host_gap, limits.host_gap, _percent("host gaps"))
    judge("reclaimable", found.reclaimable, limits.reclaimable, _percent("reclaimable"))
    cost = _Words(lambda value: f"{value:.2f} {found.currency}/h wasted", "", 1, None)
    judge("cost", found.cost_per_hour, limits.cost, cost)
    judge("blind", found.blind, None, _percent("blind"))
    worst = max(known, default=State.OK)
    if found.blind > BLIND_LIMIT:
        words.append(f"blind for {found.blind:.0%} of the time: run gpuidle doctor")
    words += [f"{name} is not known" for name in missing]
    if worst is State.OK and (missing or found.blind > BLIND_LIMIT):
        worst = State.UNKNOWN
    window = f"{found.gpus} GPUs over {found.window_s:.0f} s"
    return worst, f"GPUIDLE {worst.name} - {', '.join([*words, window])} | {' '.join(performance)}"


@dataclass(frozen=True)
class _Words:
    """How one value is said."""

    text: Callable[[float], str]
    unit: str
    scale: float
    maximum: float | None

    def performance(self, name: str, value: float, limit: Limit | None) -> str:
        ends = (None, None) if limit is None else (limit.warning, limit.critical)
        numbers = [*(None if end is None else end * self.scale for end in ends), 0.0, self.maximum]
        shown = ";".join("" if number is None else f"{number:g}" for number in numbers)
        return f"{name}={value * self.scale:.6g}{self.unit};{shown}"


def _percent(name: str) -> _Words:
    return _Words(lambda value: f"{name} {value:.1%}", "%", 100, 100)


def _unused_text(gpus: int) -> Callable[[float], str]:
    return lambda value: f"{value:.1f} of {gpus} GPUs unused"
