"""Takes an engine out of service and back, and tells what it still has to do.

The router forgets a worker for good when told to, and leaves out one whose health fails for as long
as it does. So engines of a role with replicas get a middleware that lets their health be failed.
Asks engines and router; starts and stops nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx

from pdlaunch import engine_middleware, readiness
from pdlaunch.engine_metrics import scrape
from pdlaunch.engine_middleware.pdlaunch_drain import DRAIN, HEALTH, SERVE, STARTS_DRAINED
from pdlaunch.plan import DeploymentPlan, ProcessPlan

_FLAG = "--middleware"
_MIDDLEWARE = "pdlaunch_drain.Drain"
_PATH = "PYTHONPATH"
_IN_CONTAINERS = PurePosixPath("/run/pdlaunch/middleware")
_POLL_S = 0.2
_TIMEOUT_S = 5.0
# The router has seen a request, and the engine not yet.
_LOOKS = 3
# What an engine holds for requests that it has begun.
_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:nixl_push_num_registrations",
    "vllm:nixl_push_num_prefills_held",
    "vllm:nixl_push_num_writes_in_flight",
)


@dataclass(frozen=True)
class Worker:
    """An engine as the router sees it."""

    is_healthy: bool
    # Requests that the router has sent it and that have not ended.
    load: int


def drainable(plan: DeploymentPlan) -> DeploymentPlan:
    """The plan, with the means to take an engine out of service where another can stand in."""
    processes = [
        _drainable(each) if each in plan.engines and has_stand_in(plan, each) else each
        for each in plan.processes
    ]
    return plan.model_copy(update={"processes": tuple(processes)})


def _drainable(process: ProcessPlan) -> ProcessPlan:
    folder = Path(engine_middleware.__file__).parent
    changed: dict[str, object]
    if process.container is None:
        changed = {"env_prepend": {**process.env_prepend, _PATH: str(folder)}}
    else:
        own = {
            str(_IN_CONTAINERS / file.name): str(file) for file in sorted(folder.glob("pdlaunch_*"))
        }
        paths = [str(_IN_CONTAINERS), process.env.get(_PATH, "")]
        changed = {
            "env": {**process.env, _PATH: ":".join(filter(None, paths))},
            "container": process.container.model_copy(
                update={"files": {**process.container.files, **own}}
            ),
        }
    argv = (*process.argv, _FLAG, _MIDDLEWARE)
    return process.model_copy(update={**changed, "argv": argv, "health_path": HEALTH})


def has_stand_in(plan: DeploymentPlan, process: ProcessPlan) -> bool:
    """Whether another process of the plan does the same work."""
    return len(plan.of_role(process.role)) > 1


def is_drainable(process: ProcessPlan) -> bool:
    return _MIDDLEWARE in process.argv


def out_of_service(process: ProcessPlan) -> ProcessPlan:
    """The same engine, out of service until it is told to serve."""
    return process.model_copy(update={"env": {**process.env, STARTS_DRAINED: "1"}})


async def drain(client: httpx.AsyncClient, process: ProcessPlan) -> bool:
    """Take an engine out of service; False where it does not answer."""
    return await _post(client, process, DRAIN)


async def serve(client: httpx.AsyncClient, process: ProcessPlan) -> bool:
    """Take an engine into service again; False where it does not answer."""
    return await _post(client, process, SERVE)


async def workers(client: httpx.AsyncClient, plan: DeploymentPlan) -> Mapping[str, Worker]:
    """The engines that the router knows, by name; none where it does not answer."""
    try:
        response = await client.get(f"{plan.router_url}/workers", timeout=_TIMEOUT_S)
        response.raise_for_status()
        by_url = {
            each["url"]: Worker(bool(each["is_healthy"]), int(each["load"]))
            for each in response.json()["workers"]
        }
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return {}
    return {process.name: by_url[process.url] for process in plan.engines if process.url in by_url}


async def wait_until_routed(
    client: httpx.AsyncClient,
    plan: DeploymentPlan,
    process: ProcessPlan,
    *,
    routed: bool,
    within_s: float,
) -> bool:
    """Wait until the router sends to an engine, or does not any more; whether that came."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        worker = (await workers(client, plan)).get(process.name)
        if worker is not None and worker.is_healthy == routed:
            return True
        await asyncio.sleep(_POLL_S)
    return False


async def wait_until_idle(
    client: httpx.AsyncClient, plan: DeploymentPlan, process: ProcessPlan, within_s: float
) -> str | None:
    """Wait until an engine has nothing to do for anybody; what it still has, where it goes on."""
    deadline_s = time.monotonic() + within_s
    quiet = 0
    while True:
        left = await _left(client, plan, process)
        quiet = 0 if left else quiet + 1
        if quiet >= _LOOKS:
            return None
        if time.monotonic() >= deadline_s:
            return left or "it became idle just now"
        await asyncio.sleep(_POLL_S)


async def _left(client: httpx.AsyncClient, plan: DeploymentPlan, process: ProcessPlan) -> str:
    worker = (await workers(client, plan)).get(process.name)
    metrics = await scrape(client, process)
    held = {"requests of the router": float(worker.load if worker is not None else 0)}
    held |= {gauge.removeprefix("vllm:"): metrics.value(gauge) for gauge in _GAUGES}
    return ", ".join(f"{name} {value:g}" for name, value in held.items() if value)


async def _post(client: httpx.AsyncClient, process: ProcessPlan, path: str) -> bool:
    try:
        response = await client.post(
            f"{process.url}{path}", headers=readiness.headers(), timeout=_TIMEOUT_S
        )
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK
