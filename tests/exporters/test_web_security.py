"""The endpoint with TLS and users: who gets in, and what happens when files change or are wrong."""

from __future__ import annotations

import base64
import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.exporters.frames import frame

from gpuidle.exporters.prometheus import PrometheusExporter
from gpuidle.exporters.web_security import Guard, WebSecurity, WebSecurityError

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")


def certificate(folder: Path, name: str) -> Path:
    """Return a PEM file with a certificate for the loopback and its key."""
    assert OPENSSL is not None
    file, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(file), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return file


def status(url: str, *, context: ssl.SSLContext | None = None, user: str | None = None) -> int:
    request = urllib.request.Request(url)
    if user is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            code: int = answer.status
            return code
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.fixture
def users(tmp_path: Path) -> Path:
    file = tmp_path / "users"
    file.write_text("# who scrapes\nprometheus:s3cret:with:colons\n\nother:word\n", encoding="utf-8")
    return file


def serve(security: WebSecurity) -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter("127.0.0.1:0", security=security)
    exporter.publish(frame())
    yield exporter
    exporter.close()


@pytest.fixture
def asking(users: Path) -> Iterator[PrometheusExporter]:
    yield from serve(WebSecurity(users=users))


def test_metrics_are_for_users_and_probes_for_everybody(asking: PrometheusExporter) -> None:
    assert status(asking.url, user="prometheus:s3cret:with:colons") == 200
    assert status(asking.url, user="other:word") == 200
    for wrong in (None, "prometheus:s3cret", "nobody:word", "other:", ":", "prometheus"):
        assert status(asking.url, user=wrong) == 401
    for probe in ("healthz", "readyz"):
        assert status(f"http://{asking.address}/{probe}") == 200


@pytest.mark.parametrize(
    "header", ["", "Basic", "Basic !!!", "Bearer b3RoZXI6d29yZA==", "Basic b3RoZXI6d29yZA"]
)
def test_a_header_that_is_none_lets_nobody_in(users: Path, header: str) -> None:
    assert not Guard(WebSecurity(users=users)).allows(header)


def test_a_new_password_counts_without_a_restart(asking: PrometheusExporter, users: Path) -> None:
    users.write_text("other:new\n", encoding="utf-8")
    os.utime(users, ns=(1, 1))
    assert status(asking.url, user="other:new") == 200
    assert status(asking.url, user="other:word") == 401


def test_a_file_that_breaks_leaves_the_old_users(
    asking: PrometheusExporter, users: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users.write_text("no colon here\n", encoding="utf-8")
    os.utime(users, ns=(1, 1))
    assert status(asking.url, user="other:word") == 200
    assert "line 1" in caplog.text


@needs_openssl
def test_tls_serves_those_who_trust_it_and_no_plain_http(tmp_path: Path) -> None:
    file = certificate(tmp_path, "server")
    for exporter in serve(WebSecurity(certificate=file, key=file.with_suffix(".key"))):
        assert exporter.url.startswith("https://")
        assert status(exporter.url, context=ssl.create_default_context(cafile=str(file))) == 200
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            status(exporter.url)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            status(exporter.url.replace("https", "http"))


@needs_openssl
def test_a_client_authority_turns_strangers_away(tmp_path: Path) -> None:
    server, client = certificate(tmp_path, "server"), certificate(tmp_path, "client")
    security = WebSecurity(certificate=server, key=server.with_suffix(".key"), client_ca=client)
    for exporter in serve(security):
        trusting = ssl.create_default_context(cafile=str(server))
        with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
            status(exporter.url, context=trusting)
        trusting.load_cert_chain(client, client.with_suffix(".key"))
        assert status(exporter.url, context=trusting) == 200


@needs_openssl
def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    served = tmp_path / "served.pem"
    served.write_bytes(old.read_bytes() + old.with_suffix(".key").read_bytes())
    for exporter in serve(WebSecurity(certificate=served)):
        assert status(exporter.url, context=ssl.create_default_context(cafile=str(old))) == 200
        served.write_bytes(new.read_bytes() + new.with_suffix(".key").read_bytes())
        os.utime(served, ns=(1, 1))
        assert status(exporter.url, context=ssl.create_default_context(cafile=str(new))) == 200


def test_settings_that_cannot_work_are_refused_at_the_start(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    empty = tmp_path / "empty"
    empty.touch()
    for security, word in (
        (WebSecurity(key=empty), "certificate"),
        (WebSecurity(certificate=empty), "empty"),
        (WebSecurity(certificate=nothing), "nothing"),
        (WebSecurity(users=nothing), "cannot be read"),
        (WebSecurity(users=empty), "names no user"),
    ):
        with pytest.raises(WebSecurityError, match=word):
            Guard(security)
