"""The exporters that a running agent can have: one row each.

A new exporter is one file with a class that fulfils `gpuidle.agent.ports.Exporter`, and one row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuidle.agent.ports import Exporter, Telemetry
from gpuidle.exporters.web_security import WebSecurity


@dataclass(frozen=True)
class ExporterOptions:
    """What the user asked for."""

    prometheus_address: str | None = "127.0.0.1:9405"
    """Where to serve Prometheus, "host:port"; None serves nothing."""
    prometheus_security: WebSecurity = field(default_factory=WebSecurity)
    """TLS and users of that endpoint."""
    otlp_endpoint: str | None = None
    """Base URL of an OTLP collector; None leaves the choice to the OTEL_* variables."""
    otlp_interval_s: float | None = None
    """Seconds between OTLP exports; None: OTEL_METRIC_EXPORT_INTERVAL, else 10 s."""


@dataclass(frozen=True)
class ExporterRow:
    """One exporter: `make` returns None where it was not asked for."""

    name: str
    summary: str
    make: Callable[[ExporterOptions, Telemetry | None], Exporter | None]


def _prometheus(options: ExporterOptions, telemetry: Telemetry | None) -> Exporter | None:
    if options.prometheus_address is None:
        return None
    from gpuidle.exporters.prometheus import PrometheusExporter

    return PrometheusExporter(options.prometheus_address, telemetry, options.prometheus_security)


def _otlp(options: ExporterOptions, telemetry: Telemetry | None) -> Exporter | None:
    from gpuidle.exporters import otlp

    asked = options.otlp_endpoint is not None and otlp.allowed()
    if not asked and not otlp.wanted():
        return None
    return otlp.OtlpExporter(options.otlp_endpoint, options.otlp_interval_s, telemetry)


EXPORTERS: tuple[ExporterRow, ...] = (
    ExporterRow("prometheus", "an HTTP endpoint for Prometheus to scrape", _prometheus),
    ExporterRow("otlp", "OTLP metrics pushed to a collector", _otlp),
)
