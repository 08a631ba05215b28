"""Rules that span several keys of a recipe. Pure: a recipe and a model shape in, problems out."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pdlaunch.recipe import LOCAL_HOST, SSH, ModelShape, PrefillSection, Recipe, RoleSection

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

CPU_BLOCK_MULTIPLE_TOKENS = 32
_LOADS = ("load-format", "revision", "download-dir", "config-format")
_ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe, at one key."""

    key_path: tuple[str, ...]
    message: str


def check(recipe: Recipe, shape: ModelShape | None) -> list[Problem]:
    """All problems of an otherwise well-formed recipe."""
    problems: list[Problem] = []
    for role in ROLES:
        problems += _role(recipe, role)
        if shape is not None:
            problems += _layout(recipe, role, shape)
    if recipe.engine.variant == "cpu" and recipe.transfer.buffer == "host":
        problems.append(
            Problem(("transfer", "buffer"), "engine.variant cpu has its KV in host memory: device")
        )
    problems += _pair(recipe, shape)
    problems += _disjoint(recipe)
    problems += _ports(recipe)
    problems += _hosts(recipe)
    return problems


def over_limit(recipe: Recipe, limit: int, environ: Mapping[str, str]) -> list[Problem]:
    """Requests longer than a model's limit, which vLLM refuses at start.

    Args:
        environ: what engines inherit.
    """
    problems: list[Problem] = []
    for role in ROLES:
        section = recipe.role(role)
        own = section.max_model_len_tokens
        longest = own or recipe.max_model_len_tokens
        allowed = any(_ALLOW_LONGER in env for env in (environ, recipe.engine.env, section.env))
        if longest is None or longest <= limit or allowed or "hf-overrides" in recipe.flags(role):
            continue
        key = "max_model_len_tokens"
        problem = Problem(
            (role, key) if own else (key,),
            f"{longest} tokens, and the limit of {recipe.model} is {limit} by its config.json",
        )
        if problem not in problems:
            problems.append(problem)
    return problems


def loads_otherwise(recipe: Recipe) -> str | None:
    """A flag by which engines load something else than the weights in the model's folder."""
    return next((flag for role in ROLES for flag in _LOADS if flag in recipe.flags(role)), None)


def workers_per_engine(section: RoleSection) -> int:
    """Worker processes, and devices, of one engine."""
    stages = section.pipeline_parallel if isinstance(section, PrefillSection) else 1
    return section.tensor_parallel * stages


def _role(recipe: Recipe, role: Role) -> Iterator[Problem]:
    section = recipe.role(role)
    cpu = recipe.engine.variant == "cpu"
    if cpu and section.block_size_tokens % CPU_BLOCK_MULTIPLE_TOKENS:
        yield Problem(
            (role, "block_size_tokens"),
            f"CPU attention needs a multiple of {CPU_BLOCK_MULTIPLE_TOKENS}, "
            f"found {section.block_size_tokens}",
        )
    if cpu and section.gpu_memory_fraction is not None:
        yield Problem(
            (role, "gpu_memory_fraction"), "engine.variant cpu has no device; set kv_cache_gib"
        )
    if section.efa_interfaces and cpu:
        yield Problem((role, "efa_interfaces"), "EFA needs engine.variant cuda")
    elif section.efa_interfaces and "LIBFABRIC" not in (recipe.transfer.backends or ()):
        yield Problem(
            ("transfer", "backends"),
            f"{role}.efa_interfaces is {section.efa_interfaces}, and NIXL reaches EFA through "
            "LIBFABRIC only (UCX would fall back to TCP silently): set [LIBFABRIC]",
        )
    yield from _placement(recipe, role)


def _placement(recipe: Recipe, role: Role) -> Iterator[Problem]:
    section = recipe.role(role)
    workers = workers_per_engine(section)
    cpu = recipe.engine.variant == "cpu"
    for key, wanted, instead in (
        ("devices", not cpu, "engine.variant cpu has no devices; set cores"),
        ("cores", cpu, "only engine.variant cpu pins cores; set devices"),
    ):
        replicas: tuple[tuple[int, ...], ...] | None = getattr(section, key)
        if replicas is None:
            continue
        if not wanted:
            yield Problem((role, key), instead)
        elif len(replicas) != section.replicas:
            yield Problem(
                (role, key),
                f"needs one list a replica: {section.replicas}, found {len(replicas)}",
            )
        elif any(len(set(indexes)) != len(indexes) for indexes in replicas):
            yield Problem((role, key), f"names one of its {key} twice")
        # A worker computes on one device, and on as many cores as it gets.
        elif key == "devices" and any(len(indexes) != workers for indexes in replicas):
            yield Problem((role, key), f"each replica needs {workers} devices")
        elif key == "cores" and any(len(indexes) < workers for indexes in replicas):
            yield Problem((role, key), f"each replica needs at least {workers} cores")


def _layout(recipe: Recipe, role: Role, shape: ModelShape) -> Iterator[Problem]:
    section = recipe.role(role)
    tp = section.tensor_parallel
    key = (role, "tensor_parallel")
    if shape.attention_heads % tp:
        yield Problem(
            key,
            f"{tp} does not divide the {shape.attention_heads} attention heads of {recipe.model}",
        )
    elif shape.kv_heads % tp and tp % shape.kv_heads:
        yield Problem(key, f"{tp} does not divide the {shape.kv_heads} KV heads of {recipe.model}")
    if (
        isinstance(section, PrefillSection)
        and shape.layers is not None
        and section.pipeline_parallel > shape.layers
    ):
        yield Problem(
            (role, "pipeline_parallel"),
            f"{section.pipeline_parallel} stages for the {shape.layers} layers of {recipe.model}",
        )


def _pair(recipe: Recipe, shape: ModelShape | None) -> Iterator[Problem]:
    prefill, decode = recipe.prefill, recipe.decode
    tp = sorted((prefill.tensor_parallel, decode.tensor_parallel))
    if tp[1] % tp[0]:
        yield Problem(
            ("decode", "tensor_parallel"),
            f"{decode.tensor_parallel} and prefill.tensor_parallel "
            f"{prefill.tensor_parallel}: one must divide the other",
        )
    elif (
        shape is not None
        and prefill.tensor_parallel > decode.tensor_parallel
        and prefill.tensor_parallel > shape.kv_heads
    ):
        yield Problem(
            ("prefill", "tensor_parallel"),
            f"{prefill.tensor_parallel} is above decode's {decode.tensor_parallel}, which works "
            f"up to the {shape.kv_heads} KV heads of {recipe.model} only",
        )
    blocks = sorted((prefill.block_size_tokens, decode.block_size_tokens))
    if recipe.transfer.mode == "push" and blocks[0] != blocks[1]:
        yield Problem(
            ("decode", "block_size_tokens"),
            f"{decode.block_size_tokens} and prefill.block_size_tokens "
            f"{prefill.block_size_tokens}: transfer.mode push needs them equal",
        )
    elif blocks[1] % blocks[0]:
        yield Problem(
            ("decode", "block_size_tokens"),
            f"{decode.block_size_tokens} and prefill.block_size_tokens "
            f"{prefill.block_size_tokens}: one must divide the other",
        )


def _disjoint(recipe: Recipe) -> Iterator[Problem]:
    for key in ("devices", "cores"):
        taken: dict[tuple[str, int], list[tuple[Role, int]]] = {}
        for role in ROLES:
            section = recipe.role(role)
            replicas: tuple[tuple[int, ...], ...] = getattr(section, key) or ()
            for replica, indexes in enumerate(replicas):
                for index in sorted(set(indexes)):
                    owners = taken.setdefault((section.address, index), [])
                    owners.append((role, replica))
                    message = f"{index} is already given to {owners[0][0]} replica {owners[0][1]}"
                    if len(owners) > 1 and key == "cores":
                        yield Problem((role, key), message)
                    elif len(owners) > 1 and not _can_share(recipe, [role for role, _ in owners]):
                        yield Problem(
                            (role, key),
                            f"{message}; engines that share a device need kv_cache_gib, and a "
                            "gpu_memory_fraction each that add up to at most 1",
                        )


def _can_share(recipe: Recipe, roles: Sequence[Role]) -> bool:
    """Whether engines of these roles fit on one device, whichever of them starts first.

    Without a fixed size, vLLM makes its cache as large as what the others have left so far.
    """
    sections = [recipe.role(role) for role in roles]
    fractions = [section.gpu_memory_fraction for section in sections]
    return (
        all(section.kv_cache_gib is not None for section in sections)
        and None not in fractions
        and math.fsum(fraction or 0 for fraction in fractions) <= 1
    )


def _ports(recipe: Recipe) -> Iterator[Problem]:
    taken: dict[tuple[str, int], str] = {}
    for key_path, host, first, count in named_ports(recipe):
        for port in range(first, first + count):
            if port > 65535:
                yield Problem(key_path, f"{count} replicas from {first} end above port 65535")
                break
            owner = taken.setdefault((host, port), ".".join(key_path))
            if owner != ".".join(key_path):
                yield Problem(key_path, f"port {port} is already taken by {owner}")


def named_ports(recipe: Recipe) -> Iterator[tuple[tuple[str, str], str, int, int]]:
    """Ports that the recipe names: key path, host, first port, number of ports."""
    for role in ROLES:
        section = recipe.role(role)
        for key in ("port", "side_channel_port"):
            port: int | None = getattr(section, key)
            if port is not None:
                yield (role, key), section.address, port, section.replicas
    for key in ("port", "metrics_port"):
        port = getattr(recipe.router, key)
        if port is not None:
            yield ("router", key), recipe.router.address, port, 1


def is_loopback(host: str) -> bool:
    """Whether an address only means something on its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(recipe: Recipe) -> Iterator[Problem]:
    if recipe.backend != "docker":
        for name in (*ROLES, "router"):
            host: str = getattr(recipe, name).host
            if host.startswith(SSH):
                yield Problem(
                    (name, "host"),
                    f"{host} is for containers: set backend docker, or name an address and run "
                    "`pdlaunch up --only` on each host",
                )
    hosts = {role: recipe.role(role).address for role in ROLES}
    for role, host in hosts.items():
        try:
            unspecified = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            unspecified = False
        others = [other for name, other in hosts.items() if name != role]
        if unspecified:
            yield Problem(
                (role, "host"),
                f"{host} is no address that the other role can reach; name one of this host's",
            )
        elif is_loopback(host) and any(
            other != LOCAL_HOST and not is_loopback(other) for other in others
        ):
            yield Problem(
                (role, "host"),
                f"{host} means another machine to {others[0]}; name a routable address, or "
                f"{LOCAL_HOST} to have it found",
            )
