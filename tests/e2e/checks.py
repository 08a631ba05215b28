"""What several tests wait for and check on a deployment that is up."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import httpx

from answers import Failed
from pdlaunch.deployments import Record
from pdlaunch.engine_metrics import scrape_all
from pdlaunch.plan import ProcessPlan
from questions import salted, some
from serving import Connection, Deployment, Reference, told

FREED_WITHIN_S = 10.0
USED_WITHIN_S = 30.0
COUNTED_WITHIN_S = 10.0
# A request whose prefill engine has died.
ENDED_WITHIN_S = 30.0
# The default of push_liveness_timeout_s.
LIVENESS_TIMEOUT_S = 15.0
# A new engine, and the router's next health check.
BACK_WITHIN_S = 600.0
USAGE = "vllm:kv_cache_usage_perc"


class NoMetricsError(Exception):
    """An engine does not say what it holds."""


async def usage(connection: Connection, *engines: ProcessPlan) -> dict[str, float]:
    """The share of each engine's KV blocks that requests hold; caches do not count.

    Of all engines if none is named: one that is stopped does not answer.
    """
    asked = engines or connection.deployment.plan.engines
    metrics = await scrape_all(connection.client, asked)
    if silent := [name for name, each in metrics.items() if not each.samples]:
        raise NoMetricsError(f"no metrics of {silent}")
    return {name: each.value(USAGE) for name, each in metrics.items()}


async def wait_until_used(connection: Connection, engine: str) -> None:
    async def used() -> bool:
        return (await usage(connection))[engine] > 0

    assert await _until(used, USED_WITHIN_S), f"{engine} holds no blocks"


async def wait_until_freed(connection: Connection, *engines: ProcessPlan) -> None:
    """Of all engines if none is named: one that is dead does not say what it holds."""

    async def freed() -> bool:
        return not any((await usage(connection, *engines)).values())

    assert await _until(freed, FREED_WITHIN_S), (
        f"blocks are still held: {await usage(connection, *engines)}, {await connection.moved()}"
    )


async def wait_until_counted(
    connection: Connection, engine: ProcessPlan, wanted: float, name: str, **labels: str
) -> None:
    """A metric of push has a value; an idle engine takes a second to say it."""
    found: float = -1

    async def counted() -> bool:
        nonlocal found
        metrics = (await connection.metrics())[engine.name]
        found = metrics.value(f"vllm:nixl_push_{name}", **labels)
        return bool(metrics.samples) and found == wanted

    assert await _until(counted, COUNTED_WITHIN_S), f"{engine.name} {name} {labels}: {found}"


async def check_answers(connection: Connection, reference: Reference, salt: str) -> None:
    """Ask a few questions whose KV has to move."""
    asked = some(12)
    answers = await connection.ask_all(salted(asked, salt))
    assert reference.differences(asked, answers) == []


@contextmanager
def stopped(deployment: Deployment, name: str) -> Iterator[None]:
    """Stop all of an engine's processes for a while, as a machine that hangs would."""
    group = deployment.record().pids[name]
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)


def kill(deployment: Deployment, engine: ProcessPlan) -> Record:
    """Kill an engine; what the deployment's record said before."""
    before = deployment.record()
    os.killpg(before.pids[engine.name], signal.SIGKILL)
    return before


async def wait_until_back(connection: Connection, reference: Reference, before: Record) -> None:
    """After an engine's death: the pair works again, with nothing else restarted."""
    deployment = connection.deployment

    async def restarted() -> bool:
        return deployment.record().restarts != before.restarts

    async def works() -> bool:
        try:
            await connection.ask(some(20)[0].salted(f"back {time.monotonic()}"))
        except (Failed, httpx.HTTPError):
            return False
        return True

    assert await _until(restarted, BACK_WITHIN_S)
    (killed,) = dict(deployment.record().restarts.items() - before.restarts.items())
    assert await _until(works, BACK_WITHIN_S), told(deployment.log(killed))
    moved_before = await connection.moved()
    await check_answers(connection, reference, f"back {killed}")
    moved = await connection.moved_since(moved_before, lambda moved: moved.transfers_completed > 0)
    assert moved.transfers_completed > 0
    now = deployment.record()
    assert now.restarts == {**before.restarts, killed: before.restarts.get(killed, 0) + 1}
    for name in before.pids.keys() - {killed}:
        assert now.pids[name] == before.pids[name]


async def _until(condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while True:
        with suppress(NoMetricsError):
            if await condition():
                return True
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.1)
