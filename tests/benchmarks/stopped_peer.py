"""How long decode's steps take beside a prefill engine that is stopped: `make bench-stopped-peer`.

Decode answers one client by itself, and the gaps between tokens are measured: alone, beside
requests whose KV prefill pushes, and beside the same requests while prefill is stopped, so that
they wait. The three alternate.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from answers import Failed, new_id
from checks import LIVENESS_TIMEOUT_S, stopped, wait_until_freed
from questions import Question, words
from serving import TINY, Connection, deployed

ROUNDS = 6
TOKENS = 600
REQUEST_EVERY_S = 0.5
LIMIT = 1.5
HEALTHY, STOPPED = "prefill healthy", "prefill stopped"


async def gaps(connection: Connection) -> list[float]:
    """Seconds between the tokens of one answer that decode gives alone."""
    deployment = connection.deployment
    question = Question("steps", prompt=words(64, new_id()), answer_tokens=TOKENS)
    body = question.body(deployment.plan.served_name) | {"stream": True, "ignore_eos": True}
    stamps = []
    url = deployment.decode.url + question.path
    async with connection.client.stream("POST", url, json=body, timeout=300) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                stamps.append(time.perf_counter())
    return [after - before for before, after in pairwise(stamps)]


async def keep_asking(connection: Connection) -> None:
    """Send both legs of short requests, whatever becomes of the earlier ones."""
    legs = connection.legs

    async def leg(send: Callable[[Question, str], Awaitable[object]], asked: Question) -> None:
        with suppress(Failed, httpx.HTTPError):
            await send(asked, asked.name)

    async with asyncio.TaskGroup() as group:
        while True:
            name = new_id()
            asked = Question(name, prompt=words(200, name), answer_tokens=1)
            group.create_task(leg(legs.decode_leg, asked))
            group.create_task(leg(legs.prefill_leg, asked))
            await asyncio.sleep(REQUEST_EVERY_S)


async def gaps_beside_others(connection: Connection) -> list[float]:
    others = asyncio.create_task(keep_asking(connection))
    found = await gaps(connection)
    others.cancel()
    with suppress(asyncio.CancelledError):
        await others
    return found


async def measure(connection: Connection) -> dict[str, list[float]]:
    deployment = connection.deployment
    found: dict[str, list[float]] = {name: [] for name in ("alone", HEALTHY, STOPPED)}
    await gaps(connection)
    for number in range(ROUNDS):
        found["alone"] += await gaps(connection)
        found[HEALTHY] += await gaps_beside_others(connection)
        with stopped(deployment, deployment.prefill.name):
            found[STOPPED] += await gaps_beside_others(connection)
        await asyncio.sleep(LIVENESS_TIMEOUT_S)
        await wait_until_freed(connection)
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    return found


def main() -> int:
    with (
        tempfile.TemporaryDirectory() as folder,
        deployed(TINY, f"steps-{os.getpid()}", Path(folder)) as deployment,
    ):
        found = deployment.run(measure)
    p99 = {}
    for name, seconds in found.items():
        cuts = [1e3 * cut for cut in statistics.quantiles(seconds, n=100)]
        p99[name] = cuts[98]
        print(
            f"{name:16} {len(seconds)} gaps in ms: p50 {cuts[49]:.2f}, p90 {cuts[89]:.2f}, "
            f"p99 {cuts[98]:.2f}, longest {1e3 * max(seconds):.1f}"
        )
    print(f"p99, prefill stopped over alone: {p99[STOPPED] / p99['alone']:.2f}")
    ratio = p99[STOPPED] / p99[HEALTHY]
    print(f"p99, prefill stopped over prefill healthy: {ratio:.2f} (at most {LIMIT})")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
