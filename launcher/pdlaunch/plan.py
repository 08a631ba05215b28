"""What a deployment plan is: per process argv, environment, addresses. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

ProcessRole = Literal["prefill", "decode", "router"]
TransferMode = Literal["push", "pull", "push-upstream"]


class _Plan(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class RestartPolicy(_Plan):
    """When a process that died in a running deployment is started again."""

    policy: Literal["always", "on-failure", "never"] = "always"
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    max_per_hour: int = 4


class Mount(_Plan):
    """What a container sees of its host at a path: a folder, or a volume that the daemon keeps."""

    source: str
    target: str
    is_volume: bool = False
    is_read_only: bool = False


class ContainerPlan(_Plan):
    """How a process runs in a container: all but its command, environment and addresses."""

    # The daemon's, as `docker -H` takes it.
    endpoint: str
    image: str
    name: str
    labels: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    # Uses the host's shared memory, as other engines there do.
    shares_memory: bool = False
    # Of its own, where it shares none. None: the daemon's default.
    shm_gib: float | None = None
    has_gpus: bool = False
    # Paths on the host, the same inside.
    devices: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    # By name, soft and hard alike; -1: none.
    limits: Mapping[str, int] = {}
    # Names of variables whose values the launcher hands over at start; no plan holds a value.
    secrets: tuple[str, ...] = ()
    # The launcher's own files that it hands over at start: path inside, path here.
    files: Mapping[str, str] = {}


class ProcessPlan(_Plan):
    """One process: all that a backend needs to start it and to reach it."""

    name: str
    role: ProcessRole
    host: str
    is_here: bool
    argv: tuple[str, ...]
    env: Mapping[str, str]
    # Goes before an inherited value, parted by a colon.
    env_prepend: Mapping[str, str]
    env_unset: tuple[str, ...]
    url: str
    port: int
    side_channel_port: int | None = None
    metrics_port: int | None = None
    # Where it tells its health to us; routers ask /health.
    health_path: str = "/health"
    cores: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    # By which an engine is to move KV.
    nixl_backends: tuple[str, ...] = ()
    # None: a process of its host.
    container: ContainerPlan | None = None

    @property
    def log_name(self) -> str:
        return f"{self.name}.log"

    @property
    def health_url(self) -> str:
        return f"{self.url}{self.health_path}"


class DeploymentPlan(_Plan):
    """A whole deployment, of which this machine may run one role only."""

    name: str
    launch_id: str
    model: str
    served_name: str
    mode: TransferMode
    engine_version: str
    largest_block_tokens: int
    processes: tuple[ProcessPlan, ...]
    ready_s: float
    request_s: float
    stop_s: float
    drain_s: float
    # By role.
    restart: Mapping[ProcessRole, RestartPolicy]
    notes: tuple[str, ...]
    only: ProcessRole | None = None
    # What it was made from, for whoever compares: every key with its value.
    recipe: Mapping[str, JsonValue] = {}
    # What commands take for it.
    recipe_name: str = "RECIPE"
    # Where the engines stamp the life of each transfer, if they do.
    trace_folder: str | None = None

    @property
    def router_url(self) -> str:
        (router,) = self.of_role("router")
        return router.url

    @property
    def own(self) -> tuple[ProcessPlan, ...]:
        """The processes that this machine starts."""
        return tuple(process for process in self.processes if self.only in (None, process.role))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The Docker daemons that run what this machine starts."""
        containers = [process.container for process in self.own]
        return tuple(dict.fromkeys(each.endpoint for each in containers if each is not None))

    def of_role(self, role: ProcessRole) -> tuple[ProcessPlan, ...]:
        return tuple(process for process in self.processes if process.role == role)

    @property
    def engines(self) -> tuple[ProcessPlan, ...]:
        return self.of_role("prefill") + self.of_role("decode")
