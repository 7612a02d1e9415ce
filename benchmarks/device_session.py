"""One short PM sampling session in a forked process, with other rights if asked: it may crash there."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import time
from typing import Any, Literal

import msgspec

from gpuidle.collectors.counters.cupti.child import COLUMNS, DECODE_HZ
from gpuidle.collectors.counters.cupti.faults import Fault, explain
from gpuidle.collectors.counters.cupti.library import CallFailed, Cuda, Cupti
from gpuidle.collectors.counters.cupti.ring import RingWriter, create, layout
from gpuidle.collectors.counters.cupti.session import ManyPasses, Session, UnknownChip
from gpuidle.collectors.counters.cupti.worker import anchor, check_device

Rights = Literal["own", "bare_root", "perfmon", "none"]

LIMIT_S = 15.0
CAP_SYS_ADMIN, CAP_PERFMON = 21, 38
ALL_CAPS = (1 << 41) - 1
CAPABILITY_VERSION = 0x20080522
PR_SET_KEEPCAPS = 8
NOBODY = 65534


class Tried(msgspec.Struct, kw_only=True):
    """What came of it; `error` is empty where samples came."""

    samples: int = 0
    start_s: float = 0.0
    version: int = 0
    offset_ns: int = 0
    doubt_ns: int = 0
    sample_lag_ns: int = 0
    first: str = ""
    error: str = ""


def try_session(
    library: str,
    uuid: str,
    *,
    rights: Rights = "own",
    seconds: float = 1.0,
    rate_hz: int = 1000,
    own_context: bool = False,
) -> Tried:
    """Sample for some seconds in a child; never raises for what became of it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            _take_rights(rights)
            tried = _sample(library, uuid, seconds, rate_hz, own_context=own_context)
        except BaseException as error:  # noqa: BLE001  # a forked child must not return into its parent's code
            tried = Tried(error=f"{type(error).__name__}: {error}")
        os.write(writing, json.dumps(msgspec.to_builtins(tried)).encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], LIMIT_S + seconds)
    text = os.read(reading, 65536) if ready else b""
    os.close(reading)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not ready:
        return Tried(error="hangs")
    if not text:
        return Tried(
            error=f"crashed: signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no answer"
        )
    return msgspec.json.decode(text, type=Tried)


def _take_rights(rights: Rights) -> None:
    if rights == "own":
        return
    if os.geteuid() != 0:
        raise PermissionError("only root can try other rights")
    libc = ctypes.CDLL(None, use_errno=True)
    keep = {
        "bare_root": ALL_CAPS & ~(1 << CAP_SYS_ADMIN) & ~(1 << CAP_PERFMON),
        "perfmon": 1 << CAP_PERFMON,
        "none": 0,
    }[rights]
    if rights != "bare_root":
        libc.prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
    effective, inheritable = libc_caps(libc, header) & keep, 0
    parts = [
        (each >> shift) & 0xFFFFFFFF for shift in (0, 32) for each in (effective, effective, inheritable)
    ]
    if libc.capset(header, struct.pack("<6I", *parts)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def libc_caps(libc: Any, header: bytes) -> int:
    """Return the permitted capabilities of this process."""
    data = ctypes.create_string_buffer(24)
    libc.capget(header, data)
    words = struct.unpack("<6I", data.raw)
    return int(words[1] | words[4] << 32)


def _sample(library: str, uuid: str, seconds: float, rate_hz: int, *, own_context: bool) -> Tried:
    tried = Tried()
    began = time.monotonic()
    of = layout(rate_hz, COLUMNS)
    descriptor = create(of)
    ring = RingWriter(descriptor, of)
    try:
        cuda = Cuda()
        if wrong := check_device(cuda, uuid):
            return Tried(error=wrong)
        if own_context:
            context = ctypes.c_void_p()
            ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        cupti = Cupti(library)
        tried.version = cupti.version()
        session = Session(cupti, ring, rate_hz=rate_hz, decode_hz=DECODE_HZ, buffer_bytes=20_000_000)
        session.start()
        tried.start_s = time.monotonic() - began
        theirs, ours, tried.doubt_ns = anchor(cupti)
        tried.offset_ns = theirs - ours
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(1 / DECODE_HZ)
            session.decode()
            if ring.head and not tried.first:
                newest = struct.unpack_from("<Q", os.pread(descriptor, 8, 8 * (of.capacity + ring.head - 1)))[
                    0
                ]
                tried.sample_lag_ns = cupti.timestamp() - newest
                starts = struct.unpack("<3Q", os.pread(descriptor, 24, 0))
                ends = struct.unpack("<3Q", os.pread(descriptor, 24, 8 * of.capacity))
                tried.first = " ".join(f"({a}, {b})" for a, b in zip(starts, ends, strict=True))
        tried.samples = ring.head
        session.close()
    except CallFailed as failed:
        fault = Fault(reason=failed.library, call=failed.call, code=failed.code, text=str(failed))
        tried.error = f"{failed}: {explain(fault).message}"
    except (OSError, UnknownChip, ManyPasses) as error:
        tried.error = f"{type(error).__name__}: {error}"
    if not tried.samples and not tried.error:
        tried.error = "no sample came"
    return tried
