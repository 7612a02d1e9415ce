"""ForwardPassMetrics: one ZMQ message a forward pass, from SGLang and from Dynamo's instrumented vLLM.

SGLang sends them with `--enable-forward-pass-metrics`, Dynamo's vLLM with its instrumented scheduler. A
message has three parts: topic, number (8 bytes, big-endian), and MessagePack, either a map by field names or
a list in the order of `_FIELDS`. It names no time, so that a step ends when its message arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpuidle.agent.model import StepSeries, column
from gpuidle.collectors.support.text import clean

SOURCE = "fpm"
VERSION = 1
_FIELDS = (
    "version",
    "worker_id",
    "dp_rank",
    "counter_id",
    "wall_time",
    "scheduled_requests",
    "queued_requests",
)
_SCHEDULED = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "var_prefill_length",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
    "var_decode_kv_tokens",
)
_MESSAGE_LIMIT = 64 * 1024
_MOST_WAITING = 50_000
_LONGEST_STEP_S = 600.0
_LARGEST = 1 << 40


@dataclass(frozen=True)
class FpmEndpoint:
    """Where ForwardPassMetrics of an engine are published, named by hand."""

    endpoint: str
    engine: str | None = None
    """Id or model of the engine; None: the only one."""


class FpmError(ValueError):
    """A message that is not one of a forward pass; the text says why."""


@dataclass(frozen=True)
class Pass:
    """One forward pass, as its message tells it."""

    rank: str
    wall_s: float
    """How long it took; SGLang means the GPU's time, Dynamo the time since the pass before."""
    prefill_tokens: int
    decode_tokens: int
    """One a sequence: rows of speculation are not told."""
    sequences: int
    kv_tokens: int


def decode_pass(payload: bytes) -> Pass | None:
    """Return the pass of a message; None for a heartbeat, which has no scheduled request.

    Raises:
        FpmError: it is none, or of another version.
    """
    try:
        told = _by_name(msgspec.msgpack.decode(payload), _FIELDS)
        version = told.get("version", VERSION)
        if version != VERSION:
            raise FpmError(f"version {version!r}, this gpuidle reads {VERSION}")
        scheduled = _by_name(told["scheduled_requests"], _SCHEDULED)
        wall_s = told["wall_time"]
        if isinstance(wall_s, bool) or not isinstance(wall_s, (int, float)):
            raise FpmError(f"a wall time of {type(wall_s).__name__}")
        if not 0 <= wall_s <= _LONGEST_STEP_S:
            raise FpmError(f"a wall time of {wall_s} s")
        prompts, decodes = (_count(scheduled, f"num_{kind}_requests") for kind in ("prefill", "decode"))
        if prompts + decodes == 0:
            return None
        return Pass(
            rank=str(_count(told, "dp_rank")),
            wall_s=float(wall_s),
            prefill_tokens=_count(scheduled, "sum_prefill_tokens"),
            decode_tokens=decodes,
            sequences=prompts + decodes,
            kv_tokens=_count(scheduled, "sum_prefill_kv_tokens") + _count(scheduled, "sum_decode_kv_tokens"),
        )
    except (msgspec.DecodeError, KeyError, RecursionError, UnicodeDecodeError) as error:
        raise FpmError(f"{type(error).__name__}: {error}") from error


def _by_name(value: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and len(value) >= len(names) - 1:
        return dict(zip(names, value, strict=False))
    raise FpmError("neither a map nor a list of its fields")


def _count(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise FpmError(f"{name} is {value!r}"[:200])
    return value


class _Row(NamedTuple):
    start_ns: int
    end_ns: int
    prefill_tokens: int
    decode_tokens: int
    sequences: int
    kv_tokens: int


@dataclass(frozen=True)
class Taken:
    """What came since the last call."""

    series: tuple[StepSeries, ...]
    duplicates: int
    refused: int
    """Messages that were none of a forward pass."""
    last_refusal: str


class PassFollower:
    """Turns the messages of one publisher into rows, and counts what is missing. It knows no socket."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._rows: dict[str, list[_Row]] = {}
        self._last_end_ns: dict[str, int] = {}
        self._lost = self._duplicates = self._refused = 0
        self._last_refusal = ""
        self._lock = threading.Lock()

    def take_message(self, parts: list[bytes], now_ns: int) -> None:
        """Take one message that arrived at `now_ns`; a bad one is counted and left out."""
        with self._lock:
            if len(parts) != 3 or len(parts[1]) != 8:
                self._refuse(f"a message of {len(parts)} parts")
                return
            if self._is_duplicate(int.from_bytes(parts[1], "big")):
                return
            try:
                one = decode_pass(parts[2])
            except FpmError as error:
                self._refuse(str(error))
                return
            if one is None:
                return
            rows = self._rows.setdefault(one.rank, [])
            start_ns = max(now_ns - round(one.wall_s * 1e9), self._last_end_ns.get(one.rank, 0))
            self._last_end_ns[one.rank] = now_ns
            rows.append(
                _Row(start_ns, now_ns, one.prefill_tokens, one.decode_tokens, one.sequences, one.kv_tokens)
            )
            if len(rows) > _MOST_WAITING:
                del rows[0]
                self._lost += 1

    def _refuse(self, why: str) -> None:
        self._refused += 1
        self._last_refusal = clean(why, 200)

    def _is_duplicate(self, number: int) -> bool:
        """Follow the publisher's numbers: a gap is lost, the last number again is a duplicate.

        A number further back is a publisher that began anew.
        """
        if self._next is not None:
            if number == self._next - 1:
                self._duplicates += 1
                return True
            if number > self._next:
                self._lost += number - self._next
        self._next = number + 1
        return False

    def take(self, engine_id: str) -> Taken:
        """Return what came since the last call, a series for each rank; losses are with the first."""
        with self._lock:
            rows, self._rows = self._rows, {}
            lost, duplicates, refused = self._lost, self._duplicates, self._refused
            self._lost = self._duplicates = self._refused = 0
        if lost and not rows:
            rows = {"0": []}
        made = []
        for rank in sorted(rows):
            made.append(_series(engine_id, rank, rows[rank], lost))
            lost = 0
        return Taken(tuple(made), duplicates, refused, self._last_refusal)


def _series(engine_id: str, rank: str, rows: list[_Row], lost: int) -> StepSeries:
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(_Row._fields))
    columns = {name: column(table[:, at], "i8") for at, name in enumerate(_Row._fields)}
    return StepSeries(engine_id=engine_id, source=SOURCE, exact=True, lost=lost, rank=rank, **columns)


class Subscriber:
    """The thread that listens to one publisher."""

    def __init__(self, endpoint: str) -> None:
        """Connect; ZMQ keeps trying by itself.

        Args:
            endpoint: such as "tcp://127.0.0.1:20380" or "ipc:///tmp/...".

        Raises:
            ImportError: pyzmq is not installed (the extra `fpm`).
            ValueError: the endpoint is none.
        """
        import zmq

        self.endpoint = endpoint
        self.follower = PassFollower()
        self._again = zmq.Again
        self._gone = zmq.ZMQError
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, 200)
        self._socket.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_LIMIT)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ValueError(f"{endpoint} is no ZMQ endpoint: {error}") from error
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuidle-fpm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stopped.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    parts = self._socket.recv_multipart()
                except self._again:
                    continue
                self.follower.take_message(parts, time.monotonic_ns())
        except self._gone:
            pass
        finally:
            self._socket.close()
            self._context.term()
