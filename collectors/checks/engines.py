"""Checks of each engine: its process, its endpoint, what it counts, its model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gpuidle.agent.model import Check, EngineReading, Problem
from gpuidle.agent.physics.shapes import shape_from_config
from gpuidle.collectors.checks.observe import Seen
from gpuidle.collectors.steps.sources import SourceStatus

_SETTINGS = (
    "foreign_network_namespace",
    "no_api_process",
    "no_tcp_port",
    "no_http",
    "auth_required",
    "permission",
)
"""Reasons for silence that are a setting or a right, and no fault."""


def engine_checks(seen: Seen) -> tuple[Check, ...]:
    """Return what can be measured of each engine, and of endpoints that never told what they are."""
    checks: list[Check] = []
    known = {engine.engine_id for engine in seen.engines.engines}
    for engine in seen.engines.engines:
        mine = [p for p in seen.engines.problems if p.subject == engine.engine_id]
        checks += _engine(engine, mine, seen.engines.texts)
        checks += _steps(engine, [row for row in seen.steps if row.engine_id == engine.engine_id])
    for problem in seen.engines.problems:
        if problem.subject and problem.subject not in known:
            checks.append(_check("engine.endpoint", problem.subject, problem))
        elif not problem.subject and problem.kind == "failed":
            checks.append(_check("engine.process", "", problem))
    return tuple(checks)


def _engine(
    engine: EngineReading, problems: Sequence[Problem], texts: Mapping[str, str]
) -> tuple[Check, ...]:
    kinds = {problem.kind: problem for problem in problems}
    used: set[str] = set()

    def first(*names: str) -> Problem | None:
        found = next((kinds[name] for name in names if name in kinds), None)
        if found is not None:
            used.add(found.kind)
        return found

    stats = first("stats_disabled")
    filtered = first("filter_refused")
    model = first("no_model_config")
    rights = first("permission")
    checks = [
        _process(engine, rights),
        _stats(engine, stats),
        _endpoint(engine, problems, used | {"model_overridden"}) if stats is None else None,
    ]
    if engine.counters is not None:
        checks.append(_filter(engine, filtered))
    checks += _model(engine, model or rights, texts)
    used |= {problem.kind for problem in problems if engine.counters is None and problem.kind not in used}
    checks += [_check("engine.note", engine.engine_id, p) for p in problems if p.kind not in used]
    return tuple(check for check in checks if check is not None)


def _steps(engine: EngineReading, sources: Sequence[SourceStatus]) -> tuple[Check, ...]:
    """Return the best source of steps, and what a better one would need; `sources` are best first."""
    if not sources:
        return ()
    works = next((row for row in sources if row.state == "works"), None)
    better = sources[0] if works is None or not works.gives.startswith("every step") else None
    found = "no steps" if works is None else f"{works.source}: {works.gives}"
    return (
        Check(
            id="engine.steps",
            subject=engine.engine_id,
            status="ok" if better is None else "limited",
            found=found,
            remedy="" if better is None else f"{better.source}: {better.needs}",
        ),
    )


def _process(engine: EngineReading, rights: Problem | None) -> Check:
    if rights is not None:
        return _check("engine.process", engine.engine_id, rights, limited=True)
    if engine.root_pid is None:
        return Check(
            id="engine.process",
            subject=engine.engine_id,
            status="limited",
            found="named by its URL; its processes are not known on this node",
            remedy="run gpuidle on the engine's node, and see node.pid-namespace",
        )
    version = f" {engine.version}" if engine.version else ""
    many = f", {len(engine.pids)} processes" if len(engine.pids) > 1 else ""
    return Check(
        id="engine.process",
        subject=engine.engine_id,
        status="ok",
        found=f"{engine.engine}{version}, process {engine.root_pid}{many}",
    )


def _stats(engine: EngineReading, disabled: Problem | None) -> Check | None:
    if disabled is not None:
        return _check("engine.stats", engine.engine_id, disabled, limited=True)
    if engine.counters is None:
        return None
    cores = len(engine.counters)
    return Check(
        id="engine.stats",
        subject=engine.engine_id,
        status="ok",
        found=f"counts tokens, {cores} core{'s' * (cores != 1)}",
    )


def _endpoint(engine: EngineReading, problems: Sequence[Problem], used: set[str]) -> Check:
    if engine.counters is not None:
        return Check(id="engine.endpoint", subject=engine.engine_id, status="ok", found=f"{engine.url}")
    if engine.state == "starting":
        return Check(
            id="engine.endpoint",
            subject=engine.engine_id,
            status="limited",
            found="the engine listens nowhere yet: it is starting",
            remedy="run doctor again when it serves",
        )
    why = next((p for p in reversed(problems) if p.kind not in used), None)
    if why is None:
        return Check(
            id="engine.endpoint",
            subject=engine.engine_id,
            status="limited",
            found="no endpoint is known to read tokens from",
            remedy="name it with --engine-url",
        )
    return _check("engine.endpoint", engine.engine_id, why)


def _filter(engine: EngineReading, refused: Problem | None) -> Check:
    if refused is not None:
        return _check("engine.filter", engine.engine_id, refused, limited=True)
    return Check(
        id="engine.filter",
        subject=engine.engine_id,
        status="ok",
        found="pages are filtered by name: a reading costs the server a millisecond",
    )


def _model(engine: EngineReading, missing: Problem | None, texts: Mapping[str, str]) -> tuple[Check, ...]:
    text = texts.get(engine.model_text or "")
    if text is None:
        if missing is None:
            return ()
        return (_check("engine.model-config", engine.engine_id, missing, limited=True),)
    found = Check(
        id="engine.model-config",
        subject=engine.engine_id,
        status="ok",
        found=f"the configuration of {engine.model_path or engine.model} is read",
    )
    try:
        shape = shape_from_config(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        return (
            found,
            Check(
                id="engine.flop-basis",
                subject=engine.engine_id,
                status="limited",
                found=f"no FLOPs: {error}",
                remedy="phases and counters are not affected; a newer gpuidle may know the architecture",
            ),
        )
    return (
        found,
        Check(
            id="engine.flop-basis",
            subject=engine.engine_id,
            status="ok",
            found=f"{shape.architecture}, {shape.parameters / 1e9:.3g} G parameters",
        ),
    )


def _check(name: str, subject: str, problem: Problem, *, limited: bool = False) -> Check:
    """Return a Problem as a Check: a silent endpoint is broken, what a setting would mend is limited."""
    settled = limited or name == "engine.note" or problem.kind in _SETTINGS
    return Check(
        id=name,
        subject=subject,
        status="limited" if settled else "broken",
        found=problem.message,
        remedy=problem.remedy,
    )
