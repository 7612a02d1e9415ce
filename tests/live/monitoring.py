"""A real Prometheus and a real Alertmanager on free loopback ports, and a webhook that takes alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.live.server import free_port

PROMETHEUS = shutil.which("prometheus")
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
WAIT_S = 60.0
"""How long something that must happen is waited for; it is no claim about speed."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return the condition's value once it is true."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.25)
    return value


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a program for as long as the block lasts."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def answers(url: str) -> bool:
    """Return whether a URL answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


class Webhook:
    """Takes what Alertmanager sends."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhook.alerts.extend(body["alerts"])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def firing(self) -> set[str]:
        """Return the names of the alerts that came."""
        return {alert["labels"]["alertname"] for alert in list(self.alerts) if alert["status"] == "firing"}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{expression}: {error.read().decode()}") from error
        result: list[dict[str, Any]] = body["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """Return the value of the only series; None without one."""
        found = self.query(expression)
        assert len(found) < 2, expression
        return float(found[0]["value"][1]) if found else None


def hurried(rules: Path, folder: Path) -> Path:
    """Copy a file of rules with `for` cut down to two seconds, and nothing else changed."""
    text, count = re.subn(r"^(\s+for:) .*$", r"\1 2s", rules.read_text(encoding="utf-8"), flags=re.MULTILINE)
    copy = folder / rules.name
    copy.write_text(text, encoding="utf-8")
    assert count == 0 or rules.name == "alerts.yml"
    return copy


@contextmanager
def alertmanager(folder: Path, webhook: Webhook) -> Iterator[int]:
    """Run an Alertmanager that hands everything to the webhook; yield its port."""
    assert ALERTMANAGER is not None
    port = free_port()
    config = folder / "alertmanager.json"
    route = {"receiver": "webhook", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
    receivers = [{"name": "webhook", "webhook_configs": [{"url": webhook.url, "send_resolved": False}]}]
    config.write_text(json.dumps({"route": route, "receivers": receivers}), encoding="utf-8")
    command = [
        ALERTMANAGER, f"--config.file={config}", f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=warn",
    ]  # fmt: skip
    with running(command, folder / "alertmanager.log"):
        until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"), "Alertmanager is ready")
        yield port


@contextmanager
def prometheus(
    folder: Path, target: str, rules: list[Path], alertmanager_port: int, instance: str
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes `target` each second under these rules."""
    assert PROMETHEUS is not None
    port = free_port()
    config = folder / "prometheus.json"
    relabel = [{"target_label": "instance", "replacement": instance}]
    scrape = {"job_name": "gpuidle", "static_configs": [{"targets": [target]}], "relabel_configs": relabel}
    manager = {"static_configs": [{"targets": [f"127.0.0.1:{alertmanager_port}"]}]}
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(path) for path in rules],
                "scrape_configs": [scrape],
                "alerting": {"alertmanagers": [manager]},
            }
        ),
        encoding="utf-8",
    )
    command = [
        PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with running(command, folder / "prometheus.log"):
        server = Prometheus(port)
        until(lambda: answers(f"{server.url}/-/ready"), "Prometheus is ready")
        yield server
