"""HTTP servers for tests: one that plays a vLLM from recorded pages, one that misbehaves as told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Handler = Callable[[socket.socket], None]


@contextlib.contextmanager
def raw_server(handle: Handler) -> Iterator[str]:
    """Yield the URL of a server that gives each connection to `handle`, which may do anything to it."""
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()
    threads: list[threading.Thread] = []
    held: list[socket.socket] = []

    def serve(link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            handle(link)
        with contextlib.suppress(OSError):
            link.close()

    def accept() -> None:
        while not stop.is_set():
            try:
                link, _ = server.accept()
            except OSError:
                return
            held.append(link)
            thread = threading.Thread(target=serve, args=(link,), daemon=True)
            threads.append(thread)
            thread.start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        stop.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        for link in held:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in (acceptor, *threads):
            thread.join(5)


def read_request(link: socket.socket) -> bytes:
    """Read one request up to its empty line; b"" when the client is gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = link.recv(65536)
        if not part:
            return b""
        data += part
    return data


def answer(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    """Return a whole answer."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


class FakeVllm:
    """Plays the HTTP side of a vLLM: `page` is its metrics page now, `requests` what it was asked."""

    def __init__(
        self,
        page: str,
        *,
        version: str = "0.32.0",
        served: str = "tiny",
        root: str = "/models/tiny-llama",
        filters: bool = True,
        models_status: int = 200,
    ) -> None:
        self.page = page
        self.version = version
        self.models = f'{{"object":"list","data":[{{"id":"{served}","root":"{root}","max_model_len":2048}}]}}'
        self.models_status = models_status
        self.filters = filters
        self.requests: list[str] = []
        self.links: list[socket.socket] = []
        self.hang = threading.Event()
        self.release = threading.Event()
        fake = self

        class Answers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                fake.links.append(self.connection)

            def do_GET(self) -> None:
                fake.requests.append(self.path)
                if fake.hang.is_set():
                    fake.release.wait(20)
                status, body = fake.answer(self.path)
                data = body.encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._handler = Answers

    def answer(self, target: str) -> tuple[int, str]:
        """Return status and body of GET `target`, the filter as prometheus_client has it."""
        parts = urlsplit(target)
        if parts.path == "/version":
            return 200, f'{{"version":"{self.version}"}}'
        if parts.path == "/v1/models":
            return self.models_status, self.models
        if parts.path == "/metrics":
            return 200, self.page
        if parts.path == "/metrics/":
            names = set(parse_qs(parts.query).get("name[]", []))
            if not self.filters:
                return 200, ""
            lines = [line for line in self.page.splitlines() if line.partition("{")[0] in names]
            return 200, "".join(f"{line}\n" for line in lines)
        return 404, "Not Found"

    @contextlib.contextmanager
    def serving(self, port: int = 0) -> Iterator[str]:
        """Yield the URL of the running server; at the end its connections are cut, as when it is killed."""
        server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            self.release.set()
            server.shutdown()
            thread.join(5)
            server.server_close()
            for link in self.links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
