"""Reads what a deployment's processes count: metrics and CPU seconds. Puts no load on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import httpx
import psutil

from pdlaunch import hosts, leftovers
from pdlaunch.bench.results import Legs, Moved
from pdlaunch.engine_metrics import Metrics, kv_movement, scrape_all
from pdlaunch.plan import DeploymentPlan, ProcessRole

# Engines publish their counters with a later step than the one that ended the request.
_SETTLED_WITHIN_S = 3.0
_POLL_S = 0.1
# Guests are counted as user time already.
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")
_E2E = "vllm:e2e_request_latency_seconds"

Scraped = dict[str, Metrics]


async def settled(
    client: httpx.AsyncClient, plan: DeploymentPlan, before: Scraped, requests: int
) -> Scraped:
    """Metrics once every engine has counted so many more requests, or should have long ago."""
    deadline_s = time.monotonic() + _SETTLED_WITHIN_S
    while True:
        after = await scrape_all(client, plan.engines)
        counted = all(
            _grown(f"{_E2E}_count", [process.name], before, after) >= requests
            for process in plan.engines
        )
        moved = _transfers(plan, after) - _transfers(plan, before)
        if (counted and moved >= requests) or time.monotonic() > deadline_s:
            return after
        await asyncio.sleep(_POLL_S)


def legs(plan: DeploymentPlan, role: ProcessRole, before: Scraped, after: Scraped) -> Legs:
    """Means over the legs that a role's engines have ended between two moments."""
    names = [process.name for process in plan.of_role(role)]

    def mean(metric: str) -> float:
        count = _grown(f"{metric}_count", names, before, after)
        return _grown(f"{metric}_sum", names, before, after) / count if count else 0.0

    return Legs(
        count=int(_grown(f"{_E2E}_count", names, before, after)),
        e2e_s=mean(_E2E),
        queue_s=mean("vllm:request_queue_time_seconds"),
        prefill_s=mean("vllm:request_prefill_time_seconds"),
        ttft_s=mean("vllm:time_to_first_token_seconds"),
    )


def moved(plan: DeploymentPlan, before: Scraped, after: Scraped) -> Moved:
    """The transfers between two moments. The side that issues them counts them."""
    prefill = [process.name for process in plan.of_role("prefill")]
    decode = [process.name for process in plan.of_role("decode")]
    movers = decode if plan.mode == "pull" else prefill

    def movement(metrics: Scraped) -> tuple[list[Metrics], list[Metrics]]:
        return [metrics[name] for name in prefill], [metrics[name] for name in decode]

    kv = kv_movement(plan.mode, *movement(after)).since(kv_movement(plan.mode, *movement(before)))
    ended = _grown("vllm:nixl_push_after_prefill_seconds_count", prefill, before, after)
    return Moved(
        bytes_moved=kv.bytes_moved,
        bytes_during_prefill=kv.bytes_during_prefill,
        transfers=int(kv.transfers_completed),
        transfers_failed=int(kv.transfers_failed),
        descriptors=_grown("vllm:nixl_num_descriptors_sum", movers, before, after),
        post_s=_grown("vllm:nixl_post_time_seconds_sum", movers, before, after),
        transfer_s=kv.transfer_s,
        after_prefill_s=(
            _grown("vllm:nixl_push_after_prefill_seconds_sum", prefill, before, after) / ended
            if ended
            else None
        ),
    )


def cache_size(metrics: Metrics) -> tuple[int, int]:
    """Tokens in a block of an engine's KV cache, and its blocks; zeros where it does not say."""
    for sample in metrics.samples:
        if sample.name == "vllm:cache_config_info":
            labels = sample.labels
            return int(labels.get("block_size", 0)), int(labels.get("num_gpu_blocks", 0))
    return 0, 0


def tokens(metrics: Metrics) -> float:
    """Tokens that an engine has generated so far."""
    return metrics.value("vllm:generation_tokens_total")


def legs_ended(metrics: Metrics) -> float:
    """Requests that an engine has ended so far."""
    return metrics.value(f"{_E2E}_count")


def cpu_s(plan: DeploymentPlan) -> dict[ProcessRole, float]:
    """CPU seconds so far of each role's processes, those that they started included."""
    taken: dict[ProcessRole, float] = {}
    for process in plan.own:
        total_s = 0.0
        for member in leftovers.tagged(plan.launch_id, process.name):
            with suppress(psutil.Error):
                times = member.cpu_times()
                total_s += times.user + times.system
        taken[process.role] = taken.get(process.role, 0.0) + total_s
    return taken


def all_cpu_s() -> float:
    """CPU seconds so far of everything on the cores that we may use, the hypervisor's share too."""
    cores = psutil.cpu_times(percpu=True)
    return sum(
        sum(value for name, value in cores[core]._asdict().items() if name not in _NOT_BUSY)
        for core in hosts.cores()
        if core < len(cores)
    )


def cpu_s_of(pids: Iterable[int]) -> float:
    """CPU seconds so far of these processes alone."""
    total_s = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total_s += times.user + times.system
    return total_s


def cpu_since(
    before: dict[ProcessRole, float], after: dict[ProcessRole, float]
) -> dict[ProcessRole, float]:
    """What was taken between two moments; a process that ended meanwhile takes its share along."""
    return {role: round(max(0.0, now - before.get(role, 0.0)), 3) for role, now in after.items()}


def _transfers(plan: DeploymentPlan, metrics: Scraped) -> float:
    return kv_movement(
        plan.mode,
        [metrics[process.name] for process in plan.of_role("prefill")],
        [metrics[process.name] for process in plan.of_role("decode")],
    ).transfers_completed


def _grown(metric: str, names: list[str], before: Scraped, after: Scraped) -> float:
    return sum(after[name].value(metric) - before[name].value(metric) for name in names)
