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
import itertools
import logging
import mmap
import os
import stat
import struct
import sys
import time
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
            self._map = mmap.mmap(self._descriptor, size)
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

    def write(self, *fields: int) -> None:
        """Write one record: the FIELDS after `index`."""
        index = self._committed
        row = (index, *fields)
        _pack_record(self._map, HEADER_BYTES + index % self.capacity * RECORD_BYTES, *row, checksum(row))
        self._committed = index = index + 1
        self._words[COMMITTED_AT // 8] = index

    def fault(self, steps: int = 1) -> None:
        """Count steps that could not be recorded."""
        self._faults += steps
        self._words[FAULTS_AT // 8] = self._faults

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
    """Follows one scheduler: what was scheduled, and what came of it."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._open: dict[int, tuple[int, ...]] = {}
        """Steps in flight by the identity of their schedule. Of decodes alone, which nearly every step is,
        only time and drafts: the rest can be read when it ends."""
        self._furthest: dict[str, int] = {}
        """How far prompts under way were computed: what is computed again after a preemption."""
        self._modern = False
        """Whether the engine names what was preempted and counts each request's outputs (0.12 and later)."""
        self.running = 0
        """Requests that ran before the scheduler was asked: older versions need it."""

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """Note a step that was just scheduled."""
        total = output.total_num_scheduled_tokens
        spec = output.scheduled_spec_decode_tokens
        drafts = sum(map(len, spec.values())) if spec else 0
        if (
            self._modern
            and total == len(output.num_scheduled_tokens) + drafts
            and 0 not in output.scheduled_cached_reqs.num_output_tokens
            and not output.scheduled_new_reqs
        ):
            begun: tuple[int, ...] = (_monotonic_ns(), drafts)
        else:
            begun = self._examine(scheduler, output, total, drafts)
        if not total:
            return
        if len(self._open) >= _MOST_OPEN_STEPS:  # steps whose outcome never came
            self.ring.fault(len(self._open))
            self._open.clear()
        self._open[id(output)] = begun

    def _examine(self, scheduler: Any, output: Any, total: int, drafts: int) -> tuple[int, ...]:
        """Return what is known of any step at its submission."""
        for gone in output.finished_req_ids if self._furthest else ():
            self._furthest.pop(gone, None)
        preempted = getattr(output, "preempted_req_ids", None)
        self._modern = preempted is not None and hasattr(output.scheduled_cached_reqs, "num_output_tokens")
        prefill, again, resumed, kv, admitted = self._rows(scheduler, output, total, drafts)
        if preempted is None:
            preemptions = max(0, self.running + admitted - len(scheduler.running))
        else:
            preemptions = len(preempted)
        return (
            _monotonic_ns(), prefill, total - prefill, len(output.num_scheduled_tokens), kv, drafts,
            preemptions, again, resumed,
        )  # fmt: skip

    def _rows(self, scheduler: Any, output: Any, total: int, drafts: int) -> tuple[int, int, int, int, int]:
        """Split the rows of a step into those of prompts and the others.

        A request is in its prompt until it has an output token, as the engine's own log has it. What a
        preempted request with outputs computes again counts as prefill too, and as `resumed`.
        """
        scheduled, requests = output.num_scheduled_tokens, scheduler.requests
        ids, begins, outputs, resumptions = _cached(output.scheduled_cached_reqs, requests)
        kv = sum(begins)
        prefill = again = resumed = 0
        prompts = outputs.count(0)
        chunks = []
        at = -1
        for _ in range(prompts):
            at = outputs.index(0, at + 1)
            chunks.append((ids[at], begins[at]))
        for new in output.scheduled_new_reqs:
            kv += new.num_computed_tokens
            chunks.append((new.req_id, new.num_computed_tokens))
        for name, begin in chunks:
            tokens = scheduled[name]
            prefill += tokens
            request = requests.get(name)
            done = request.num_tokens if request is not None else 0
            begun_again = request is not None and request.num_tokens > request.num_prompt_tokens
            furthest = done - 1 if begun_again else self._furthest.get(name, 0)
            again += max(0, min(begin + tokens, furthest) - begin)
            if begin + tokens >= done:
                self._furthest.pop(name, None)
            elif begin + tokens > furthest:
                self._furthest[name] = begin + tokens
        if total - prefill > len(scheduled) - len(chunks) + drafts:
            # More rows than decodes and drafts: requests that were preempted after their first token.
            spec = output.scheduled_spec_decode_tokens
            for name, begin, made in zip(ids, begins, outputs, strict=True):
                tokens = scheduled[name]
                if made and tokens > 1 + len(spec.get(name, ())):
                    prefill += tokens
                    resumed += tokens
                    again += max(0, min(begin + tokens, requests[name].num_tokens - 1) - begin)
        admitted = len(output.scheduled_new_reqs) + resumptions
        return prefill, again, resumed, kv, admitted

    def accepted(self, scheduler: Any, output: Any, sampled: Any) -> int:
        """Count accepted drafts, of requests that are still there: what a sequence made beyond one token.

        Asked before the engine works on the result: it cuts what goes beyond the end of a request.
        """
        tokens = sampled.sampled_token_ids
        if not tokens:
            return 0
        nobody_left = len(self._open) == 1 and not scheduler.finished_req_ids
        if nobody_left or output.num_scheduled_tokens.keys() <= scheduler.requests.keys():
            lengths = list(map(len, tokens))
            return sum(lengths) - len(lengths) + lengths.count(0)
        rows = sampled.req_id_to_index
        return sum(
            max(0, len(tokens[rows[name]]) - 1)
            for name in output.scheduled_spec_decode_tokens
            if name in scheduler.requests and name in rows
        )

    def finished(self, output: Any, results: Any, end_ns: int, accepted: int) -> None:
        """Write the record of a step that ended at `end_ns` and whose tokens were handed out."""
        begun = self._open.pop(id(output), None)
        if begun is None:
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
    begin, schedule, update = (
        scheduler_class.__init__, scheduler_class.schedule, scheduler_class.update_from_output,
    )  # fmt: skip

    @functools.wraps(begin)
    def begin_recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _attach(self)

    @functools.wraps(schedule)
    def schedule_recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(self, _RECORDER, None)
        if recorder is None:
            return schedule(self, *args, **kwargs)
        recorder.running = len(getattr(self, "running", ()))
        output = schedule(self, *args, **kwargs)
        try:
            recorder.scheduled(self, output)
        except Exception:  # noqa: BLE001
            _fault(self, recorder)
        return output

    @functools.wraps(update)
    def update_recorded(self: Any, output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(self, _RECORDER, None)
        if recorder is None:
            return update(self, output, sampled, *args, **kwargs)
        end_ns = _monotonic_ns()
        accepted = 0
        try:
            if output.scheduled_spec_decode_tokens:
                accepted = recorder.accepted(self, output, sampled)
        except Exception:  # noqa: BLE001
            _fault(self, recorder)
        results = update(self, output, sampled, *args, **kwargs)
        try:
            recorder.finished(output, results, end_ns, accepted)
        except Exception:  # noqa: BLE001
            _fault(self, recorder)
        return results

    scheduler_class.__init__ = begin_recorded
    scheduler_class.schedule = schedule_recorded
    scheduler_class.update_from_output = update_recorded
    setattr(scheduler_class, _WRAPPED, True)


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
