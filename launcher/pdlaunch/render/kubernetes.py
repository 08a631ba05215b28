"""The Kubernetes objects of a deployment. Pure: a recipe, its plan and settings in, documents out.

Nothing here was ever applied to a cluster by its authors: tests hold it to the published schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from pdlaunch.plan import DeploymentPlan
from pdlaunch.recipe import Recipe
from pdlaunch.recipe_checks import ROLES, Role
from pdlaunch.render import monitoring, pods
from pdlaunch.render.cluster import (
    COMPONENT,
    ENGINE_PORT,
    INSTANCE,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    SIDE_CHANNEL_PORT,
    Settings,
    layout,
    selector,
)
from pdlaunch.render.documents import Document

# Of an engine, on average over a role's: prompts that queue at prefill, the share of KV cache that
# is in use at decode. Beyond it the role gets one more.
_SCALE_AT: dict[Role, str] = {"prefill": "4", "decode": "800m"}

# A rollout may take as long as one engine after the other, and is given up only later than that.
_ROLLOUT_MARGIN_S = 600


def documents(recipe: Recipe, plan: DeploymentPlan, settings: Settings) -> tuple[Document, ...]:
    """All objects of a deployment, in an order in which they can be applied.

    Args:
        recipe: what the plan was made of.
        plan: one engine a role, as `cluster.planned` makes it.
        settings: what the plan was made with.
    """
    return tuple(_documents(recipe, plan, settings))


def _documents(recipe: Recipe, plan: DeploymentPlan, settings: Settings) -> Iterator[Document]:
    yield Document(_namespace(settings), _introduction(recipe, plan, settings))
    for role in ROLES:
        yield from _engines(recipe, role, plan, settings)
    yield from _router(plan, settings)
    yield Document(_network_policy(settings), _POLICY_COMMENT)
    if settings.pod_monitor:
        yield Document(_pod_monitor(settings), "Needs the Prometheus operator.")


def _introduction(recipe: Recipe, plan: DeploymentPlan, settings: Settings) -> str:
    create = f"kubectl --namespace {settings.namespace} create secret generic"
    lines = [
        f"{recipe.name}: {plan.served_name}, KV by {plan.mode}.",
        "Checked against the published schemas; not applied to a cluster by its authors.",
        "",
        "Once, before the engines can start:",
        f"  {create} {settings.side_channel_secret} \\",
        f'    --from-literal={pods.SIDE_CHANNEL_KEY}="$(openssl rand -hex 32)"',
    ]
    if "HF_HUB_OFFLINE" not in plan.engines[0].env:
        lines += [
            "and, for a model that the hub gives to some only:",
            f"  {create} {settings.hub_token_secret} \\",
            f'    --from-literal={pods.HUB_TOKEN_KEY}="$HF_TOKEN"',
        ]
    return "\n".join(lines)


def _namespace(settings: Settings) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace}}


def _metadata(settings: Settings, component: str, name: str = "") -> dict[str, Any]:
    return {
        "name": name or f"{settings.name}-{component}",
        "namespace": settings.namespace,
        "labels": pods.labels(settings, component),
    }


def _engines(
    recipe: Recipe, role: Role, plan: DeploymentPlan, settings: Settings
) -> Iterator[Document]:
    (process,) = plan.of_role(role)
    several = layout(recipe, role, settings).nodes > 1
    make = _group if several else _deployment
    body = make(recipe, role, settings, pods.engine(recipe, role, process, settings))
    comment = ""
    if several:
        worker = pods.engine(recipe, role, process, settings, leads=False)
        body["spec"]["leaderWorkerTemplate"]["workerTemplate"] = worker
        comment = "One group of pods is one engine. Needs the LeaderWorkerSet controller."
    scaled = role in settings.scale_to
    if not scaled:
        # An autoscaler's number must not be set back with every apply.
        body["spec"] = {"replicas": recipe.role(role).replicas, **body["spec"]}
    yield Document(body, comment)
    yield Document(_engine_service(recipe, role, settings))
    if scaled:
        yield Document(_autoscaler(recipe, role, settings, body), _SCALING_COMMENT)


def _deployment(
    recipe: Recipe, role: Role, settings: Settings, pod: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(settings, role),
        "spec": {
            "selector": {"matchLabels": {INSTANCE: settings.name, COMPONENT: role}},
            # One engine goes before its successor comes: nobody keeps devices for one more.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0},
            },
            "progressDeadlineSeconds": ceil(recipe.timeouts.ready_s) + _ROLLOUT_MARGIN_S,
            "template": pod,
        },
    }


def _group(
    recipe: Recipe, role: Role, settings: Settings, leader: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(settings, role),
        "spec": {
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": layout(recipe, role, settings).nodes,
                # The ranks of an engine live and die together.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
            },
        },
    }


def _engine_service(recipe: Recipe, role: Role, settings: Settings) -> dict[str, Any]:
    # LeaderWorkerSet makes a Service of the group's own name, for the host names of its pods.
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(settings, role, f"{settings.name}-{role}-engines"),
        "spec": {
            "clusterIP": "None",
            "selector": selector(recipe, role, settings),
            "ports": [
                {"name": pods.HTTP, "port": ENGINE_PORT, "targetPort": pods.HTTP},
                {
                    "name": "side-channel",
                    "port": SIDE_CHANNEL_PORT,
                    "targetPort": "side-channel",
                },
            ],
        },
    }


_SCALING_COMMENT = (
    "Needs the metric from an adapter: `pdlaunch render monitoring` writes the rules of\n"
    "prometheus-adapter. Engines that start take as long as the model takes to load."
)


def _autoscaler(
    recipe: Recipe, role: Role, settings: Settings, target: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _metadata(settings, role),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": target["apiVersion"],
                "kind": target["kind"],
                "name": target["metadata"]["name"],
            },
            "minReplicas": recipe.role(role).replicas,
            "maxReplicas": settings.scale_to[role],
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": monitoring.SCALING_METRICS[role].metric},
                        "target": {"type": "AverageValue", "averageValue": _SCALE_AT[role]},
                    },
                }
            ],
            "behavior": {
                "scaleUp": {
                    "stabilizationWindowSeconds": 60,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                },
                # An engine that was let go takes a model's load time to come back.
                "scaleDown": {
                    "stabilizationWindowSeconds": max(600, ceil(recipe.timeouts.ready_s)),
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
                },
            },
        },
    }


def _router(plan: DeploymentPlan, settings: Settings) -> Iterator[Document]:
    (process,) = plan.of_role("router")
    metadata = _metadata(settings, "router")
    labels = {INSTANCE: settings.name, COMPONENT: "router"}
    yield Document({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    yield Document(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
            ],
        }
    )
    yield Document(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "subjects": [
                {
                    "kind": "ServiceAccount",
                    "name": metadata["name"],
                    "namespace": settings.namespace,
                }
            ],
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": metadata["name"],
            },
        }
    )
    yield Document(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                # Its policies know what it has sent itself; two of them would know half each.
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": pods.router(process, settings, plan.stop_s),
            },
        },
        "The one address for clients. It finds engines by their labels, and is ready when it has "
        "one\nof each role.",
    )
    yield Document(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "type": "ClusterIP",
                "selector": labels,
                "ports": [
                    {
                        "name": pods.ROUTER_HTTP,
                        "port": ROUTER_PORT,
                        "targetPort": pods.ROUTER_HTTP,
                    },
                    {
                        "name": pods.ROUTER_METRICS,
                        "port": ROUTER_METRICS_PORT,
                        "targetPort": pods.ROUTER_METRICS,
                    },
                ],
            },
        }
    )


_POLICY_COMMENT = (
    "Engines hear each other, the router and whoever reads metrics, nobody else: who reaches the\n"
    "NIXL side channel can read KV. Needs a network plugin that enforces policies."
)


def _network_policy(settings: Settings) -> dict[str, Any]:
    own = {"podSelector": {"matchLabels": {INSTANCE: settings.name}}}
    monitoring = {
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": settings.monitoring_namespace}
        }
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(settings, "engines"),
        "spec": {
            "podSelector": {
                "matchLabels": {INSTANCE: settings.name},
                "matchExpressions": [{"key": COMPONENT, "operator": "In", "values": list(ROLES)}],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"from": [monitoring], "ports": [{"port": pods.HTTP}]},
            ],
        },
    }


def _pod_monitor(settings: Settings) -> dict[str, Any]:
    # Labels of their own: vLLM's metrics already have one named `role`.
    relabelings = [
        {"sourceLabels": [_meta_label(COMPONENT)], "targetLabel": monitoring.ROLE_LABEL},
        {"sourceLabels": [_meta_label(INSTANCE)], "targetLabel": monitoring.DEPLOYMENT_LABEL},
    ]
    interval = f"{monitoring.SCRAPE_INTERVAL_S}s"
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(settings, "metrics"),
        "spec": {
            "selector": {"matchLabels": {INSTANCE: settings.name}},
            "podMetricsEndpoints": [
                {"port": port, "path": "/metrics", "interval": interval, "relabelings": relabelings}
                for port in (pods.HTTP, pods.ROUTER_METRICS)
            ],
        },
    }


def _meta_label(label: str) -> str:
    return "__meta_kubernetes_pod_label_" + "".join(
        char if char.isalnum() else "_" for char in label
    )
