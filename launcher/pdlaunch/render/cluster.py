"""From a recipe to a plan whose processes are pods: addresses, ports, nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path, PurePosixPath

from pydantic import JsonValue

from pdlaunch import containers
from pdlaunch.engine import Engine
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan
from pdlaunch.planner import DEFAULT_CPU_KV_CACHE_GIB, Facts, ModelLocation, plan
from pdlaunch.recipe import Recipe
from pdlaunch.recipe_checks import ROLES, Role, workers_per_engine
from pdlaunch.render.documents import LONGEST_LABEL, check_label, check_reference

# Kubernetes puts the variable's value there. Each server listens on its pod's own address alone,
# and NIXL advertises what it is bound to.
POD_IP = "$(POD_IP)"

# LeaderWorkerSet puts the host name of a group's first pod there.
LEADER_ADDRESS = "$(LWS_LEADER_ADDRESS)"

# Each pod has an address of its own, so the ports of a recipe, which keep engines of one host
# apart, mean nothing here. The router finds all engines at one port.
ENGINE_PORT = 8000
SIDE_CHANNEL_PORT = 5600
ROUTER_PORT = 8000
ROUTER_METRICS_PORT = 29000

# Where the volume with the models is; the hub's cache, where the model comes from the hub.
MODELS = "/models"

INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
# LeaderWorkerSet's own; only the first pod of a group serves HTTP.
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"

# The longest thing that a controller makes of a name and that must be a label is the host name of
# a pod: NAME-prefill-99-99.
_LONGEST_NAME = LONGEST_LABEL - len("-prefill-99-99")


@dataclass(frozen=True)
class Settings:
    """What only the cluster's operator knows. None: chosen by the recipe's engine variant."""

    name: str
    namespace: str
    image: str
    side_channel_secret: str
    hub_token_secret: str = "huggingface"  # noqa: S105 - the name of one
    # Of an existing claim, which every node must be able to mount.
    model_claim: str | None = None
    gpus_per_node: int = 8
    cpus_per_worker: int | None = None
    memory_gib_per_worker: int | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    # Whose pods may read the engines' metrics.
    monitoring_namespace: str = "monitoring"
    pod_monitor: bool = True
    # Upper bounds for autoscaling; a role that is not named has a fixed number of engines.
    scale_to: Mapping[Role, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """How one engine lies on nodes."""

    nodes: int
    workers_per_node: int
    efa_per_node: int


def name_of(recipe: Recipe) -> str:
    """The recipe's name as objects of a cluster may have it."""
    return recipe.name.replace(".", "-")


def check(recipe: Recipe, settings: Settings) -> None:
    """Raise UsageError for settings that do not hold, or do not go with the recipe."""
    check_label(settings.name, "--name", longest=_LONGEST_NAME)
    check_label(settings.namespace, "--namespace")
    check_label(settings.monitoring_namespace, "--monitoring-namespace")
    check_reference(settings.side_channel_secret, "--side-channel-secret")
    check_reference(settings.hub_token_secret, "--hub-token-secret")
    if settings.model_claim is not None:
        check_reference(settings.model_claim, "--model-claim")
    for role in ROLES:
        layout(recipe, role, settings)
        most = settings.scale_to.get(role)
        least = recipe.role(role).replicas
        if most is not None and most <= least:
            raise UsageError(
                f"{role} has {least} engines and cannot scale up to {most}",
                where=f"--scale-{role}-to",
                next_step=f"name more than {least}, or lower {role}.replicas",
            )


def layout(recipe: Recipe, role: Role, settings: Settings) -> Layout:
    """The nodes that one engine of a role needs.

    Raises:
        UsageError: its workers or EFA interfaces do not spread evenly over them.
    """
    section = recipe.role(role)
    workers = workers_per_engine(section)
    if recipe.engine.variant == "cpu":
        return Layout(nodes=1, workers_per_node=workers, efa_per_node=0)
    nodes = ceil(workers / settings.gpus_per_node)
    if workers % nodes:
        raise UsageError(
            f"an engine of {workers} workers does not spread evenly over {nodes} nodes of "
            f"{settings.gpus_per_node} GPUs",
            where=f"{role}.tensor_parallel",
            next_step="change it, or say what nodes there are with --gpus-per-node",
        )
    if section.efa_interfaces % nodes:
        raise UsageError(
            f"{section.efa_interfaces} EFA interfaces do not spread evenly over {nodes} nodes",
            where=f"{role}.efa_interfaces",
            next_step=f"name a multiple of {nodes}: the interfaces of one engine, on all its nodes",
        )
    return Layout(nodes, workers // nodes, section.efa_interfaces // nodes)


def memory_gib(recipe: Recipe, role: Role, settings: Settings) -> int:
    """Memory of one worker: what the weights pass through, or on CPU lie in, and the KV cache."""
    if settings.memory_gib_per_worker is not None:
        return settings.memory_gib_per_worker
    if recipe.engine.variant == "cuda":
        return 64
    return 8 + ceil(recipe.role(role).kv_cache_gib or DEFAULT_CPU_KV_CACHE_GIB)


def planned(
    recipe: Recipe, settings: Settings, engine: Engine, model: ModelLocation
) -> DeploymentPlan:
    """The plan of a recipe with one engine a role, as every replica's pod runs it.

    Args:
        recipe: what to serve.
        settings: what the operator says.
        engine: as on this machine.
        model: as on this machine; in the pods it is on a volume.

    Raises:
        UsageError: the recipe and the settings do not go together.
    """
    check(recipe, settings)
    return plan(
        _in_pods(recipe),
        Facts(
            launch_id=settings.name,
            cores=(),
            gpus=None,
            free_ports=(),
            local_addresses=frozenset(),
            routable_address=POD_IP,
            resolved={},
        ),
        containers.in_image(engine),
        _model(recipe, settings, model),
        discovery=_discovery(recipe, settings),
        # Each node would draw an id of its own, and peers refuse ranks that do not agree.
        engine_ids={
            role: LEADER_ADDRESS for role in ROLES if layout(recipe, role, settings).nodes > 1
        },
    )


def selector(recipe: Recipe, role: Role, settings: Settings) -> dict[str, str]:
    """The labels of the pods of a role that serve HTTP."""
    labels = {INSTANCE: settings.name, COMPONENT: role}
    if layout(recipe, role, settings).nodes > 1:
        labels[WORKER_INDEX] = "0"
    return labels


def _in_pods(recipe: Recipe) -> Recipe:
    # The router stops sending as soon as a pod is to go; what it has sent may still end.
    drain: dict[str, JsonValue] = {"shutdown-timeout": ceil(recipe.timeouts.stop_s)}
    engine = recipe.engine.model_copy(update={"args": drain | dict(recipe.engine.args)})
    alone = {
        "replicas": 1,
        "host": POD_IP,
        "port": ENGINE_PORT,
        "side_channel_port": SIDE_CHANNEL_PORT,
        # The cluster hands out devices and cores.
        "devices": None,
        "cores": None,
    }
    router = {"host": POD_IP, "port": ROUTER_PORT, "metrics_port": ROUTER_METRICS_PORT}
    return recipe.model_copy(
        update={
            "engine": engine,
            "prefill": recipe.prefill.model_copy(update=alone),
            "decode": recipe.decode.model_copy(update=alone),
            "router": recipe.router.model_copy(update=router),
        }
    )


def _model(recipe: Recipe, settings: Settings, model: ModelLocation) -> ModelLocation:
    if not model.is_local:
        return model
    if settings.model_claim is None:
        raise UsageError(
            f"{recipe.model} is a folder of this machine, which pods do not have",
            where="model",
            next_step=f"copy {model.argument} to a volume and name its claim with --model-claim, "
            "or name a model on the hub",
        )
    return ModelLocation(str(PurePosixPath(MODELS, Path(model.argument).name)), is_local=True)


def _discovery(recipe: Recipe, settings: Settings) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = {
        "service-discovery": True,
        "service-discovery-namespace": settings.namespace,
        "service-discovery-port": ENGINE_PORT,
    }
    for role in ROLES:
        labels = selector(recipe, role, settings)
        found[f"{role}-selector"] = [f"{name}={value}" for name, value in labels.items()]
    return found
