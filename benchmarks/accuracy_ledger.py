"""The ledger against the simulator's truth, for each kind of evidence; GPU 0, whole runs after a warm-up."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.nodes import steady_node, trace_node
from msgspec.structs import replace

from gpuidle.agent.analysis.analyzer import Analyzer
from gpuidle.agent.model import CAUSES
from gpuidle.collectors.simulator.gpu import Sampling
from gpuidle.collectors.simulator.node import GPM_10_HZ, Visible, simulate
from gpuidle.collectors.simulator.scenario import GpuSpec, Scenario, demo

A100 = GpuSpec(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability="8.0",
    memory_total_bytes=81_920 << 20,
    power_limit_watts=400.0,
    bare_watts=50.0,
    loaded_watts=70.0,
    sm_clock_max_hz=1_410_000_000,
    memory_clock_hz=1_593_000_000,
)
EVIDENCE = {
    "PM counters and steps": Visible(counters=Sampling("cupti_pm", 1000.0)),
    "GPM windows and token sums": Visible(counters=GPM_10_HZ, steps=False),
    "NVML and token sums": Visible(counters=None, steps=False),
}
TIME_SPLIT = {
    "working": ("useful", "padding", "memory_bound", "communication", "latency", "throttled_power"),
    "host_gap": ("host_gap",),
    "no_request": ("no_request",),
}


class Result(NamedTuple):
    """Shares of the run's time."""

    errors: dict[str, float]
    """Ours less the truth, in points, by cause."""
    unattributed: float
    used_error: float
    """Relative error of the used ratio."""


def compare(scenario: Scenario, visible: Visible, *, warm_up: int = 20) -> Result:
    analyzer = Analyzer()
    causes: dict[str, int] = dict.fromkeys(CAUSES, 0)
    truth: dict[str, int] = dict.fromkeys(CAUSES, 0)
    settled = 0
    real = []
    for snapshot, now in simulate(scenario, visible=visible):
        if now.window_ns:
            real.append(now.gpus[0].window.causes_ns)
        gpu = analyzer.feed(snapshot).gpus[0]
        if not gpu.window_ns:
            continue
        if settled >= warm_up:
            for name, value in gpu.causes_ns.items():
                causes[name] += value
            for cause, ns in real[settled].items():
                truth[cause] += ns
        settled += 1
    whole = sum(truth.values())
    errors: dict[str, float] = {
        c: 100 * (causes[c] - truth[c]) / whole for c in CAUSES if c != "unattributed"
    }
    used = causes["useful"] / truth["useful"] - 1 if truth["useful"] else 0.0
    return Result(errors, causes["unattributed"] / whole, used)


def nodes(seconds: int, seed: int) -> dict[str, Scenario]:
    found = {
        f"{engine} {trace} x{load:g}": trace_node(trace, load, engine, seconds=seconds, start_s=300 * seed)
        for engine in ("8B", "70B TP4", "MoE TP2")
        for trace in ("code", "conv")
        for load in (1.0, 2.0)
    }
    known = {name: node for name, node in found.items() if node is not None}
    known["demo"] = replace(demo(seed), duration_ns=seconds * 10**9)
    known["steady 8B"] = steady_node(
        "8B", per_second=2.0, prompt=(50, 1500), output=(20, 200), seconds=seconds, seed=seed
    )
    return known


def on_a100(scenario: Scenario) -> Scenario:
    return replace(scenario, gpus=(A100,) * len(scenario.gpus))


def report(seconds: int = 90, seeds: tuple[int, ...] = (3,), *, verbose: bool = False) -> None:
    for name, visible in EVIDENCE.items():
        worst: dict[str, tuple[float, str]] = {}
        unattributed = used = (0.0, "")
        for seed in seeds:
            for node, scenario in nodes(seconds, seed).items():
                only_time = name.startswith("NVML")
                result = compare(on_a100(scenario) if only_time else scenario, visible)
                errors = result.errors
                if only_time:
                    errors = {k: sum(errors[c] for c in causes) for k, causes in TIME_SPLIT.items()}
                for cause, error in errors.items():
                    if abs(error) > abs(worst.get(cause, (0.0, ""))[0]):
                        worst[cause] = (error, node)
                unattributed = max(unattributed, (result.unattributed, node))
                used = max(used, (abs(result.used_error), node))
                if verbose:
                    shown = {c: round(e, 1) for c, e in result.errors.items() if abs(e) >= 0.5}
                    print(f"    {node}: {shown} unattributed {result.unattributed:.3f}")
        text = ", ".join(f"{c} {e:+.1f} ({n})" for c, (e, n) in worst.items() if abs(e) >= 0.05)
        print(f"ledger, {name}: worst errors in points: {text}")
        print(
            f"  unattributed at most {unattributed[0]:.3f} ({unattributed[1]}),"
            f" used ratio off by at most {used[0]:.3f} ({used[1]})"
        )


if __name__ == "__main__":
    report(verbose=True)
