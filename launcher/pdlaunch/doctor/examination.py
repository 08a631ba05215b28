"""Gathers the facts of one examination and has every check judge them. Mends nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from pdlaunch import (
    backend,
    containers,
    deployments,
    engine,
    hosts,
    preparation,
    process_backend,
    recipe_loader,
    upstream,
)
from pdlaunch.doctor import (
    check_containers,
    check_devices,
    check_machine,
    check_model,
    check_network,
    machine,
    model,
    network,
    nixl,
)
from pdlaunch.doctor.facts import Deployment, EngineFacts, Facts, Image, NixlProbe
from pdlaunch.doctor.findings import Finding, error
from pdlaunch.engine import Engine
from pdlaunch.errors import PdError, UsageError
from pdlaunch.plan import DeploymentPlan, ProcessRole
from pdlaunch.recipe import OWNED_ENV, EngineVariant, Recipe
from pdlaunch.series import load as load_series
from pdlaunch.transport import DEFAULT_BACKENDS
from pdlaunch.upstream import Variant

Check = Callable[[Facts, Deployment | None], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_machine.python,
    check_machine.engine,
    check_machine.folders,
    check_machine.cores,
    check_machine.memory,
    check_machine.shared_memory,
    check_machine.open_files,
    check_machine.clock,
    check_devices.gpus,
    check_devices.efa,
    check_devices.nixl,
    check_network.placement,
    check_network.addresses,
    check_network.ports,
    check_network.proxies,
    check_network.peers,
    check_model.presence,
    check_model.shape,
    check_model.length,
    check_model.cache,
    check_model.blocks,
)
# The others judge what processes of this machine need of it.
CHECKS_OF_CONTAINERS: tuple[Check, ...] = (
    check_containers.images,
    check_network.placement,
    check_network.addresses,
    check_network.ports,
    check_network.proxies,
    check_network.peers,
    check_model.shape,
    check_model.length,
    check_model.blocks,
)


@dataclass(frozen=True)
class Surroundings:
    """Where facts come from: this machine, or what tests put in its place."""

    root: Path = Path("/")
    probe_timeout_s: float = nixl.TIMEOUT_S
    connect_timeout_s: float = network.CONNECT_TIMEOUT_S


HERE = Surroundings()


def judge(facts: Facts, deployment: Deployment | None) -> list[Finding]:
    """What all checks say that have something to judge."""
    in_containers = deployment is not None and bool(deployment.plan.endpoints)
    checks = CHECKS_OF_CONTAINERS if in_containers else CHECKS
    return [finding for check in checks for finding in check(facts, deployment)]


def examine(
    path: Path | None,
    overrides: tuple[str, ...] = (),
    only: ProcessRole | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    surroundings: Surroundings = HERE,
) -> list[Finding]:
    """Examine this machine, for a recipe or as such; a recipe that is refused is a finding too."""
    refused: list[Finding] = []
    if path is not None:
        try:
            loaded = recipe_loader.load(path, overrides, environ)
            made = preparation.planned(loaded, only)
        except PdError as refusal:
            remedy = refusal.next_step or "mend the recipe"
            refused = [error("recipe", refusal.what, remedy, where=refusal.where)]
        else:
            deployment = replace(
                _deployment(loaded.recipe, made, environ),
                up=_up(loaded.recipe.name),
                # A plan's notes begin with those of its recipe, which the checks know better.
                notes=made.notes[len(loaded.notes) :],
            )
            facts = _quick_facts(deployment, surroundings, environ)
            return judge(_thorough(facts, deployment, surroundings, environ), deployment)
    # The machine can be looked at all the same.
    seen = machine.read(surroundings.root, environ)
    variant: Variant = "cuda" if seen.gpus.devices else "cpu"
    found = _engine_facts(variant)
    probes: tuple[NixlProbe, ...] = ()
    if found.is_ready:
        built = engine.planned(variant)
        probes = (_probe("this machine", built, DEFAULT_BACKENDS, environ, surroundings),)
    return [*refused, *judge(Facts(seen, replace(found, probes=probes)), None)]


def before_start(
    recipe: Recipe,
    made: DeploymentPlan,
    environ: Mapping[str, str] = os.environ,
    surroundings: Surroundings = HERE,
) -> list[Finding]:
    """The quick part: what works less well than meant; a UsageError about what cannot work."""
    deployment = _deployment(recipe, made, environ)
    found = judge(_quick_facts(deployment, surroundings, environ), deployment)
    hopeless = [finding for finding in found if finding.state == "error"]
    if len(hopeless) == 1:
        (first,) = hopeless
        raise UsageError(first.evidence, where=first.where or first.check, next_step=first.remedy)
    if hopeless:
        lines = [
            f"  {each.where or each.check}: {each.evidence}: {each.remedy}" for each in hopeless
        ]
        raise UsageError(
            f"{len(hopeless)} things keep it from working:\n" + "\n".join(lines),
            next_step="mend them; pdlaunch doctor looks further",
        )
    return [finding for finding in found if finding.state == "warning"]


def _deployment(recipe: Recipe, made: DeploymentPlan, environ: Mapping[str, str]) -> Deployment:
    return Deployment(
        recipe=recipe,
        plan=made,
        environments={
            process.name: process_backend.environment(process, environ)
            for process in made.own
            if process.is_here and process.role != "router" and process.container is None
        },
    )


def _up(name: str) -> tuple[str, ...]:
    """Names of what runs of a recipe here: all of it, or roles that were started alone."""
    names = (name, *(f"{name}-{role}" for role in get_args(ProcessRole)))
    records = ((each, deployments.read(each)) for each in names)
    return tuple(
        each for each, record in records if record is not None and record.supervisor() is not None
    )


def _engine_facts(variant: EngineVariant) -> EngineFacts:
    planned = engine.planned(variant)
    by_architecture = load_series().upstream.wheels[planned.variant]
    published = by_architecture.get(upstream.machine())
    return EngineFacts(
        variant=planned.variant,
        root=str(planned.root),
        is_ready=engine.is_ready(planned),
        published_wheel=published.filename if published is not None else None,
    )


def _quick_facts(
    deployment: Deployment, surroundings: Surroundings, environ: Mapping[str, str]
) -> Facts:
    """What costs milliseconds, or a call of the driver's tool, and reaches no other host."""
    recipe, made = deployment.recipe, deployment.plan
    roles = {process.role for process in made.own}
    return Facts(
        machine=machine.read(surroundings.root, environ),
        engine=_engine_facts(recipe.engine.variant),
        model=model.read(recipe, made.model, _model_environ(deployment, environ), ask_hub=False),
        unusable_ports=hosts.unusable_ports(recipe, hosts.facts_for(recipe, made.launch_id), roles),
    )


def _thorough(
    facts: Facts, deployment: Deployment, surroundings: Surroundings, environ: Mapping[str, str]
) -> Facts:
    """The rest: other hosts, the hub, and NIXL in child processes."""
    recipe, made = deployment.recipe, deployment.plan
    return replace(
        facts,
        engine=replace(facts.engine, probes=_probes(facts, deployment, surroundings)),
        model=model.read(recipe, made.model, _model_environ(deployment, environ), ask_hub=True),
        peers=network.peers(made, surroundings.connect_timeout_s),
        images=tuple(_image(endpoint, recipe) for endpoint in made.endpoints),
    )


def _image(endpoint: str, recipe: Recipe) -> Image:
    name = containers.image_of(recipe)
    try:
        labels = backend.image_labels(endpoint, name)
    except PdError as why:
        return Image(endpoint, name, problem=f"{endpoint}: {why.what}", remedy=why.next_step)
    return Image(endpoint, name, version=labels.get(containers.VERSION_LABEL))


def _model_environ(deployment: Deployment, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Of an engine that loads the model here; ours where none does."""
    return next(iter(deployment.environments.values()), environ)


def _probes(
    facts: Facts, deployment: Deployment, surroundings: Surroundings
) -> tuple[NixlProbe, ...]:
    """One for each environment that differs in more than addresses and devices."""
    if not facts.engine.is_ready:
        return ()
    built = engine.planned(facts.engine.variant)
    backends = deployment.recipe.transfer.backends or DEFAULT_BACKENDS
    kinds: dict[frozenset[tuple[str, str]], str] = {}
    for name, environment in deployment.environments.items():
        kind = frozenset((key, each) for key, each in environment.items() if key not in OWNED_ENV)
        kinds.setdefault(kind, name)
    return tuple(
        _probe(name, built, backends, deployment.environments[name], surroundings)
        for name in kinds.values()
    )


def _probe(
    name: str,
    built: Engine,
    backends: Sequence[str],
    environment: Mapping[str, str],
    surroundings: Surroundings,
) -> NixlProbe:
    return nixl.probe(name, built.python, backends, environment, surroundings.probe_timeout_s)
