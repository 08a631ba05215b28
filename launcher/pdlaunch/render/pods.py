"""Pod templates: how one process of a plan runs in a cluster. Pure; knows no controllers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from pdlaunch.containers import SHM_GIB
from pdlaunch.plan import ProcessPlan
from pdlaunch.recipe import Recipe
from pdlaunch.recipe_checks import ROLES, Role
from pdlaunch.render.cluster import (
    COMPONENT,
    INSTANCE,
    LEADER_ADDRESS,
    MODELS,
    POD_IP,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    SIDE_CHANNEL_PORT,
    Settings,
    layout,
    memory_gib,
)

# Names of ports: monitors and policies tell them apart by these.
HTTP = "http"
ROUTER_HTTP = "api"
ROUTER_METRICS = "metrics"

SIDE_CHANNEL_SECRET = "VLLM_NIXL_SIDE_CHANNEL_SECRET"  # noqa: S105 - the name of one
HUB_TOKEN = "HF_TOKEN"  # noqa: S105 - the name of one
SIDE_CHANNEL_KEY = "secret"
HUB_TOKEN_KEY = "token"  # noqa: S105 - the name of one

# The image's own user, and the group that may write to its home; volumes get a group of their own.
_USER = {"runAsNonRoot": True, "runAsUser": 2000, "runAsGroup": 0}
_VOLUME_GROUP = 2000

# The cluster's device plugins decide which devices a container sees.
_CLUSTER_DECIDES = ("CUDA_VISIBLE_DEVICES",)

# EFA's driver sets 5128 pages of 2 MiB aside on an instance: room for two engines.
_HUGE_PAGES_MIB = 5120

_STARTUP_PERIOD_S = 10
# Whoever sends to a pod still does so until it has learned that the pod is to go.
_LEARN_S = 5
# For what vLLM does when its last request has ended.
_EXIT_S = 15


def labels(settings: Settings, component: str) -> dict[str, str]:
    """The labels of one component's objects; its pods have all of them."""
    return {
        "app.kubernetes.io/name": "pdlaunch",
        INSTANCE: settings.name,
        COMPONENT: component,
        "app.kubernetes.io/managed-by": "pdlaunch",
    }


def engine(
    recipe: Recipe, role: Role, process: ProcessPlan, settings: Settings, *, leads: bool = True
) -> dict[str, Any]:
    """The pod of an engine, or of one of its nodes.

    leads: whether it is the engine's first node, which serves HTTP; the others compute only.
    """
    section = recipe.role(role)
    lies = layout(recipe, role, settings)
    is_local = "HF_HUB_OFFLINE" in process.env
    container: dict[str, Any] = {
        "name": "engine",
        "image": settings.image,
        "command": [process.argv[0]],
        "args": [*map(_escaped, process.argv[1:]), *_nodes(lies.nodes, leads)],
        "env": [
            *_own_address(),
            *_environment(process.env, without=_CLUSTER_DECIDES),
            *([{"name": "VLLM_HOST_IP", "value": POD_IP}] if lies.nodes > 1 else []),
            *_secrets(settings, is_local=is_local),
        ],
    }
    if leads:
        container |= {
            "ports": [
                {"name": HTTP, "containerPort": process.port},
                {"name": "side-channel", "containerPort": SIDE_CHANNEL_PORT},
            ],
            **_engine_probes(recipe.timeouts.ready_s),
            "lifecycle": {"preStop": {"sleep": {"seconds": _LEARN_S}}},
        }
    container |= {
        "resources": _resources(recipe, role, settings),
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS} | ({"readOnly": True} if is_local else {}),
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the pod's own
        ],
        "securityContext": _confined(("IPC_LOCK",) if section.efa_interfaces else ()),
    }
    spec: dict[str, Any] = {
        **_pod_basics(),
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _grace_s(recipe.timeouts.stop_s),
        "containers": [container],
        "volumes": [
            {"name": "models", **_models(settings)},
            {
                "name": "shm",
                "emptyDir": {
                    "medium": "Memory",
                    "sizeLimit": f"{SHM_GIB[recipe.engine.variant]}Gi",
                },
            },
        ],
    }
    if recipe.engine.variant == "cuda":
        spec["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if section.efa_interfaces:
        spec["affinity"] = _one_zone(settings)
    return {"metadata": {"labels": labels(settings, role)}, "spec": spec}


def router(process: ProcessPlan, settings: Settings, stop_s: float) -> dict[str, Any]:
    """The pod of the router."""
    container: dict[str, Any] = {
        "name": "router",
        "image": settings.image,
        "command": [process.argv[0]],
        "args": [*map(_escaped, process.argv[1:])],
        "env": [*_own_address(), *_environment(process.env)],
        "ports": [
            {"name": ROUTER_HTTP, "containerPort": ROUTER_PORT},
            {"name": ROUTER_METRICS, "containerPort": ROUTER_METRICS_PORT},
        ],
        "livenessProbe": _probe("/liveness", ROUTER_HTTP, period_s=10, failures=6),
        # Not ready before it has a healthy engine of each role.
        "readinessProbe": _probe("/readiness", ROUTER_HTTP, period_s=5, failures=2),
        # Clients' connections go elsewhere only when the Service has learned of it.
        "lifecycle": {"preStop": {"sleep": {"seconds": _LEARN_S}}},
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": _confined(()),
    }
    return {
        "metadata": {"labels": labels(settings, "router")},
        "spec": {
            **_pod_basics(),
            "serviceAccountName": f"{settings.name}-router",
            "terminationGracePeriodSeconds": _grace_s(stop_s),
            "containers": [container],
        },
    }


def _grace_s(stop_s: float) -> int:
    return ceil(_LEARN_S + stop_s + _EXIT_S)


def _pod_basics() -> dict[str, Any]:
    return {
        # Variables that Kubernetes makes of Services may have names that vLLM gives a meaning.
        "enableServiceLinks": False,
        "securityContext": {
            **_USER,
            "fsGroup": _VOLUME_GROUP,
            # Volumes of models are large: no walk over all files at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _confined(capabilities: Sequence[str]) -> dict[str, Any]:
    added = {"add": list(capabilities)} if capabilities else {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **added}}


def _own_address() -> list[dict[str, Any]]:
    """First of all, for later values name it."""
    return [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


def _environment(env: Mapping[str, str], without: Iterable[str] = ()) -> list[dict[str, Any]]:
    return [
        {"name": name, "value": _escaped(value)}
        for name, value in sorted(env.items())
        if name not in without
    ]


def _secrets(settings: Settings, *, is_local: bool) -> list[dict[str, Any]]:
    side_channel = {"name": settings.side_channel_secret, "key": SIDE_CHANNEL_KEY}
    found: list[dict[str, Any]] = [
        {"name": SIDE_CHANNEL_SECRET, "valueFrom": {"secretKeyRef": side_channel}}
    ]
    if not is_local:
        # Models that are open to all need none.
        token = {"name": settings.hub_token_secret, "key": HUB_TOKEN_KEY, "optional": True}
        found += [
            {"name": HUB_TOKEN, "valueFrom": {"secretKeyRef": token}},
            {"name": "HF_HOME", "value": MODELS},
        ]
    return found


def _escaped(text: str) -> str:
    """Kubernetes replaces $(NAME); only what the plan puts there is meant to be."""
    escaped = text.replace("$(", "$$(")
    for meant in (POD_IP, LEADER_ADDRESS):
        escaped = escaped.replace(f"${meant}", meant)
    return escaped


def _nodes(nodes: int, leads: bool) -> list[str]:
    """What tells vLLM about an engine's other nodes. LeaderWorkerSet sets the variables."""
    if nodes == 1:
        return []
    group = {
        "--nnodes": str(nodes),
        "--node-rank": "$(LWS_WORKER_INDEX)",
        "--master-addr": LEADER_ADDRESS,
    }
    return [word for pair in group.items() for word in pair] + ([] if leads else ["--headless"])


def _engine_probes(ready_s: float) -> dict[str, Any]:
    return {
        # As long as the model may take to load; the other probes wait until this one has passed.
        "startupProbe": _probe(
            "/health", HTTP, period_s=_STARTUP_PERIOD_S, failures=ceil(ready_s / _STARTUP_PERIOD_S)
        ),
        "readinessProbe": _probe("/health", HTTP, period_s=5, failures=3),
        "livenessProbe": _probe("/health", HTTP, period_s=10, failures=6),
    }


def _probe(path: str, port: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(recipe: Recipe, role: Role, settings: Settings) -> dict[str, Any]:
    lies = layout(recipe, role, settings)
    section = recipe.role(role)
    cuda = recipe.engine.variant == "cuda"
    cpus = settings.cpus_per_worker or (8 if cuda else 1)
    # Shared memory counts as the pod's.
    memory = (
        lies.workers_per_node * memory_gib(recipe, role, settings) + SHM_GIB[recipe.engine.variant]
    )
    limits = {"memory": f"{memory}Gi"}
    if cuda:
        limits["nvidia.com/gpu"] = str(lies.workers_per_node)
    if lies.efa_per_node:
        limits["vpc.amazonaws.com/efa"] = str(lies.efa_per_node)
        env = {**recipe.engine.env, **section.env}
        if env.get("FI_EFA_USE_HUGE_PAGE") == "1":
            limits["hugepages-2Mi"] = f"{_HUGE_PAGES_MIB}Mi"
    return {
        "requests": {"cpu": str(lies.workers_per_node * cpus), "memory": f"{memory}Gi"},
        "limits": limits,
    }


def _models(settings: Settings) -> dict[str, Any]:
    if settings.model_claim is None:
        return {"emptyDir": {}}
    return {"persistentVolumeClaim": {"claimName": settings.model_claim}}


def _one_zone(settings: Settings) -> dict[str, Any]:
    """EFA does not cross availability zones."""
    engines = {
        "matchLabels": {INSTANCE: settings.name},
        "matchExpressions": [{"key": COMPONENT, "operator": "In", "values": list(ROLES)}],
    }
    term = {"labelSelector": engines, "topologyKey": "topology.kubernetes.io/zone"}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
