"""What there is to judge: facts about the machine, the model, the network and the engine.

Frozen data, read once. None stands for what nobody could tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from pdlaunch.checkpoint import Weights
from pdlaunch.hosts import UnusablePort
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.recipe import ModelShape, Recipe
from pdlaunch.recipe_checks import ROLES, Role
from pdlaunch.upstream import Variant


@dataclass(frozen=True)
class Folder:
    """A folder that pdlaunch or an engine writes to."""

    purpose: str
    path: str
    free_bytes: int | None
    # Why it cannot be written to; None where it can.
    problem: str | None
    # What decides where it is.
    variable: str


@dataclass(frozen=True)
class Gpu:
    """One device, as the driver's tool lists it."""

    index: str
    uuid: str
    name: str
    driver: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Gpus:
    """What the driver's tool says; `problem` where it says nothing."""

    devices: tuple[Gpu, ...] = ()
    problem: str | None = None
    # Nodes of devices: without the tool they tell that there is a driver.
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Resource limits of this process, which the engines inherit. None: no limit."""

    locked_bytes: int | None
    locked_hard_bytes: int | None
    # CAP_IPC_LOCK: no limit on locked memory counts.
    may_lock_all: bool
    open_files_hard: int | None


@dataclass(frozen=True)
class Fabric:
    """RDMA devices, and what a container may have left out of them."""

    # Interfaces in /sys: Amazon's, and others.
    efa: tuple[str, ...]
    other_rdma: tuple[str, ...]
    # Nodes in /dev/infiniband that an engine can open, one a device.
    nodes: tuple[str, ...]
    # Nodes that are there and must not be opened.
    closed_nodes: tuple[str, ...]
    has_efa_libfabric: bool
    huge_pages_total: int
    huge_pages_free: int


@dataclass(frozen=True)
class Machine:
    """This machine, as this process sees it."""

    python: str
    architecture: str
    # Tags of wheels that this Python can install.
    wheel_tags: frozenset[str]
    can_make_environments: bool
    cores: tuple[int, ...]
    # Cores' worth of time that a container may use.
    cpu_quota_cores: float | None
    # Empty where the kernel does not tell.
    cpu_flags: frozenset[str]
    memory_total_bytes: int
    memory_available_bytes: int
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    folders: tuple[Folder, ...]
    limits: Limits
    gpus: Gpus
    fabric: Fabric
    ephemeral_ports: tuple[int, int] | None
    clock_is_synchronised: bool | None
    # Settings that decide how this machine talks to others; never a secret's value.
    # Of plain HTTP, as the processes speak it; empty where there is none.
    proxy: str
    no_proxy: str
    has_side_channel_secret: bool


@dataclass(frozen=True)
class Hub:
    """What the model hub answered."""

    url: str
    # HTTP status; None where nothing answered, then `problem` says why.
    status: int | None
    problem: str | None = None
    # The hub's clock less ours.
    clock_skew_s: float | None = None


@dataclass(frozen=True)
class Model:
    """The recipe's model: its config, and where its weights are."""

    # The content of config.json.
    config: Mapping[str, Any] | None
    shape: ModelShape | None
    weights: Weights | None
    # Why the config, which is there, cannot be read.
    problem: str | None = None
    # None: not asked, for the model is here or this is a quick examination.
    hub: Hub | None = None
    is_hub_model: bool = False
    is_made_here: bool = False
    is_offline: bool = False


@dataclass(frozen=True)
class Peer:
    """One port of a process on another host, tried from here."""

    process: str
    host: str
    port: int
    is_side_channel: bool
    # None: something accepts connections. "refused": the host answers, nothing listens yet.
    problem: str | None


@dataclass(frozen=True)
class NixlProbe:
    """What a child process in an engine's environment found out about NIXL."""

    # The process plan whose environment it had.
    process: str
    wanted: tuple[str, ...]
    torch: str | None
    # CUDA that torch was built for, such as "12.9"; None for a CPU build.
    cuda: str | None
    # Why torch cannot compute on a device; None where it can, or was not asked.
    cuda_problem: str | None
    nixl: str | None
    builds: tuple[str, ...]
    plugins: tuple[str, ...]
    # Backend: what instantiating it raised; None where it went well.
    backends: Mapping[str, str | None]
    # What `ldd` says about the plugin for libfabric, and what the process had loaded.
    fabric_libraries: str
    loaded: str
    # How the child ended, where it did not end well.
    problem: str | None


@dataclass(frozen=True)
class EngineFacts:
    """The engine environment that the deployment uses."""

    variant: Variant
    root: str
    is_ready: bool
    # None where none is published for this architecture.
    published_wheel: str | None
    # Empty where the engine is not there, or this is a quick examination.
    probes: tuple[NixlProbe, ...] = ()


@dataclass(frozen=True)
class Image:
    """The image of a deployment's containers, looked for on one of its hosts."""

    endpoint: str
    name: str
    # As its label says.
    version: str | None = None
    # Why nobody can start it there, and what helps; None where somebody can.
    problem: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Deployment:
    """What is examined: a recipe and its plan on this machine."""

    recipe: Recipe
    plan: DeploymentPlan
    # The environment of every engine that would start here, by name.
    environments: Mapping[str, Mapping[str, str]]
    # What runs of it here already, by name: what that holds is no fault.
    up: tuple[str, ...] = ()
    # What the planner had to say, unless that was told already.
    notes: tuple[str, ...] = ()

    @property
    def engines_here(self) -> tuple[ProcessPlan, ...]:
        return tuple(
            process for process in self.plan.own if process.is_here and process.role != "router"
        )

    @property
    def roles_here(self) -> tuple[Role, ...]:
        names = {process.role for process in self.engines_here}
        return tuple(role for role in ROLES if role in names)

    @property
    def is_spread(self) -> bool:
        """Whether processes of it run on other hosts."""
        return any(not process.is_here for process in self.plan.processes)

    def count_here(self, role: Role) -> int:
        """Engines of a role that start here."""
        return sum(process.role == role for process in self.engines_here)

    def flags(self, role: Role) -> Mapping[str, JsonValue]:
        """The further `vllm serve` flags of a role's engines."""
        return self.recipe.flags(role)


@dataclass(frozen=True)
class Facts:
    """All that checks may look at."""

    machine: Machine
    engine: EngineFacts
    model: Model | None = None
    unusable_ports: tuple[UnusablePort, ...] = ()
    # None: a quick examination, which connects to nobody.
    peers: tuple[Peer, ...] | None = None
    images: tuple[Image, ...] = ()

    @property
    def weights_bytes(self) -> int | None:
        """The size of the model's weights; None where they are not all here."""
        weights = self.model.weights if self.model is not None else None
        return None if weights is None or weights.missing else weights.total_bytes or None
