"""Writes the Grafana dashboards: `python deploy/grafana/build.py [FOLDER]`, beside this file by default.

They need Grafana 10 or newer, a Prometheus data source, and the recording rules of deploy/prometheus.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from panels import (
    CAUSE_COLOURS,
    PHASE_COLOURS,
    Board,
    rate,
    scatter,
    series,
    stat,
    table,
    variable,
)

IDLE = (
    "Compute that is known to have been idle, weighted by peak. High idle alone is physics: decode waits for"
    " memory. What could be had back is under waste."
)
CLUSTER = variable("cluster", "Cluster", "label_values(gpuidle_gpu_engine_info, cluster)", every=True)
NODE = variable(
    "instance", "Node", 'label_values(gpuidle_gpu_engine_info{cluster=~"$cluster"}, instance)', every=False
)
GPU = variable(
    "hw_id", "GPU", 'label_values(gpuidle_gpu_engine_info{instance=~"$instance"}, hw_id)', every=False
)


def fleet() -> Board:
    """All clusters: what is wasted, where, and what nobody can see."""
    board = Board("gpuidle-fleet", "gpuidle: fleet", "Wasted compute over all nodes.", [CLUSTER])
    of = 'cluster=~"$cluster"'
    board.add(
        stat("GPUs", "Devices that are watched.", f"sum(cluster:gpuidle_gpus:sum{{{of}}})", "none"), 4, 4
    )
    board.add(
        stat(
            "Waste",
            "Loaded and unused, unallocated, host gaps and reclaimable, at the configured price.",
            f"sum by (gpuidle_currency) (cluster_waste:gpuidle_cost:per_hour{{{of}}})",
            "none",
            decimals=2,
        ),
        5,
        4,
    )
    board.add(
        stat("Idle compute", IDLE, f"avg(cluster:gpuidle_idle:ratio_rate5m{{{of}}})", "percentunit"), 5, 4
    )
    board.add(
        stat(
            "Blind",
            "GPU time that nobody could attribute.",
            f"avg(cluster:gpuidle_blind:ratio_rate5m{{{of}}})",
            "percentunit",
        ),
        5,
        4,
    )
    board.add(
        stat(
            "Alerts",
            "Alerts of gpuidle that fire now.",
            f'count(ALERTS{{alertname=~"Gpuidle.*", alertstate="firing", {of}}}) or vector(0)',
            "none",
        ),
        5,
        4,
    )
    board.add(
        series(
            "Waste per hour",
            "Money an hour by kind of waste.",
            [(f"sum by (gpuidle_waste) (cluster_waste:gpuidle_cost:per_hour{{{of}}})", "{{gpuidle_waste}}")],
            "none",
            stacked=True,
        ),
        12,
        9,
    )
    board.add(
        series(
            "Where the GPUs' time goes",
            "The ledger in GPUs: the causes sum to the GPUs that are watched.",
            [
                (
                    f"sum by (gpuidle_cause) (cluster_cause:gpuidle_compute_time:sum_rate5m{{{of}}})",
                    "{{gpuidle_cause}}",
                )
            ],
            "none",
            stacked=True,
            colours=CAUSE_COLOURS,
        ),
        12,
        9,
    )
    board.add(
        table(
            "Top wasters",
            "Engines by what they waste an hour.",
            "topk(20, sum by (cluster, instance, k8s_namespace_name, gpuidle_model, gpuidle_engine_id,"
            f" gpuidle_currency) (engine_waste:gpuidle_cost:per_hour{{{of}}}))",
            "none",
            "per hour",
        ),
        12,
        9,
    )
    board.add(
        table(
            "Loaded and unused",
            "Money an hour for models that nobody asks, by namespace.",
            "sum by (k8s_namespace_name, gpuidle_model, gpuidle_currency)"
            f' (model_waste:gpuidle_cost:per_hour{{gpuidle_waste="no_request", {of}}})',
            "none",
            "per hour",
        ),
        12,
        9,
    )
    board.add(
        table(
            "Idle compute by model", IDLE, f"model:gpuidle_idle:ratio_rate5m{{{of}}}", "percentunit", "idle"
        ),
        8,
        9,
    )
    board.add(
        table(
            "GPUs by model",
            "Devices that each model holds.",
            f"sum by (gpuidle_model) (model:gpuidle_gpus:sum{{{of}}})",
            "none",
            "GPUs",
        ),
        8,
        9,
    )
    board.add(
        table(
            "Blind GPUs",
            "Share of the time that nobody could attribute; gpuidle doctor on the node says why.",
            f"gpu:gpuidle_blind:ratio_rate5m{{{of}}}",
            "percentunit",
            "blind",
        ),
        8,
        9,
    )
    return board


def node() -> Board:
    """One node: its GPUs, its engines, and the agent itself."""
    board = Board("gpuidle-node", "gpuidle: node", "One node: GPUs, engines and the agent.", [CLUSTER, NODE])
    of = 'cluster=~"$cluster", instance=~"$instance"'
    board.add(
        series(
            "Where the GPUs' time goes",
            "The ledger of the node in GPUs.",
            [(f"node_cause:gpuidle_compute_time:sum_rate5m{{{of}}}", "{{gpuidle_cause}}")],
            "none",
            stacked=True,
            colours=CAUSE_COLOURS,
        ),
        12,
        9,
    )
    board.add(
        series(
            "Waste per hour",
            "Money an hour by kind of waste.",
            [(f"node_waste:gpuidle_cost:per_hour{{{of}}}", "{{gpuidle_waste}} {{gpuidle_currency}}")],
            "none",
            stacked=True,
        ),
        12,
        9,
    )
    board.add(
        series(
            "Tokens per second",
            "Prompt tokens computed, and tokens decoded.",
            [
                (
                    f"sum by (gpuidle_model, gpuidle_phase) ({rate('gpuidle_engine_tokens_total', of)})",
                    "{{gpuidle_model}} {{gpuidle_phase}}",
                )
            ],
            "none",
        ),
        12,
        8,
    )
    board.add(
        series(
            "Requests",
            "In the engines, running and waiting.",
            [(f"gpuidle_engine_requests{{{of}}}", "{{gpuidle_model}} {{gpuidle_state}}")],
            "none",
        ),
        6,
        8,
    )
    board.add(
        series(
            "KV cache in use",
            "Room here is what more rows a step need.",
            [(f"gpuidle_engine_kv_usage_ratio{{{of}}}", "{{gpuidle_model}}")],
            "percentunit",
            highest=1,
        ),
        6,
        8,
    )
    board.add(
        series(
            "Host gaps",
            "Share of GPU time between steps while requests run.",
            [
                (
                    f'engine_cause:gpuidle_compute_time:ratio_rate5m{{gpuidle_cause="host_gap", {of}}}',
                    "{{gpuidle_model}}",
                )
            ],
            "percentunit",
        ),
        8,
        8,
    )
    board.add(
        series(
            "Idle compute by GPU",
            IDLE,
            [(f"gpu:gpuidle_idle:ratio_rate5m{{{of}}}", "{{hw_id}}")],
            "percentunit",
            highest=1,
        ),
        8,
        8,
    )
    board.add(
        series("Power", "Drawn by each GPU.", [(f"hw_power_watts{{{of}}}", "{{hw_name}}")], "watt"), 8, 8
    )
    board.add(
        series(
            "What gpuidle costs",
            "CPU of the agent in cores, and its memory.",
            [(rate("gpuidle_agent_cpu_time_seconds_total", of), "CPU")],
            "none",
        ),
        8,
        7,
    )
    board.add(
        series(
            "Agent's memory",
            "Resident.",
            [(f"gpuidle_agent_memory_usage_bytes{{{of}}}", "memory")],
            "bytes",
        ),
        8,
        7,
    )
    board.add(
        series(
            "Agent's frame age",
            "Time since the last measurement.",
            [(f"gpuidle_agent_frame_age_seconds{{{of}}}", "age")],
            "s",
        ),
        8,
        7,
    )
    return board


def gpu() -> Board:
    """One GPU: phases, ledger, roofline."""
    board = Board(
        "gpuidle-gpu", "gpuidle: GPU", "One GPU: phases, ledger and roofline.", [CLUSTER, NODE, GPU]
    )
    of = 'instance=~"$instance", hw_id=~"$hw_id"'
    board.add(
        series(
            "Phases",
            "Share of time by phase; mixed steps hold prefill and decode.",
            [
                (
                    f"sum by (gpuidle_phase) ({rate('gpuidle_phase_time_seconds_total', of)})",
                    "{{gpuidle_phase}}",
                )
            ],
            "percentunit",
            stacked=True,
            colours=PHASE_COLOURS,
            highest=1,
        ),
        12,
        9,
    )
    board.add(
        series(
            "Ledger",
            "Where each second went, by cause.",
            [
                (
                    f"sum by (gpuidle_cause) ({rate('gpuidle_compute_time_seconds_total', of)})",
                    "{{gpuidle_cause}}",
                )
            ],
            "percentunit",
            stacked=True,
            colours=CAUSE_COLOURS,
            highest=1,
        ),
        12,
        9,
    )
    board.add(
        scatter(
            "Roofline",
            "Each point is a moment: right is bound by memory, up by compute, the origin by neither.",
            f"max(gpuidle_dram_bandwidth_ratio{{{of}}})",
            f"max(gpuidle_tensor_active_ratio{{{of}}})",
        ),
        8,
        9,
    )
    board.add(
        series(
            "Counters",
            "Trailing minute: tensor pipe, SMs, DRAM, and what the roofline allows.",
            [
                (f"max(gpuidle_tensor_active_ratio{{{of}}})", "tensor pipe"),
                (f"max(gpuidle_sm_active_ratio{{{of}}})", "SMs with a warp"),
                (f"max(gpuidle_dram_bandwidth_ratio{{{of}}})", "DRAM bandwidth"),
                (f"max(gpuidle_roofline_attained_ratio{{{of}}})", "of the roofline"),
            ],
            "percentunit",
            highest=1,
        ),
        8,
        9,
    )
    board.add(
        series(
            "Idle compute",
            f"{IDLE} Both bases bracket the truth.",
            [(f"max by (gpuidle_basis) (gpuidle_compute_idle_ratio{{{of}}})", "{{gpuidle_basis}}")],
            "percentunit",
            highest=1,
        ),
        8,
        9,
    )
    board.add(
        series(
            "Waste per hour",
            "Money an hour by kind of waste.",
            [(f"gpu_waste:gpuidle_cost:per_hour{{{of}}}", "{{gpuidle_waste}} {{gpuidle_currency}}")],
            "none",
            stacked=True,
        ),
        8,
        8,
    )
    board.add(
        series(
            "Memory",
            "In use by all processes.",
            [
                (f"hw_gpu_memory_usage_bytes{{{of}}}", "in use"),
                (f"hw_gpu_memory_limit_bytes{{{of}}}", "size"),
            ],
            "bytes",
        ),
        8,
        8,
    )
    board.add(
        table(
            "Engine and evidence",
            "Who holds the GPU.",
            f"gpuidle_gpu_engine_info{{{of}}}",
            "none",
            "held",
        ),
        8,
        8,
    )
    return board


def dashboards() -> dict[str, str]:
    """Return the files' texts by name."""
    return {
        f"{name}.json": json.dumps(make().json(), indent=2) + "\n"
        for name, make in (("fleet", fleet), ("node", node), ("gpu", gpu))
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for file, text in dashboards().items():
        (folder / file).write_text(text, encoding="utf-8")
