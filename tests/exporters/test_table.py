"""Which exporters a configuration makes."""

from __future__ import annotations

import os

import pytest
from tests.exporters.http import otlp_server

from gpuidle.exporters.table import EXPORTERS, ExporterOptions


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def made(options: ExporterOptions) -> list[str]:
    exporters = [exporter for row in EXPORTERS if (exporter := row.make(options, None)) is not None]
    for exporter in exporters:
        exporter.close()
    return [exporter.name for exporter in exporters]


def test_by_default_only_prometheus_is_served() -> None:
    assert made(ExporterOptions(prometheus_address="127.0.0.1:0")) == ["prometheus"]
    assert ExporterOptions().prometheus_address == "127.0.0.1:9405"


def test_nothing_is_made_when_nothing_is_asked_for() -> None:
    assert made(ExporterOptions(prometheus_address=None)) == []


def test_an_endpoint_asks_for_otlp_and_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_server() as collector:
        asked = ExporterOptions(prometheus_address=None, otlp_endpoint=collector.url)
        assert made(asked) == ["otlp"]
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        assert made(asked) == []


def test_the_environment_alone_asks_for_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert made(ExporterOptions(prometheus_address=None)) == ["otlp"]


def test_rows_carry_the_names_of_their_exporters() -> None:
    options = ExporterOptions(prometheus_address="127.0.0.1:0", otlp_endpoint="http://127.0.0.1:1")
    assert made(options) == [row.name for row in EXPORTERS]
    assert all(row.summary for row in EXPORTERS)
