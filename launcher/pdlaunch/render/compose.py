"""A Compose file for a deployment on one host. Pure: a recipe and its plan in, documents out."""

from __future__ import annotations

from math import ceil
from typing import Any

from pdlaunch import containers
from pdlaunch.errors import UsageError
from pdlaunch.plan import ContainerPlan, DeploymentPlan, Mount, ProcessPlan
from pdlaunch.planner import FIXED_PORTS
from pdlaunch.recipe import LOCAL_HOST, Recipe, RestartSection
from pdlaunch.recipe_checks import Problem, check, is_loopback
from pdlaunch.render.documents import Document


def with_fixed_ports(recipe: Recipe) -> Recipe:
    """The recipe with a number for every port that it leaves open.

    Raises:
        UsageError: it is not for one host; with all that would be in the way on one.
    """
    sections: dict[str, Any] = {}
    for (name, key), port in FIXED_PORTS.items():
        section = sections.get(name, getattr(recipe, name))
        if getattr(section, key) is None:
            section = section.model_copy(update={key: port})
        sections[name] = section
    here = {name: each.model_copy(update={"host": LOCAL_HOST}) for name, each in sections.items()}
    hosts = {name: each.host for name, each in sections.items() if not _is_here(each.host)}
    problems = [
        *(Problem((name, "host"), f"{host} is a host of its own") for name, host in hosts.items()),
        *check(recipe.model_copy(update=here), None),
    ]
    if problems:
        rows = [f"  {'.'.join(each.key_path)}: {each.message}" for each in problems]
        sets = [f"--set {name}.host={LOCAL_HOST}" for name in hosts]
        raise UsageError(
            "a Compose file is for one host, and there the recipe does not hold:\n"
            + "\n".join(rows),
            where=", ".join(dict.fromkeys(".".join(each.key_path) for each in problems)),
            next_step="use `pdlaunch render k8s`, or set these keys"
            + (f": {' '.join(sets)}" if sets else ""),
        )
    return recipe.model_copy(update=sections)


def _is_here(host: str) -> bool:
    return host == LOCAL_HOST or is_loopback(host)


def documents(recipe: Recipe, plan: DeploymentPlan) -> tuple[Document, ...]:
    """The Compose file of a plan that was made `with_fixed_ports`."""
    # Compose has its own way to say which daemon.
    plan = containers.containerised(plan, recipe, here="")
    services: dict[str, Any] = {}
    volumes: dict[str, Any] = {}
    for process in plan.processes:
        container = process.container
        if container is None:
            continue
        service = _service(recipe, process, container)
        if process.role == "router":
            # It would wait for them itself, but not as long as a model may take to load.
            waits_for = {each.name: {"condition": "service_healthy"} for each in plan.engines}
            service["depends_on"] = waits_for
            service["healthcheck"] = _healthcheck(process.health_url, 60)
        else:
            service["healthcheck"] = _healthcheck(process.health_url, plan.ready_s)
        services[process.name] = service
        volumes |= {mount.source: {} for mount in container.mounts if mount.is_volume}
    body: dict[str, Any] = {"name": recipe.name.replace(".", "-"), "services": services}
    if volumes:
        body["volumes"] = volumes
    return (Document(body, _introduction(recipe, plan)),)


def _introduction(recipe: Recipe, plan: DeploymentPlan) -> str:
    return (
        f"{recipe.name}: {plan.served_name}, KV by {plan.mode}, at {plan.router_url}/v1.\n"
        "Checked against the Compose specification; not run by its authors.\n"
        "\n"
        "All servers listen on the loopback interface of the host. With others on it, export\n"
        "VLLM_NIXL_SIDE_CHANNEL_SECRET first: who knows it may read KV, nobody else."
    )


def _restart(section: RestartSection) -> str:
    """Docker restarts without end, or not at all."""
    if section.policy == "never" or section.max_per_hour == 0:
        return "no"
    return "unless-stopped" if section.policy == "always" else "on-failure"


def _service(recipe: Recipe, process: ProcessPlan, container: ContainerPlan) -> dict[str, Any]:
    environment: dict[str, str | None] = {
        name: _escaped(value) for name, value in sorted(process.env.items())
    }
    # Taken from the shell of `docker compose`, which leaves out what is not set there.
    environment |= dict.fromkeys(container.secrets)
    service: dict[str, Any] = {
        "image": container.image,
        "entrypoint": [process.argv[0]],
        "command": [_escaped(word) for word in process.argv[1:]],
        "network_mode": "host",
        "init": True,
        "restart": _restart(recipe.restart(process.role)),
        "stop_grace_period": f"{ceil(recipe.timeouts.stop_s)}s",
        "environment": environment,
    }
    if container.shares_memory:
        service["ipc"] = "host"
    if container.limits:
        service["ulimits"] = dict(container.limits)
    if container.mounts:
        service["volumes"] = [_mount(mount) for mount in container.mounts]
    if container.has_gpus:
        gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    if process.cores:
        service["cpuset"] = ",".join(map(str, process.cores))
    if container.devices:
        service["devices"] = [f"{path}:{path}" for path in container.devices]
    if container.capabilities:
        service["cap_add"] = list(container.capabilities)
    return service


def _mount(mount: Mount) -> dict[str, Any]:
    source, target = _escaped(mount.source), _escaped(mount.target)
    if mount.is_volume:
        return {"type": "volume", "source": source, "target": target}
    return {
        "type": "bind",
        "source": source,
        "target": target,
        "read_only": mount.is_read_only,
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
