"""Facts about this machine: cores, devices, addresses, ports. Decides nothing."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from pdlaunch.planner import LOOPBACK, Facts, ports_needed
from pdlaunch.recipe import LOCAL_HOST, Recipe
from pdlaunch.recipe_checks import is_loopback, named_ports

# Below the range that kernels give to outgoing connections, so that none of those takes a port
# between the choice and the use.
_PORT_RANGE = range(20000, 32000)


def facts_for(recipe: Recipe, launch_id: str) -> Facts:
    """The facts that a plan of this recipe needs."""
    sections = (recipe.prefill, recipe.decode, recipe.router)
    named = {section.address for section in sections} - {LOCAL_HOST}
    resolved = {host: address for host in named if (address := _resolve(host)) is not None}
    remote = [host for host in resolved.values() if not is_loopback(host)]
    return Facts(
        launch_id=launch_id,
        cores=cores(),
        gpus=gpus(),
        free_ports=free_ports(ports_needed(recipe) + 16),
        local_addresses=local_addresses(),
        routable_address=routable_address(remote[0] if remote else None),
        resolved=resolved,
    )


def cores() -> tuple[int, ...]:
    """Cores that this process, and so its children, may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Names for CUDA_VISIBLE_DEVICES of the devices one may use; None where nobody can tell."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return None
    try:
        listed = subprocess.run(
            [program, "--list-gpus"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(index) for index in range(len(lines)))


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody listens on now, in random order so that two launches rarely meet."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORT_RANGE, len(_PORT_RANGE)):
        if len(found) == count:
            break
        if is_free(LOOPBACK, port) and is_free("", port):
            found.append(port)
    return tuple(found)


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    return why_not_free(host, port) is None


def why_not_free(host: str, port: int) -> str | None:
    """What keeps a server from listening there now; None where nothing does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do it: a port is free again while its old connections linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # vLLM lets several servers share a port; one that listens already must count.
            probe.listen(1)
        except PermissionError:
            return "may not be used without privileges"
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"cannot be used: {error.strerror or error}"
            holder = _holder(port)
            return "is taken" + (f" by {holder}" if holder else "")
    return None


@dataclass(frozen=True)
class UnusablePort:
    """A port that the recipe names for this machine and that no server could listen on now."""

    key: str
    port: int
    why: str


def unusable_ports(
    recipe: Recipe, facts: Facts, sections: Iterable[str]
) -> tuple[UnusablePort, ...]:
    """The ports that these sections of the recipe name for this machine and cannot have."""
    found = []
    for key_path, host, first, count in named_ports(recipe):
        address = facts.resolved.get(host, host)
        here = host == LOCAL_HOST or is_loopback(host) or address in facts.local_addresses
        if key_path[0] not in sections or not here:
            continue
        bind_to = LOOPBACK if host == LOCAL_HOST else address
        for port in range(first, first + count):
            why = why_not_free(bind_to, port)
            if why is not None:
                found.append(UnusablePort(".".join(key_path), port, why))
    return tuple(found)


def local_addresses() -> frozenset[str]:
    """All addresses of this machine's interfaces."""
    return frozenset(
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    )


def routable_address(towards: str | None = None) -> str:
    """The address of this machine from which packets to a peer would leave."""
    # Connecting a datagram socket sends nothing; it only asks the routing table. The default is an
    # address kept for documentation, which follows the default route.
    target = towards or "192.0.2.1"
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


def _resolve(host: str) -> str | None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    # IPv4 first: side channels listen on one family, and peers must pick the same.
    families = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(families[0][4][0])


def _holder(port: int) -> str | None:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and getattr(connection.laddr, "port", None) == port:
                if connection.pid is None:
                    return None
                process = psutil.Process(connection.pid)
                return f"process {connection.pid} ({process.name()})"
    return None
