"""From a recipe to a plan that can run here: facts, checks, engine, model. Starts nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

from pdlaunch import backend, containers, deployments, draining, engine, hosts, models, trace
from pdlaunch.console import Reporter
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan, ProcessPlan, ProcessRole
from pdlaunch.planner import ModelLocation, plan
from pdlaunch.recipe import SSH, Recipe, is_path
from pdlaunch.recipe_loader import Loaded


def planned(
    loaded: Loaded,
    only: ProcessRole | None,
    *,
    is_traced: bool = False,
    running: DeploymentPlan | None = None,
) -> DeploymentPlan:
    """The plan of a recipe on this machine, without building or fetching anything.

    Args:
        running: what runs by an older recipe; processes that are to run as they do come out equal.
    """
    recipe = _traced(loaded.recipe) if is_traced else loaded.recipe
    if only is not None:
        # Roles of one deployment may share a machine, and each has a life of its own.
        recipe = recipe.model_copy(update={"name": f"{recipe.name}-{only}"})
    if running is None:
        facts = hosts.facts_for(recipe, secrets.token_hex(4))
    else:
        facts = hosts.facts_for(recipe, running.launch_id)
        facts = replace(facts, free_ports=(*_ports_of(running), *facts.free_ports))
    own = engine.planned(recipe.engine.variant)
    if only == "router":
        own = replace(own, router=engine.planned_router())
    if recipe.backend == "docker":
        made = plan(recipe, facts, containers.in_image(own), planned_model(recipe))
        hosts_named = (recipe.prefill.host, recipe.decode.host, recipe.router.host)
        is_all_elsewhere = all(host.startswith(SSH) for host in hosts_named)
        made = containers.containerised(
            made,
            recipe,
            here="" if is_all_elsewhere else backend.docker_here(),
            owner=deployments.owner(recipe.name),
        )
    else:
        made = plan(recipe, facts, own, planned_model(recipe))
    return draining.drainable(made).model_copy(
        update={
            "only": only,
            "notes": (*loaded.notes, *made.notes),
            "recipe": recipe.model_dump(mode="json"),
            "recipe_name": loaded.name,
        }
    )


def _ports_of(running: DeploymentPlan) -> Iterator[int]:
    """Its ports in the order in which a planner takes free ones; it passes over named ones."""
    for process in running.processes:
        for port in (process.port, process.side_channel_port, process.metrics_port):
            if port is not None:
                yield port


def _traced(recipe: Recipe) -> Recipe:
    """The same recipe, with the life of each transfer stamped in the deployment's folder."""
    transfer = recipe.transfer
    if transfer.mode != "push":
        raise UsageError(
            f"transfers by {transfer.mode} cannot be traced",
            where="--trace",
            next_step="leave it out, or set transfer.mode=push",
        )
    extra = {**transfer.extra, trace.SETTING: str(deployments.trace_folder(recipe.name))}
    return recipe.model_copy(update={"transfer": transfer.model_copy(update={"extra": extra})})


def check_startable(made: DeploymentPlan) -> None:
    """Raise where a deployment belongs to other hosts."""
    elsewhere = [process for process in made.own if not can_start(process)]
    if elsewhere:
        process = elsewhere[0]
        ways = [
            f"--set {process.role}.host=ADDRESS, one of this machine's, if this is that host",
            "--dry-run to see each host's commands",
        ]
        if not made.only:
            ways.insert(0, "--only prefill (or decode, router) on each host")
        if process.container is not None:
            ways.insert(0, f"{process.role}.host {SSH}USER@{process.host} to start it there")
        raise UsageError(
            f"{process.name} belongs to {process.host}, which is not this machine",
            where=f"{process.role}.host",
            next_step=f"use {', or '.join(ways)}",
        )


def can_start(process: ProcessPlan) -> bool:
    """Whether a process can be started from this machine."""
    container = process.container
    return process.is_here or (container is not None and container.endpoint.startswith(SSH))


def provide(recipe: Recipe, made: DeploymentPlan, reporter: Reporter) -> None:
    """See that the engine, or its image, and the model are where the plan says they are.

    Raises:
        PdError: they are not, and cannot be made.
    """
    if made.endpoints:
        _check_images(containers.image_of(recipe), made, reporter)
    kind, _, name = recipe.model.partition(":")
    if made.endpoints and kind not in ("embedded", "random"):
        return
    if made.only == "router":
        engine.ensure_router(reporter)
        return
    built = engine.ensure(recipe.engine.variant, reporter)
    if kind == "embedded":
        models.ensure_embedded(name, built, reporter)
    elif kind == "random":
        models.ensure_random(name, built, reporter)


def _check_images(image: str, made: DeploymentPlan, reporter: Reporter) -> None:
    versions: dict[str, str] = {}
    for endpoint in made.endpoints:
        labels = backend.image_labels(endpoint, image)
        versions[endpoint] = labels.get(containers.VERSION_LABEL, "an unknown version")
    if len(set(versions.values())) > 1:
        found = ", ".join(f"{version} at {endpoint}" for endpoint, version in versions.items())
        raise UsageError(
            f"the image {image} is not the same on all hosts: {found}",
            where="docker.image",
            next_step="bring one image to all: engines of different series refuse each other",
        )
    (version,) = set(versions.values())
    if version != made.engine_version:
        reporter.warning(
            f"the image {image} holds vLLM {version}, and this is pdlaunch for "
            f"{made.engine_version}: `pdlaunch build image` makes that"
        )


def planned_model(recipe: Recipe) -> ModelLocation:
    """Where a recipe's model is, or would be, on this machine. Touches nothing."""
    kind, _, name = recipe.model.partition(":")
    if kind == "embedded":
        return ModelLocation(str(models.planned_embedded(name)), is_local=True)
    if kind == "random":
        return ModelLocation(str(models.planned_random(name)), is_local=True)
    return ModelLocation(recipe.model, is_local=is_path(recipe.model))
