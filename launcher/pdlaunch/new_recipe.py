"""Makes a recipe from a few answers, each key with what it means. Pure: answers in, text out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from pdlaunch import recipe_loader, recipe_schema
from pdlaunch.errors import UsageError
from pdlaunch.recipe import Recipe
from pdlaunch.recipe_checks import ROLES, Role
from pdlaunch.recipe_loader import KeyPath

Place = Literal["cpu", "one-gpu", "gpus", "efa"]
PLACES: Mapping[Place, str] = {
    "cpu": "this machine's CPU",
    "one-gpu": "one NVIDIA GPU of this machine, which prefill and decode share",
    "gpus": "NVIDIA GPUs of this machine, of its own for each engine",
    "efa": "two EC2 instances with EFA, one a role",
}
SUGGESTED_MODELS: Mapping[Place, str] = {
    "cpu": "embedded:smollm2-135m-instruct",
    "one-gpu": "Qwen/Qwen3-0.6B",
    "gpus": "Qwen/Qwen3-0.6B",
    "efa": "Qwen/Qwen3-32B",
}

InstanceType = Literal["p5.48xlarge", "p5en.48xlarge"]
EFA_PER_GPU: Mapping[InstanceType, int] = {"p5.48xlarge": 4, "p5en.48xlarge": 2}
GPUS_PER_INSTANCE = 8

# What engines on one device leave to CUDA.
_SHARED_OUT = 0.9
_WIDTH = 100

_WHY: Mapping[str, str] = {
    "engine.args.enforce-eager": "Compiles nothing: starts sooner, computes a little slower.",
    "prefill.args.max-num-batched-tokens": "Small chunks, so that KV leaves while the rest of a "
    "long prompt is still computed.",
    "engine.env.FI_EFA_USE_HUGE_PAGE": "Registers memory faster where the hosts reserve 2 MiB huge "
    "pages.",
    "transfer.backends": "NIXL's default, UCX, would fall back to TCP on EFA without saying so.",
}


@dataclass(frozen=True)
class RoleAnswers:
    """What is asked of one role."""

    tensor_parallel: int = 1
    replicas: int = 1
    # Of place efa only, and needed there.
    host: str = ""


@dataclass(frozen=True)
class Answers:
    """What a recipe is made from."""

    name: str
    model: str
    place: Place
    prefill: RoleAnswers = RoleAnswers()
    decode: RoleAnswers = RoleAnswers()
    instance_type: InstanceType = "p5en.48xlarge"
    # The router's. None: one that is free, or 8000 over two hosts.
    port: int | None = None
    served_name: str | None = None
    # None: what the place suggests.
    max_model_len_tokens: int | None = None
    block_size_tokens: int | None = None

    def role(self, role: Role) -> RoleAnswers:
        return self.prefill if role == "prefill" else self.decode


def text(answers: Answers, overrides: Sequence[str] = ()) -> str:
    """The recipe, with comments.

    Args:
        answers: what it is made from.
        overrides: further keys, as --set names them.

    Raises:
        UsageError: the answers do not go together. Whether the recipe holds, the loader says.
    """
    data = _data(answers)
    for override in overrides:
        problem = recipe_loader.override_key(data, override, {})
        if problem is not None:
            raise UsageError(problem.message, where=f"--set {override}")
    lines = [
        "# yaml-language-server: $schema=recipe.schema.json",
        f"# Prefill and decode on {PLACES[answers.place]}.",
        "# Written by `pdlaunch new`; nobody has run it yet. Every key: pdlaunch's docs/recipe.md.",
        "# Editors complete them after: pdlaunch recipe schema --output recipe.schema.json",
        *_advice(answers),
        "",
        *_written({key: data[key] for key in Recipe.model_fields if key in data} | data),
    ]
    return "\n".join(lines) + "\n"


def _data(answers: Answers) -> dict[str, Any]:
    """The recipe without comments, in the order in which it is written."""
    _check(answers)
    longest = answers.max_model_len_tokens
    if longest is None:
        longest = {"cpu": 4096, "one-gpu": 8192}.get(answers.place)
    data: dict[str, Any] = {"name": answers.name, "model": answers.model}
    if answers.served_name is not None:
        data["served_name"] = answers.served_name
    if longest is not None:
        data["max_model_len_tokens"] = longest
    data["engine"] = _engine(answers)
    if answers.place == "efa":
        data["transfer"] = {"backends": ["LIBFABRIC"]}
    for role in ROLES:
        data[role] = _role(answers, role)
    router: dict[str, Any] = {}
    if answers.place == "efa":
        router = {"host": answers.prefill.host, "port": 8000, "metrics_port": 29000}
    if answers.port is not None:
        router["port"] = answers.port
    if router:
        data["router"] = router
    return data


def _check(answers: Answers) -> None:
    for role in ROLES:
        asked = answers.role(role)
        if answers.place == "one-gpu" and asked.tensor_parallel > 1:
            raise UsageError(
                f"an engine of {asked.tensor_parallel} GPUs does not go with one",
                where=f"--{role}-tp",
                next_step="leave it out, or choose --where gpus",
            )
        devices = asked.tensor_parallel * asked.replicas
        if answers.place == "efa" and devices > GPUS_PER_INSTANCE:
            raise UsageError(
                f"{role} needs {devices} GPUs, and a {answers.instance_type} has "
                f"{GPUS_PER_INSTANCE}",
                where=f"--{role}-tp, --{role}-replicas",
                next_step="name fewer; engines over several instances are for a cluster: "
                "`pdlaunch render k8s`",
            )


def _engine(answers: Answers) -> dict[str, Any]:
    if answers.place == "cpu":
        return {"variant": "cpu", "args": {"enforce-eager": True}}
    if answers.place == "efa":
        return {"variant": "cuda", "env": {"FI_EFA_USE_HUGE_PAGE": 1}}
    return {"variant": "cuda"}


def _role(answers: Answers, role: Role) -> dict[str, Any]:
    asked = answers.role(role)
    section: dict[str, Any] = {}
    if answers.place == "efa":
        port = 8100 if role == "prefill" else 8200
        section |= {"host": asked.host, "port": port, "side_channel_port": 5600}
    section |= {"replicas": asked.replicas, "tensor_parallel": asked.tensor_parallel}
    match answers.place:
        case "cpu":
            section |= {"block_size_tokens": 32, "kv_cache_gib": 2}
            if role == "prefill":
                section["args"] = {"max-num-batched-tokens": 256}
        case "one-gpu":
            engines = answers.prefill.replicas + answers.decode.replicas
            section |= {
                "devices": [[0] for _ in range(asked.replicas)],
                "block_size_tokens": 64,
                "kv_cache_gib": 4,
                "gpu_memory_fraction": int(_SHARED_OUT / engines * 100) / 100,
            }
        case "gpus":
            section |= {"block_size_tokens": 64, "gpu_memory_fraction": 0.9}
        case "efa":
            size = asked.tensor_parallel
            section |= {
                "devices": [
                    list(range(first, first + size))
                    for first in range(0, size * asked.replicas, size)
                ],
                "efa_interfaces": size * EFA_PER_GPU[answers.instance_type],
                "block_size_tokens": 128,
                "gpu_memory_fraction": 0.9,
            }
    if answers.block_size_tokens is not None:
        section["block_size_tokens"] = answers.block_size_tokens
    return section


def _advice(answers: Answers) -> list[str]:
    if answers.place != "efa":
        return []
    return [
        "#",
        "# Both instances must be in one availability zone and in a security group that allows",
        "# itself.",
        "# With the same file on both:",
        "#   on decode's instance:   pdlaunch up FILE --only decode",
        "#   on prefill's instance:  pdlaunch up FILE --only prefill",
        "#                           pdlaunch up FILE --only router",
    ]


def _written(data: Mapping[str, Any]) -> Iterator[str]:
    told = _meanings()
    for key, value in data.items():
        if isinstance(value, dict):
            yield ""
        yield from _lines((key,), value, told)


@cache
def _meanings() -> Mapping[str, str]:
    keys = {".".join(path): part["description"] for path, part in recipe_schema.described_keys()}
    return {**keys, **_WHY}


def _lines(path: KeyPath, value: Any, told: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * (len(path) - 1)
    about = told.get(".".join(path), "")
    # What both roles have is explained at the first.
    if path[0] != "decode" or about != told.get(".".join(("prefill", *path[1:]))):
        yield from textwrap.wrap(
            about,
            _WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
            break_on_hyphens=False,
        )
    if isinstance(value, dict) and value:
        yield f"{indent}{path[-1]}:"
        for key, inner in value.items():
            yield from _lines((*path, str(key)), inner, told)
    else:
        yield f"{indent}{_flow(path[-1])}: {_flow(value)}"


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return dumped.removesuffix("...\n").strip()
