"""What stands in the way of steps, in words."""

from __future__ import annotations

from gpuidle.agent.model import Problem, StepSeries
from gpuidle.collectors.steps.fpm import FpmEndpoint
from gpuidle.collectors.steps.fuse import Agreement

_TOLERATED_RATIO = 0.02
"""Of steps that two sources do not share, before it is said: at the edges of a tick one may be missing."""


def problem(kind: str, message: str, remedy: str, subject: str = "") -> Problem:
    """Return a Problem of this collector."""
    return Problem(source="steps", kind=kind, message=message, remedy=remedy, subject=subject)


def bad_ring(engine_id: str, error: Exception) -> Problem:
    """Return the Problem of a ring that is not what it should be."""
    return problem(
        "bad_ring",
        f"the plugin's ring cannot be read: {error}",
        "use the same version of gpuidle in the engine's environment, and restart the engine",
        engine_id,
    )


def plugin_stopped(engine_id: str, version: str) -> Problem:
    """Return the Problem of a plugin that gave up."""
    return problem(
        "plugin_stopped",
        f"the plugin does not understand this engine (version {version or 'unknown'}) and records no steps",
        "use a version of gpuidle that knows it, or vLLM's memory-mapped metrics (docs/steps.md)",
        engine_id,
    )


def bad_metric_files(engine_id: str, why: str) -> Problem:
    """Return the Problem of metric files that are not what they should be."""
    return problem(
        "bad_metric_files",
        f"the engine's memory-mapped metrics cannot be read: {why}",
        "give PROMETHEUS_MULTIPROC_DIR a folder of the engine's own",
        engine_id,
    )


def several_front_ends(engine_id: str) -> Problem:
    """Return the Problem of steps that no front end counts whole."""
    return problem(
        "several_front_ends",
        "several API servers each count their own share of a step: no steps from their metrics",
        "use the plugin (docs/steps.md), or --api-server-count 1",
        engine_id,
    )


def lost(one: StepSeries) -> Problem:
    """Return the Problem of a series with steps missing."""
    return problem(
        "steps_lost",
        f"{one.lost} steps were lost beside {len(one)} that were seen ({one.source})",
        "read more often (--interval), or leave gpuidle some processor time",
        one.engine_id,
    )


def remarks(engine_id: str, agreement: Agreement) -> list[Problem]:
    """Return what is to be said of two sources that do not agree."""
    astray = agreement.without_tokens + agreement.without_boundary
    if astray <= max(2, agreement.steps * _TOLERATED_RATIO) and not agreement.disagreeing:
        return []
    return [
        problem(
            "sources_disagree",
            f"{agreement.clock_source} and {agreement.count_source} share {agreement.matched} of "
            f"{agreement.steps} steps; {agreement.without_tokens} have no tokens, "
            f"{agreement.without_boundary} no boundary, {agreement.disagreeing} other tokens",
            f"times are those of {agreement.clock_source}, tokens those of {agreement.count_source}",
            engine_id,
        )
    ]


def no_engine(one: FpmEndpoint) -> Problem:
    """Return the Problem of passes without an engine."""
    return problem(
        "no_such_engine",
        f"the passes of {one.endpoint} belong to no engine that is known",
        "name the engine's id or model: --steps-fpm NAME=ENDPOINT",
    )


def refused(engine_id: str, endpoint: str, count: int, why: str) -> Problem:
    """Return the Problem of messages that are no passes."""
    return problem(
        "bad_passes",
        f"{count} messages of {endpoint} were no forward passes: {why}",
        "name the endpoint of ForwardPassMetrics, of a version that this gpuidle knows",
        engine_id,
    )


def no_subscriber(endpoint: str, error: Exception) -> Problem:
    """Return the Problem of an endpoint that cannot be listened to."""
    missing = isinstance(error, ImportError)
    return problem(
        "no_zmq" if missing else "bad_endpoint",
        "pyzmq is not installed" if missing else str(error),
        "pip install 'gpuidle[fpm]'" if missing else f"{endpoint} should be like tcp://127.0.0.1:20380",
    )
