"""A hostile endpoint costs a bounded time and a bounded memory, and says what it did (fault 50)."""

from __future__ import annotations

import gzip
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from tests.doubles.http_server import answer, raw_server, read_request

from gpuidle.collectors.support.http import HttpClient, HttpError, parse_base_url

PATIENCE_S = 20.0
"""Far above any limit under test: a hang fails the test, a slow machine does not."""


def failure_of(
    handle: Callable[[socket.socket], None], *, timeout_s: float = 0.5, max_bytes: int = 10_000
) -> HttpError:
    with raw_server(handle) as url:
        client = HttpClient(url, timeout_s=timeout_s, max_bytes=max_bytes)
        begin = time.monotonic()
        with pytest.raises(HttpError) as caught:
            client.get("/metrics")
        assert time.monotonic() - begin < PATIENCE_S
        client.close()
    return caught.value


def test_a_body_and_the_time_of_its_last_byte() -> None:
    def handle(link: socket.socket) -> None:
        read_request(link)
        link.sendall(answer("a 1\nb ü\n".encode()))

    with raw_server(handle) as url:
        before = time.monotonic_ns()
        with closing(HttpClient(url)) as client:
            got = client.get("/metrics")
        assert got.text == "a 1\nb ü\n"
        assert before < got.read_ns < time.monotonic_ns()


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    def handle(link: socket.socket) -> None:
        read_request(link)
        link.sendall(answer(b'name{gpu="\xf8"} 1\n'))

    with raw_server(handle) as url, closing(HttpClient(url)) as client:
        assert client.get("/metrics").text == 'name{gpu="�"} 1\n'


def test_one_connection_serves_many_requests() -> None:
    links: list[socket.socket] = []

    def handle(link: socket.socket) -> None:
        links.append(link)
        while read_request(link):
            link.sendall(answer(b"ok"))

    with raw_server(handle) as url, closing(HttpClient(url)) as client:
        assert [client.get("/").text for _ in range(5)] == ["ok"] * 5
        client.close()
    assert len(links) == 1


def test_a_connection_that_the_server_closed_in_between_is_replaced_silently() -> None:
    served = 0

    def handle(link: socket.socket) -> None:
        nonlocal served
        read_request(link)
        served += 1
        link.sendall(answer(f"answer {served}".encode()))

    with raw_server(handle) as url, closing(HttpClient(url)) as client:
        assert [client.get("/").text for _ in range(3)] == ["answer 1", "answer 2", "answer 3"]


def test_a_connection_that_dies_on_reuse_without_a_byte_is_tried_once_more() -> None:
    connections = 0

    def handle(link: socket.socket) -> None:
        nonlocal connections
        connections += 1
        read_request(link)
        link.sendall(answer(b"first of its connection"))
        read_request(link)  # and hang up instead of answering

    with raw_server(handle) as url, closing(HttpClient(url)) as client:
        assert client.get("/").text == client.get("/").text
    assert connections == 2


def test_bytes_left_over_from_one_answer_do_not_become_the_next() -> None:
    asked = threading.Event()

    def handle(link: socket.socket) -> None:
        while read_request(link):
            link.sendall(answer(b"mine") + answer(b"smuggled"))
            asked.set()

    with raw_server(handle) as url, closing(HttpClient(url)) as client:
        assert client.get("/").text == "mine"
        assert asked.wait(PATIENCE_S)
        assert client.get("/").text == "mine"


def test_a_bearer_key_is_sent_and_compression_is_not_asked_for() -> None:
    seen: list[bytes] = []

    def handle(link: socket.socket) -> None:
        seen.append(read_request(link))
        link.sendall(answer(b"ok"))

    with raw_server(handle) as url, closing(HttpClient(url + "/prefix/", bearer="key")) as client:
        client.get("/v1/models")
    assert seen[0].startswith(b"GET /prefix/v1/models HTTP/1.1\r\n")
    assert b"Authorization: Bearer key\r\n" in seen[0]
    assert b"Accept-Encoding: identity\r\n" in seen[0]


def test_nobody_listening_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(HttpError) as caught:
        HttpClient(f"http://127.0.0.1:{port}").get("/")
    assert caught.value.kind == "refused"
    assert str(port) in str(caught.value)


def test_a_server_that_never_answers_times_out() -> None:
    def handle(link: socket.socket) -> None:
        read_request(link)
        link.recv(1)  # until the client hangs up

    assert failure_of(handle, timeout_s=0.2).kind == "timeout"


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["status", "header", "body", "chunks", "continue"],
)
def test_a_dripping_server_is_held_to_the_whole_deadline(start: bytes, drop: bytes) -> None:
    def handle(link: socket.socket) -> None:
        read_request(link)
        link.sendall(start)
        while True:
            link.sendall(drop)
            time.sleep(0.02)

    assert failure_of(handle, timeout_s=0.3).kind == "timeout"


def flood(link: socket.socket, start: bytes, block: bytes) -> None:
    read_request(link)
    link.sendall(start)
    while True:
        link.sendall(block)


@pytest.mark.parametrize(
    ("start", "kinds"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n", {"too_large"}),
        (b"HTTP/1.1 200 OK\r\n\r\n", {"too_large"}),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2540BE400\r\n", {"too_large"}),
        (b"HTTP/1.1 200 OK\r\nX: ", {"too_large", "protocol"}),
    ],
    ids=["announced", "until close", "one chunk", "one header"],
)
def test_ten_gigabytes_are_not_read(start: bytes, kinds: set[str]) -> None:
    error = failure_of(lambda link: flood(link, start, b"x" * 65536), timeout_s=5)
    assert error.kind in kinds


def test_a_flood_of_headers_is_refused() -> None:
    error = failure_of(lambda link: flood(link, b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 1000), timeout_s=5)
    assert error.kind in ("protocol", "too_large")


def test_a_redirect_is_not_followed_but_named() -> None:
    followed = threading.Event()
    with raw_server(lambda _link: followed.set()) as elsewhere:

        def handle(link: socket.socket) -> None:
            read_request(link)
            link.sendall(answer(b"", status="302 Found", headers=f"Location: {elsewhere}/secret\r\n"))

        error = failure_of(handle)
    assert (error.kind, error.status) == ("redirect", 302)
    assert f"{elsewhere}/secret" in str(error)
    assert not followed.is_set()


def test_another_status_is_told() -> None:
    def handle(link: socket.socket) -> None:
        read_request(link)
        link.sendall(answer(b"no", status="501 Not Implemented"))

    error = failure_of(handle)
    assert (error.kind, error.status) == ("http_status", 501)


def test_a_compressed_or_binary_answer_is_no_text() -> None:
    def compressed(link: socket.socket) -> None:
        read_request(link)
        link.sendall(answer(gzip.compress(b"x"), headers="Content-Encoding: gzip\r\n"))

    def binary(link: socket.socket) -> None:
        read_request(link)
        link.sendall(answer(b"a\0b"))

    assert failure_of(compressed).kind == "not_text"
    assert failure_of(binary).kind == "not_text"


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.7\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 twohundred OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc",
        b"",
    ],
    ids=["ssh", "tls", "status", "cut", "negative chunk", "no chunk", "nothing"],
)
def test_what_is_no_http_is_a_protocol_error(reply: bytes) -> None:
    def handle(link: socket.socket) -> None:
        read_request(link)
        link.sendall(reply)

    assert failure_of(handle).kind == "protocol"


def test_nothing_but_the_documented_error_escapes_any_bytes() -> None:
    rng = random.Random(11)
    pieces = [
        *(b"HTTP/1.1 ", b"200 OK", b"\r\n", b"\n", b"Content-Length: ", b"-1", b"7", b"\xff\xfe", b"\0"),
        *(b"Transfer-Encoding: chunked", b"5\r\nhello\r\n", b"0\r\n\r\n", b"Connection: close", b": "),
        *(b"99999999999999999999", b"HTTP/0.9", b"Location: x", b"HTTP/1.1 100 C\r\n\r\n", b"\x00\x80"),
    ]
    replies = [b"".join(rng.choices(pieces, k=rng.randint(0, 14))) for _ in range(250)]
    replies += [
        b"HTTP/1.1 200 OK\r\n" + b"".join(rng.choices(pieces, k=rng.randint(0, 9))) for _ in range(250)
    ]
    turn = iter(replies)

    def handle(link: socket.socket) -> None:
        read_request(link)
        link.sendall(next(turn))

    outcomes: set[str] = set()
    with raw_server(handle) as url:
        client = HttpClient(url, timeout_s=5)
        for _ in replies:
            try:
                client.get("/")
                outcomes.add("answer")
            except HttpError as error:
                outcomes.add(error.kind)
            client.close()
    assert {"answer", "protocol"} <= outcomes


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "127.0.0.1:8000",
        "http://",
        "http://host:0",
        "http://host:99999",
        "http://user:key@host",
        "http://[::1",
    ],
)
def test_a_url_that_cannot_be_asked_is_refused_at_once(url: str) -> None:
    with pytest.raises(HttpError) as caught:
        parse_base_url(url)
    assert caught.value.kind == "bad_url"
    assert "key@" not in str(caught.value)
