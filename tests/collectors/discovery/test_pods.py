"""The pod of a process, from its own root folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.doubles.proc_tree import ProcTree

from gpuidle.collectors.discovery.pods import Pod, pod_of
from gpuidle.collectors.discovery.processes import ProcessTable

SECRETS = "var/run/secrets/kubernetes.io/serviceaccount"


def files(root: Path, hostname: str | None, namespace: str | None) -> Path:
    if hostname is not None:
        (root / "etc").mkdir(parents=True)
        (root / "etc" / "hostname").write_text(f"{hostname}\n")
    if namespace is not None:
        (root / SECRETS).mkdir(parents=True)
        (root / SECRETS / "namespace").write_text(namespace)
    return root


@pytest.mark.parametrize(
    ("hostname", "namespace", "pod"),
    [
        ("llama-0", "chat", Pod("chat", "llama-0")),
        ("node-a", "chat", Pod("chat", None)),  # on the node's network
        ("llama-0", None, Pod()),  # a container without a service account: its name alone says nothing
        (None, "chat", Pod("chat", None)),
        ("llama-0", "two words", Pod()),
    ],
)
def test_a_pod_is_told_by_its_own_files(
    tmp_path: Path, hostname: str | None, namespace: str | None, pod: Pod
) -> None:
    tree = ProcTree(tmp_path / "proc")
    tree.add(1, ["init"], files=files(tmp_path / "host", "node-a", None))
    tree.add(70, ["vllm"], files=files(tmp_path / "pod", hostname, namespace))
    assert pod_of(ProcessTable(tmp_path / "proc"), 70) == pod


def test_a_process_whose_root_cannot_be_entered_has_no_pod(tmp_path: Path) -> None:
    assert pod_of(ProcessTable(tmp_path), 70) == Pod()


def test_an_absolute_link_in_a_container_leads_to_its_own_files_and_not_to_ours(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    files(ours, None, "monitoring")
    root = files(tmp_path / "container", "llama-0", None)
    (root / "var").mkdir()
    (root / "var" / "run").symlink_to(ours / "var" / "run")  # as /var/run -> /run in most images
    tree = ProcTree(tmp_path / "proc")
    tree.add(1, ["init"], files=files(tmp_path / "host", "node-a", None))
    tree.add(70, ["vllm"], files=root)
    assert pod_of(ProcessTable(tmp_path / "proc"), 70) == Pod()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    root = files(tmp_path / "container", None, "chat")
    (root / "etc").mkdir()
    os.mkfifo(root / "etc" / "hostname")
    tree = ProcTree(tmp_path / "proc")
    tree.add(1, ["init"], files=files(tmp_path / "host", "node-a", None))
    tree.add(70, ["vllm"], files=root)
    assert pod_of(ProcessTable(tmp_path / "proc"), 70) == Pod("chat", None)
