"""What one kind of engine brings along: a rule to recognise its processes, and a way to read its endpoint.

A new engine is one file beside this one that makes an `EngineKind`, and one row in `collectors/table.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpuidle.agent.model import EngineCounters, EngineLimits, Parallelism, Problem, Role
from gpuidle.collectors.support.http import HttpClient

ReadText = Callable[[str], "str | None"]
"""Reads a small text file by the path that the engine's process knows; None where it cannot."""


@dataclass(frozen=True)
class Settings:
    """What an engine's command line tells. None: it does not tell, and the default depends on more."""

    model: str | None = None
    """A folder or a hub id, as it was given."""
    served_model: str | None = None
    config_path: str | None = None
    """A folder or hub id for the configuration, where it is not the model's own."""
    revision: str | None = None
    download_dir: str | None = None
    host: str | None = None
    port: int | None = None
    scheme: str = "http"
    front_ends: int | None = None
    """Processes that answer on the endpoint, each counting its own share of a step."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    limits: EngineLimits = field(default_factory=EngineLimits)
    role: Role = "unified"
    blind: Problem | None = None
    """Why no counters can come from this process, ever."""
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class EngineRule:
    """How processes of one engine look. The functions are pure."""

    engine: str
    is_root: Callable[[Sequence[str]], bool]
    """Whether this argument vector starts an engine."""
    is_part: Callable[[str], bool]
    """Whether this process title is one that the engine gives to its children."""
    is_front_end: Callable[[str], bool]
    """Whether this title is that of a child which answers on the engine's port."""
    settings: Callable[[Sequence[str], ReadText], Settings]
    """From the argument vector of a root."""


@dataclass(frozen=True)
class Identity:
    """What an endpoint says of itself; None: it does not say."""

    version: str | None = None
    served_model: str | None = None
    model: str | None = None
    """A folder or a hub id."""
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Scrape:
    """One answer of a metrics endpoint."""

    read_ns: int
    counters: tuple[EngineCounters, ...] | None
    """One row a core; None: the page does not tell."""
    recognised: bool
    """Whether the page is one of this engine at all."""
    served_model: str | None = None
    """The served name as the page's labels have it; None: they have none, or several."""
    asleep: bool | None = None
    steps_reliable: bool = True
    limits: Mapping[str, object] = field(default_factory=dict)
    """Fields of EngineLimits that the page tells."""
    problems: tuple[Problem, ...] = ()


class EngineAdapter(Protocol):
    """Reads one engine's endpoint, blocking, always from the same thread."""

    def identify(self) -> Identity:
        """Ask for version and model.

        Raises:
            HttpError: nobody answers, or what answers is no such engine.
        """
        ...

    def scrape(self, now_ns: int) -> Scrape | None:
        """Read the counters; None where it is too early to ask again (`now_ns` is CLOCK_MONOTONIC).

        Raises:
            HttpError: no usable answer.
        """
        ...


@dataclass(frozen=True)
class EngineKind:
    """One row of the table of engines."""

    rule: EngineRule
    connect: Callable[[HttpClient, Settings], EngineAdapter]
