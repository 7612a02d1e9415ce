"""vLLM, versions 0.8.5 to 0.33: how its processes look, what its flags say, and how to read its counters.

Counters come from a filtered page (`/metrics/?name[]=...`; the slash matters: without it another route
answers, which ignores the filter). It costs the server 1 ms where the whole page costs 8: 0.1 % and 0.8 %
of a core at 1 Hz (docs/costs.md). Several API servers share their counters through files, and then a filtered
page comes back empty: the whole page is read instead, every 10 s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gpuidle.agent.model import EngineLimits, Parallelism, Problem, Role
from gpuidle.collectors.engines.flags import Flags, parse_flags, parse_simple_yaml
from gpuidle.collectors.engines.rule import (
    EngineKind,
    EngineRule,
    Identity,
    ReadText,
    Scrape,
    Settings,
)
from gpuidle.collectors.engines.vllm_page import (
    ALL,
    FAST,
    QUICK,
    SLEEP,
    SLOW,
    page_limits,
    problem,
    read_counters,
)
from gpuidle.collectors.support.exposition import ExpositionError, Page, parse_page
from gpuidle.collectors.support.http import Answer, HttpClient, HttpError
from gpuidle.collectors.support.text import clean

ENGINE = "vllm"

# --------------------------------------------------------------------------------------------------------
# Processes and flags

_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")
_PYTHON_OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_TITLE = re.compile(r"\S*::(EngineCore|Worker|APIServer|DPCoordinator)")
_FRONT_END = re.compile(r"\S*::APIServer")
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
    "-asc": "api-server-count",
    "-sc": "speculative-config",
    "-r": "node-rank",
    "-n": "nnodes",
}
_SWITCHES = {
    "enforce-eager",
    "headless",
    "trust-remote-code",
    "async-scheduling",
    "calculate-kv-scales",
    "data-parallel-hybrid-lb",
    "data-parallel-external-lb",
    "grpc",
}
_LISTS = {"served-model-name", "api-key", "lora-modules", "middleware", "allowed-origins"}


def _basename(path: str) -> str:
    return path.rpartition("/")[2]


def _server_words(argv: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Return what starts the server ("serve" or a module's name) and the words after it."""
    at = 0
    if argv and _PYTHON.fullmatch(_basename(argv[0])):
        at = 1
        while at < len(argv) and argv[at].startswith("-") and argv[at] != "-m":
            at += 2 if argv[at] in _PYTHON_OPTIONS_WITH_VALUE else 1
    rest = argv[at:]
    if len(rest) > 1 and at and rest[0] == "-m":
        module, words = rest[1], rest[2:]
        if module in ("vllm", "vllm.entrypoints.cli.main"):
            return ("serve", words[1:]) if tuple(words[:1]) == ("serve",) else None
        return (module, words) if module.startswith("vllm.entrypoints.") else None
    if not rest:
        return None
    if _basename(rest[0]) == "vllm" and tuple(rest[1:2]) == ("serve",):
        return "serve", rest[2:]
    if at and re.search(r"/vllm/entrypoints/.*\.py$", rest[0]):
        return _basename(rest[0]).removesuffix(".py"), rest[1:]
    return None


def is_root(argv: Sequence[str]) -> bool:
    """Return whether this command line starts a vLLM server."""
    return _server_words(argv) is not None


def settings(argv: Sequence[str], read_text: ReadText) -> Settings:
    """Return what the command line, and the file that `--config` names, say of a server."""
    kind, words = _server_words(argv) or ("", ())
    flags = _with_config_file(parse_flags(words, short=_SHORT, switches=_SWITCHES, lists=_LISTS), read_text)
    model = flags.text("model", "model-tag") or next(iter(flags.positionals), None)
    data_parallel = flags.number("data-parallel-size") or 1
    quantization = flags.text("quantization")
    speculative = any(flags.text(n) for n in ("speculative-config", "speculative-model"))
    return Settings(
        model=model,
        served_model=flags.text("served-model-name") or model,
        config_path=flags.text("hf-config-path"),
        revision=flags.text("revision"),
        download_dir=flags.text("download-dir"),
        host=flags.text("host"),
        port=flags.number("port") or 8000,
        scheme="https" if flags.text("ssl-certfile", "ssl-keyfile") else "http",
        front_ends=flags.number("api-server-count") or 1,
        parallelism=Parallelism(
            tensor=flags.number("tensor-parallel-size") or 1,
            pipeline=flags.number("pipeline-parallel-size") or 1,
            data=data_parallel,
            expert=bool(flags.switch("enable-expert-parallel")),
        ),
        limits=EngineLimits(
            max_batched_tokens=flags.number("max-num-batched-tokens"),
            max_sequences=flags.number("max-num-seqs"),
            kv_block_tokens=flags.number("block-size"),
            dtype=flags.text("dtype") or "auto",
            kv_dtype=flags.text("kv-cache-dtype") or "auto",
            quantization=quantization,
            speculative=speculative,
            async_scheduling=_async_scheduling(flags),
        ),
        role=_role(flags.text("kv-transfer-config")),
        blind=_blind(kind, flags),
        problems=_remarks(flags),
    )


def _with_config_file(flags: Flags, read_text: ReadText) -> Flags:
    name = flags.text("config")
    text = read_text(name) if name else None
    if text is None:
        return flags
    return Flags({**parse_simple_yaml(text), **flags.options}, flags.positionals)


_DRAFTED_ON_THE_HOST = ("ngram", "suffix", "medusa", "mlp_speculator")
"""Speculation that all versions schedule synchronously."""


def _async_scheduling(flags: Flags) -> bool | None:
    """Return what the flags say; None: it is up to the version (`_overlaps`)."""
    told = flags.switch("async-scheduling")
    if told is not None:
        return told
    drafts = flags.text("speculative-config")  # JSON, or the method where it is given as a nested option
    alone = {drafts, _json_member(drafts, "method")} & set(_DRAFTED_ON_THE_HOST)
    return False if alone else None


def _overlaps(version: str | None) -> bool | None:
    """Return False for versions that schedule synchronously where no flag says otherwise; None: not known.

    Since 0.14 they schedule ahead, unless something stands against it that flags do not show; builds for CPUs
    ("+cpu") never do.
    """
    numbers = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", version or "")
    if version is None or numbers is None:
        return None
    # Builds without a tag call themselves 0.1.dev: they may be any version.
    before = (0, 8) <= (int(numbers[1]), int(numbers[2])) < (0, 14)
    return False if before or version.endswith("+cpu") else None


def _role(transfer: str | None) -> Role:
    """Return the role of a server in a disaggregated pair; "kv_both" and anything unknown is unified."""
    kv_role = _json_member(transfer, "kv_role")
    return "prefill" if kv_role == "kv_producer" else "decode" if kv_role == "kv_consumer" else "unified"


def _json_member(text: str | None, key: str) -> str | None:
    try:
        told = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return _member(told, key)


def _blind(kind: str, flags: Flags) -> Problem | None:
    if flags.switch("headless") or (flags.number("node-rank") or 0) > 0:
        return problem(
            "no_api_process",
            "this node of a multi-node engine has no API process, its counters are on the head node",
            "run gpuidle on the head node too; here only GPU counters tell something",
        )
    if kind.endswith("run_batch"):
        return problem("no_api_process", "an offline batch has no API process", "use `vllm serve`")
    if flags.text("uds"):
        return problem(
            "no_tcp_port",
            "the server listens on a unix socket only",
            "start it with --host and --port instead of --uds",
        )
    if flags.switch("grpc") or kind.endswith("grpc_server"):
        return problem("no_http", "the server speaks gRPC only", "start it without gRPC")
    if flags.switch("disable-log-stats"):
        return problem(
            "stats_disabled",
            "the server was started with --disable-log-stats and counts nothing",
            "start it without --disable-log-stats",
        )
    return None


def _remarks(flags: Flags) -> tuple[Problem, ...]:
    if not flags.text("hf-overrides"):
        return ()
    return (
        problem(
            "model_overridden",
            "--hf-overrides changes the model's configuration; the one on disk is used",
            "FLOPs may be off where an override changes a size",
        ),
    )


# --------------------------------------------------------------------------------------------------------
# The endpoint

_SERIES_LIMIT = 5000
_SLOW_PERIOD_NS = 10_000_000_000
_QUICK_PERIOD_NS = 450_000_000
"""Who asks more often than that wants short windows, and bears what they cost."""
_PAGE_BYTES = 4 * 1024 * 1024
_JSON_BYTES = 256 * 1024


class VllmAdapter:
    """Reads one vLLM endpoint: a few names at each call, the others and whole pages every 10 s."""

    def __init__(self, client: HttpClient, told: Settings) -> None:
        self._client = client
        self._front_ends = told.front_ends
        self._whole_pages = False
        self._next_slow_ns: int | None = None
        self._asked_ns: int | None = None
        self._asleep: bool | None = None
        self._told_scheduling = told.limits.async_scheduling
        self._version: str | None = None

    def identify(self) -> Identity:
        """Ask /version and /v1/models; what is missing or needs a key is a Problem."""
        version = self._version = _member(self._json("/version"), "version")
        problems: list[Problem] = []
        served = root = None
        try:
            models = self._json("/v1/models")
        except HttpError as error:
            if error.kind != "http_status":
                raise
            problems.append(_no_models(error))
        else:
            data = models.get("data") if isinstance(models, dict) else None
            first = data[0] if isinstance(data, list) and data else None
            served, root = _member(first, "id"), _member(first, "root")
        return Identity(version, served, root, tuple(problems))

    def scrape(self, now_ns: int) -> Scrape | None:
        """Read what is due; None between two whole pages."""
        slow = self._next_slow_ns is None or now_ns >= self._next_slow_ns
        if self._whole_pages and not slow:
            return None
        if slow:
            self._next_slow_ns = now_ns + _SLOW_PERIOD_NS
        quick = self._asked_ns is not None and now_ns - self._asked_ns < _QUICK_PERIOD_NS
        self._asked_ns = now_ns
        if not self._whole_pages:
            answer, page = self._filtered(slow=slow, quick=quick)
            if page.others == 0 and page.samples:
                return self._result(answer, page)
            self._whole_pages = True
            # From here on at most one page in 10 s, also where the switch fell on a fast turn.
            self._next_slow_ns = now_ns + _SLOW_PERIOD_NS
            if page.others and page.samples:
                return self._result(answer, _parse(answer.text, ALL))
        answer = self._client.get("/metrics", max_bytes=_PAGE_BYTES)
        return self._result(answer, _parse(answer.text, ALL))

    def _filtered(self, *, slow: bool, quick: bool) -> tuple[Answer, Page]:
        names = (*FAST, *SLOW) if slow else (*FAST, SLEEP) if self._asleep else FAST
        names = (*names, *QUICK) if quick else names
        try:
            answer = self._client.get("/metrics/?" + "&".join(f"name[]={name}" for name in names))
        except HttpError as error:
            if error.kind not in ("http_status", "redirect"):
                raise
            return Answer("", 0), Page((), 0, 0)
        return answer, _parse(answer.text, frozenset(names))

    def _result(self, answer: Answer, page: Page) -> Scrape:
        counters, problems = read_counters(page, answer.read_ns)
        sleep = {
            s.value == 0.0 for s in page.samples if s.name == SLEEP and s.labels.get("sleep_state") == "awake"
        }
        if sleep:
            self._asleep = all(sleep)
        if self._whole_pages:
            problems = (*problems, _FILTER_REFUSED)
        limits = page_limits(page)
        if self._told_scheduling is None:
            limits["async_scheduling"] = _overlaps(self._version)
        reliable = self._front_ends == 1 or (self._front_ends is None and not self._whole_pages)
        return Scrape(
            read_ns=answer.read_ns,
            counters=counters,
            recognised=bool(page.samples) or "\nvllm:" in answer.text,
            served_model=_served_model(page),
            asleep=self._asleep,
            steps_reliable=reliable,
            limits=limits,
            problems=problems,
        )

    def _json(self, target: str) -> object:
        try:
            return json.loads(self._client.get(target, max_bytes=_JSON_BYTES).text)
        except HttpError as error:
            if error.kind == "http_status" and target == "/version":
                return None
            raise
        except (ValueError, RecursionError):
            return None


def _served_model(page: Page) -> str | None:
    names = {clean(sample.labels.get("model_name", "")) for sample in page.samples} - {""}
    return names.pop() if len(names) == 1 else None


_FILTER_REFUSED = problem(
    "filter_refused",
    "the server does not answer filtered pages (several API servers do not), so that the whole page is "
    "read every 10 s: tokens come in windows of 10 s",
    "start it with --api-server-count 1, and without PROMETHEUS_MULTIPROC_DIR",
)


def _no_models(error: HttpError) -> Problem:
    if error.status in (401, 403):
        return problem(
            "auth_required",
            "/v1/models needs the server's API key; the model's name is taken from its metrics",
            "give the engine's URL together with a key",
        )
    return problem("no_model_list", str(error), "the model is taken from the command line")


def _member(value: object, key: str) -> str | None:
    found = value.get(key) if isinstance(value, dict) else None
    return clean(found) or None if isinstance(found, str) else None


def _parse(text: str, names: frozenset[str]) -> Page:
    try:
        return parse_page(text, names, max_series=_SERIES_LIMIT)
    except ExpositionError as error:
        raise HttpError("too_large", str(error)) from error


KIND = EngineKind(
    rule=EngineRule(
        engine=ENGINE,
        is_root=is_root,
        is_part=lambda title: _TITLE.match(title) is not None,
        is_front_end=lambda title: _FRONT_END.match(title) is not None,
        settings=settings,
    ),
    connect=VllmAdapter,
)
