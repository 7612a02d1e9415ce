"""Metrics for Prometheus: a small HTTP server that answers from the last Frame at once.

`/metrics` in the text format or OpenMetrics, as the scraper asks. `/healthz` is 200 while the process serves,
and 503 once Frames have stopped for a minute (or three intervals if that is more), so that whoever watches
over the process starts it again. `/readyz` is 200 after the first Frame. No state is kept between scrapes:
the series of a process or an engine that is gone end with the next Frame.

When no Frame has come for longer than the limit (10 s, or three intervals if that is more), values of the
moment are left out, while counters stay and `gpuidle_agent_frame_age_seconds` tells the age: an old reading
must not pass for a new one.

With a certificate it speaks TLS; with a file of users `/metrics` asks for one (`web_security`), while the two
probes answer everybody.
"""

from __future__ import annotations

import gzip
import ipaddress
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from gpuidle.agent.model import Frame
from gpuidle.agent.ports import Telemetry
from gpuidle.exporters.agent_self import SelfMeter
from gpuidle.exporters.catalogue import agent_points
from gpuidle.exporters.exposition import OPENMETRICS, TEXT, page
from gpuidle.exporters.latest import Latest, frame_points
from gpuidle.exporters.web_security import Guard, WebSecurity

DEFAULT_ADDRESS = "127.0.0.1:9405"
_READER_TIMEOUT_S = 10

logger = logging.getLogger(__name__)


_Environ = dict[str, object]
_Start = Callable[[str, list[tuple[str, str]]], object]
_App = Callable[[_Environ, _Start], Iterable[bytes]]


class ListenError(Exception):
    """The address cannot be listened on; the message names it and the remedy."""


class PrometheusExporter:
    """Serves the last Frame over HTTP on `address` ("host:port"; port 0 takes a free one).

    Raises:
        ListenError: the address is malformed, taken, or not ours.
        WebSecurityError: a file of `security` cannot be used.
    """

    name = "prometheus"

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        telemetry: Telemetry | None = None,
        security: WebSecurity = WebSecurity(),  # noqa: B008 - frozen
    ) -> None:
        self._latest: Latest | None = None
        self._meter = SelfMeter(telemetry)
        guard = Guard(security)
        self._encrypts = guard.encrypts
        self._server = _listen(address)
        self._server.guard = guard
        if guard.asks and not guard.encrypts and not self._is_loopback:
            logger.warning("passwords for %s travel in clear: give a certificate too", self.address)
        self._server.set_app(_routes(_asking(guard, self._metrics), lambda: self._latest))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="gpuidle-prometheus",
            daemon=True,
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, "host:port"."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    @property
    def url(self) -> str:
        """What a scraper asks."""
        return f"{'https' if self._encrypts else 'http'}://{self.address}/metrics"

    @property
    def _is_loopback(self) -> bool:
        return ipaddress.ip_address(str(self._server.server_address[0])).is_loopback

    def publish(self, frame: Frame) -> None:
        """Keep the Frame for the next scrape."""
        self._latest = Latest(frame, time.monotonic_ns())

    def _metrics(self, environ: _Environ, start_response: _Start) -> Iterable[bytes]:
        """Answer a scrape, as text or OpenMetrics, compressed where the scraper takes it."""
        latest, now_ns = self._latest, time.monotonic_ns()
        entries = frame_points(latest, now_ns)
        own = agent_points(self._meter.read(latest.age_s(now_ns) if latest else None))
        openmetrics = "application/openmetrics-text" in str(environ.get("HTTP_ACCEPT", ""))
        body = page([*entries, *own], openmetrics=openmetrics).encode()
        headers = [("Content-Type", OPENMETRICS if openmetrics else TEXT)]
        if "gzip" in str(environ.get("HTTP_ACCEPT_ENCODING", "")):
            body = gzip.compress(body, compresslevel=1)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [body]

    def close(self) -> None:
        """Stop serving; a scrape in progress is cut off with the process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1)


# --------------------------------------------------------------------------------------------------------
# HTTP


def _routes(metrics: _App, latest: Callable[[], Latest | None]) -> _App:
    """Return the WSGI application of the three paths."""

    def probe(path: str) -> tuple[str, str]:
        last, now_ns = latest(), time.monotonic_ns()
        if path == "/":
            return "200 OK", "gpuidle: /metrics /healthz /readyz\n"
        if path == "/healthz":
            if last is not None and last.stopped(now_ns):
                return "503 Service Unavailable", f"no frame for {last.age_s(now_ns):.0f} s\n"
            return "200 OK", "ok\n"
        if path == "/readyz":
            return ("503 Service Unavailable", "no frame yet\n") if last is None else ("200 OK", "ready\n")
        return "404 Not Found", "not found: see /metrics\n"

    def app(environ: _Environ, start_response: _Start) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/metrics":
            return metrics(environ, start_response)
        status, text = probe(str(path))
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text.encode()]

    return app


def _asking(guard: Guard, app: _App) -> _App:
    """Return the app behind the guard's question for a user."""

    def ask(environ: _Environ, start_response: _Start) -> Iterable[bytes]:
        if guard.allows(str(environ.get("HTTP_AUTHORIZATION", ""))):
            return app(environ, start_response)
        headers = [("WWW-Authenticate", 'Basic realm="gpuidle"'), ("Content-Type", "text/plain")]
        start_response("401 Unauthorized", headers)
        return [b"name and password are needed here\n"]

    return ask


class _Handler(WSGIRequestHandler):
    timeout = _READER_TIMEOUT_S  # a reader that stops reading gives its thread back

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Log no requests."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    guard: Guard

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Speak TLS where it is on: in the thread of this reader, so that a slow handshake is its own."""
        context = self.guard.context()
        if context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_READER_TIMEOUT_S)
        with context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def server_bind(self) -> None:
        """Bind without the base class's reverse look-up of the host's name, which can hang for seconds."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of readers that went away; the base class prints a traceback for each."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def _listen(address: str) -> _Server:
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ListenError(
            f"{address!r} is no address to listen on: write host:port, such as {DEFAULT_ADDRESS}"
        )
    server = _ServerV6 if ":" in host else _Server
    try:
        return server((host, int(port)), _Handler)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address} for Prometheus: {error.strerror or error}. If another gpuidle runs"
            " there, stop it; else choose another address"
        ) from error
