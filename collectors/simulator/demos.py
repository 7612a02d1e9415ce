"""Simulated nodes and faults by name, for the command line: what `--demo` can show beside its usual node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from gpuidle.collectors.simulator.options import (
    BadCounter,
    ClockSpell,
    CounterClock,
    Fault,
    Handover,
    LateTokens,
    LostSteps,
    MissingSamples,
    Restart,
    Speculation,
    Straggler,
)
from gpuidle.collectors.simulator.scenario import (
    LLAMA_3_8B,
    SECOND_NS,
    EngineSpec,
    GpuSpec,
    Poisson,
    Scenario,
    ScenarioError,
    Sizes,
    demo,
)

BEGIN_NS = 30 * SECOND_NS
"""When faults begin: `watch --demo` starts at 55 s, so its history shows the time before and after."""
CHATS = (Sizes(prompt=(200, 1500), output=(60, 200)),)
SMALL = EngineSpec(
    name="llama-3-8b",
    config=LLAMA_3_8B,
    gpus=(0,),
    kv_blocks=8_000,
    arrivals=(Poisson(2.5, CHATS),),
)


def _changed(node: Scenario, **changes: object) -> Scenario:
    """Return the node with its only engine changed."""
    return replace(node, engines=(replace(node.engines[0], **changes),))


def _roles(seed: int) -> Scenario:
    prefill = replace(SMALL, name="prefill", role="prefill", hands_to=Handover("decode"))
    decode = replace(SMALL, name="decode", gpus=(1,), role="decode", arrivals=())
    return Scenario(seed=seed, gpus=(GpuSpec(), GpuSpec()), engines=(prefill, decode))


def _shared(seed: int) -> Scenario:
    engines = (SMALL, replace(SMALL, name="other-8b"))
    return Scenario(seed=seed, gpus=(GpuSpec(),), engines=engines, shared_gpus=True)


NODES: Mapping[str, Callable[[int], Scenario]] = {
    "plain": demo,
    "speculation": lambda seed: _changed(demo(seed), speculation=Speculation((0.8, 0.7, 0.6))),
    "pipeline": lambda seed: _changed(demo(seed), pipeline_stages=2),
    "async": lambda seed: _changed(demo(seed), async_scheduling=True),
    "straggler": lambda seed: _changed(demo(seed), straggler=Straggler(rank=1, slower=1.4)),
    "power-cap": lambda seed: replace(demo(seed), gpus=(GpuSpec(power_cap_watts=350.0),) * 2),
    "hot": lambda seed: replace(demo(seed), clocks=(ClockSpell(1, 0.7, start_ns=BEGIN_NS),)),
    "roles": _roles,
    "shared": _shared,
}
"""By name: the node of a seed. "plain" is the demo."""

FAULTS: Mapping[str, Callable[[Scenario], Fault]] = {
    "dead-counter": lambda _node: BadCounter(start_ns=BEGIN_NS, gpu=0),
    "frozen-counter": lambda _node: BadCounter("frozen", start_ns=BEGIN_NS, gpu=0),
    "missing-samples": lambda _node: MissingSamples(0.5, start_ns=BEGIN_NS),
    "counter-clock": lambda _node: CounterClock(lag_ns=20_000_000, drift_ppm=50.0),
    "lost-steps": lambda _node: LostSteps(0.1, start_ns=BEGIN_NS),
    "late-tokens": lambda _node: LateTokens(800_000_000),
    "restart": lambda node: Restart(node.engines[0].name, at_ns=BEGIN_NS + 5 * SECOND_NS),
}
"""By name: the fault as it is on a node."""


def named(name: str = "plain", faults: Sequence[str] = (), seed: int = 0) -> Scenario:
    """Return the node of this name with these faults.

    Raises:
        ScenarioError: there is no such node or fault, or the two do not go together.
    """
    if name not in NODES or any(fault not in FAULTS for fault in faults):
        raise ScenarioError(f"no such node or fault: {name}, {', '.join(faults)}")
    node = NODES[name](seed)
    return replace(node, faults=tuple(FAULTS[fault](node) for fault in faults))
