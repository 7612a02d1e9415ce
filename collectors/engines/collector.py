"""The engines of the node as one collector: finds them, keeps a session to each, reads them each tick."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from gpuidle.agent.model import EngineReading, Problem, Reading
from gpuidle.collectors.discovery.engines import Discovered, FoundEngine, find_engines, forbidden
from gpuidle.collectors.discovery.pods import Pod, pod_of
from gpuidle.collectors.discovery.processes import ProcessTable
from gpuidle.collectors.engines.identity import engine_id, is_loopback, port_of
from gpuidle.collectors.engines.rule import EngineKind, Identity, Settings
from gpuidle.collectors.engines.session import Candidate, ModelConfig, Session
from gpuidle.collectors.engines.track import NamedEndpoint, Track, reading_of
from gpuidle.collectors.modelfiles.config_json import (
    ConfigError,
    ConfigForbiddenError,
    read_model_config,
)
from gpuidle.collectors.support.http import parse_base_url

_DISCOVERY_NS = 5_000_000_000
_GPU_WAIT_NS = 10_000_000_000

GpuProcesses = Mapping[str, tuple[int, ...]]
"""PIDs by hw_id."""


class EnginesCollector:
    """Implements `gpuidle.agent.ports.Collector` for all engines of the node."""

    name = "engines"

    def __init__(
        self,
        kinds: Sequence[EngineKind],
        *,
        proc_root: str = "/proc",
        endpoints: Sequence[NamedEndpoint] = (),
        gpu_processes: Callable[[], GpuProcesses | None] = dict,
        discover: bool = True,
        scrape_period_s: float = 1.0,
        timeout_s: float = 1.0,
        patience_s: float = 0.3,
    ) -> None:
        """Make a collector; nothing is read before the first `read`.

        Args:
            kinds: the engines that can be recognised, as in `collectors.table.ENGINES`.
            proc_root: where the processes are read from.
            endpoints: engines named by hand.
            gpu_processes: PIDs by hw_id as the driver gave them last; None where it was not read yet. Engines
                are not reported until it was, for 10 s at most: their names are made of their GPUs.
            discover: whether to look for engines among the processes.
            scrape_period_s: no engine is asked more often.
            timeout_s: the longest time for one request.
            patience_s: how long `read` waits for answers; a later one is reported in the next reading.

        Raises:
            HttpError: (bad_url) an endpoint's URL is none.
        """
        for endpoint in endpoints:
            parse_base_url(endpoint.url)
        self._kinds = tuple(kinds)
        self._table = ProcessTable(proc_root)
        self._endpoints = tuple(endpoints)
        self._gpu_processes = gpu_processes
        self._gpus: GpuProcesses = {}
        self._discover = discover
        # Ticks jitter: one that comes a little early still counts as the next period.
        self._period_ns = int(scrape_period_s * 0.8e9)
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._tracks: dict[object, Track] = {}
        self._first_ns: int | None = None
        self._next_discovery_ns = 0
        self._missing_pids: frozenset[int] = frozenset()
        self._node_problems: tuple[Problem, ...] = ()
        self._named_models: dict[str, str | None] = {}
        self._last_ids: dict[tuple[str, str | None, int | None], str] = {}

    def read(self, now_ns: int) -> Reading:
        """Find engines every 5 s, and at once after a failure; ask each at most once a period."""
        if self._first_ns is None:
            self._first_ns = self._next_discovery_ns = now_ns
        gpus = self._gpu_processes()
        if gpus is None and now_ns - self._first_ns < _GPU_WAIT_NS:
            return Reading()
        if self._is_discovery_due(now_ns, gpus or {}):
            self._next_discovery_ns = now_ns + _DISCOVERY_NS
            self._rediscover(gpus or {})
        self._ask(now_ns)
        self._name_tracks()
        readings: list[EngineReading] = []
        texts: dict[str, str] = {}
        problems = [*self._node_problems]
        for track in self._tracks.values():
            reading, faults = reading_of(track, now_ns)
            problems += faults
            if reading is not None:
                readings.append(reading)
                if track.model_key is not None and track.config.text is not None:
                    texts[track.model_key] = track.config.text
        return Reading(engines=tuple(readings), texts=texts, problems=tuple(problems))

    def close(self) -> None:
        """End all sessions."""
        for track in self._tracks.values():
            track.close()
        self._tracks = {}

    def _is_discovery_due(self, now_ns: int, gpus: GpuProcesses) -> bool:
        if now_ns >= self._next_discovery_ns or gpus != self._gpus:
            return True
        return any(
            t.found is not None and not self._table.is_alive(t.found.root) for t in self._tracks.values()
        )

    def _ask(self, now_ns: int) -> None:
        """Let the sessions that are due take a turn, and take what is finished."""
        live = [(track, track.session) for track in self._tracks.values() if track.session is not None]
        started = {id(track) for track, session in live if session.start(now_ns, self._period_ns)}
        deadline = time.monotonic() + self._patience_s
        for track, session in live:
            wait_s = max(0.0, deadline - time.monotonic()) if id(track) in started else 0.0
            track.learn(session.take(wait_s))
            if track.failure is not None and track.fresh:
                self._next_discovery_ns = min(self._next_discovery_ns, now_ns + 1)
            if track.model is not None and track.named is not None:
                self._named_models[track.named.url] = track.model

    def _rediscover(self, gpus: GpuProcesses) -> None:
        self._gpus = gpus
        found: tuple[FoundEngine, ...] = ()
        self._node_problems = ()
        if self._discover:
            watched = [pid for t in self._tracks.values() if t.found for pid in t.found.pids]
            try:
                self._table.refresh([*watched, *(pid for pids in gpus.values() for pid in pids)])
            except OSError as error:
                self._node_problems = (_no_proc(self._table, error),)
            else:
                discovered = find_engines(self._table, self._kinds, gpus, self._answering())
                found = discovered.engines
                self._node_problems = _namespace_problems(discovered, self._missing_pids)
                self._missing_pids = discovered.missing_pids
        owners = {endpoint: self._owner(endpoint, found) for endpoint in self._endpoints}
        old, self._tracks = self._tracks, {}
        for engine in found:
            named = next((e for e, owner in owners.items() if owner is engine), None)
            self._keep(engine.key, old, engine, named)
        for endpoint, owner in owners.items():
            if owner is None:
                self._keep(endpoint.url, old, None, endpoint)
        for track in old.values():
            track.close()

    def _answering(self) -> dict[tuple[int, int], FoundEngine]:
        """Return the engines whose sockets are known well enough."""
        return {
            track.found.key: track.found
            for track in self._tracks.values()
            if track.found is not None and track.served and track.failure is None
        }

    def _owner(self, endpoint: NamedEndpoint, found: Sequence[FoundEngine]) -> FoundEngine | None:
        """Return the engine among the processes that an endpoint named by hand belongs to, if it is sure."""
        same = [e for e in found if endpoint.url.rstrip("/") in e.urls]
        if not same and is_loopback(endpoint.url):
            port = port_of(endpoint.url)
            same = [e for e in found if any(is_loopback(url) and port_of(url) == port for url in e.urls)]
        if same:
            return same[0]
        # An engine in a container may be asked at another address: the only one with this model must be it.
        model = self._named_models.get(endpoint.url)
        far = [e for e in found if _is_far(e) and model and e.settings.model == model]
        twins = [url for url, told in self._named_models.items() if told == model]
        return far[0] if len(far) == 1 and len(twins) == 1 else None

    def _keep(
        self, key: object, old: dict[object, Track], found: FoundEngine | None, named: NamedEndpoint | None
    ) -> None:
        """Carry a track over, or begin one; its session goes on while the places to ask stay the same."""
        track = old.pop(key, None)
        if track is None:
            track = Track(pod=Pod() if found is None else pod_of(self._table, found.root.pid))
        track.found, track.named = found, named
        self._tracks[key] = track
        candidates = self._candidates(found, named)
        if track.session is not None and track.session.candidates == candidates:
            return
        track.close()
        if candidates:
            track.session = Session(
                candidates,
                timeout_s=self._timeout_s,
                read_config=lambda identity: self._read_config(found, identity),
            )

    def _candidates(self, found: FoundEngine | None, named: NamedEndpoint | None) -> tuple[Candidate, ...]:
        if found is not None:
            if found.settings.blind is not None:
                return ()
            urls = (named.url,) if named is not None else found.urls
            bearer = named.bearer if named is not None else None
            return tuple(Candidate(found.kind, url, found.settings, bearer) for url in urls)
        if named is None:
            return ()
        return tuple(Candidate(kind, named.url, Settings(), named.bearer) for kind in self._kinds)

    def _read_config(self, found: FoundEngine | None, identity: Identity) -> ModelConfig:
        """Read the model's configuration through the serving process's own folders."""
        if found is None:
            return ModelConfig(problem=_no_config("the engine's process is not known on this node"))
        told, pid = found.settings, found.root.pid
        model = told.config_path or identity.model or told.model
        if model is None:
            return ModelConfig(problem=_no_config("neither the engine nor its command line names a model"))
        try:
            text = read_model_config(
                model,
                root=self._table.folder(pid, "root"),
                cwd=self._table.working_folder(pid),
                environ=self._table.environ(pid),
                revision=told.revision,
                download_dir=told.download_dir,
            )
        except (PermissionError, ConfigForbiddenError):
            return ModelConfig(problem=forbidden(found.kind, found.root, "environment and model files"))
        except (OSError, ConfigError) as error:
            return ModelConfig(problem=_no_config(str(error)[:400]))
        return ModelConfig(text=text)

    def _name_tracks(self) -> None:
        """Give each track its name; it is fixed once the engine answered, when all its GPUs are known."""
        taken = {t.engine_id for t in self._tracks.values() if t.pinned and t.engine_id is not None}
        loose = [t for t in self._tracks.values() if not t.pinned]
        for track in sorted(loose, key=lambda t: t.port or 0):
            kind = track.kind
            if kind is None:
                continue
            engine = kind.rule.engine
            past_key = (engine, track.model, track.port)
            past = self._last_ids.get(past_key)
            label = track.named.name or "" if track.named is not None else ""
            if not track.served and past is not None and past not in taken:
                track.engine_id = past
            elif track.found is not None:
                track.engine_id = engine_id(engine, track.model, track.found.hw_ids, taken, label)
            elif track.named is not None:
                place = track.named.name or track.named.url
                track.engine_id = engine_id(engine, track.model, (place,), taken, label)
            track.pinned = track.served
            if track.engine_id is not None:
                taken.add(track.engine_id)
                if track.pinned and track.found is not None:
                    self._last_ids[past_key] = track.engine_id


def _no_config(message: str) -> Problem:
    return Problem(
        source="discovery",
        kind="no_model_config",
        message=f"the model's configuration is not known: {message}",
        remedy="tokens and phases are not affected; FLOPs need a config.json that gpuidle may read",
    )


def _no_proc(table: ProcessTable, error: OSError) -> Problem:
    return Problem(
        source="discovery",
        kind="no_proc",
        message=f"no processes can be read under {table.root}: {error}",
        remedy="mount the proc file system there, or name engines with --engine-url",
    )


def _is_far(found: FoundEngine) -> bool:
    """Return whether what listens is not on this machine's loopback."""
    return found.unreachable is not None or (
        bool(found.urls) and not any(is_loopback(url) for url in found.urls)
    )


def _namespace_problems(discovered: Discovered, missing_before: frozenset[int]) -> tuple[Problem, ...]:
    """Say why GPU processes are not among ours. One that is gone since the driver was asked is no news."""
    if discovered.foreign_namespace:
        return (
            Problem(
                source="discovery",
                kind="foreign_pid_namespace",
                message="the driver's processes cannot be matched with those seen here: gpuidle runs in a "
                "PID namespace of its own",
                remedy="run gpuidle with the host's PIDs (hostPID: true, docker run --pid=host)",
            ),
        )
    hidden = discovered.missing_pids & missing_before
    if not hidden:
        return ()
    return (
        Problem(
            source="discovery",
            kind="hidden_process",
            message=f"GPU processes are not to be seen: {', '.join(str(pid) for pid in sorted(hidden)[:8])}",
            remedy="the proc file system may be mounted with hidepid: run gpuidle in the group it allows",
        ),
    )
