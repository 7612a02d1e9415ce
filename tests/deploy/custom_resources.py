"""Schemas of the custom resources, as far as ours go: no package publishes them in a form to test with.

Written by hand after the API references of the Prometheus operator (monitoring.coreos.com/v1) and of KEDA
(keda.sh/v1alpha1); a key that is not listed is refused.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d))+$"}
NUMBER_IN_TEXT: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}

METADATA = record("name", name=TEXT, namespace=TEXT, labels=TEXTS)
ACTIONS = (
    "replace",
    "keep",
    "drop",
    "hashmod",
    "labelmap",
    "labeldrop",
    "labelkeep",
    "lowercase",
    "uppercase",
)
RELABELING = record(
    "action",
    action={"enum": list(ACTIONS)},
    sourceLabels=many(TEXT),
    separator=TEXT,
    targetLabel=TEXT,
    regex=TEXT,
    replacement=TEXT,
)
ENDPOINT = record(
    "port",
    port=TEXT,
    path=TEXT,
    interval=DURATION,
    scrapeTimeout=DURATION,
    relabelings=many(RELABELING),
    metricRelabelings=many(RELABELING),
)
SELECTOR = record("matchLabels", matchLabels=TEXTS)
POLICY = record(
    "type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=COUNT, periodSeconds=COUNT
)
SCALING = record(
    "policies", policies=many(POLICY), stabilizationWindowSeconds={"type": "integer", "maximum": 3600}
)
TRIGGER = record(
    "type name metadata",
    type={"const": "prometheus"},
    name=TEXT,
    metadata=record(
        "serverAddress query threshold",
        serverAddress=TEXT,
        query=TEXT,
        threshold=NUMBER_IN_TEXT,
        activationThreshold=NUMBER_IN_TEXT,
    ),
)


def resource(version: str, spec: Schema) -> Schema:
    return record(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind=TEXT,
        metadata=METADATA,
        spec=spec,
    )


SCHEMAS = {
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1", record("selector endpoints", selector=SELECTOR, endpoints=many(ENDPOINT))
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1",
        record("selector podMetricsEndpoints", selector=SELECTOR, podMetricsEndpoints=many(ENDPOINT)),
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        record(
            "scaleTargetRef triggers",
            scaleTargetRef=record("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            pollingInterval=COUNT,
            cooldownPeriod=COUNT,
            advanced=record(
                "horizontalPodAutoscalerConfig",
                horizontalPodAutoscalerConfig=record(
                    "behavior", behavior=record("", scaleUp=SCALING, scaleDown=SCALING)
                ),
            ),
            triggers=many(TRIGGER),
        ),
    ),
}
