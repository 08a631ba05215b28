"""`pdlaunch render`: a recipe as files for other programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from pdlaunch import containers, deployments, engine, hosts, planner, preparation, recipe_loader
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan
from pdlaunch.recipe import Recipe
from pdlaunch.recipe_checks import Role
from pdlaunch.render import cluster, compose, documents, kubernetes, monitoring


@click.group(
    epilog=parameters.examples(
        "pdlaunch render k8s qwen3-32b-p5en > p5en.yaml",
        "pdlaunch render compose qwen3-0.6b-gpu > compose.yaml",
        "pdlaunch render monitoring qwen3-32b-p5en",
    )
)
def render() -> None:
    """Write a recipe as manifests, a Compose file or monitoring."""


_image = click.option(
    "--image", help="The image of all containers. [default: the recipe's, or the one built here]"
)


@render.command(
    epilog=parameters.examples(
        "pdlaunch render k8s qwen3-32b-p5en --image registry.example/pdlaunch:1 > p5en.yaml",
        "pdlaunch render k8s qwen3-32b-p5en --set decode.replicas=2 | kubectl diff -f -",
        "pdlaunch render k8s ./mine.yaml --model-claim models --scale-decode-to 4",
    )
)
@parameters.recipe
@parameters.overrides
@_image
@click.option("--name", help="Base of all objects' names. [default: the recipe's name]")
@click.option("--namespace", help="Where all of it goes. [default: the base of the names]")
@click.option(
    "--model-claim",
    metavar="CLAIM",
    help="Volume claim with the models, mountable on all nodes; in pods it is /models. Of a "
    "model's folder, the claim has a copy at its top, under the folder's own name. For a model on "
    "the hub it is HF_HOME: hub/models--Org--Name below it, written by the first pod where it is "
    "not there. [default: each pod downloads the model]",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="An engine with more workers than that spans nodes.",
)
@click.option(
    "--cpus-per-worker", type=click.IntRange(min=1), help="[default: 8, for the CPU engine 1]"
)
@click.option(
    "--memory-gib-per-worker",
    type=click.IntRange(min=1),
    help="[default: 64, for the CPU engine 8 and its KV cache]",
)
@click.option(
    "--node-selector",
    "node_labels",
    multiple=True,
    metavar="LABEL=VALUE",
    help="Nodes for engines, such as node.kubernetes.io/instance-type=p5en.48xlarge.",
)
@click.option(
    "--side-channel-secret",
    metavar="NAME",
    help="Secret whose key `secret` engines prove to each other. [default: NAME-side-channel]",
)
@click.option(
    "--hub-token-secret",
    metavar="NAME",
    default="huggingface",
    show_default=True,
    help="Secret whose key `token` opens models on the hub; may be missing.",
)
@click.option(
    "--scale-prefill-to", type=click.IntRange(min=2), metavar="N", help="Autoscale up to N."
)
@click.option(
    "--scale-decode-to", type=click.IntRange(min=2), metavar="N", help="Autoscale up to N."
)
@click.option(
    "--monitoring-namespace",
    metavar="NAME",
    default="monitoring",
    show_default=True,
    help="The namespace whose pods may read the engines' metrics.",
)
@click.option(
    "--pod-monitor/--no-pod-monitor",
    default=True,
    show_default=True,
    help="For the Prometheus operator.",
)
def k8s(
    *,
    recipe: str,
    overrides: tuple[str, ...],
    image: str | None,
    name: str | None,
    namespace: str | None,
    model_claim: str | None,
    gpus_per_node: int,
    cpus_per_worker: int | None,
    memory_gib_per_worker: int | None,
    node_labels: tuple[str, ...],
    side_channel_secret: str | None,
    hub_token_secret: str,
    scale_prefill_to: int | None,
    scale_decode_to: int | None,
    monitoring_namespace: str,
    pod_monitor: bool,
) -> None:
    """Print a recipe's Kubernetes manifests.

    A role whose engine fits on a node is a Deployment, else a LeaderWorkerSet. Hosts, ports,
    devices and cores of the recipe are for processes: in a cluster each engine has an address of
    its own, and the router finds engines by label. Needs Kubernetes 1.30 or later.
    """
    terminal = Terminal()
    loaded = recipe_loader.load(recipe_loader.find(recipe), overrides)
    for note in loaded.notes:
        terminal.warning(note)
    patched = engine.planned(loaded.recipe.engine.variant)
    chosen = _with_image(loaded.recipe, image, terminal)
    base = name or cluster.name_of(loaded.recipe)
    scale_to: dict[Role, int | None] = {"prefill": scale_prefill_to, "decode": scale_decode_to}
    settings = cluster.Settings(
        name=base,
        namespace=namespace or base,
        image=containers.image_of(chosen),
        side_channel_secret=side_channel_secret or f"{base}-side-channel",
        hub_token_secret=hub_token_secret,
        model_claim=model_claim,
        gpus_per_node=gpus_per_node,
        cpus_per_worker=cpus_per_worker,
        memory_gib_per_worker=memory_gib_per_worker,
        node_selector=dict(_pair(label, "--node-selector") for label in node_labels),
        monitoring_namespace=monitoring_namespace,
        pod_monitor=pod_monitor,
        scale_to={role: most for role, most in scale_to.items() if most is not None},
    )
    plan = cluster.planned(
        loaded.recipe,
        settings,
        patched,
        preparation.planned_model(loaded.recipe),
    )
    terminal.data(documents.dump(kubernetes.documents(loaded.recipe, plan, settings)))


@render.command(
    "compose",
    epilog=parameters.examples(
        "pdlaunch render compose qwen3-0.6b-gpu > compose.yaml && docker compose up",
        "pdlaunch render compose ./mine.yaml --image registry.example/pdlaunch:1",
    ),
)
@parameters.recipe
@parameters.overrides
@_image
def compose_file(recipe: str, overrides: tuple[str, ...], image: str | None) -> None:
    """Print a Compose file for a recipe on one host.

    All servers listen on loopback, as for `pdlaunch up`; ports that the recipe leaves open get
    fixed numbers, 8000 for the router.
    """
    terminal = Terminal()
    loaded = recipe_loader.load(recipe_loader.find(recipe), overrides)
    for note in loaded.notes:
        terminal.warning(note)
    in_image = containers.in_image(engine.planned(loaded.recipe.engine.variant))
    fixed = compose.with_fixed_ports(_with_image(loaded.recipe, image, terminal))
    # The file may be for another host: what devices this one has does not matter.
    facts = replace(hosts.facts_for(fixed, "compose"), gpus=None)
    plan = planner.plan(fixed, facts, in_image, preparation.planned_model(fixed))
    for note in plan.notes:
        terminal.warning(note)
    terminal.data(documents.dump(compose.documents(fixed, plan)))


@render.command(
    "monitoring",
    epilog=parameters.examples(
        "pdlaunch render monitoring qwen3-32b-p5en",
        "pdlaunch render monitoring tiny-qwen3-cpu --out /tmp/monitoring",
    ),
)
@parameters.recipe_or_running
@parameters.overrides
@click.option(
    "--out",
    "out_dir",
    metavar="DIR",
    default=Path("monitoring"),
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to put them (default: monitoring).",
)
def monitoring_files(recipe: str, overrides: tuple[str, ...], out_dir: Path) -> None:
    """Write a Grafana dashboard and Prometheus's configuration; prints their paths.

    RECIPE may also be the name of a deployment that runs on this machine: then its ports are
    taken. In a cluster the PodMonitor replaces prometheus.yaml, and prometheus-adapter.yaml gives
    autoscalers their metrics.
    """
    terminal = Terminal()
    plan = _watched(recipe, overrides, terminal)
    contents = {
        "grafana-dashboard.json": json.dumps(monitoring.dashboard(), indent=2) + "\n",
        "prometheus.yaml": documents.dump([monitoring.scrape_configuration(plan)]),
        "prometheus-adapter.yaml": documents.dump([monitoring.adapter_rules()]),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (out_dir / name).write_text(text, encoding="utf-8")
        terminal.data(str(out_dir / name))


def _watched(recipe: str, overrides: tuple[str, ...], terminal: Terminal) -> DeploymentPlan:
    running = deployments.find(recipe)
    if running is not None and running.supervisor() is not None:
        return running.plan
    loaded = recipe_loader.load(recipe_loader.find(recipe), overrides)
    for note in loaded.notes:
        terminal.warning(note)
    facts = hosts.facts_for(loaded.recipe, "monitoring")
    # Stands for ports that are chosen at start.
    unknown = replace(facts, gpus=None, free_ports=(0,) * planner.ports_needed(loaded.recipe))
    in_image = containers.in_image(engine.planned(loaded.recipe.engine.variant))
    plan = planner.plan(loaded.recipe, unknown, in_image, preparation.planned_model(loaded.recipe))
    for process in plan.processes:
        if 0 in (process.port, process.metrics_port):
            raise UsageError(
                f"the port of {process.name} is chosen at each start",
                where=f"{process.role}.port",
                next_step="name the ports in the recipe, or start it and name the deployment",
            )
    return plan


def _with_image(recipe: Recipe, image: str | None, terminal: Terminal) -> Recipe:
    """The recipe with the image of its containers named."""
    if (named := image or recipe.docker.image) is None:
        named = containers.image_of(recipe)
        made = "" if recipe.engine.variant == "cuda" else f" --variant {recipe.engine.variant}"
        terminal.warning(
            f"{named} must be where the containers run: `pdlaunch build image{made}` makes it; "
            "push it to a registry that they can pull from, and name it with --image"
        )
    docker = recipe.docker.model_copy(update={"image": named})
    return recipe.model_copy(update={"docker": docker})


def _pair(text: str, where: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise UsageError(f"{text!r} is not LABEL=VALUE", where=where)
    return name, value
