"""The manifests as a cluster gets them: built by kustomize, checked against schemas, and for their rights."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.custom_resources import SCHEMAS

from gpuidle.exporters.catalogue import FRAME_METRICS

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install '.[deploy]'")

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
COMPONENTS = sorted(path.parent for path in KUBERNETES.glob("components/*/kustomization.yaml"))
EXAMPLES = sorted(KUBERNETES.glob("examples/*.yaml"))

Document = dict[str, Any]


@cache
def build(folder: Path) -> tuple[Document, ...]:
    """Return what `kustomize build` makes of a folder."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    else:
        pytest.skip("neither kubectl nor kustomize is here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return tuple(yaml.safe_load_all(done.stdout))


def with_component(component: Path, folder: Path) -> tuple[Document, ...]:
    """Build the base with one component; kustomize wants relative paths."""
    shutil.copytree(KUBERNETES / "base", folder / "base")
    shutil.copytree(component, folder / component.name)
    (folder / "top").mkdir()
    top = {"resources": ["../base"], "components": [f"../{component.name}"]}
    (folder / "top" / "kustomization.yaml").write_text(yaml.safe_dump(top))
    return build(folder / "top")


def one(documents: tuple[Document, ...], kind: str) -> Document:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def pod_of(documents: tuple[Document, ...]) -> Document:
    spec: Document = one(documents, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def check(document: Document) -> None:
    """Check one document against its schema, unknown keys included."""
    if document["kind"] in SCHEMAS:
        jsonschema = pytest.importorskip("jsonschema", reason="pip install '.[deploy]'")
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    else:
        validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[deploy]'")
        validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize("folder", ["base", "overlays/full"])
def test_what_is_applied_fits_the_schemas(folder: str) -> None:
    documents = build(KUBERNETES / folder)
    for document in documents:
        check(document)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "gpuidle"
    kinds = [document["kind"] for document in documents]
    assert not {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} & set(kinds)


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda path: path.name)
def test_each_component_stands_on_the_base_alone(component: Path, tmp_path: Path) -> None:
    for document in with_component(component, tmp_path):
        check(document)


@pytest.mark.parametrize("wrong", ["hostPid", "replicas"])
def test_a_wrong_key_would_be_seen(wrong: str) -> None:
    documents = build(KUBERNETES / "base")
    daemon_set = one(documents, "DaemonSet")
    broken = {**daemon_set, "spec": {**daemon_set["spec"], wrong: True}}
    check(daemon_set)
    with pytest.raises(Exception, match=wrong):
        check(broken)


def test_a_wrong_key_of_a_monitor_would_be_seen(tmp_path: Path) -> None:
    monitor = one(with_component(KUBERNETES / "components" / "service-monitor", tmp_path), "ServiceMonitor")
    check(monitor)
    with pytest.raises(Exception, match="intervall"):
        check({**monitor, "spec": {**monitor["spec"], "intervall": "15s"}})


def test_the_base_runs_without_root_and_without_a_capability() -> None:
    pod = pod_of(build(KUBERNETES / "base"))
    (container,) = pod["containers"]
    assert pod["hostPID"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["tolerations"]
    assert container["resources"]["limits"] == {"cpu": "200m", "memory": "512Mi"}


def test_reading_other_pods_adds_one_capability_and_the_user_that_can_hold_it(tmp_path: Path) -> None:
    pod = pod_of(with_component(KUBERNETES / "components" / "other-users", tmp_path))
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsUser"] == 0


def test_the_full_overlay_takes_one_monitor_and_the_image_that_is_named() -> None:
    documents = build(KUBERNETES / "overlays" / "full")
    assert len([d for d in documents if d["kind"].endswith("Monitor")]) == 1
    pod = pod_of(documents)
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["containers"][0]["image"].startswith("registry.example.com/gpuidle:")


def test_service_and_monitors_select_the_pods_and_their_port() -> None:
    documents = build(KUBERNETES / "overlays" / "full")
    template = one(documents, "DaemonSet")["spec"]["template"]
    labels, (container,) = template["metadata"]["labels"], template["spec"]["containers"]
    (port,) = container["ports"]
    assert container["args"][-1] == f"0.0.0.0:{port['containerPort']}"
    service = one(documents, "Service")
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    monitor = one(documents, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    pod_monitor = yaml.safe_load((KUBERNETES / "components/pod-monitor/pod-monitor.yaml").read_text())["spec"]
    assert pod_monitor["selector"]["matchLabels"].items() <= labels.items()
    assert pod_monitor["podMetricsEndpoints"][0]["port"] == port["name"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_scaling_fits_its_schema(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    if "kind" in document:
        check(document)
    else:
        assert set(document) == {"externalRules"}


def test_scaling_asks_for_demand_by_metrics_that_exist_and_never_for_the_idle_ratio() -> None:
    scaled = yaml.safe_load((KUBERNETES / "examples" / "keda-scaledobject.yaml").read_text())
    rules = yaml.safe_load((KUBERNETES / "examples" / "prometheus-adapter-rules.yaml").read_text())
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    queries += [rule["seriesQuery"] for rule in rules["externalRules"]]
    names = {name for query in queries for name in re.findall(r"gpuidle_\w+?(?=[{\[(]|$)", query)}
    assert names == {"gpuidle_engine_requests", "gpuidle_engine_tokens_total"}
    assert names <= {metric.prometheus for metric in FRAME_METRICS}
    labels = {label for query in queries for label in re.findall(r"(gpuidle_\w+)=", query)}
    assert labels == {"gpuidle_state", "gpuidle_model"}


def test_the_autoscaler_asks_for_the_metrics_that_the_adapter_makes() -> None:
    scaler = yaml.safe_load((KUBERNETES / "examples" / "hpa.yaml").read_text())
    rules = yaml.safe_load((KUBERNETES / "examples" / "prometheus-adapter-rules.yaml").read_text())
    asked = {metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in rules["externalRules"]}
