"""Metrics over OTLP: the last Frame, sent by a thread of its own at a fixed interval.

`publish` only stores the Frame. A collector that is down, slow or a black hole costs nothing but exports:
one Frame is kept, cumulative counters carry everything once it is back, and deltas count from the last
export that arrived.

The data is built by hand rather than by the SDK's instruments: its observable instruments keep every
attribute set they ever saw, and after 2000 fold all new ones into one overflow point.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import gpuidle
from gpuidle.agent.model import Frame
from gpuidle.agent.ports import Telemetry
from gpuidle.exporters.agent_self import SelfMeter
from gpuidle.exporters.catalogue import agent_points
from gpuidle.exporters.latest import Latest, frame_points
from gpuidle.exporters.otlp_resource import resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource

    from gpuidle.exporters.otlp_series import Key, Series

DEFAULT_INTERVAL_S = 10.0
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
_COMPLAIN_EVERY_S = 60.0
_FLUSH_TIMEOUT_S = 0.8
_CLOSE_WITHIN_S = 1.8

logger = logging.getLogger(__name__)


class OtlpConfigError(Exception):
    """A setting of the OTLP exporter cannot work; the message names it and the remedy."""


def wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment asks for OTLP metrics.

    It does by naming an endpoint, or "otlp" in OTEL_METRICS_EXPORTER, unless it switches them off.
    """
    if not allowed(environ):
        return False
    named = environ.get("OTEL_METRICS_EXPORTER", "").split(",")
    return "otlp" in (name.strip() for name in named) or any(
        environ.get(name) for name in ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    )


def allowed(environ: Mapping[str, str] = os.environ) -> bool:
    """Return False where OTEL_SDK_DISABLED is true or OTEL_METRICS_EXPORTER is "none"."""
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not disabled and environ.get("OTEL_METRICS_EXPORTER", "").strip().lower() != "none"


class OtlpExporter:
    """Sends the last Frame every `interval_s` seconds; all OTEL_* variables of OTLP metrics are honoured.

    `endpoint` is a base URL as in OTEL_EXPORTER_OTLP_ENDPOINT and wins over it; `interval_s` wins over
    OTEL_METRIC_EXPORT_INTERVAL, and without either it is 10 s.

    Raises:
        OtlpConfigError: the endpoint is no URL, the protocol is not supported here, or the SDK refuses a
            variable.
    """

    name = "otlp"

    def __init__(
        self,
        endpoint: str | None = None,
        interval_s: float | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        from gpuidle.exporters.otlp_series import temporality_of

        self._make = _exporter_factory(endpoint)
        try:
            self._exporter = self._make(None)
        except ValueError as error:  # older SDKs parse their variables strictly
            raise OtlpConfigError(f"a variable OTEL_EXPORTER_OTLP_* cannot be used: {error}") from error
        self._meter = SelfMeter(telemetry)
        preference = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "")
        aggregation = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "")
        self._temporality = temporality_of(preference, aggregation, self._meter.started_ns)
        self._interval_s = interval_s if interval_s is not None else _interval_from_environment()
        self._complaints = _Complaints(_shown(endpoint), self._interval_s)
        self._quiet = _SdkLog()
        self._sdk_logger = logging.getLogger(type(self._exporter).__module__)
        self._sdk_logger.addFilter(self._quiet)
        self._latest: Latest | None = None
        self._resource: Resource | None = None
        self._known: OrderedDict[Key, Series] = OrderedDict()
        self._last_export_ns: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuidle-otlp", daemon=True)
        self._thread.start()

    def publish(self, frame: Frame) -> None:
        """Keep the Frame for the next export."""
        self._latest = Latest(frame, time.monotonic_ns())

    def close(self) -> None:
        """Send once more and stop, within two seconds even if the collector does not answer."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._exporter.shutdown()  # wakes an export that waits to try again
        self._thread.join(_CLOSE_WITHIN_S)
        if not self._thread.is_alive():  # else it is stuck in a request, and the process ends without it
            self._sdk_logger.removeFilter(self._quiet)

    # The thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._closing.wait(max(0.0, due - time.monotonic())):
            self._export(self._exporter)
            due = max(due + self._interval_s, time.monotonic())
        last = self._make(_FLUSH_TIMEOUT_S)
        self._export(last)
        last.shutdown()

    def _export(self, exporter: MetricExporter) -> None:
        """Send the state of this moment; on success the receiver's state is ours."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        from gpuidle.exporters.otlp_series import remember

        latest = self._latest
        if latest is None:
            return
        self._quiet.message = ""
        try:
            data, counters = self._metrics_data(latest)
            arrived = exporter.export(data) is MetricExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - whatever it is, the next export is another chance
            arrived, self._quiet.message = False, f"{type(error).__name__}: {error}"
        if arrived:
            remember(self._known, counters)
            self._last_export_ns = latest.frame.wall_ns
        self._complaints.note(arrived=arrived, reason=self._quiet.message, now=time.monotonic())

    def _metrics_data(self, latest: Latest) -> tuple[MetricsData, dict[Key, Series]]:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from gpuidle.exporters.otlp_series import data_points

        if self._resource is None:
            self._resource = resource_of(latest.frame.node)
        now_ns = time.monotonic_ns()
        of_frame, counters = data_points(
            frame_points(latest, now_ns),
            self._known,
            self._temporality,
            latest.frame.wall_ns,
            self._last_export_ns,
        )
        of_agent, own = data_points(
            agent_points(self._meter.read(latest.age_s(now_ns))),
            self._known,
            self._temporality,
            time.time_ns(),
            self._last_export_ns,
        )
        scope = InstrumentationScope("gpuidle", gpuidle.__version__, SCHEMA_URL)
        scope_metrics = ScopeMetrics(scope, [*of_frame, *of_agent], SCHEMA_URL)
        data = MetricsData([ResourceMetrics(self._resource, [scope_metrics], self._resource.schema_url)])
        return data, {**counters, **own}


# --------------------------------------------------------------------------------------------------------
# Settings


def _exporter_factory(endpoint: str | None) -> Callable[[float | None], MetricExporter]:
    """Return a maker of SDK exporters with a given timeout (None: the environment's, else 10 s)."""
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    ).strip()
    if endpoint is not None and urlsplit(endpoint).scheme not in {"http", "https"}:
        raise OtlpConfigError(f"{endpoint!r} is no OTLP endpoint: write a URL such as http://localhost:4318")
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        url = _metrics_url(endpoint) if endpoint is not None else None
        # A timeout of less than a second is honoured, though older versions are annotated with int.
        return lambda timeout: OTLPMetricExporter(endpoint=url, timeout=timeout)
    if protocol == "grpc":
        try:
            grpc = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.metric_exporter")
        except ImportError as error:
            raise OtlpConfigError(
                "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, which needs more: pip install 'gpuidle[grpc]'"
            ) from error
        return lambda timeout: grpc.OTLPMetricExporter(endpoint=endpoint, timeout=timeout)
    raise OtlpConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol!r} is not supported: http/protobuf or grpc")


def _metrics_url(endpoint: str) -> str:
    """Return the URL of metrics below a base URL; one that already names them is kept."""
    return endpoint if endpoint.endswith("/v1/metrics") else f"{endpoint.rstrip('/')}/v1/metrics"


def _interval_from_environment() -> float:
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    if not text:
        return DEFAULT_INTERVAL_S
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        logger.warning(
            "OTEL_METRIC_EXPORT_INTERVAL %r is no number of milliseconds: using %g s",
            text,
            DEFAULT_INTERVAL_S,
        )
        return DEFAULT_INTERVAL_S
    return milliseconds / 1000


def _shown(endpoint: str | None) -> str:
    """Return the endpoint for messages, without user, password and query."""
    url = (
        endpoint
        or os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or "http://localhost:4318"
    )
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


# --------------------------------------------------------------------------------------------------------
# What is said when it does not work


class _SdkLog(logging.Filter):
    """Keeps the SDK's last message for ours: it would else write several lines for each failed export."""

    message = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.message = record.getMessage()
        return False


class _Complaints:
    """Says at most once a minute that exports fail, and once that they work again."""

    def __init__(self, endpoint: str, interval_s: float) -> None:
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._failed_since: float | None = None
        self._said_at: float | None = None

    def note(self, *, arrived: bool, reason: str, now: float) -> None:
        """Take the outcome of one export."""
        if arrived:
            if self._failed_since is not None and self._failed_since <= (self._said_at or 0.0):
                logger.info("metrics reach %s again", self._endpoint)
            self._failed_since = None
            return
        if self._failed_since is None:
            self._failed_since = now
        if self._said_at is None or now - self._said_at >= _COMPLAIN_EVERY_S:
            self._said_at = now
            logger.warning(
                "metrics do not reach %s, for %.0f s now (%s). Check that a collector listens there; the"
                " next try is in %g s, and counters catch up",
                self._endpoint,
                now - self._failed_since,
                reason or "no reason given",
                self._interval_s,
            )
