"""One engine's endpoint and the thread that asks it: an engine that hangs delays nobody else.

The thread lives as long as the session and has at most one request in flight, so that threads cannot pile
up behind a server that never answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuidle.agent.model import Problem
from gpuidle.collectors.engines.rule import EngineAdapter, EngineKind, Identity, Scrape, Settings
from gpuidle.collectors.support.http import HttpClient, HttpError

_BACKOFF_NS = 1_000_000_000
_LONGEST_BACKOFF_NS = 10_000_000_000
_STALE_KINDS = ("refused", "unreachable", "protocol", "http_status")
"""Errors after which another process may answer next time: it is asked for its name again."""


@dataclass(frozen=True)
class Candidate:
    """A place where an engine may answer, and what kind it would be."""

    kind: EngineKind
    url: str
    settings: Settings
    bearer: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why there is no answer: a word for programs and a sentence."""

    kind: str
    message: str


@dataclass(frozen=True)
class ModelConfig:
    """The served model's configuration, or why there is none."""

    text: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class Outcome:
    """One finished turn of the thread. Without a scrape and a failure it was too early to ask."""

    candidate: Candidate | None = None
    identity: Identity | None = None
    """Set in the turn that made contact, as is `config`."""
    config: ModelConfig | None = None
    scrape: Scrape | None = None
    failure: Failure | None = None


class Session:
    """Asks the first of several candidates that turns out to be the engine."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        timeout_s: float,
        read_config: Callable[[Identity], ModelConfig],
    ) -> None:
        """Make a session; `read_config` runs in its thread, since a file system may hang too."""
        self.candidates = tuple(candidates)
        self._timeout_s = timeout_s
        self._read_config = read_config
        self._current: tuple[Candidate, HttpClient, EngineAdapter] | None = None
        self._condition = threading.Condition()
        self._job_ns: int | None = None
        self._outcome: Outcome | None = None
        self._closed = False
        self._failures = 0
        self._next_ns = 0
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn is under way."""
        with self._condition:
            return self._job_ns is not None

    def start(self, now_ns: int, period_ns: int) -> bool:
        """Begin a turn if the last one is over and taken, and it is time; return whether one began."""
        with self._condition:
            if (
                self._closed
                or self._job_ns is not None
                or self._outcome is not None
                or now_ns < self._next_ns
            ):
                return False
            self._next_ns = now_ns + period_ns
            self._job_ns = now_ns
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpuidle-engine", daemon=True)
                self._thread.start()
            self._condition.notify_all()
            return True

    def take(self, wait_s: float = 0.0) -> Outcome | None:
        """Return the outcome of a finished turn, once; wait for it at most `wait_s`."""
        with self._condition:
            if wait_s > 0:
                self._condition.wait_for(lambda: self._outcome is not None, wait_s)
            outcome, self._outcome = self._outcome, None
            return outcome

    def close(self) -> None:
        """Let the thread end after the turn it is in; its outcome is dropped."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._job_ns is not None)
                if self._closed:
                    break
                now_ns = self._job_ns or 0
            outcome = self._turn(now_ns)
            with self._condition:
                if outcome.failure is not None:
                    self._failures += 1
                    pause = min(_BACKOFF_NS << min(self._failures - 1, 10), _LONGEST_BACKOFF_NS)
                    self._next_ns = max(self._next_ns, now_ns + pause)
                elif outcome.scrape is not None:
                    self._failures = 0
                self._job_ns = None
                self._outcome = outcome
                self._condition.notify_all()
        self._disconnect()

    def _turn(self, now_ns: int) -> Outcome:
        if self._current is None:
            return self._contact(now_ns)
        candidate, _client, adapter = self._current
        try:
            return Outcome(candidate, scrape=adapter.scrape(now_ns))
        except HttpError as error:
            if error.kind in _STALE_KINDS:
                self._disconnect()
            return Outcome(candidate, failure=Failure(error.kind, str(error)))
        except Exception as error:  # noqa: BLE001 (an adapter's defect costs this engine only)
            self._disconnect()
            return Outcome(candidate, failure=_defect(error))

    def _contact(self, now_ns: int) -> Outcome:
        failure = Failure("refused", "there is nothing to ask")
        for candidate in self.candidates:
            try:
                client = HttpClient(candidate.url, timeout_s=self._timeout_s, bearer=candidate.bearer)
            except HttpError as error:
                failure = Failure(error.kind, str(error))
                continue
            adapter = candidate.kind.connect(client, candidate.settings)
            try:
                identity = adapter.identify()
                scrape = adapter.scrape(now_ns)
            except HttpError as error:
                failure = Failure(error.kind, str(error))
            except Exception as error:  # noqa: BLE001
                failure = _defect(error)
            else:
                if identity.version is not None or (scrape is not None and scrape.recognised):
                    self._current = (candidate, client, adapter)
                    return Outcome(candidate, identity, self._read_config(identity), scrape)
                failure = Failure(
                    "not_an_engine", f"what answers at {candidate.url} is no {candidate.kind.rule.engine}"
                )
            client.close()
        return Outcome(failure=failure)

    def _disconnect(self) -> None:
        if self._current is not None:
            self._current[1].close()
            self._current = None


def _defect(error: Exception) -> Failure:
    return Failure("defect", f"{type(error).__name__}: {error}"[:300])
