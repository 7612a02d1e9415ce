"""Who sends: from the node, from Kubernetes, from the environment."""

from __future__ import annotations

import socket

import pytest

from gpuidle.agent.model import Node
from gpuidle.exporters.otlp_resource import attributes_of, resource_of

HERE = Node(hostname=socket.gethostname())
POD = {
    "NODE_NAME": "gpu-7",
    "POD_NAME": "gpuidle-x2x",
    "POD_NAMESPACE": "gpuidle",
    "K8S_CLUSTER_NAME": "east",
}


def test_in_a_pod_the_node_is_the_host_and_the_instance() -> None:
    told = attributes_of(HERE, POD)
    assert told["service.instance.id"] == told["host.name"] == told["k8s.node.name"] == "gpu-7"
    assert told["k8s.pod.name"] == "gpuidle-x2x"
    assert told["k8s.namespace.name"] == "gpuidle"
    assert told["k8s.cluster.name"] == "east"
    assert "host.id" not in told


def test_outside_of_one_nothing_is_said_of_kubernetes() -> None:
    assert not [name for name in attributes_of(HERE, {"NODE_NAME": ""}) if name.startswith("k8s.")]


def test_the_node_of_a_recording_is_not_the_pod_that_replays_it() -> None:
    told = attributes_of(Node(hostname="recorded"), POD)
    assert told["service.instance.id"] == told["host.name"] == "recorded"
    assert not [name for name in told if name.startswith("k8s.")]


def test_the_operators_word_counts_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.node.name=told,cluster=prod")
    told = resource_of(HERE, POD).attributes
    assert (told["k8s.node.name"], told["cluster"], told["host.name"]) == ("told", "prod", "gpu-7")
