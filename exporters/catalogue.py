"""Every metric that gpuidle publishes: one row each, fed from a Frame or from the agent itself.

Identity rules, on which joins and sums depend:

- GPU series carry `hw.id`, `hw.name`, `hw.model`, for a MIG instance `hw.parent`, and at most one enum of
  their own. Never an engine, a model or a pod: those change while the GPU stays.
- Engine series carry `gpuidle.engine.id`, `gpuidle.engine.name`, `gpuidle.model`, `gpuidle.role`. Never
  `hw.id`: with tensor parallelism over 8 GPUs the tokens would be counted 8 times.
- `gpuidle.gpu.engine.info` joins the two, with exactly one series per `hw.id`.
- A label that becomes known later would end one series and start another, so an engine's series are held
  back until its model is known.
- A GPU that is split in MIG instances emits nothing of `gpuidle.*` but its info series: its instances
  carry the ledger, and it would be counted twice.

An absent value gives no point: not 0, not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from gpuidle.agent.model import PHASES, Frame
from gpuidle.exporters.agent_self import AgentReading
from gpuidle.exporters.feeds import (
    ENGINE,
    GPU,
    INFO,
    Attributes,
    Number,
    Point,
    busy_ratio,
    causes,
    clean,
    device,
    engine_info,
    errors,
    estimated,
    idle,
    memory_ratio,
    of_steps,
    peak,
    per_engine,
    phases,
    price,
    reclaimable,
    rungs,
    trailing,
)
from gpuidle.exporters.histograms import HISTOGRAMS, Histogram
from gpuidle.exporters.naming import Kind, prometheus_name

T = TypeVar("T")


@dataclass(frozen=True)
class Metric(Generic[T]):
    """One row of the catalogue. `read` is pure."""

    name: str
    """In OpenTelemetry."""
    unit: str
    """UCUM; empty for info and status metrics."""
    kind: Kind
    description: str
    attributes: tuple[str, ...]
    read: Callable[[T], Iterable[Point]] = field(repr=False)
    since: Literal["agent", "device"] = "agent"
    """When a counter was 0: as the agent started, or at an unknown time before (the driver's counters)."""

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, on both paths."""
        return prometheus_name(self.name, self.unit, self.kind)


NumberMetric = Metric[Frame] | Metric[AgentReading]
AnyMetric = NumberMetric | Histogram


class MetricPoints(NamedTuple):
    """A row of the catalogue with its points of the moment; there is at least one."""

    metric: NumberMetric
    points: tuple[Point, ...]


def points(frame: Frame) -> list[MetricPoints]:
    """Return all metrics that the Frame can feed; a metric without a point is left out."""
    return [MetricPoints(metric, found) for metric in FRAME_METRICS if (found := _sound(metric, frame))]


def agent_points(reading: AgentReading) -> list[MetricPoints]:
    """Return the metrics of the agent itself; a metric without a point is left out."""
    return [MetricPoints(metric, found) for metric in AGENT_METRICS if (found := _sound(metric, reading))]


def _sound(metric: Metric[T], subject: T) -> tuple[Point, ...]:
    """Return the points that may be published.

    One point a series (the first one: a second would make a whole scrape unreadable), finite, and no
    negative counter.
    """
    found: dict[Attributes, Number] = {}
    for attributes, value in metric.read(subject):
        if not math.isfinite(value) or (metric.kind == "counter" and value < 0):
            continue
        found.setdefault(tuple((name, clean(text)) for name, text in attributes), value)
    return tuple(Point(attributes, value) for attributes, value in found.items())


# --------------------------------------------------------------------------------------------------------
# The table

FRAME_METRICS: tuple[Metric[Frame], ...] = (
    Metric(
        "hw.gpu.memory.limit",
        "By",
        "updowncounter",
        "Size of the GPU's memory.",
        GPU,
        device(lambda gpu: gpu.memory_total_bytes),
    ),
    Metric(
        "hw.gpu.memory.usage",
        "By",
        "updowncounter",
        "GPU memory in use by all processes.",
        GPU,
        device(lambda gpu: gpu.memory_used_bytes),
    ),
    Metric(
        "hw.gpu.memory.utilization",
        "1",
        "gauge",
        "GPU memory in use over its size. It is not bandwidth.",
        GPU,
        device(memory_ratio),
    ),
    Metric(
        "hw.gpu.utilization",
        "1",
        "gauge",
        "Share of time with any kernel on the GPU. It is not load: one kernel on one SM counts as 1.",
        (*GPU, "hw.gpu.task"),
        device(busy_ratio, ("hw.gpu.task", "general")),
    ),
    Metric(
        "hw.energy",
        "J",
        "counter",
        "Energy used by the GPU since its driver was loaded.",
        (*GPU, "hw.type"),
        device(lambda gpu: gpu.energy_joules, ("hw.type", "gpu")),
        since="device",
    ),
    Metric(
        "hw.power",
        "W",
        "gauge",
        "Power drawn by the GPU.",
        (*GPU, "hw.type"),
        device(lambda gpu: gpu.power_watts, ("hw.type", "gpu")),
    ),
    Metric(
        "hw.errors",
        "{error}",
        "counter",
        "Errors that the GPU's driver reported since the agent started: ECC, and Xids by number.",
        (*GPU, "hw.type", "error.type"),
        errors,
    ),
    Metric(
        "gpuidle.compute.time",
        "s",
        "counter",
        "Where each second of the GPU went, by cause; the causes sum to the time observed.",
        (*GPU, "gpuidle.cause"),
        causes,
    ),
    Metric(
        "gpuidle.compute.estimated.time",
        "s",
        "counter",
        "How much of gpuidle.compute.time is an estimate, by cause; the rest was measured.",
        (*GPU, "gpuidle.cause"),
        estimated,
    ),
    Metric(
        "gpuidle.phase.time",
        "s",
        "counter",
        "Time of the GPU by phase of inference; the phases sum to the time observed.",
        (*GPU, "gpuidle.phase"),
        phases,
    ),
    Metric(
        "gpuidle.compute.reclaimable.time",
        "s",
        "counter",
        "Compute time, idle in memory-bound steps, that more rows per step could use.",
        GPU,
        reclaimable,
    ),
    Metric(
        "gpuidle.compute.idle_ratio",
        "1",
        "gauge",
        "Idle compute over peak compute in the trailing window, by basis. High idle alone is physics.",
        (*GPU, "gpuidle.basis"),
        idle,
    ),
    Metric(
        "gpuidle.tensor.active_ratio",
        "1",
        "gauge",
        "Share of cycles with the tensor pipe busy in the trailing window.",
        GPU,
        trailing(lambda gpu: gpu.tensor_active),
    ),
    Metric(
        "gpuidle.sm.active_ratio",
        "1",
        "gauge",
        "Share of SM time with a warp resident in the trailing window.",
        GPU,
        trailing(lambda gpu: gpu.sm_active),
    ),
    Metric(
        "gpuidle.dram.bandwidth_ratio",
        "1",
        "gauge",
        "DRAM bytes moved over the sheet's bandwidth in the trailing window.",
        GPU,
        trailing(lambda gpu: gpu.dram_bandwidth),
    ),
    Metric(
        "gpuidle.roofline.attained_ratio",
        "1",
        "gauge",
        "Useful FLOP/s over what the roofline allows at this arithmetic intensity.",
        GPU,
        trailing(lambda gpu: gpu.roofline_attained),
    ),
    Metric(
        "gpuidle.gpu.peak",
        "{flop}/s",
        "gauge",
        "Dense peak of the GPU in FLOP/s at the dtype in use: the weight in fleet averages.",
        (*GPU, "gpuidle.dtype"),
        peak,
    ),
    Metric(
        "gpuidle.gpu.price",
        "{currency}/h",
        "gauge",
        "Price of the GPU per hour as configured.",
        (*GPU, "gpuidle.currency"),
        price,
    ),
    Metric(
        "gpuidle.evidence.source",
        "",
        "gauge",
        "1 for the rung that served the GPU's last window, 0 for the others.",
        (*GPU, "gpuidle.rung"),
        rungs,
    ),
    Metric(
        "gpuidle.gpu.engine.info",
        "",
        "gauge",
        "Always 1, once per GPU: its engine; or none, shared, or unknown while one is being identified.",
        INFO,
        engine_info,
    ),
    Metric(
        "gpuidle.engine.tokens",
        "{token}",
        "counter",
        "Tokens of the engine by phase: prompt tokens computed, and tokens decoded after the first.",
        (*ENGINE, "gpuidle.phase"),
        per_engine(
            ((("gpuidle.phase", "prefill"),), lambda engine: engine.prefill_tokens_total),
            ((("gpuidle.phase", "decode"),), lambda engine: engine.decode_tokens_total),
        ),
    ),
    Metric(
        "gpuidle.engine.flops",
        "{flop}",
        "counter",
        "FLOPs of the engine on all its GPUs: useful (delivered tokens), executed (with all overhead).",
        (*ENGINE, "gpuidle.kind"),
        per_engine(
            ((("gpuidle.kind", "useful"),), lambda engine: engine.useful_flops_total),
            ((("gpuidle.kind", "executed"),), lambda engine: engine.executed_flops_total),
        ),
    ),
    Metric(
        "gpuidle.engine.steps",
        "{step}",
        "counter",
        "Forward passes of the engine by phase, where steps are seen.",
        (*ENGINE, "gpuidle.phase"),
        per_engine(*(of_steps(phase) for phase in PHASES if phase != "idle")),
    ),
    Metric(
        "gpuidle.engine.requests",
        "{request}",
        "updowncounter",
        "Requests in the engine now, by state.",
        (*ENGINE, "gpuidle.state"),
        per_engine(
            ((("gpuidle.state", "running"),), lambda engine: engine.requests_running),
            ((("gpuidle.state", "waiting"),), lambda engine: engine.requests_waiting),
        ),
    ),
    Metric(
        "gpuidle.engine.kv.usage_ratio",
        "1",
        "gauge",
        "Share of the engine's KV cache in use.",
        ENGINE,
        per_engine(((), lambda engine: engine.kv_usage_ratio)),
    ),
    Metric(
        "gpuidle.agent.collector.duration",
        "s",
        "gauge",
        "How long the collector took in the last tick.",
        ("gpuidle.collector",),
        lambda frame: (
            Point((("gpuidle.collector", run.collector),), run.duration_ns / 1e9) for run in frame.runs
        ),
    ),
    Metric(
        "gpuidle.agent.collector.success",
        "",
        "gauge",
        "1 if the collector answered in the last tick, else 0.",
        ("gpuidle.collector",),
        lambda frame: (Point((("gpuidle.collector", run.collector),), int(run.ok)) for run in frame.runs),
    ),
    Metric(
        "gpuidle.agent.tick.lateness",
        "s",
        "gauge",
        "How late the last tick ended.",
        (),
        lambda frame: (Point((), frame.lateness_ns / 1e9),),
    ),
    Metric(
        "gpuidle.agent.tick.missed",
        "{tick}",
        "counter",
        "Ticks that were left out because the one before took too long.",
        (),
        lambda frame: (Point((), frame.missed_ticks_total),),
    ),
    Metric(
        "gpuidle.agent.simulated",
        "",
        "gauge",
        "1 if the node exists only in the simulator, else 0.",
        (),
        lambda frame: (Point((), int(frame.node.simulated)),),
    ),
)

AGENT_METRICS: tuple[Metric[AgentReading], ...] = (
    Metric(
        "gpuidle.agent.build.info",
        "",
        "gauge",
        "Always 1: the agent's version and the Python it runs on.",
        ("gpuidle.version", "gpuidle.python.version"),
        lambda agent: (
            Point(
                (("gpuidle.version", agent.version), ("gpuidle.python.version", agent.python_version)),
                1,
            ),
        ),
    ),
    Metric(
        "gpuidle.agent.cpu.time",
        "s",
        "counter",
        "CPU time of the agent's process, user and system.",
        (),
        lambda agent: (Point((), agent.cpu_seconds),),
    ),
    Metric(
        "gpuidle.agent.memory.usage",
        "By",
        "updowncounter",
        "Resident memory of the agent's process.",
        (),
        lambda agent: (Point((), agent.resident_bytes),),
    ),
    Metric(
        "gpuidle.agent.frame.age",
        "s",
        "gauge",
        "Time since the exporter got its last frame; gauges are left out once it passes the limit.",
        (),
        lambda agent: () if agent.frame_age_seconds is None else (Point((), agent.frame_age_seconds),),
    ),
    Metric(
        "gpuidle.agent.outlet.frames",
        "{frame}",
        "counter",
        "Frames of each outlet by result: delivered, dropped (the outlet was behind) or failed.",
        ("gpuidle.outlet", "gpuidle.result"),
        lambda agent: (
            Point((("gpuidle.outlet", outlet.outlet), ("gpuidle.result", result)), count)
            for outlet in agent.outlets
            for result, count in (
                ("delivered", outlet.delivered),
                ("dropped", outlet.dropped),
                ("failed", outlet.failed),
            )
        ),
    ),
)

CATALOGUE: tuple[AnyMetric, ...] = (*FRAME_METRICS, *HISTOGRAMS, *AGENT_METRICS)
"""Everything that can be published, in the order in which it is."""
