"""What the service tells systemd (sd_notify): ready, alive, what it sees, stopping.

The protocol is one datagram of `NAME=value` lines to the socket that NOTIFY_SOCKET names: a path, or an
abstract socket with a leading `@` (sd_notify(3)). A restart by the watchdog is wanted exactly when frames
stop, so the only thing that pings is a frame that came all the way through the pipe.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from gpuidle.agent.model import Frame

WATCHDOG_INTERVALS = 3
"""A watchdog shorter than so many intervals would end a healthy agent: it is lengthened."""


class ServiceManager:
    """An exporter (ports.Exporter) that reports to the service manager."""

    name = "systemd"

    def __init__(self, address: str, *, watchdog_us: int | None = None, interval_s: float = 1.0) -> None:
        """Prepare; nothing is sent before the first frame.

        Args:
            address: Of the datagram socket: a path, or `@name` for an abstract one.
            watchdog_us: How long the manager waits between two pings; None: it does not watch.
            interval_s: Between two frames.

        Raises:
            ValueError: the address is of another kind.
        """
        if not address.startswith(("/", "@")):
            raise ValueError(f"NOTIFY_SOCKET {address!r} is neither a path nor an abstract socket")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        # The manager may be busy: a ping is then lost and counted, the outlet's thread does not wait.
        self._socket.settimeout(0)
        self._watched = watchdog_us is not None
        needed_us = round(WATCHDOG_INTERVALS * interval_s * 1e6)
        self._longer_us = needed_us if watchdog_us is not None and watchdog_us < needed_us else None
        self._ready = False
        self._status = ""

    def publish(self, frame: Frame) -> None:
        """Say that a frame has come; with the first one, that the service is ready."""
        lines = []
        if not self._ready:
            lines.append("READY=1")
            if self._longer_us is not None:
                lines.append(f"WATCHDOG_USEC={self._longer_us}")
        if self._watched:
            lines.append("WATCHDOG=1")
        status = summary(frame)
        if status != self._status:
            lines.append(f"STATUS={status}")
        if lines:
            self._send(lines)
        self._ready, self._status = True, status

    def close(self) -> None:
        """Say that the service ends."""
        try:
            self._send(["STOPPING=1"])
        finally:
            self._socket.close()

    def _send(self, lines: list[str]) -> None:
        self._socket.sendto("\n".join(lines).encode(), self._address)


def summary(frame: Frame) -> str:
    """Return the line that `systemctl status` shows."""
    gpus = _count(len(frame.gpus), "GPU") if frame.gpu_source else "no GPU source"
    simulated = "simulated: " if frame.node.simulated else ""
    engines, problems = _count(len(frame.engines), "engine"), _count(len(frame.problems), "problem")
    return f"{simulated}{gpus}, {engines}, {problems}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def service_manager(environ: MutableMapping[str, str], interval_s: float) -> ServiceManager | None:
    """Return the reporter if a service manager listens; None where this is no service.

    The variables are taken out of `environ`: a child process must not report in this one's name.

    Raises:
        ValueError: NOTIFY_SOCKET or WATCHDOG_USEC cannot be read.
    """
    address = environ.pop("NOTIFY_SOCKET", "")
    watchdog = environ.pop("WATCHDOG_USEC", "")
    watched_pid = environ.pop("WATCHDOG_PID", "")
    if not address:
        return None
    if watched_pid and watched_pid != str(os.getpid()):
        watchdog = ""
    return ServiceManager(address, watchdog_us=int(watchdog) if watchdog else None, interval_s=interval_s)
