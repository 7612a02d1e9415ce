"""The child of one device: `python -m ...cupti.worker` with its orders as JSON. Standard library only.

It samples into shared memory and says on its standard output, one JSON object a line, what it does. It ends
its session in the documented order on SIGTERM, when its parent dies, and when its standard input is closed;
if a call of the library hangs then, it leaves all the same after three seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from gpuidle.collectors.counters.cupti.library import CallFailed, Cuda, Cupti
from gpuidle.collectors.counters.cupti.ring import Layout, RingWriter
from gpuidle.collectors.counters.cupti.session import ManyPasses, Session, UnknownChip

PR_SET_PDEATHSIG = 1
GRACE_S = 3.0
ANCHOR_PERIOD_S = 1.0
ANCHOR_TRIES = 5


def say(**message: Any) -> None:
    """Send one message. If the parent does not read, it is lost: the counts in later ones include it."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def leave_with_parent() -> None:
    """Turn the end of standard input into SIGTERM, and leave if that is not heeded."""
    with contextlib.suppress(OSError):
        while os.read(0, 64):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(3)


def anchor(cupti: Cupti) -> list[int]:
    """Return [CUPTI's time, CLOCK_MONOTONIC at the same moment, the doubt to each side], in nanoseconds."""
    tries = []
    for _ in range(ANCHOR_TRIES):
        before = time.monotonic_ns()
        theirs = cupti.timestamp()
        after = time.monotonic_ns()
        tries.append((after - before, theirs, (before + after) // 2))
    width, theirs, ours = min(tries)
    return [theirs, ours, width // 2]


def check_device(cuda: Cuda, uuid: str) -> str:
    """Return why device 0 is not the one that was asked for, or ""."""
    if cuda.device_count() != 1:
        return f"the driver shows {cuda.device_count()} devices where one was asked for"
    seen = cuda.uuid(0)
    if seen != uuid.split("-", 1)[-1].lower():
        return f"the driver shows {seen} where {uuid} was asked for"
    return ""


def run(orders: dict[str, Any]) -> int:
    """Sample until told to stop; return the exit status."""
    try:
        cuda = Cuda()
        wrong = check_device(cuda, orders["uuid"])
        if wrong:
            say(kind="fault", reason="wrong_device", call="", code=0, text=wrong)
            return 1
        capability = cuda.compute_capability(0)
        if capability < (7, 5):
            say(kind="fault", reason="old_chip", call="", code=0, text=f"{capability[0]}.{capability[1]}")
            return 1
        cupti = Cupti(orders["library"])
        version = cupti.version()
        ring = RingWriter(orders["descriptor"], Layout(*orders["layout"]))
        session = Session(
            cupti,
            ring,
            rate_hz=orders["rate_hz"],
            decode_hz=orders["decode_hz"],
            buffer_bytes=orders["buffer_bytes"],
        )
    except OSError as error:
        say(kind="fault", reason="library", call="", code=0, text=str(error))
        return 1
    except UnknownChip as unknown:
        say(kind="fault", reason="unknown_chip", call="", code=0, text=str(unknown))
        return 1
    except ManyPasses as many:
        say(kind="fault", reason="passes", call="", code=0, text=str(many))
        return 1
    except CallFailed as failed:
        say(kind="fault", reason=failed.library, call=failed.call, code=failed.code, text=str(failed))
        return 1
    try:
        on_s, period_s = orders["duty_on_s"], orders["duty_period_s"]
        while True:
            began = time.monotonic()
            session.start()
            say(kind="ready", chip=session.chip, columns=session.metrics.columns, version=version)
            if _sample(session, cupti, ring, 1 / orders["decode_hz"], began + on_s if period_s else None):
                break
            session.stop()
            say(kind="paused", head=ring.head)
            if _rest(began + period_s):
                break
    except CallFailed as failed:
        say(kind="fault", reason=failed.library, call=failed.call, code=failed.code, text=str(failed))
        return 1
    finally:
        session.close()
        say(kind="ended", head=ring.head)
    return 0


def _told_to_stop(wait_s: float) -> bool:
    return signal.sigtimedwait({signal.SIGTERM}, max(0.0, wait_s)) is not None


def _sample(session: Session, cupti: Cupti, ring: RingWriter, period_s: float, until: float | None) -> bool:
    """Sample until `until` of time.monotonic, or for ever; return whether it was told to stop."""
    due = time.monotonic()
    fit_due = 0.0
    where: list[int] = []
    while until is None or due < until:
        session.decode()
        decoded_ns = time.monotonic_ns()
        now = decoded_ns / 1e9
        if now >= fit_due:
            where = anchor(cupti)
            fit_due = now + ANCHOR_PERIOD_S
        say(
            kind="rows",
            head=ring.head,
            anchor=where,
            decoded_ns=decoded_ns,
            overflows=session.overflows,
        )
        due = max(due + period_s, now)
        if _told_to_stop(due - time.monotonic()):
            return True
    return False


def _rest(until: float) -> bool:
    """Wait, giving a sign of life each second; return whether it was told to stop."""
    while (left := until - time.monotonic()) > 0:
        if _told_to_stop(min(left, 1.0)):
            return True
        say(kind="paused")
    return False


def main() -> int:
    """Run as the child of the process that gave the orders."""
    orders = json.loads(sys.argv[1])
    # The signal waits until the loop asks for it, so that no call into CUPTI is cut short; Ctrl-C is the
    # parent's.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.set_blocking(1, False)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    return run(orders)


if __name__ == "__main__":
    sys.exit(main())
