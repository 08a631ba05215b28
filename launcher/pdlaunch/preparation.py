"""From a recipe to a plan that can run here: facts, checks, engine, model. Starts nothing."""

from __future__ import annotations

import secrets

from pdlaunch import deployments, engine, hosts, models, trace
from pdlaunch.console import Reporter
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan, ProcessRole
from pdlaunch.planner import ModelLocation, plan
from pdlaunch.recipe import Recipe, is_path
from pdlaunch.recipe_loader import Loaded


def planned(loaded: Loaded, only: ProcessRole | None, *, is_traced: bool = False) -> DeploymentPlan:
    """The plan of a recipe on this machine, without building or fetching anything."""
    recipe = _traced(loaded.recipe) if is_traced else loaded.recipe
    if only is not None:
        # Roles of one deployment may share a machine, and each has a life of its own.
        recipe = recipe.model_copy(update={"name": f"{recipe.name}-{only}"})
    facts = hosts.facts_for(recipe, secrets.token_hex(4))
    made = plan(recipe, facts, engine.planned(recipe.engine.variant), planned_model(recipe))
    return made.model_copy(update={"only": only, "notes": (*loaded.notes, *made.notes)})


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
    """Raise where a deployment is up already, or belongs to other hosts."""
    record = deployments.read(made.name)
    if record is not None and record.supervisor() is not None:
        raise deployments.already_up(made.name)
    elsewhere = [process for process in made.own if not process.is_here]
    if elsewhere:
        process = elsewhere[0]
        only = "" if made.only else " --only prefill (or decode, router) on each host, or"
        raise UsageError(
            f"{process.name} belongs to {process.host}, which is not this machine",
            where=f"{process.role}.host",
            next_step=f"use{only} --dry-run to see each host's commands",
        )


def provide(recipe: Recipe, reporter: Reporter) -> None:
    """See that the engine and the model are where the plan says they are."""
    built = engine.ensure(recipe.engine.variant, reporter)
    kind, _, name = recipe.model.partition(":")
    if kind == "embedded":
        models.ensure_embedded(name, built, reporter)
    elif kind == "random":
        models.ensure_random(name, built, reporter)


def planned_model(recipe: Recipe) -> ModelLocation:
    """Where a recipe's model is, or would be, on this machine. Touches nothing."""
    kind, _, name = recipe.model.partition(":")
    if kind == "embedded":
        return ModelLocation(str(models.planned_embedded(name)), is_local=True)
    if kind == "random":
        return ModelLocation(str(models.planned_random(name)), is_local=True)
    return ModelLocation(recipe.model, is_local=is_path(recipe.model))
