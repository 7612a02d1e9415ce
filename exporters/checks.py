"""What `gpuidle doctor` asks of the exporters."""

from __future__ import annotations

from gpuidle.agent.model import Check


def prometheus_check(address: str) -> Check:
    """Return whether `run` could serve its metrics on `address` ("host:port"), by doing so for a moment."""
    from gpuidle.exporters.prometheus import ListenError, PrometheusExporter

    try:
        PrometheusExporter(address).close()
    except ListenError as error:
        return Check(
            id="export.prometheus",
            status="limited",
            found=str(error),
            remedy="gpuidle run --prometheus HOST:PORT chooses another one",
        )
    return Check(id="export.prometheus", status="ok", found=f"{address} is free for `gpuidle run`")
