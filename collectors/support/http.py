"""GET with limits: on time, on bytes, on redirects. An endpoint may hang, lie, flood or die.

The deadline covers the whole exchange: every receive gets only the time that is left, so a server that
drips one byte a second cannot hold the thread. Name resolution alone is the system's and is not bounded.
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, urlsplit

HttpErrorKind = Literal[
    "bad_url",
    "refused",
    "unreachable",
    "timeout",
    "too_large",
    "redirect",
    "http_status",
    "not_text",
    "protocol",
    "tls",
]

_HEADER_BYTES = 64 * 1024
"""Room for status line and headers beside the body."""
_QUOTE_LENGTH = 200
"""How much of a server's own words an error repeats."""


class HttpError(Exception):
    """A GET that gave no answer; `kind` is for programs, `status` the HTTP status where there was one."""

    def __init__(self, kind: HttpErrorKind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind: HttpErrorKind = kind
        self.status = status


@dataclass(frozen=True)
class Answer:
    """The body of a 200, and when its last byte was there (CLOCK_MONOTONIC nanoseconds)."""

    text: str
    read_ns: int


def parse_base_url(url: str) -> SplitResult:
    """Split a base URL such as "http://127.0.0.1:8000".

    Raises:
        HttpError: (bad_url) the scheme is not http or https, there is no host, or it holds a password.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise HttpError("bad_url", f"{url!r}: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise HttpError("bad_url", f"{url!r} starts with neither http:// nor https://")
    if not parts.hostname or port == 0:
        raise HttpError("bad_url", f"{url!r} names no host, or port 0")
    if parts.username is not None or parts.password is not None:
        raise HttpError("bad_url", f"the URL of {parts.hostname} holds a user name or password")
    return parts


class _DeadlineReader(io.RawIOBase):
    """Receives until a deadline and up to a number of bytes, both of the whole answer."""

    def __init__(self, sock: socket.socket, deadline: float, budget: int) -> None:
        self._sock = sock
        self._deadline = deadline
        self._budget = budget
        self.started = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._sock.settimeout(_left(self._deadline))
        count = self._sock.recv_into(buffer)
        self.started = self.started or count > 0
        self._budget -= count
        if self._budget < 0:
            raise HttpError("too_large", "the answer is larger than the limit")
        return count


class _Wire:
    """What http.client needs of a socket, with `_DeadlineReader` for its file."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.deadline = 0.0
        self.budget = 0
        self.reader: _DeadlineReader | None = None

    def makefile(self, _mode: str) -> io.BufferedReader:
        self.reader = _DeadlineReader(self.sock, self.deadline, self.budget)
        return io.BufferedReader(self.reader)

    def sendall(self, data: bytes) -> None:
        self.sock.settimeout(_left(self.deadline))
        self.sock.sendall(data)

    def close(self) -> None:
        """Do nothing: http.client hangs up on some answers before it has read them."""

    def hang_up(self) -> None:
        self.sock.close()

    def is_quiet(self) -> bool:
        """Return whether nothing is pending: bytes between two answers mean a closed or poisoned link."""
        return not select.select([self.sock], [], [], 0)[0]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class HttpClient:
    """One keep-alive connection to one server; not for several threads at once."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 1.0,
        max_bytes: int = 4 * 1024 * 1024,
        bearer: str | None = None,
    ) -> None:
        parts = parse_base_url(base_url)
        self._parts = parts
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "gpuidle"}
        if bearer is not None:
            self._headers["Authorization"] = f"Bearer {bearer}"
        self._wire: _Wire | None = None
        self.base_url = f"{parts.scheme}://{parts.netloc}{self._prefix}"

    def get(self, target: str, *, max_bytes: int | None = None) -> Answer:
        """Return the body of GET `target` (such as "/version"), bytes that are not UTF-8 replaced.

        A kept connection that turns out to be dead is replaced once, silently.

        Raises:
            HttpError: anything but a whole text of status 200 within the limits.
        """
        limit = self._max_bytes if max_bytes is None else max_bytes
        deadline = time.monotonic() + self._timeout_s
        while True:
            reused = self._wire is not None
            try:
                return self._exchange(target, limit, deadline)
            except (OSError, http.client.HTTPException, ValueError, HttpError) as error:
                # A kept link that breaks before a byte came was closed while it was idle.
                stale = reused and isinstance(error, ConnectionError) and not self._answer_began()
                self.close()
                if not stale:
                    raise self._explain(error) from error

    def close(self) -> None:
        """Drop the connection; the next `get` opens another."""
        if self._wire is not None:
            self._wire.hang_up()
            self._wire = None

    def _answer_began(self) -> bool:
        return self._wire is not None and self._wire.reader is not None and self._wire.reader.started

    def _exchange(self, target: str, limit: int, deadline: float) -> Answer:
        if self._wire is not None and not self._wire.is_quiet():
            self.close()
        if self._wire is None:
            self._wire = _Wire(self._connect(deadline))
        wire = self._wire
        wire.deadline = deadline
        wire.budget = limit + _HEADER_BYTES
        wire.reader = None
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.sock = wire
        connection.auto_open = 0
        connection.request("GET", self._prefix + target, headers=self._headers)
        response = connection.getresponse()
        self._check(response, target, limit)
        body = response.read(limit + 1)
        read_ns = time.monotonic_ns()
        if len(body) > limit:
            raise HttpError("too_large", f"the answer to {target[:_QUOTE_LENGTH]} exceeds {limit} bytes")
        if response.length:
            raise HttpError("protocol", "the connection closed in the middle of an answer")
        if response.will_close or not response.isclosed():
            self.close()
        if b"\0" in body:
            raise HttpError("not_text", f"the answer to {target[:_QUOTE_LENGTH]} is binary")
        return Answer(body.decode("utf-8", "replace"), read_ns)

    def _check(self, response: http.client.HTTPResponse, target: str, limit: int) -> None:
        where = target[:_QUOTE_LENGTH]
        if 300 <= response.status < 400:
            place = response.headers.get("Location", "")[:_QUOTE_LENGTH]
            raise HttpError("redirect", f"{where} redirects to {place!r}", response.status)
        if response.status != 200:
            raise HttpError("http_status", f"{where} answers HTTP {response.status}", response.status)
        if response.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise HttpError("not_text", "the answer is compressed, which was not asked for")
        if response.length is not None and response.length > limit:
            raise HttpError("too_large", f"an answer of {response.length} bytes is announced")

    def _connect(self, deadline: float) -> socket.socket:
        addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        failure: OSError = OSError("no address")
        for family, kind, protocol, _name, address in addresses:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_left(deadline))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._secure(sock, deadline)
            except OSError as error:
                sock.close()
                failure = error
        raise failure

    def _secure(self, sock: socket.socket, deadline: float) -> socket.socket:
        if self._parts.scheme == "http":
            return sock
        context = ssl.create_default_context()
        secured = context.wrap_socket(sock, server_hostname=self._host, do_handshake_on_connect=False)
        try:
            secured.settimeout(_left(deadline))
            secured.do_handshake()
        except OSError:
            secured.close()
            raise
        return secured

    def _explain(self, error: Exception) -> HttpError:
        where = self.base_url
        if isinstance(error, HttpError):
            return HttpError(error.kind, f"{where}: {error}", error.status)
        if isinstance(error, TimeoutError):
            return HttpError("timeout", f"{where}: no whole answer within {self._timeout_s:g} s")
        if isinstance(error, ConnectionRefusedError):
            return HttpError("refused", f"{where}: connection refused")
        if isinstance(error, ssl.SSLError):
            return HttpError("tls", f"{where}: {str(error)[:_QUOTE_LENGTH]}")
        if isinstance(error, (http.client.HTTPException, ConnectionError)):
            return HttpError("protocol", f"{where}: {type(error).__name__}: {str(error)[:_QUOTE_LENGTH]}")
        if isinstance(error, OSError):
            return HttpError("unreachable", f"{where}: {str(error)[:_QUOTE_LENGTH]}")
        return HttpError("protocol", f"{where}: not HTTP: {str(error)[:_QUOTE_LENGTH]}")
