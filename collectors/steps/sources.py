"""Which sources of steps an engine has, what each would need and what it costs: for `doctor`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpuidle.agent.model import EngineReading
from gpuidle.collectors.steps.finding import Found, find_files
from gpuidle.collectors.steps.fpm import SOURCE as FPM
from gpuidle.collectors.steps.polling import SOURCE as MMAP
from gpuidle.collectors.steps.ring import SOURCE as PLUGIN

SourceState = Literal["works", "possible", "forbidden", "impossible"]


@dataclass(frozen=True)
class SourceStatus:
    """One source of steps for one engine."""

    engine_id: str
    source: str
    """As in StepSeries.source."""
    state: SourceState
    """`possible`: it would work after `needs`; `forbidden`: it cannot be told without more rights."""
    needs: str
    """What would make it work; "" where it does."""
    gives: str
    costs: str


def step_sources(
    engines: Sequence[EngineReading], *, proc: Path = Path("/proc"), fpm: Sequence[str] = ()
) -> tuple[SourceStatus, ...]:
    """Return the sources of steps of each engine, best first.

    Args:
        engines: as the collector of engines read them.
        proc: where the node's /proc is mounted.
        fpm: ids of engines that an endpoint of ForwardPassMetrics was named for.
    """
    out: list[SourceStatus] = []
    for engine in engines:
        found = find_files(proc, engine.pids)
        if engine.engine == "vllm":
            out += [_plugin(engine, found), _fpm(engine, fpm), _mmap(engine, found)]
        elif engine.engine in ("sglang", "dynamo"):
            out.append(_fpm(engine, fpm))
        out.append(_counters(engine))
    return tuple(out)


def _plugin(engine: EngineReading, found: Found) -> SourceStatus:
    state, needs = _state(
        found,
        bool(found.rings),
        "in the engine's environment: pip install --no-deps gpuidle; start the engine with GPUIDLE_STEPS=1",
    )
    return SourceStatus(
        engine.engine_id, PLUGIN, state, needs,
        gives="every step with its times, tokens, KV, drafts and preemptions, exactly",
        costs="a few microseconds a step in the engine's core process, 1.8 MB of shared memory a core",
    )  # fmt: skip


def _fpm(engine: EngineReading, named: Sequence[str]) -> SourceStatus:
    if importlib.util.find_spec("zmq") is None:
        state: SourceState = "possible"
        needs = "pip install 'gpuidle[fpm]', and "
    else:
        state, needs = ("works", "") if engine.engine_id in named else ("possible", "")
    if state != "works":
        flag = (
            "--scheduler-cls dynamo.vllm.instrumented_scheduler.InstrumentedScheduler (NVIDIA Dynamo)"
            if engine.engine == "vllm"
            else "--enable-forward-pass-metrics"
        )
        needs += f"start the engine with {flag} and name its ZMQ endpoint with --steps-fpm"
    return SourceStatus(
        engine.engine_id, FPM, state, needs,
        gives="every step with its tokens and KV; its end is when the message arrives",
        costs="one message a step in the engine",
    )  # fmt: skip


def _mmap(engine: EngineReading, found: Found) -> SourceStatus:
    if len(found.front_ends) > 1:
        state: SourceState = "impossible"
        needs = "--api-server-count 1: several API servers each count their own share of a step"
    else:
        state, needs = _state(
            found,
            bool(found.front_ends),
            "start the engine with PROMETHEUS_MULTIPROC_DIR set to an empty folder",
        )
    return SourceStatus(
        engine.engine_id, MMAP, state, needs,
        gives="steps that gave a token, with their tokens; chunks of a prompt alone are not seen",
        costs="nothing in the engine; a few per cent of a core here while it works",
    )  # fmt: skip


def _counters(engine: EngineReading) -> SourceStatus:
    works = engine.state == "serving"
    return SourceStatus(
        engine.engine_id, "counters", "works" if works else "possible",
        "" if works else "an endpoint that answers",
        gives="sums of tokens over a window, no steps",
        costs="one small page a second in the API server",
    )  # fmt: skip


def _state(found: Found, works: bool, needs: str) -> tuple[SourceState, str]:  # noqa: FBT001
    if works:
        return "works", ""
    if found.hidden:
        return "forbidden", "run gpuidle as the engine's user or with CAP_SYS_PTRACE"
    return "possible", needs
