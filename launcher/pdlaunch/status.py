"""Gathers how a deployment is doing. Shows and changes nothing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

from pdlaunch import readiness
from pdlaunch.deployments import Event, Record
from pdlaunch.engine_metrics import (
    Failures,
    KvMovement,
    Metrics,
    failures,
    kv_movement,
    scrape_all,
)
from pdlaunch.plan import DeploymentPlan, ProcessPlan


@dataclass(frozen=True)
class ProcessStatus:
    """One process, as its health address and its metrics tell."""

    name: str
    role: str
    url: str
    pid: int | None
    restarts: int
    is_healthy: bool
    kv_cache_usage: float
    requests_running: int
    requests_waiting: int
    # Of an engine that answers.
    failures: Failures | None
    # Its name, where it is one: no process of this machine.
    container: str | None = None


@dataclass(frozen=True)
class DeploymentStatus:
    """One deployment at one moment."""

    name: str
    state: str
    is_healthy: bool
    url: str
    model: str
    transfer_mode: str
    engine_version: str
    up_s: float
    processes: tuple[ProcessStatus, ...]
    kv: KvMovement
    events: tuple[Event, ...]


async def gather(record: Record) -> DeploymentStatus:
    """Ask all of a deployment's processes at once."""
    plan = record.plan
    async with httpx.AsyncClient() as client:
        healthy, metrics = await asyncio.gather(
            readiness.is_healthy(client, plan.processes), scrape_all(client, plan.engines)
        )
    processes = tuple(
        _process(process, record, ok, metrics.get(process.name, Metrics()))
        for process, ok in zip(plan.processes, healthy, strict=True)
    )
    alive = record.supervisor() is not None
    return DeploymentStatus(
        name=record.name,
        state=record.state if alive else "crashed",
        is_healthy=alive and record.state == "ready" and all(healthy),
        url=plan.router_url,
        model=plan.served_name,
        transfer_mode=plan.mode,
        engine_version=plan.engine_version,
        up_s=time.time() - record.started_unix_s,
        processes=processes,
        kv=_movement(plan, metrics),
        events=record.events,
    )


def _process(
    process: ProcessPlan, record: Record, is_healthy: bool, metrics: Metrics
) -> ProcessStatus:
    return ProcessStatus(
        name=process.name,
        role=process.role,
        url=process.url,
        pid=record.pids.get(process.name),
        restarts=record.restarts.get(process.name, 0),
        is_healthy=is_healthy,
        kv_cache_usage=metrics.value("vllm:kv_cache_usage_perc"),
        requests_running=int(metrics.value("vllm:num_requests_running")),
        requests_waiting=int(metrics.value("vllm:num_requests_waiting")),
        failures=failures(record.plan.mode, metrics),
        container=process.container.name if process.container is not None else None,
    )


def _movement(plan: DeploymentPlan, metrics: dict[str, Metrics]) -> KvMovement:
    return kv_movement(
        plan.mode,
        [metrics[process.name] for process in plan.of_role("prefill")],
        [metrics[process.name] for process in plan.of_role("decode")],
    )
