"""Gathers how a deployment is doing. Shows and changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from pdlaunch import readiness, transport
from pdlaunch.deployments import Event, Record
from pdlaunch.engine_metrics import (
    Failures,
    KvMovement,
    Metrics,
    failures,
    kv_movement,
    scrape,
)
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.transport import Transport

ANSWER_WITHIN_S = 10.0


@dataclass(frozen=True)
class ProcessStatus:
    """One process, as its health address, its metrics and its log tell."""

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
    # Of an engine that was started here and has been ready since.
    transport: Transport | None = None
    # In transfers that the engine issued itself, as NIXL counts them.
    nixl_bytes: float = 0.0
    # What speaks against KV moving as the recipe asks, a sentence each.
    doubts: tuple[str, ...] = ()


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

    @property
    def is_amiss(self) -> bool:
        """Whether somebody should look: what starts or stops need not answer."""
        return self.state == "crashed" or (self.state == "ready" and not self.is_healthy)


@dataclass(frozen=True)
class Look:
    """What the processes of a deployment answered, by name."""

    healthy: Mapping[str, bool]
    # Engines only; none of those that did not answer.
    metrics: Mapping[str, Metrics]
    # When an engine had answered, on a clock that never jumps.
    at_s: Mapping[str, float]


async def gather(record: Record) -> DeploymentStatus:
    """Ask all of a deployment's processes at once."""
    async with httpx.AsyncClient() as client:
        return summary(record, await look(record.plan, client))


async def look(
    plan: DeploymentPlan, client: httpx.AsyncClient, within_s: float = ANSWER_WITHIN_S
) -> Look:
    """Ask all of a deployment's processes at once; who has not answered in time does not."""
    healthy, scraped = await asyncio.gather(
        readiness.is_healthy(client, plan.processes, within_s),
        asyncio.gather(*(_scraped(client, engine, within_s) for engine in plan.engines)),
    )
    names = [engine.name for engine in plan.engines]
    return Look(
        healthy={process.name: ok for process, ok in zip(plan.processes, healthy, strict=True)},
        metrics={name: metrics for name, (metrics, _) in zip(names, scraped, strict=True)},
        at_s={name: at_s for name, (_, at_s) in zip(names, scraped, strict=True)},
    )


def summary(record: Record, seen: Look) -> DeploymentStatus:
    """What a record and a look say of a deployment."""
    plan = record.plan
    condition = record.condition()
    return DeploymentStatus(
        name=record.name,
        state=condition,
        is_healthy=condition == "ready" and all(seen.healthy.values()),
        url=plan.router_url,
        model=plan.served_name,
        transfer_mode=plan.mode,
        engine_version=plan.engine_version,
        up_s=time.time() - record.started_unix_s,
        processes=tuple(_process(process, record, seen) for process in plan.processes),
        kv=_movement(plan, seen.metrics),
        events=record.events,
    )


async def _scraped(
    client: httpx.AsyncClient, engine: ProcessPlan, within_s: float
) -> tuple[Metrics, float]:
    metrics = await scrape(client, engine, within_s)
    return metrics, time.monotonic()


def _process(process: ProcessPlan, record: Record, seen: Look) -> ProcessStatus:
    metrics = seen.metrics.get(process.name, Metrics())
    said = record.transports.get(process.name)
    return ProcessStatus(
        name=process.name,
        role=process.role,
        url=process.url,
        pid=record.pids.get(process.name),
        restarts=record.restarts.get(process.name, 0),
        is_healthy=seen.healthy[process.name],
        kv_cache_usage=metrics.value("vllm:kv_cache_usage_perc"),
        requests_running=int(metrics.value("vllm:num_requests_running")),
        requests_waiting=int(metrics.value("vllm:num_requests_waiting")),
        failures=failures(record.plan.mode, metrics),
        container=process.container.name if process.container is not None else None,
        transport=said,
        nixl_bytes=metrics.value("vllm:nixl_bytes_transferred_sum"),
        doubts=tuple(transport.doubts(process, said)) if said is not None else (),
    )


def _movement(plan: DeploymentPlan, metrics: Mapping[str, Metrics]) -> KvMovement:
    return kv_movement(
        plan.mode,
        [metrics[process.name] for process in plan.of_role("prefill")],
        [metrics[process.name] for process in plan.of_role("decode")],
    )
