"""What is kept of one engine between ticks, and the reading that follows from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

from gpuidle.agent.model import EngineLimits, EngineReading, EngineState, Problem
from gpuidle.collectors.discovery.engines import FoundEngine
from gpuidle.collectors.discovery.pods import Pod
from gpuidle.collectors.engines.identity import port_of
from gpuidle.collectors.engines.rule import EngineKind, Identity, Scrape, Settings
from gpuidle.collectors.engines.session import Failure, ModelConfig, Outcome, Session

_REMEDIES = {
    "refused": "see whether the engine still runs and where it listens",
    "timeout": "the engine is overloaded, stopped or hangs; gpuidle keeps trying",
    "redirect": "name the engine's own address with --engine-url, not a proxy's",
    "not_an_engine": "name the engine's address with --engine-url",
    "tls": "name the endpoint with --engine-url under the name that its certificate has",
}
_NO_REMEDY = "gpuidle keeps trying"


@dataclass(frozen=True)
class NamedEndpoint:
    """An engine that the user named by hand."""

    url: str
    name: str | None = None
    """Stands in the engine's id instead of the model's name."""
    bearer: str | None = None


@dataclass
class Track:
    """One engine: its processes, or the endpoint named by hand, or both."""

    found: FoundEngine | None = None
    named: NamedEndpoint | None = None
    pod: Pod = field(default_factory=Pod)
    session: Session | None = None
    engine_id: str | None = None
    pinned: bool = False
    """Whether `engine_id` is final."""
    served: bool = False
    """Whether it ever answered."""
    identity: Identity = field(default_factory=Identity)
    config: ModelConfig = field(default_factory=ModelConfig)
    url: str | None = None
    contacted_kind: EngineKind | None = None
    limits: dict[str, object] = field(default_factory=dict)
    """What pages told of the limits: it does not change while the engine runs."""
    scrape: Scrape | None = None
    """The last one; its counters were reported once and are not reported again."""
    failure: Failure | None = None
    """Of the last turn."""
    fresh: bool = False
    """Whether a turn ended since the last reading."""
    fresh_scrape: bool = False

    @property
    def kind(self) -> EngineKind | None:
        """What engine it is."""
        return self.found.kind if self.found is not None else self.contacted_kind

    @property
    def settings(self) -> Settings:
        """What the command line told."""
        return self.found.settings if self.found is not None else Settings()

    @property
    def model(self) -> str | None:
        """Folder or hub id of the model, the endpoint's word before the command line's."""
        return self.identity.model or self.settings.model

    @property
    def served_model(self) -> str | None:
        """The served name: the endpoint's word, the command line's, then that of its metrics."""
        told = self.identity.served_model or self.settings.served_model
        return told or (self.scrape.served_model if self.scrape is not None else None)

    @property
    def model_key(self) -> str | None:
        """Key of the configuration's text: two containers may have two models under one path."""
        if self.config.text is None:
            return None
        return f"{self.model}#{hashlib.sha256(self.config.text.encode()).hexdigest()[:12]}"

    @property
    def port(self) -> int | None:
        """The port it is known by."""
        if self.settings.port is not None:
            return self.settings.port
        return port_of(self.named.url) if self.named is not None else None

    def learn(self, outcome: Outcome | None) -> None:
        """Take in a finished turn; None: none ended since the last reading."""
        self.fresh = outcome is not None
        self.fresh_scrape = outcome is not None and outcome.scrape is not None
        if outcome is None:
            return
        self.failure = outcome.failure
        if outcome.identity is not None and outcome.candidate is not None:
            self.identity = outcome.identity
            self.config = outcome.config or ModelConfig()
            self.url = outcome.candidate.url
            self.contacted_kind = outcome.candidate.kind
            self.served = True
        if outcome.scrape is not None:
            self.scrape = outcome.scrape
            self.limits.update(outcome.scrape.limits)

    def close(self) -> None:
        """End the session."""
        if self.session is not None:
            self.session.close()
            self.session = None


def reading_of(track: Track, now_ns: int) -> tuple[EngineReading | None, list[Problem]]:
    """Return what is known of an engine in this tick, and what stands in the way.

    An endpoint named by hand that never answered has no reading: it is not known what it is.
    """
    state, problems = _state(track)
    told = track.settings
    subject = track.engine_id or (track.named.url if track.named is not None else "")
    kind = track.kind
    problems = [msgspec.structs.replace(p, subject=p.subject or subject) for p in problems]
    if kind is None or track.engine_id is None:
        return None, problems
    scrape = track.scrape if track.fresh_scrape else None
    found = track.found
    reading = EngineReading(
        engine_id=track.engine_id,
        engine=kind.rule.engine,
        state=state,
        read_ns=scrape.read_ns if scrape is not None else now_ns,
        url=track.url,
        version=track.identity.version,
        root_pid=found.root.pid if found is not None else None,
        root_start_ns=found.root.start_ns if found is not None else None,
        pids=found.pids if found is not None else (),
        model=track.served_model,
        model_path=track.model,
        model_text=track.model_key,
        role=told.role,
        parallelism=told.parallelism,
        limits=_limits(told.limits, track.limits),
        steps_reliable=track.scrape.steps_reliable
        if track.scrape is not None
        else told.front_ends in (None, 1),
        namespace=track.pod.namespace,
        pod=track.pod.name,
        counters=scrape.counters if scrape is not None else None,
    )
    return reading, problems


def _limits(told: EngineLimits, page: dict[str, object]) -> EngineLimits:
    return msgspec.convert({**msgspec.structs.asdict(told), **page}, EngineLimits)


def _state(track: Track) -> tuple[EngineState, list[Problem]]:
    problems = [*track.found.problems] if track.found is not None else []
    problems += track.identity.problems
    problems += [track.config.problem] if track.config.problem is not None else []
    if track.settings.blind is not None:
        return "unobserved", [*problems, track.settings.blind]
    if track.session is None:
        return _silent(track, problems)
    if track.failure is not None:
        return "unobserved", [*problems, _failed(track.failure)]
    if not track.fresh and track.session.busy:
        late = Failure("timeout", f"no answer of {track.session.candidates[0].url} within this reading")
        return "unobserved", [*problems, _failed(late)]
    scrape = track.scrape
    if not track.served or scrape is None:
        return "unobserved", problems
    problems += scrape.problems
    if scrape.counters is None:
        return "unobserved", problems
    return ("asleep" if scrape.asleep else "serving"), problems


def _silent(track: Track, problems: list[Problem]) -> tuple[EngineState, list[Problem]]:
    """Return the state of an engine that there is no place to ask of."""
    found = track.found
    if found is None:
        return "unobserved", problems
    if found.unreachable is not None:
        return "unobserved", [*problems, found.unreachable]
    if found.hidden:
        return "unobserved", problems
    if track.served:
        gone = Failure("refused", f"process {found.root.pid} does not listen any more")
        return "unobserved", [*problems, _failed(gone)]
    return "starting", problems


def _failed(failure: Failure) -> Problem:
    return Problem(
        source="engines",
        kind=failure.kind,
        message=failure.message,
        remedy=_REMEDIES.get(failure.kind, _NO_REMEDY),
    )
