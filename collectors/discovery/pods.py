"""The Kubernetes pod of a process, without asking the cluster: read from the process's own root folder.

The kubelet mounts the namespace's name into every pod (unless its service-account token is switched off), and
the host name inside a pod is the pod's name (unless it uses the node's network or sets another one).
"""

from __future__ import annotations

from typing import NamedTuple

from gpuidle.collectors.discovery.processes import ProcessTable
from gpuidle.collectors.modelfiles.config_json import ConfigError, resolve_within
from gpuidle.collectors.support.files import read_regular

_NAMESPACE = "run/secrets/kubernetes.io/serviceaccount/namespace"
_HOSTNAME = "etc/hostname"
_NAME_LIMIT = 253


class Pod(NamedTuple):
    """Where a process runs; None is not known, or no pod."""

    namespace: str | None = None
    name: str | None = None


def pod_of(table: ProcessTable, pid: int) -> Pod:
    """Return the pod of a process; nothing outside a pod, and where its root may not be entered."""
    namespace = _word(table, pid, _NAMESPACE)
    if namespace is None:
        namespace = _word(table, pid, f"var/{_NAMESPACE}")
    if namespace is None:
        return Pod()
    name = _word(table, pid, _HOSTNAME)
    # A pod on the node's network has the node's host name, and would be taken for another pod.
    return Pod(namespace, None if name == _word(table, 1, _HOSTNAME) else name)


def _word(table: ProcessTable, pid: int, path: str) -> str | None:
    try:
        # A link in a container is the container's: followed by the kernel it would lead to our own files.
        data = read_regular(resolve_within(table.folder(pid, "root"), path), _NAME_LIMIT + 1)
        text = data.decode("ascii").strip()
    except (OSError, ConfigError, UnicodeDecodeError):
        return None
    return text if 0 < len(text) <= _NAME_LIMIT and text.isprintable() and " " not in text else None
