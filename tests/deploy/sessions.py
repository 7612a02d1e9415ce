"""Simulated nodes, what an hour of scraping them gives, and the same as input of promtool's tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuidle.agent.analysis.analyzer import Analyzer, Settings
from gpuidle.agent.model import Frame, Snapshot
from gpuidle.collectors.simulator.node import Visible, simulate
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    SECOND_NS,
    ClosedLoop,
    EngineSpec,
    GpuSpec,
    Scenario,
    Sizes,
)
from gpuidle.exporters.catalogue import points
from gpuidle.exporters.naming import label_name
from gpuidle.exporters.recording.writer import SessionWriter

SCRAPE_S = 60
WARM_UP_S = 240
"""Left out of what is continued: engines fill their batches."""

PRICES = {"": 2.5}
ALL = Visible()
CHATS = (Sizes(prompt=(200, 600), output=(200, 400)),)
LONG_PROMPTS = (Sizes(prompt=(2000, 3000), output=(1, 1)),)

UNUSED = EngineSpec(name="unused", config=LLAMA_3_8B, gpus=(0,))
GAPS = EngineSpec(
    name="gaps",
    config=LLAMA_3_8B,
    gpus=(1,),
    host_gap_ns=150_000_000,
    max_sequences=8,
    kv_blocks=8192,
    arrivals=(ClosedLoop(users=16, mix=CHATS),),
)
FEW_ROWS = EngineSpec(
    name="few-rows",
    config=LLAMA_3_8B,
    gpus=(2,),
    max_sequences=4,
    kv_blocks=20_000,
    launch_ns=0,
    arrivals=(ClosedLoop(users=10, mix=CHATS),),
)
HALF_EMPTY = replace(
    FEW_ROWS, name="half-empty", max_sequences=256, arrivals=(ClosedLoop(users=4, mix=CHATS),)
)
"""The same rows a step, because no more are asked for."""
WASTED = Scenario(seed=1, gpus=(GpuSpec(),) * 4, engines=(UNUSED, GAPS, FEW_ROWS), hostname="wasted")
"""GPU 0 is loaded and unused, GPU 1 waits for its host, GPU 2 runs four rows a step, GPU 3 is nobody's."""

HIDDEN = EngineSpec(name="hidden", config=LLAMA_3_8B, gpus=(4,))
WASTED_AND_BLIND = replace(WASTED, gpus=(GpuSpec(),) * 5, engines=(*WASTED.engines, HIDDEN))
"""The same, and GPU 4 whose engine cannot be asked (see `with_one_hidden`)."""

FULL = EngineSpec(
    name="llama-3-70b",
    config=LLAMA_3_70B,
    gpus=(0, 1),
    kv_blocks=2112,
    arrivals=(ClosedLoop(users=80, mix=CHATS),),
)
SATURATED = Scenario(seed=1, gpus=(GpuSpec(),) * 2, engines=(FULL,), hostname="saturated")
"""A decode whose KV cache is full, with requests waiting: as good as this hardware gets."""

PROMPTS = replace(FULL, name="prompts", arrivals=(ClosedLoop(users=8, mix=LONG_PROMPTS),))

Change = Callable[[Snapshot, float], Snapshot]
"""What becomes of a Snapshot, so many seconds after the start, before anything looks at it."""


def untouched(snapshot: Snapshot, _seconds: float) -> Snapshot:
    """Leave it."""
    return snapshot


def in_pods(snapshot: Snapshot, _seconds: float) -> Snapshot:
    """Put each engine into a pod of its own, in the namespace "chat"."""
    return msgspec.structs.replace(
        snapshot,
        engines=tuple(
            msgspec.structs.replace(each, namespace="chat", pod=f"{each.model}-0")
            for each in snapshot.engines
        ),
    )


def with_one_hidden(snapshot: Snapshot, seconds: float) -> Snapshot:
    """Take everything away that an engine and its GPU tell; the others are in pods."""
    pods = in_pods(snapshot, seconds)
    engines = tuple(
        msgspec.structs.replace(each, state="unobserved", counters=None) if each.model == "hidden" else each
        for each in pods.engines
    )
    [hidden] = [each.engine_id for each in engines if each.model == "hidden"]
    cards = pods.gpus or ()
    return msgspec.structs.replace(
        pods,
        engines=engines,
        steps=tuple(each for each in pods.steps if each.engine_id != hidden),
        counters=tuple(each for each in pods.counters if each.hw_id != cards[4].hw_id),
        gpus=(*cards[:4], msgspec.structs.replace(cards[4], busy_ratio=None)),
    )


def record(path: Path, scenario: Scenario, seconds: int, change: Change = untouched) -> None:
    """Write a session with a Snapshot a second, as `gpuidle record` would have on that node."""
    writer = SessionWriter(path)
    spec = replace(scenario, duration_ns=seconds * SECOND_NS)
    for number, (snapshot, _) in enumerate(simulate(spec, tick_ns=SECOND_NS)):
        writer.write(change(snapshot, number))
    writer.close()


def frames(
    scenario: Scenario, seconds: int, change: Change = untouched, visible: Visible = ALL
) -> Iterator[Frame]:
    """Yield the Frame of each scrape."""
    analyzer = Analyzer(Settings(price_per_hour=PRICES, currency="USD"))
    spec = replace(scenario, duration_ns=seconds * SECOND_NS)
    for number, (snapshot, _) in enumerate(simulate(spec, tick_ns=SCRAPE_S * SECOND_NS, visible=visible)):
        yield analyzer.feed(change(snapshot, number * SCRAPE_S))


Samples = dict[str, list[float | None]]
"""By series, in PromQL's notation: one value a scrape, None where the page had none."""


def scraped(run: Iterator[Frame], instance: str) -> tuple[Samples, set[str]]:
    """Return what a Prometheus gets from `run`, and which of the series are counters."""
    samples: Samples = defaultdict(list)
    counters: set[str] = set()
    number = 0
    for number, frame in enumerate(run, start=1):
        for metric, found in points(frame):
            for attributes, value in found:
                series = notation(
                    metric.prometheus, {**dict(attributes), "instance": instance, "job": "gpuidle"}
                )
                values = samples[series]
                values += [None] * (number - 1 - len(values))
                values.append(value)
                if metric.kind == "counter":
                    counters.add(series)
    padded = {series: [*values, *[None] * (number - len(values))] for series, values in samples.items()}
    return padded, counters


def notation(name: str, labels: dict[str, str]) -> str:
    """Return a series as PromQL writes it; an empty label is no label."""
    pairs = ", ".join(f'{label_name(key)}="{value}"' for key, value in labels.items() if value)
    return f"{name}{{{pairs}}}"


def continued(samples: Samples, counters: set[str], minutes: int) -> Samples:
    """Go on with what came after the warm-up, again and again: gauges repeat, counters add the same."""
    begin = WARM_UP_S // SCRAPE_S
    wanted = minutes * 60 // SCRAPE_S
    out: Samples = {}
    for series, values in samples.items():
        period = values[begin:]
        longer = list(values)
        while len(longer) < wanted:
            value = period[(len(longer) - len(values)) % len(period)]
            rounds = (len(longer) - len(values)) // len(period) + 1
            if value is not None and series in counters:
                first, last = next(v for v in period if v is not None), values[-1] or 0.0
                pairs = pairwise(period)
                step = next(b - a for a, b in pairs if a is not None and b is not None)
                value += rounds * (last - first + step)
            longer.append(value)
        out[series] = longer
    return out


def promtool_input(samples: Samples) -> list[dict[str, str]]:
    """Return promtool's `input_series`."""
    return [
        {
            "series": series,
            "values": " ".join("_" if value is None else repr(float(value)) for value in values),
        }
        for series, values in samples.items()
    ]
