"""The parent's handle on the child that samples one device."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

import gpuidle
from gpuidle.collectors.counters.cupti.clockfit import Anchor
from gpuidle.collectors.counters.cupti.columns import RingReader
from gpuidle.collectors.counters.cupti.ring import create, layout

COLUMNS = 7
"""Counters of a sample: as many as every set in `chips` has."""
DECODE_HZ = 10
BYTES_PER_SAMPLE = 10_000
"""Of hardware buffer, at most."""
BUFFER_S = 2.0
BUFFER_LEAST_S = 0.3
MODULE = "gpuidle.collectors.counters.cupti.worker"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What the child says; see `worker`."""

    kind: Literal["ready", "rows", "paused", "fault", "ended"]
    head: int = 0
    anchor: Anchor | None = None
    decoded_ns: int = 0
    """CLOCK_MONOTONIC: no sample up to `head` ended later."""
    overflows: int = 0
    chip: str = ""
    columns: tuple[str, ...] = ()
    version: int = 0
    reason: str = ""
    call: str = ""
    code: int = 0
    text: str = ""


_DECODER = msgspec.json.Decoder(Message)


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do."""

    uuid: str
    library: str
    rate_hz: int
    buffer_bytes: int
    decode_hz: int = DECODE_HZ
    duty_on_s: float = 0.0
    """0: without pause."""
    duty_period_s: float = 0.0


def buffer_bytes(rate_hz: int, limit_bytes: int) -> int | None:
    """Return the size of the hardware buffer, or None if the limit leaves less than 0.3 s of it."""
    wanted = min(BUFFER_S * rate_hz * BYTES_PER_SAMPLE, limit_bytes)
    return int(wanted) if wanted >= BUFFER_LEAST_S * rate_hz * BYTES_PER_SAMPLE else None


class Child:
    """A running child. It is started from a thread that lives as long: its death would end the child."""

    def __init__(self, orders: Orders) -> None:
        """Start it.

        Raises:
            OSError: no process or no shared memory can be had.
        """
        of = layout(orders.rate_hz, COLUMNS)
        descriptor = create(of)
        try:
            self.ring = RingReader(descriptor, of)
            text = json.dumps(
                {
                    **msgspec.structs.asdict(orders),
                    "descriptor": descriptor,
                    "layout": [of.capacity, of.values],
                }
            )
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter and module
                [sys.executable, "-m", MODULE, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(descriptor,),
                env=_environment(orders),
            )
        finally:
            os.close(descriptor)
        self._partial = b""
        self._last_words = b""
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Its PID."""
        return self._process.pid

    def messages(self) -> list[Message]:
        """Return what it has said since it was last asked."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._last_words = (self._last_words + _drain(self._process.stderr.fileno()))[-2000:]
        *lines, self._partial = (self._partial + _drain(self._process.stdout.fileno())).split(b"\n")
        return [_DECODER.decode(line) for line in lines]

    def exit_status(self) -> int | None:
        """Return its status once it has ended: negative is the signal that ended it."""
        return self._process.poll()

    def last_words(self) -> str:
        """Return the last line of its standard error."""
        lines = self._last_words.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def ask_to_end(self) -> None:
        """Have it end its session and leave."""
        with contextlib.suppress(OSError):
            self._process.terminate()

    def kill(self) -> None:
        """End it at once: the driver has to clean up after it."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the pipes of a child that has ended."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _drain(descriptor: int) -> bytes:
    parts = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except BlockingIOError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _environment(orders: Orders) -> dict[str, str]:
    """Show the child one device and the libraries beside its libcupti, which loads them by name."""
    env: dict[str, Any] = dict(os.environ)
    package = gpuidle.__file__
    paths = [str(Path(package).parents[1]), env.get("PYTHONPATH", "")]
    libraries = [str(Path(orders.library).parent), env.get("LD_LIBRARY_PATH", "")]
    env.pop("CUDA_INJECTION64_PATH", None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    env["CUDA_VISIBLE_DEVICES"] = orders.uuid
    return env
