"""What a deployment plan is: per process argv, environment, addresses. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

ProcessRole = Literal["prefill", "decode", "router"]
TransferMode = Literal["push", "pull", "push-upstream"]


class _Plan(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


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
    cores: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()

    @property
    def log_name(self) -> str:
        return f"{self.name}.log"

    @property
    def health_url(self) -> str:
        return f"{self.url}/health"


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
    restarts_per_hour: int
    notes: tuple[str, ...]
    only: ProcessRole | None = None
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

    def of_role(self, role: ProcessRole) -> tuple[ProcessPlan, ...]:
        return tuple(process for process in self.processes if process.role == role)

    @property
    def engines(self) -> tuple[ProcessPlan, ...]:
        return self.of_role("prefill") + self.of_role("decode")
