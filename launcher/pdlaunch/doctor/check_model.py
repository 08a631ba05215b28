"""Judges the model against the recipe: is it there, does it fit, how big are its blocks. Pure."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pdlaunch import model_shape, recipe_checks
from pdlaunch.checkpoint import Weights
from pdlaunch.doctor import check_devices, kv
from pdlaunch.doctor.facts import Deployment, Facts, Hub, Model
from pdlaunch.doctor.findings import Finding, error, not_checked, ok, size, warning
from pdlaunch.planner import DEFAULT_CPU_KV_CACHE_GIB
from pdlaunch.recipe import is_path
from pdlaunch.recipe_checks import ROLES, Role, workers_per_engine

_SMALL_BLOCK_TOKENS = 64
# Of its longest requests, the share that a running request is taken to hold on average.
_MEAN_SHARE = 0.25


def presence(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Whether the model is here, or can be fetched, where an engine is to load it."""
    if deployment is None or facts.model is None or not deployment.engines_here:
        return
    model, name = facts.model, deployment.recipe.model
    otherwise = recipe_checks.loads_otherwise(deployment.recipe)
    if model.problem is not None:
        yield error(
            "model", model.problem, "fetch the model again, or mend the file", where="model"
        )
    elif is_path(name) and model.config is None:
        yield error(
            "model",
            f"no model folder at {name}",
            "copy the model there, or name the folder that has it",
            where="model",
        )
    elif otherwise is not None:
        yield not_checked(
            "model", f"--{otherwise} decides what of {name} is loaded, and from where"
        )
    elif model.weights is not None and model.weights.problem is not None:
        yield _broken_weights(model.weights, model.weights.problem, model, name)
    elif model.weights is not None:
        seen = f"{size(model.weights.total_bytes)} of weights in {model.weights.folder}"
        yield ok("model", seen)
    elif model.is_made_here:
        yield ok("model", f"{name} is not made yet; up makes it")
    elif model.is_offline:
        yield error(
            "model",
            f"{name} is not in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it",
            f"fetch it where there is a network (hf download {name}), or unset HF_HUB_OFFLINE",
            where="model",
        )
    elif model.hub is None:
        yield not_checked("model", f"{name} is not here; the hub was not asked for it")
    else:
        yield _hub(model.hub, name)


def _broken_weights(weights: Weights, problem: str, model: Model, name: str) -> Finding:
    if weights.missing or weights.damaged:
        # What is there already, the hub's client fetches again by force alone.
        forced = "" if weights.missing else " --force-download"
        again = f"hf download {name}{forced}" if model.is_hub_model else "copy it again"
        remedy = f"complete it: {again}"
    elif weights.unreadable:
        file = PurePath(weights.folder) / weights.unreadable[0]
        remedy = f"let this user read it: chmod a+r {file}"
    elif model.is_hub_model and not model.is_offline:
        return ok("model", f"the config of {name} is here; its weights are fetched at start")
    else:
        remedy = "put the model's *.safetensors there, or name the folder that has them"
    return error("model", problem, remedy, where="model")


def _hub(hub: Hub, name: str) -> Finding:
    if hub.status is None:
        return error(
            "model",
            f"{name} is not here, and the hub does not answer: {hub.problem}",
            "see to it that this machine reaches the hub (HF_ENDPOINT names another one, "
            "HTTPS_PROXY a way to it), or fetch the model elsewhere and name its folder",
            where="model",
        )
    if hub.status in (401, 403):
        return error(
            "model",
            f"the hub refuses {name} with {hub.status}: it is gated, private, or not there",
            "accept its licence on the hub and export HF_TOKEN; check the spelling",
            where="model",
        )
    if hub.status == 404:
        return error(
            "model",
            f"the hub has no {name}",
            "check the spelling of model; a folder starts with / or ./",
            where="model",
        )
    if hub.status >= 400:
        return warning(
            "model", f"the hub answers {hub.status} for {hub.url}", "try again later", where="model"
        )
    return ok("model", f"the hub has {name}; its weights are fetched at start")


def shape(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """The model's sizes against the parallel layout."""
    if deployment is None or facts.model is None:
        return
    recipe, model = deployment.recipe, facts.model
    if model.shape is None:
        yield not_checked(
            "shape",
            f"the sizes of {recipe.model} are not known here",
            "tell them in model_shape",
        )
        return
    stated = recipe.model_shape
    if stated is not None and model.config is not None:
        differ = [
            f"{key} is {getattr(stated, key)} in model_shape and {getattr(model.shape, key)} in "
            "config.json"
            for key in ("attention_heads", "kv_heads", "layers")
            if getattr(stated, key) not in (None, getattr(model.shape, key))
        ]
        for each in differ:
            yield warning("shape", each, "mend or remove model_shape", where="model_shape")
    problems = recipe_checks.check(recipe, model.shape)
    for problem in problems:
        key = ".".join(problem.key_path)
        yield error("shape", problem.message, f"set {key} to a value that fits", where=key)
    if not problems:
        yield ok(
            "shape",
            f"{model.shape.attention_heads} attention heads and {model.shape.kv_heads} KV heads "
            f"fit TP {recipe.prefill.tensor_parallel} to {recipe.decode.tensor_parallel}",
        )


def length(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """max_model_len_tokens against what the model was made for."""
    if deployment is None or facts.model is None or facts.model.config is None:
        return
    limit = model_shape.longest(facts.model.config)
    if limit is None:
        return
    inherited = dict(ChainMap(*map(dict, deployment.environments.values())))
    for problem in recipe_checks.over_limit(deployment.recipe, limit, inherited):
        key = ".".join(problem.key_path)
        yield error("length", problem.message, f"set {key} to {limit} or less", where=key)


def cache(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """KV cache against the longest request, and against many of them."""
    if deployment is None or facts.model is None or facts.model.config is None:
        return
    for role in ROLES:
        yield from _cache(facts, deployment, role, facts.model.config)


def _cache(
    facts: Facts, deployment: Deployment, role: Role, config: Mapping[str, Any]
) -> Iterator[Finding]:
    section, flags = deployment.recipe.role(role), deployment.flags(role)
    a_token = kv.bytes_a_token(config, section, flags)
    if isinstance(a_token, str):
        yield not_checked("kv-cache", f"{role}: what a token takes is not worked out: {a_token}")
        return
    longest = (
        section.max_model_len_tokens
        or deployment.recipe.max_model_len_tokens
        or model_shape.longest(config)
    )
    offered = _offered(facts, deployment, role)
    if longest is None or offered is None:
        what = "its memory is that of another machine" if longest else "the longest request is open"
        yield not_checked("kv-cache", f"{role}: {what}")
        return
    block = section.block_size_tokens
    blocks = -(-longest // block) * block
    room = max(0, offered.at_most - (offered.weights or 0))
    if offered.weights is None and room >= blocks * a_token:
        yield not_checked(
            "kv-cache",
            f"{role}: {size(room)} a worker are for weights and cache, and the weights, whose size "
            "decides, are not here",
        )
        return
    tokens = room // (a_token * block) * block
    seen = f"{role}: {size(room)} a worker at {size(a_token)} a token hold {tokens} tokens"
    key = f"{role}.kv_cache_gib"
    enough = math.ceil(blocks * a_token / 2**30 * 100) / 100
    if tokens < blocks:
        # How much the weights take is not certain: they may be quantized or offloaded.
        complain = error if offered.at_most < blocks * a_token else warning
        yield complain(
            "kv-cache",
            f"{seen}, and one request may have {longest}",
            f"lower max_model_len_tokens, or give it more: {key} {enough} at least"
            + (f", or {role}.gpu_memory_fraction" if facts.engine.variant == "cuda" else ""),
            where=key,
        )
        return
    at_once = flags.get("max-num-seqs")
    if isinstance(at_once, int) and at_once * longest * _MEAN_SHARE > tokens:
        fitting = max(1, int(tokens / (longest * _MEAN_SHARE)))
        yield warning(
            "kv-cache",
            f"{seen}; {at_once} requests at once (max-num-seqs) of up to {longest} would be "
            "preempted and computed again",
            f"lower {role}.args.max-num-seqs to {fitting}, or raise {key}",
            where=f"{role}.args.max-num-seqs",
        )
    elif tokens < 2 * blocks:
        yield warning(
            "kv-cache",
            f"{seen}: one request of {longest} and no second beside it",
            f"raise {key}, or lower max_model_len_tokens",
            where=key,
        )
    else:
        yield ok("kv-cache", f"{seen}: {tokens // blocks} requests of {longest}")


@dataclass(frozen=True)
class _Offered:
    """What one worker has for its KV cache, in bytes."""

    at_most: int
    # What its weights take of that: nothing where the recipe sets the cache; None: not known.
    weights: int | None


def _offered(facts: Facts, deployment: Deployment, role: Role) -> _Offered | None:
    section = deployment.recipe.role(role)
    named_gib = section.kv_cache_gib
    if named_gib is None and facts.engine.variant == "cpu":
        named_gib = DEFAULT_CPU_KV_CACHE_GIB
    if named_gib is not None:
        return _Offered(int(named_gib * 2**30), weights=0)
    engines = [process for process in deployment.engines_here if process.role == role]
    if not engines:
        return None
    names = deployment.environments[engines[0].name].get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpu = check_devices.named(facts.machine.gpus.devices, names[0])
    if gpu is None:
        return None
    fraction = section.gpu_memory_fraction or kv.DEFAULT_GPU_FRACTION
    in_all = facts.weights_bytes
    share = None if in_all is None else in_all // workers_per_engine(section)
    return _Offered(int(gpu.total_bytes * fraction), share)


def blocks(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Block sizes: small ones make many descriptors, and each costs time."""
    if deployment is None:
        return
    recipe = deployment.recipe
    layers = facts.model.shape.layers if facts.model is not None and facts.model.shape else None
    for role in ROLES:
        tokens = recipe.role(role).block_size_tokens
        key = f"{role}.block_size_tokens"
        seen = f"{role}: blocks of {tokens} tokens"
        if layers is not None:
            seen += f", up to {-(-1000 // tokens) * layers} descriptors a 1,000 tokens"
        if recipe.engine.variant == "cuda" and tokens < _SMALL_BLOCK_TOKENS:
            yield warning(
                "block-size",
                f"{seen} where they lie scattered",
                f"set {key} to 64 or 128 on both sides: fewer, larger transfers",
                where=key,
            )
        else:
            yield ok("block-size", seen)
