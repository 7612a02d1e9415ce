"""The vLLM plugin: writes one record a step into a ring in shared memory. Runs inside the engine.

Loaded through the entry point group `vllm.general_plugins`; does nothing unless GPUIDLE_STEPS=1. This module
imports the standard library only, so that `pip install --no-deps gpuidle` into the engine's environment is
enough. It also is the one place where the layout of the ring is laid down: the reader imports it.

Rules, since it runs in somebody else's process: it never waits, it never raises into the engine, it keeps no
reference to the engine's objects after a step, and after `MOST_FAULTS` faults it writes nothing any more.

The ring is a file of `HEADER_BYTES` + capacity x `RECORD_BYTES`, all little-endian. The header's `committed`
counts records ever written; record i lies in slot i mod capacity, holds i itself and ends in a checksum, so
that a reader sees a torn or overwritten record whatever the processor's memory order. The writer holds an
exclusive flock as long as it lives: a ring without it is stale, whatever PID namespace it came from.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import inspect
import itertools
import logging
import mmap
import os
import stat
import struct
import sys
import time
from collections.abc import Iterable
from multiprocessing import util
from typing import Any

MAGIC = b"GPUIDLE\x01"
LAYOUT = 1
HEADER_BYTES = 4096
HEADER = struct.Struct("<8sIIIIqqqq32s")
"""magic, layout, header bytes, record bytes, capacity, PID (of the writer's own namespace), created_ns
(CLOCK_MONOTONIC), data-parallel rank, number of the scheduler in its process, version of the engine."""
COMMITTED_AT = 256
FAULTS_AT = 264
_COMMITTED_WORD, _FAULTS_WORD = COMMITTED_AT // 8, FAULTS_AT // 8
COUNTER = struct.Struct("<Q")

FIELDS = (
    "index",
    "submit_ns",
    "end_ns",
    "prefill_tokens",
    "decode_tokens",
    "delivered_tokens",
    "sequences",
    "kv_tokens",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "recomputed_tokens",
    "resumed_tokens",
)
"""Of a record, int64 each; then comes `checksum` of them.

`resumed_tokens` are those of `prefill_tokens` that belong to requests with outputs: the engine's own log
counts them among its generation tokens.
"""
RECORD = struct.Struct("<14q")
RECORD_BYTES = RECORD.size
CAPACITY = 16384
"""Records: 1.8 MiB, 16 s of an engine that makes 1,000 steps a second."""

checksum = hash
"""Of the tuple of a record's fields: CPython's, from 3.8 on the same on every 64-bit machine, and a third of
the time of packing the fields and taking their CRC-32."""

MOST_FAULTS = 100
"""Steps that could not be recorded, after which nothing is recorded any more."""
_MOST_OPEN_STEPS = 64
_LOGGER = logging.getLogger("gpuidle.steps")
_RECORDER = "_gpuidle_steps"
_WRAPPED = "_gpuidle_wrapped"
_NOT_GIVEN = object()
_numbers = itertools.count()
_pack_record = RECORD.pack_into
_monotonic_ns = time.monotonic_ns


# --------------------------------------------------------------------------------------------------------
# The ring


def folder_of(environ: Any, uid: int) -> str:
    """Return the private folder of rings: GPUIDLE_STEPS_DIR, else /dev/shm, else XDG_RUNTIME_DIR."""
    base = environ.get("GPUIDLE_STEPS_DIR")
    if not base:
        base = "/dev/shm" if os.path.isdir("/dev/shm") else environ.get("XDG_RUNTIME_DIR", "/run")  # noqa: PTH112, S108
    return f"{base}/gpuidle-{uid}"


def _private_folder(path: str) -> None:
    """Make the folder, or make sure that an existing one is nobody else's.

    Raises:
        OSError: it cannot be made, is a link, or others may write to it.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)  # noqa: PTH102
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{path} is not a private folder of user {os.geteuid()}")


def remove_stale(folder: str) -> None:
    """Remove the rings of this user whose writer is gone (killed: it could not do so itself)."""
    for name in os.listdir(folder):  # noqa: PTH208
        path = f"{folder}/{name}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.pread(descriptor, len(MAGIC), 0) == MAGIC:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)  # noqa: PTH108
        except OSError:
            continue
        finally:
            os.close(descriptor)


class Ring:
    """The writing end."""

    def __init__(self, folder: str, rank: int, version: str, capacity: int = CAPACITY) -> None:
        """Make the file, all of its pages at once: a full tmpfs must fail here and not kill the engine later.

        Raises:
            OSError: it cannot be made.
        """
        _private_folder(folder)
        remove_stale(folder)
        number = next(_numbers)
        self.path = f"{folder}/steps-{os.getpid()}-{number}-{time.monotonic_ns()}.ring"
        self.capacity = capacity
        size = HEADER_BYTES + capacity * RECORD_BYTES
        draft = f"{self.path}.new"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(draft, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._descriptor, 0, size)
            # With its pages in place, none of the first steps waits for one.
            self._map = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._map[: HEADER.size] = HEADER.pack(
                MAGIC, LAYOUT, HEADER_BYTES, RECORD_BYTES, capacity, os.getpid(), time.monotonic_ns(), rank,
                number, version.encode()[:31],
            )  # fmt: skip
            os.rename(draft, self.path)  # noqa: PTH104
        except BaseException:
            os.close(self._descriptor)
            os.unlink(draft)  # noqa: PTH108
            raise
        self._words = memoryview(self._map).cast("q")
        self._committed = 0
        self._faults = 0

    def write(
        self, submit_ns: int, end_ns: int, prefill: int, decode: int, delivered: int, sequences: int, kv: int,
        drafts: int, accepted: int, preemptions: int, again: int, resumed: int,
    ) -> None:  # fmt: skip
        """Write one record: the FIELDS after `index`, spelt out since `*fields` takes 0.3 us more."""
        index = self._committed
        _pack_record(
            self._map, HEADER_BYTES + index % self.capacity * RECORD_BYTES,
            index, submit_ns, end_ns, prefill, decode, delivered, sequences, kv,
            drafts, accepted, preemptions, again, resumed,
            checksum((
                index, submit_ns, end_ns, prefill, decode, delivered, sequences, kv,
                drafts, accepted, preemptions, again, resumed,
            )),
        )  # fmt: skip
        self._committed = index = index + 1
        self._words[_COMMITTED_WORD] = index

    def fault(self, steps: int = 1) -> None:
        """Count steps that could not be recorded."""
        self._faults += steps
        self._words[_FAULTS_WORD] = self._faults

    @property
    def broken(self) -> bool:
        """Whether there were so many faults that it is better to stop."""
        return self._faults >= MOST_FAULTS

    def close(self) -> None:
        """Remove the file's name; a reader that has it open still reads the end."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # noqa: PTH108


# --------------------------------------------------------------------------------------------------------
# What a step was


class Recorder:
    """Follows one scheduler: what was scheduled, and what came of it.

    What is called at each step is written for speed. Of a step of decodes, which nearly every step is, only
    `finished` is called; `_record_schedule` notes in line that it began.
    """

    __slots__ = ("furthest", "legacy", "ring", "running", "steps")

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.steps: dict[int, tuple[int, ...]] = {}
        """Steps in flight by the identity of their schedule. Of decodes alone only time and drafts: the rest
        can be read when it ends."""
        self.furthest: dict[str, int] = {}
        """How far prompts under way were computed: what is computed again after a preemption."""
        self.legacy = True
        """Whether the engine does not name what it preempted, or count outputs of requests (before 0.12)."""
        self.running = 0
        """Requests that ran before the scheduler was asked; counted for such an engine only."""

    def examine(self, scheduler: Any, output: Any, total: int, drafts: int) -> tuple[int, ...]:
        """Return what is known of any step at its submission.

        A request is in its prompt until it has an output token, as the engine's own log has it. What a
        preempted request with outputs computes again counts as prefill too, and as `resumed`.
        """
        submit_ns = _monotonic_ns()
        furthest = self.furthest
        if furthest and output.finished_req_ids:
            for gone in output.finished_req_ids:
                furthest.pop(gone, None)
        scheduled, requests = output.num_scheduled_tokens, scheduler.requests
        cached, fresh = output.scheduled_cached_reqs, output.scheduled_new_reqs
        preemptions = None
        if self.legacy:
            ids, begins, outputs, preemptions = self._examine_legacy(scheduler, output)
        else:
            ids, begins, outputs = cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens
        if preemptions is None:
            preemptions = len(output.preempted_req_ids)
        prefill = again = resumed = kv = left = prompts = 0
        if ids:
            kv, left = sum(begins), outputs.count(0)
            prompts = left
        at = -1
        while left:
            left -= 1
            at = outputs.index(0, at + 1)
            name, begin = ids[at], begins[at]
            tokens = scheduled[name]
            prefill += tokens
            end = begin + tokens
            before = furthest.get(name, 0)
            if before > begin:
                again += (before if before < end else end) - begin  # noqa: FURB136 (a third of the time of min)
            if end >= requests[name].num_prompt_tokens:
                furthest.pop(name, None)
            elif end > before:
                furthest[name] = end
        for new in fresh:
            name, begin = new.req_id, new.num_computed_tokens
            tokens = scheduled[name]
            kv += begin
            prefill += tokens
            again += self._computed_again(name, requests[name], begin, begin + tokens)
        if total - prefill > len(scheduled) - prompts - len(fresh) + drafts:
            # More rows than decodes and drafts: requests that were preempted after their first token.
            resumed, more = _resumed(output, requests, zip(ids, begins, outputs, strict=True))
            prefill += resumed
            again += more
        return (
            submit_ns, prefill, total - prefill, len(scheduled), kv, drafts, preemptions, again, resumed,
        )  # fmt: skip

    def _examine_legacy(
        self, scheduler: Any, output: Any
    ) -> tuple[list[str], list[int], list[int], int | None]:
        """Return ids, computed and output tokens of cached requests, and preemptions if they are not told."""
        cached = output.scheduled_cached_reqs
        preempted = getattr(output, "preempted_req_ids", None)
        self.legacy = preempted is None or not hasattr(cached, "num_output_tokens")
        ids, begins, outputs, resumptions = _cached(cached, scheduler.requests)
        if preempted is not None:
            return ids, begins, outputs, None
        admitted = len(output.scheduled_new_reqs) + resumptions
        return ids, begins, outputs, max(0, self.running + admitted - len(scheduler.running))

    def _computed_again(self, name: str, request: Any, begin: int, end: int) -> int:
        """Return how many tokens of a prompt's chunk had been computed before; note how far it is now."""
        known = request.num_tokens
        if known > request.num_prompt_tokens:  # it has outputs, of which the last was not computed yet
            before: int = known - 1
        else:
            before = self.furthest.get(name, 0)
            if end >= known:
                self.furthest.pop(name, None)
            elif end > before:
                self.furthest[name] = end
        if before <= begin:
            return 0
        return min(before, end) - begin

    def accepted(self, scheduler: Any, output: Any, sampled: Any) -> int:
        """Count accepted drafts, of requests that are still there: what a sequence made beyond one token.

        Asked before the engine works on the result: it cuts what goes beyond the end of a request.
        """
        tokens = sampled.sampled_token_ids
        if not tokens:
            return 0
        if (
            not scheduler.finished_req_ids and len(self.steps) == 1  # nobody has left
        ) or output.num_scheduled_tokens.keys() <= scheduler.requests.keys():
            if type(tokens[0]) is list and all(tokens):  # some versions have arrays
                return sum(map(len, tokens)) - len(tokens)
            lengths = list(map(len, tokens))
            return sum(lengths) - len(lengths) + lengths.count(0)
        rows = sampled.req_id_to_index
        return sum(
            max(0, len(tokens[rows[name]]) - 1)
            for name in output.scheduled_spec_decode_tokens
            if name in scheduler.requests and name in rows
        )

    def finished(self, output: Any, results: Any, end_ns: int, accepted: int | None) -> None:
        """Write the record of a step that ended at `end_ns` and whose tokens were handed out.

        Without a number of accepted drafts it is a step that could not be recorded.
        """
        begun = self.steps.pop(id(output), None)
        if begun is None or accepted is None:
            if output.total_num_scheduled_tokens:
                self.ring.fault()
            return
        delivered = 0
        for group in results.values() if isinstance(results, dict) else (results,):  # by front end
            for each in group.outputs:
                delivered += len(each.new_token_ids)
        if len(begun) == 2:
            self.ring.write(
                begun[0], end_ns, 0, output.total_num_scheduled_tokens, delivered,
                len(output.num_scheduled_tokens), sum(output.scheduled_cached_reqs.num_computed_tokens),
                begun[1], accepted, len(output.preempted_req_ids), 0, 0,
            )  # fmt: skip
            return
        submit_ns, prefill, decode, sequences, kv, drafts, preemptions, again, resumed = begun
        self.ring.write(
            submit_ns, end_ns, prefill, decode, delivered, sequences, kv, drafts, accepted, preemptions,
            again, resumed,
        )  # fmt: skip


def _resumed(output: Any, requests: Any, rows: Iterable[tuple[str, int, int]]) -> tuple[int, int]:
    """Return rows of requests with outputs that are neither decodes nor drafts, and those computed before."""
    scheduled, spec = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    resumed = again = 0
    for name, begin, made in rows:
        tokens = scheduled[name]
        if made and tokens > 1 + len(spec.get(name, ())):
            resumed += tokens
            again += max(0, min(begin + tokens, requests[name].num_tokens - 1) - begin)
    return resumed, again


def _cached(cached: Any, requests: Any) -> tuple[list[str], list[int], list[int], int]:
    """Return ids, computed tokens, output tokens and the number resumed, of any version's shape."""
    if isinstance(cached, list):  # one object a request (0.8.5)
        ids = [each.req_id for each in cached]
        begins = [each.num_computed_tokens for each in cached]
        return (
            ids,
            begins,
            _outputs(ids, begins, requests),
            sum(each.resumed_from_preemption for each in cached),
        )
    ids, begins = cached.req_ids, cached.num_computed_tokens
    outputs = getattr(cached, "num_output_tokens", None)
    if outputs is None:
        outputs = _outputs(ids, begins, requests)
    resumed = getattr(cached, "resumed_req_ids", None)
    return ids, begins, outputs, len(resumed) if resumed is not None else sum(cached.resumed_from_preemption)


def _outputs(ids: list[str], begins: list[int], requests: Any) -> list[int]:
    """Return 0 for each request that is in its prompt: no output yet, nor one under way."""
    return [
        requests[name].num_output_tokens or int(begin >= requests[name].num_prompt_tokens)
        for name, begin in zip(ids, begins, strict=True)
    ]


# --------------------------------------------------------------------------------------------------------
# The engine's side


def register() -> None:
    """Entry point: wrap the scheduler, in every process that vLLM loads plugins in. Never raises."""
    if os.environ.get("GPUIDLE_STEPS") != "1":
        return
    try:
        wrap(importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler)
    except Exception as error:  # noqa: BLE001
        _LOGGER.warning("gpuidle records no steps of this engine: %s: %s", type(error).__name__, error)


def wrap(scheduler_class: Any) -> None:
    """Replace three methods of the scheduler's class by ones that also record."""
    if getattr(scheduler_class, _WRAPPED, False):
        return
    begin = scheduler_class.__init__

    @functools.wraps(begin)
    def begin_recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _attach(self)

    setattr(scheduler_class, _RECORDER, None)
    scheduler_class.__init__ = begin_recorded
    scheduler_class.schedule = _recording_schedule(scheduler_class.schedule)
    scheduler_class.update_from_output = _recording_update(scheduler_class.update_from_output)
    setattr(scheduler_class, _WRAPPED, True)


def _recording_schedule(schedule: Any) -> Any:
    """Return `schedule` so that it also records. To hand on any arguments takes 0.3 us: not known ones."""
    if _parameters(schedule) in {("self",), ("self", "throttle_prefills")}:
        return functools.wraps(schedule)(_record_schedule(schedule))

    def of_any_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _record_schedule(lambda _: schedule(self, *args, **kwargs))(self)

    return functools.wraps(schedule)(of_any_signature)


def _record_schedule(schedule: Any) -> Any:
    def recorded(self: Any, throttle_prefills: Any = _NOT_GIVEN) -> Any:
        recorder = self._gpuidle_steps
        if recorder is not None and recorder.legacy:
            recorder.running = len(getattr(self, "running", ()))
        output = schedule(self) if throttle_prefills is _NOT_GIVEN else schedule(self, throttle_prefills)
        if recorder is None:
            return output
        try:
            total = output.total_num_scheduled_tokens
            spec = output.scheduled_spec_decode_tokens
            drafts = sum(map(len, spec.values())) if spec else 0
            if (
                total == len(output.num_scheduled_tokens) + drafts
                and not output.scheduled_new_reqs
                and not recorder.legacy
                and not recorder.furthest
                and all(output.scheduled_cached_reqs.num_output_tokens)
            ):
                begun = (_monotonic_ns(), drafts)
            else:
                begun = recorder.examine(self, output, total, drafts)
            if total:
                steps = recorder.steps
                if len(steps) >= _MOST_OPEN_STEPS:  # whose outcome never came
                    recorder.ring.fault(len(steps))
                    steps.clear()
                steps[id(output)] = begun
        except Exception:  # noqa: BLE001
            return output  # when it ends, nothing is known of it: it is counted then
        return output

    return recorded


def _recording_update(update: Any) -> Any:
    """Return `update_from_output` so that it also records."""
    if _parameters(update) != ("self", "scheduler_output", "model_runner_output"):

        def of_any_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
            output, sampled, *_ = (*args, *kwargs.values(), None, None)
            as_called = _record_update(lambda *_: update(self, *args, **kwargs))
            return as_called(self, output, sampled)

        return functools.wraps(update)(of_any_signature)
    return functools.wraps(update)(_record_update(update))


def _parameters(method: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return ()


def _record_update(update: Any) -> Any:
    def recorded(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        recorder = self._gpuidle_steps
        if recorder is None:
            return update(self, scheduler_output, model_runner_output)
        end_ns = _monotonic_ns()
        accepted: int | None = 0
        try:
            if scheduler_output.scheduled_spec_decode_tokens:
                accepted = recorder.accepted(self, scheduler_output, model_runner_output)
        except Exception:  # noqa: BLE001
            accepted = None
        results = update(self, scheduler_output, model_runner_output)
        try:
            recorder.finished(scheduler_output, results, end_ns, accepted)
        except Exception:  # noqa: BLE001
            _fault(self, recorder)
        return results

    return recorded


def _attach(scheduler: Any) -> None:
    """Give a new scheduler its ring; without one it works as if we were not there."""
    try:
        parallel = scheduler.vllm_config.parallel_config
        rank = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
        version = getattr(sys.modules.get("vllm"), "__version__", "")
        ring = Ring(folder_of(os.environ, os.geteuid()), int(rank or 0), str(version))
        # Children of `multiprocessing` leave without atexit; its own finalizers do run.
        util.Finalize(None, ring.close, exitpriority=1)
        setattr(scheduler, _RECORDER, Recorder(ring))
    except Exception as error:  # noqa: BLE001
        _LOGGER.warning("gpuidle records no steps of this engine: %s: %s", type(error).__name__, error)


def _fault(scheduler: Any, recorder: Recorder) -> None:
    recorder.ring.fault()
    if recorder.ring.broken:
        setattr(scheduler, _RECORDER, None)
        _LOGGER.warning("gpuidle stopped recording steps: this version of vLLM is not understood")
