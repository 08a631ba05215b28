"""How the processes of a plan run in containers. Pure: knows the Docker API's words, calls nothing.

The same plan becomes containers of `pdlaunch up`, and services of a Compose file.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from pdlaunch.engine import Engine
from pdlaunch.errors import UsageError
from pdlaunch.plan import ContainerPlan, DeploymentPlan, Mount, ProcessPlan
from pdlaunch.recipe import SSH, Recipe, is_path

LABEL = "pdlaunch"
# Which deployment of which launcher: whoever holds that deployment's lock may remove what has it.
OWNER_LABEL = f"{LABEL}.owner"
LAUNCH_LABEL = f"{LABEL}.launch"
# Of our images: what is installed in them.
VERSION_LABEL = "org.opencontainers.image.version"

# What `pdlaunch build image` makes.
OWN_IMAGES: Mapping[str, str] = {"cuda": "pdlaunch:latest", "cpu": "pdlaunch:cpu"}

# What engines take from the launcher's environment; the router needs none of it.
SECRETS = ("VLLM_NIXL_SIDE_CHANNEL_SECRET", "HF_TOKEN", "VLLM_API_KEY")
SECRETS_FILE = PurePosixPath("/run/pdlaunch/secrets")

# NCCL and UCX move between an engine's workers through it.
SHM_GIB: Mapping[str, int] = {"cuda": 32, "cpu": 4}

# The image's user owns it, and a new volume takes that over.
_CACHE = Mount(source="pdlaunch-cache", target="/home/vllm/.cache", is_volume=True)
_FABRIC = "/dev/infiniband"
# Memory is registered with devices and adapters, and registered memory is locked.
_LIMITS: Mapping[str, Mapping[str, int]] = {
    "cuda": {"memlock": -1, "stack": 64 * 2**20},
    "cpu": {},
}
# The launcher has the log too; without a limit the daemon's copy would fill its disk.
_LOG: Mapping[str, Any] = {
    "Type": "json-file",
    "Config": {"max-size": "64m", "max-file": "2"},
}


def in_image(engine: Engine) -> Engine:
    """An engine as containers have it: its programs are on the path."""
    return replace(engine, vllm=Path("vllm"), router=Path("vllm-router"))


def image_of(recipe: Recipe) -> str:
    """The recipe's image, or the one that `pdlaunch build image` makes for its engine.

    Raises:
        UsageError: it names none, and there is none of ours.
    """
    image = recipe.docker.image or OWN_IMAGES.get(recipe.engine.variant)
    if image is None:
        raise UsageError(
            f"there is no image of ours for engine.variant {recipe.engine.variant}",
            where="docker.image",
            next_step="name yours",
        )
    return image


def containerised(
    plan: DeploymentPlan, recipe: Recipe, *, here: str, owner: str = ""
) -> DeploymentPlan:
    """The plan, with a container for each of its processes.

    Args:
        here: endpoint of the daemon of roles whose host names none.
        owner: what is the same in all launches of this deployment by this launcher, and in no
            other's.

    Raises:
        UsageError: its model, or its trace, would be on another host than its engines.
    """
    hosts = {"prefill": recipe.prefill.host, "decode": recipe.decode.host}
    endpoints = {
        process.name: _endpoint(hosts.get(process.role, recipe.router.host), here)
        for process in plan.processes
    }
    _check_files(plan, recipe, hosts)
    engines_at = Counter(endpoints[process.name] for process in plan.engines)
    processes = []
    for process in plan.processes:
        endpoint = endpoints[process.name]
        base = ContainerPlan(
            endpoint=endpoint,
            image=image_of(recipe),
            name=f"pdlaunch-{plan.name}-{process.name}",
            labels={
                f"{LABEL}.deployment": plan.name,
                f"{LABEL}.process": process.name,
                LAUNCH_LABEL: plan.launch_id,
                OWNER_LABEL: owner,
            },
        )
        if process.role != "router":
            base = _engine(base, recipe, process, plan, is_alone=engines_at[endpoint] == 1)
        processes.append(process.model_copy(update={"container": base}))
    return plan.model_copy(update={"processes": tuple(processes)})


def request(process: ProcessPlan) -> dict[str, Any]:
    """What the daemon is asked to create, in the words of its API."""
    container = _container(process)
    host: dict[str, Any] = {
        "NetworkMode": "host",
        "IpcMode": "host" if container.shares_memory else "private",
        # Passes signals on, and reaps what engines leave: as the first process they would do
        # neither.
        "Init": True,
        "LogConfig": dict(_LOG),
    }
    if container.shm_gib is not None:
        host["ShmSize"] = int(container.shm_gib * 2**30)
    if container.mounts:
        host["Mounts"] = [
            {
                "Type": "volume" if mount.is_volume else "bind",
                "Source": mount.source,
                "Target": mount.target,
                "ReadOnly": mount.is_read_only,
            }
            for mount in container.mounts
        ]
    if container.has_gpus:
        # All of them, as for a process: CUDA_VISIBLE_DEVICES says which are meant, and an engine
        # can map the memory of another's.
        host["DeviceRequests"] = [{"Count": -1, "Capabilities": [["gpu"]]}]
    if container.devices:
        host["Devices"] = [
            {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rwm"}
            for path in container.devices
        ]
    if container.capabilities:
        host["CapAdd"] = list(container.capabilities)
    if container.limits:
        host["Ulimits"] = [
            {"Name": name, "Soft": limit, "Hard": limit} for name, limit in container.limits.items()
        ]
    if process.cores:
        host["CpusetCpus"] = ",".join(map(str, process.cores))
    entrypoint, command = [process.argv[0]], list(process.argv[1:])
    if container.secrets:
        script = f'. {SECRETS_FILE}; exec "$@"'
        entrypoint, command = ["/bin/sh", "-c", script, "sh"], list(process.argv)
    return {
        "Image": container.image,
        "Entrypoint": entrypoint,
        "Cmd": command,
        "Env": [f"{name}={value}" for name, value in sorted(process.env.items())],
        "Labels": dict(container.labels),
        "HostConfig": host,
    }


def handed_over(process: ProcessPlan, environ: Mapping[str, str]) -> bytes | None:
    """A tar, relative to the root, of what a container is given before it starts; None: nothing.

    Its secrets are a file: what the API is given as environment is shown by `docker inspect` ever
    after.
    """
    container = _container(process)
    contents = {inside: Path(here).read_bytes() for inside, here in container.files.items()}
    if container.secrets:
        lines = [
            f"export {name}={shlex.quote(environ[name])}\n"
            for name in container.secrets
            if name in environ
        ]
        contents[str(SECRETS_FILE)] = "".join(lines).encode()
    if not contents:
        return None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for folder in sorted({PurePosixPath(path).parent for path in contents}):
            member = tarfile.TarInfo(str(folder)[1:])
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for path, content in contents.items():
            member = tarfile.TarInfo(path[1:])
            # The image decides which user reads it, and nobody else is in there.
            member.size, member.mode = len(content), 0o444
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def _engine(
    base: ContainerPlan,
    recipe: Recipe,
    process: ProcessPlan,
    plan: DeploymentPlan,
    *,
    is_alone: bool,
) -> ContainerPlan:
    section = recipe.prefill if process.role == "prefill" else recipe.decode
    variant = recipe.engine.variant
    own = Mount(source=plan.model, target=plan.model, is_read_only=True)
    return base.model_copy(
        update={
            "mounts": (own if _is_local(process) else _CACHE,),
            # What is in shared memory of its own goes with the container; but engines of one host
            # reach each other's memory through the host's only.
            "shares_memory": not is_alone,
            "shm_gib": (recipe.docker.shm_gib or SHM_GIB[variant]) if is_alone else None,
            "has_gpus": bool(process.devices),
            "devices": (_FABRIC,) if section.efa_interfaces else (),
            "capabilities": ("IPC_LOCK",) if section.efa_interfaces else (),
            "limits": _LIMITS[variant],
            "secrets": SECRETS,
        }
    )


def _check_files(plan: DeploymentPlan, recipe: Recipe, hosts: Mapping[str, str]) -> None:
    if plan.trace_folder is not None:
        raise UsageError(
            "traces are written by processes of this machine",
            where="--trace",
            next_step="leave it out, or use --backend process",
        )
    for role, host in hosts.items():
        if host.startswith(SSH) and ":" in recipe.model and not is_path(recipe.model):
            raise UsageError(
                f"{recipe.model} is made on this machine, and {role} is on {host}",
                where="model",
                next_step="name a model on the hub, or a folder that each host has",
            )


def _endpoint(host: str, here: str) -> str:
    return host if host.startswith(SSH) else here


def _is_local(process: ProcessPlan) -> bool:
    return "HF_HUB_OFFLINE" in process.env


def _container(process: ProcessPlan) -> ContainerPlan:
    if process.container is None:
        raise ValueError(f"{process.name} is not planned as a container")
    return process.container
