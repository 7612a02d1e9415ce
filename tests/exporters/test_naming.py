"""One name on both paths."""

from __future__ import annotations

import pytest

from gpuidle.exporters.naming import Kind, label_name, prometheus_name


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("gpuidle.compute.time", "s", "counter", "gpuidle_compute_time_seconds_total"),
        ("hw.gpu.memory.usage", "By", "updowncounter", "hw_gpu_memory_usage_bytes"),
        ("hw.gpu.utilization", "1", "gauge", "hw_gpu_utilization_ratio"),
        ("gpuidle.compute.idle_ratio", "1", "gauge", "gpuidle_compute_idle_ratio"),
        ("gpuidle.step.duration", "s", "histogram", "gpuidle_step_duration_seconds"),
        ("hw.energy", "J", "counter", "hw_energy_joules_total"),
        ("hw.power", "W", "gauge", "hw_power_watts"),
        ("gpuidle.engine.tokens", "{token}", "counter", "gpuidle_engine_tokens_total"),
        ("gpuidle.gpu.price", "{currency}/h", "gauge", "gpuidle_gpu_price_per_hour"),
        ("gpuidle.gpu.peak", "{flop}/s", "gauge", "gpuidle_gpu_peak_per_second"),
        ("gpuidle.gpu.engine.info", "", "gauge", "gpuidle_gpu_engine_info"),
        # Of the specification and the translator's own tests
        ("system.filesystem.usage", "By", "updowncounter", "system_filesystem_usage_bytes"),
        ("system.network.dropped", "{packets}", "counter", "system_network_dropped_total"),
        ("requests.total", "1", "counter", "requests_total"),
        ("hw.status", "1", "updowncounter", "hw_status"),
        ("hw.fan.speed_ratio", "1", "gauge", "hw_fan_speed_ratio"),
        ("system.network.io", "By/s", "gauge", "system_network_io_bytes_per_second"),
        ("redis.latest_fork", "us", "gauge", "redis_latest_fork_microseconds"),
        ("process.uptime.seconds", "s", "gauge", "process_uptime_seconds"),
        ("a..b__c", "", "gauge", "a_b_c"),
        ("2xx.responses", "", "gauge", "_2xx_responses"),
    ],
)
def test_names_are_those_of_the_otlp_translation(name: str, unit: str, kind: Kind, expected: str) -> None:
    assert prometheus_name(name, unit, kind) == expected


def test_labels_keep_their_underscores_and_lose_their_dots() -> None:
    assert label_name("gpuidle.engine.id") == "gpuidle_engine_id"
    assert label_name("hw.gpu.task") == "hw_gpu_task"
