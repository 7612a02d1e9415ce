"""Who sends OTLP: the resource's attributes, from the node, from Kubernetes and from the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import gpuidle
from gpuidle.agent.model import Node

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

_FROM_KUBERNETES = (
    ("k8s.cluster.name", ("K8S_CLUSTER_NAME", "CLUSTER_NAME")),
    ("k8s.node.name", ("K8S_NODE_NAME", "NODE_NAME")),
    ("k8s.namespace.name", ("K8S_NAMESPACE_NAME", "POD_NAMESPACE")),
    ("k8s.pod.name", ("K8S_POD_NAME", "POD_NAME")),
    ("k8s.pod.uid", ("K8S_POD_UID", "POD_UID")),
)
"""Attributes with the variables that a pod's specification fills by the downward API; the first counts."""


def resource_of(node: Node, environ: Mapping[str, str] = os.environ) -> Resource:
    """Return who sends: this node and this program, unless OTEL_RESOURCE_ATTRIBUTES says otherwise.

    In a pod the host is named for the node, and the instance too: the pod's own name changes with each start.
    """
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    told = OTELResourceDetector().detect().attributes
    ours = attributes_of(node, environ)
    return Resource.create({name: value for name, value in ours.items() if name not in told})


def attributes_of(node: Node, environ: Mapping[str, str]) -> dict[str, str | bool]:
    """Return the attributes that the node, the program and Kubernetes give."""
    kubernetes = {
        attribute: value
        for attribute, names in _FROM_KUBERNETES
        if (value := next((environ[name] for name in names if environ.get(name)), ""))
    }
    here = node.hostname == socket.gethostname()
    node_name = kubernetes.get("k8s.node.name") if here else None
    # A container has a machine id of its own, if any: the node's name stands for the node there.
    host_id = _machine_id() if here and node_name is None else None
    ours: dict[str, str | bool] = {
        "service.name": "gpuidle",
        "service.version": gpuidle.__version__,
        "service.instance.id": node_name or host_id or node.hostname,
        "host.name": node_name or node.hostname,
    }
    if host_id:
        ours["host.id"] = host_id
    if node.simulated:
        ours["gpuidle.simulated"] = True
    return {**ours, **(kubernetes if here else {})}


def _machine_id() -> str | None:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            return text
    return None
