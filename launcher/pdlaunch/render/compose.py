"""A Compose file for a deployment on one host. Pure: a recipe and its plan in, documents out."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.planner import FIXED_PORTS
from pdlaunch.recipe import LOCAL_HOST, Recipe
from pdlaunch.recipe_checks import ROLES, is_loopback
from pdlaunch.render.documents import Document

# Taken from the shell of `docker compose`, which leaves out what is not set there.
_SECRETS = ("VLLM_NIXL_SIDE_CHANNEL_SECRET", "HF_TOKEN")

# The image's user owns it, and a new volume takes that over.
_CACHE = "/home/vllm/.cache"


def with_fixed_ports(recipe: Recipe) -> Recipe:
    """The recipe with a number for every port that it leaves open.

    Raises:
        UsageError: it is not for one host.
    """
    for name in (*ROLES, "router"):
        host: str = getattr(recipe, name).host
        if host != LOCAL_HOST and not is_loopback(host):
            raise UsageError(
                f"{name} is on {host}, and a Compose file is for one host",
                where=f"{name}.host",
                next_step=f"use `pdlaunch render k8s`, or --set {name}.host={LOCAL_HOST}",
            )
    sections: dict[str, Any] = {}
    for (name, key), port in FIXED_PORTS.items():
        section = sections.get(name, getattr(recipe, name))
        if getattr(section, key) is None:
            section = section.model_copy(update={key: port})
        sections[name] = section
    return recipe.model_copy(update=sections)


def documents(recipe: Recipe, plan: DeploymentPlan, image: str) -> tuple[Document, ...]:
    """The Compose file of a plan that was made `with_fixed_ports`."""
    is_local = any("HF_HUB_OFFLINE" in process.env for process in plan.engines)
    services = {
        process.name: _engine(recipe, process, plan, image, is_local=is_local)
        for process in plan.engines
    }
    (router,) = plan.of_role("router")
    services["router"] = _router(recipe, router, plan, image)
    body: dict[str, Any] = {"name": recipe.name.replace(".", "-"), "services": services}
    if not is_local:
        body["volumes"] = {"cache": {}}
    return (Document(body, _introduction(recipe, plan)),)


def _introduction(recipe: Recipe, plan: DeploymentPlan) -> str:
    return (
        f"{recipe.name}: {plan.served_name}, KV by {plan.mode}, at {plan.router_url}/v1.\n"
        "Checked against the Compose specification; not run by its authors.\n"
        "\n"
        "All servers listen on the loopback interface of the host. With others on it, export\n"
        "VLLM_NIXL_SIDE_CHANNEL_SECRET first: who knows it may read KV, nobody else."
    )


def _service(recipe: Recipe, process: ProcessPlan, image: str) -> dict[str, Any]:
    return {
        "image": image,
        "entrypoint": [process.argv[0]],
        "command": [_escaped(word) for word in process.argv[1:]],
        "network_mode": "host",
        "restart": "on-failure" if recipe.restarts_per_hour else "no",
        "stop_grace_period": f"{ceil(recipe.timeouts.stop_s)}s",
    }


def _engine(
    recipe: Recipe, process: ProcessPlan, plan: DeploymentPlan, image: str, *, is_local: bool
) -> dict[str, Any]:
    service = _service(recipe, process, image) | {
        # One engine may map another's memory.
        "ipc": "host",
        "ulimits": {"memlock": -1},
        "environment": _environment(process.env, _SECRETS),
        "volumes": [_model(plan) if is_local else f"cache:{_CACHE}"],
        "healthcheck": _healthcheck(process.health_url, plan.ready_s),
    }
    if process.devices:
        # All of them, as for a process: CUDA_VISIBLE_DEVICES says which are meant.
        gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    if process.cores:
        service["cpuset"] = ",".join(map(str, process.cores))
    section = recipe.prefill if process.role == "prefill" else recipe.decode
    if section.efa_interfaces:
        service["devices"] = ["/dev/infiniband:/dev/infiniband"]
        service["cap_add"] = ["IPC_LOCK"]
    return service


def _router(
    recipe: Recipe, process: ProcessPlan, plan: DeploymentPlan, image: str
) -> dict[str, Any]:
    return _service(recipe, process, image) | {
        "environment": _environment(process.env, ()),
        # It would wait for them itself, but not as long as a model may take to load.
        "depends_on": {each.name: {"condition": "service_healthy"} for each in plan.engines},
        "healthcheck": _healthcheck(f"{process.url}/readiness", 60),
    }


def _environment(env: Mapping[str, str], passed_on: tuple[str, ...]) -> dict[str, str | None]:
    given: dict[str, str | None] = {name: _escaped(env[name]) for name in sorted(env)}
    return given | dict.fromkeys(passed_on)


def _model(plan: DeploymentPlan) -> dict[str, Any]:
    return {
        "type": "bind",
        "source": _escaped(plan.model),
        "target": _escaped(plan.model),
        "read_only": True,
        # A missing folder is an error, not an empty one.
        "bind": {"create_host_path": False},
    }


def _healthcheck(url: str, start_s: float) -> dict[str, Any]:
    # The image has no curl that one could rely on.
    code = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)"
    return {
        "test": ["CMD", "python3", "-c", code],
        "interval": "10s",
        "timeout": "10s",
        "retries": 6,
        "start_period": f"{ceil(start_s)}s",
        "start_interval": "2s",
    }


def _escaped(text: str) -> str:
    """Compose replaces $NAME."""
    return text.replace("$", "$$")
