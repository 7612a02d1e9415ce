"""Small nodes for tests: one or two H100s, a model of 8B, few requests."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gpuidle.agent.model import EngineCounters, Snapshot
from gpuidle.collectors.simulator.arrivals import Feed
from gpuidle.collectors.simulator.batch import Step
from gpuidle.collectors.simulator.costs import SHEET, Costs
from gpuidle.collectors.simulator.engine import Engine
from gpuidle.collectors.simulator.node import simulate
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    SECOND_NS,
    EngineSpec,
    GpuSpec,
    Listed,
    Request,
    Scenario,
)
from gpuidle.collectors.simulator.truth import Truth

# Without jitter an engine takes the same steps whatever its seed.
SMALL = EngineSpec(
    name="small", config=LLAMA_3_8B, gpus=(0,), max_batched_tokens=256, kv_blocks=1024, jitter=0.0
)


def asked(*requests: Request, engine: EngineSpec = SMALL) -> EngineSpec:
    """Return `engine` asked for these requests."""
    return replace(engine, arrivals=(Listed(requests),))


def node(*engines: EngineSpec, gpus: int = 1, seconds: float = 20.0, seed: int = 1) -> Scenario:
    """Return a node of H100s that runs for some seconds."""
    return Scenario(
        seed=seed, gpus=(GpuSpec(),) * gpus, engines=engines, duration_ns=int(seconds * SECOND_NS)
    )


def steps_of(spec: EngineSpec, seconds: float = 600.0, clocks: int = 1) -> tuple[list[Step], Engine]:
    """Run one engine and return its steps, with the costs of so many ranks apart, and itself."""
    engine = Engine(spec, Costs(spec, GpuSpec()), "test", clocks=lambda _at_ns: (SHEET,) * clocks)
    return engine.advance(int(seconds * SECOND_NS)), engine


def ran(scenario: Scenario, tick_ns: int = SECOND_NS) -> tuple[list[Snapshot], list[Truth]]:
    """Run a scenario to its end."""
    pairs = list(simulate(scenario, tick_ns=tick_ns))
    return [snapshot for snapshot, _ in pairs], [truth for _, truth in pairs]


def counters_of(snapshot: Snapshot) -> EngineCounters:
    """Return the counters of the first engine."""
    counters = snapshot.engines[0].counters
    assert counters is not None
    return counters[0]


def requests_of(spec: EngineSpec, until_ns: int) -> Sequence[Request]:
    """Return what a feed of the engine's arrivals gives by `until_ns`."""
    return [request for request, _ in Feed(spec.arrivals, "test").take(until_ns)]
