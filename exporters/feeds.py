"""How each metric is fed: pure functions from a Frame to the points of one metric.

The identity rules stand in `catalogue`; the two functions that build identities are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from gpuidle.agent.model import CAUSES, PHASES, RUNGS, EngineFrame, Figure, Frame, GpuFrame

Attributes = tuple[tuple[str, str], ...]
Number = int | float
Feed = Callable[[Frame], Iterator["Point"]]

GPU = ("hw.id", "hw.name", "hw.model", "hw.parent")
"""Of GPU series; `hw.parent` only where the device is a MIG instance."""
ENGINE = ("gpuidle.engine.id", "gpuidle.engine.name", "gpuidle.model", "gpuidle.role")
INFO = (
    "hw.id",
    "gpuidle.engine.id",
    "gpuidle.model",
    "gpuidle.role",
    "k8s.namespace.name",
    "k8s.pod.name",
)

NO_ENGINE = "none"
"""`gpuidle.engine.id` in the info series of a GPU that no engine holds."""
UNKNOWN_ENGINE = "unknown"
"""The same where an engine holds the GPU and its identity is not complete yet."""
SHARED = "shared"
"""The same where several engines hold the GPU."""

_LABEL_LIMIT = 256


class Point(NamedTuple):
    """One value of one series."""

    attributes: Attributes
    value: Number


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """Return a label value that every encoder takes: valid UTF-8 of bounded length."""
    return text[:_LABEL_LIMIT].encode("utf-8", "replace").decode("utf-8")


# --------------------------------------------------------------------------------------------------------
# Of GPUs


def _identity(gpu: GpuFrame) -> Attributes:
    identity = (("hw.id", gpu.hw_id), ("hw.name", f"gpu{gpu.index}"), ("hw.model", gpu.name))
    return (*identity, ("hw.parent", gpu.parent_hw_id)) if gpu.parent_hw_id else identity


def _ledger_gpus(frame: Frame) -> list[GpuFrame]:
    parents = {gpu.parent_hw_id for gpu in frame.gpus}
    return [gpu for gpu in frame.gpus if gpu.hw_id not in parents]


def device(value: Callable[[GpuFrame], Number | None], *extra: tuple[str, str]) -> Feed:
    """Feed a metric of the hardware from every GPU that has the value."""

    def read(frame: Frame) -> Iterator[Point]:
        for gpu in frame.gpus:
            number = value(gpu)
            if number is not None:
                yield Point((*_identity(gpu), *extra), number)

    return read


def trailing(figure: Callable[[GpuFrame], Figure | None]) -> Feed:
    """Feed a gauge from a Figure of every GPU with a ledger."""

    def read(frame: Frame) -> Iterator[Point]:
        for gpu in _ledger_gpus(frame):
            found = figure(gpu)
            if found is not None and found.evidence != "unknown":
                yield Point(_identity(gpu), found.value)

    return read


def memory_ratio(gpu: GpuFrame) -> float | None:
    """Return memory in use over memory, or None where either is unknown."""
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    return gpu.memory_used_bytes / gpu.memory_total_bytes


def busy_ratio(gpu: GpuFrame) -> float | None:
    """Return the share of time with work on the GPU, or None where nobody measured it."""
    return gpu.busy.value if gpu.busy is not None and gpu.busy.evidence != "unknown" else None


def errors(frame: Frame) -> Iterator[Point]:
    """Feed the errors that the driver reported, by kind; nothing for a GPU that reports none of its own."""
    for gpu in frame.gpus:
        for kind, count in sorted((gpu.error_counts or {}).items()):
            yield Point((*_identity(gpu), ("hw.type", "gpu"), ("error.type", kind)), count)


def causes(frame: Frame) -> Iterator[Point]:
    """Feed the ledger in seconds since the agent's start: every cause of the closed enum, always."""
    for gpu in _ledger_gpus(frame):
        for cause in CAUSES:
            seconds = gpu.causes_total_ns.get(cause, 0) / 1e9
            yield Point((*_identity(gpu), ("gpuidle.cause", cause)), seconds)


def estimated(frame: Frame) -> Iterator[Point]:
    """Feed how much of the ledger is estimates, in seconds since the agent's start."""
    for gpu in _ledger_gpus(frame):
        for cause, total_ns in (gpu.estimated_total_ns or {}).items():
            yield Point((*_identity(gpu), ("gpuidle.cause", cause)), total_ns / 1e9)


def phases(frame: Frame) -> Iterator[Point]:
    """Feed the seconds of each phase since the agent's start, all five always."""
    for gpu in _ledger_gpus(frame):
        for phase in PHASES:
            seconds = gpu.phases_total_ns.get(phase, 0) / 1e9
            yield Point((*_identity(gpu), ("gpuidle.phase", phase)), seconds)


def reclaimable(frame: Frame) -> Iterator[Point]:
    """Feed the reclaimable seconds where the work model can tell them."""
    for gpu in _ledger_gpus(frame):
        if gpu.reclaimable_total_ns is not None:
            yield Point(_identity(gpu), gpu.reclaimable_total_ns / 1e9)


def idle(frame: Frame) -> Iterator[Point]:
    """Feed the idle-compute ratio on each basis that has evidence."""
    for gpu in _ledger_gpus(frame):
        for basis, figure in sorted(gpu.idle.items()):
            if figure.evidence != "unknown":
                yield Point((*_identity(gpu), ("gpuidle.basis", basis)), figure.value)


def peak(frame: Frame) -> Iterator[Point]:
    """Feed the dense peak of the dtype in use, FLOP/s."""
    for gpu in _ledger_gpus(frame):
        if gpu.peak is not None:
            yield Point((*_identity(gpu), ("gpuidle.dtype", gpu.peak.dtype)), gpu.peak.flops_per_s)


def price(frame: Frame) -> Iterator[Point]:
    """Feed the configured price per hour."""
    for gpu in _ledger_gpus(frame):
        if gpu.price_per_hour is not None:
            yield Point((*_identity(gpu), ("gpuidle.currency", gpu.currency)), gpu.price_per_hour)


def rungs(frame: Frame) -> Iterator[Point]:
    """Feed 1 for the rung that served and 0 for each other one."""
    for gpu in _ledger_gpus(frame):
        for rung in RUNGS:
            yield Point((*_identity(gpu), ("gpuidle.rung", rung)), int(gpu.rung == rung))


def engine_info(frame: Frame) -> Iterator[Point]:
    """Feed the join: exactly one point for each GPU.

    A GPU without an engine has one too, since an inner join would else drop it from every sum.
    """
    engines = {engine.engine_id: engine for engine in frame.engines}
    for gpu in frame.gpus:
        instances = [other for other in frame.gpus if other.parent_hw_id == gpu.hw_id]
        held = sorted({engine_id for device in (gpu, *instances) for engine_id in device.engine_ids})
        model = role = namespace = pod = ""
        if not held:
            engine_id = NO_ENGINE
        elif len(held) > 1:
            engine_id = SHARED
        else:
            engine = engines.get(held[0])
            if engine is not None and engine.model is not None:
                engine_id, model, role = engine.engine_id, engine.model, engine.role
                namespace, pod = engine.namespace or "", engine.pod or ""
            else:
                engine_id = UNKNOWN_ENGINE
        yield Point(tuple(zip(INFO, (gpu.hw_id, engine_id, model, role, namespace, pod), strict=True)), 1)


# --------------------------------------------------------------------------------------------------------
# Of engines


def engine_identity(engine: EngineFrame) -> Attributes | None:
    """Return what names an engine's series; None until it is complete."""
    if engine.model is None:
        return None
    return tuple(zip(ENGINE, (engine.engine_id, engine.engine, engine.model, engine.role), strict=True))


def per_engine(
    *values: tuple[Attributes, Callable[[EngineFrame], Number | None]],
) -> Feed:
    """Feed a metric from every engine whose identity is complete: one value for each of its enum."""

    def read(frame: Frame) -> Iterator[Point]:
        for engine in frame.engines:
            identity = engine_identity(engine)
            if identity is None:
                continue
            for extra, value in values:
                number = value(engine)
                if number is not None:
                    yield Point((*identity, *extra), number)

    return read


def of_steps(phase: str) -> tuple[Attributes, Callable[[EngineFrame], Number | None]]:
    """Return the value of `per_engine` that counts the steps of one phase."""
    return (("gpuidle.phase", phase),), lambda engine: engine.steps_total.get(phase)
