"""Tells when a deployment is ready: healthy, answering end to end, and KV moving as asked.

Waits and asks; starts and stops nothing.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import httpx

from pdlaunch.console import Reporter
from pdlaunch.engine_metrics import KvMovement, kv_movement, scrape_all
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan

_POLL_S = 0.25
_HEALTH_TIMEOUT_S = 5.0
_PROGRESS_EVERY_S = 10.0
_REPEAT_AFTER_S = 60.0
# Engines publish their counters with the next step, so the proof may trail the answer.
_COUNTER_DELAY_S = 5.0
_PROOF_ROUNDS = 3


def headers(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a request needs where the engines ask for a key, which they take from there too."""
    key = environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def wait_until_healthy(
    processes: Sequence[ProcessPlan],
    reporter: Reporter,
    doing: Callable[[ProcessPlan], str],
    client: httpx.AsyncClient,
) -> None:
    """Return when every process answers at its health address; who else gives up, decides."""
    started_s = told_s = time.monotonic()
    told: dict[str, tuple[str, float]] = {}
    waiting = list(processes)
    while waiting:
        for process in tuple(waiting):
            if await _is_healthy(client, process):
                waiting.remove(process)
                reporter.status(f"{process.name} is up after {time.monotonic() - started_s:.0f} s")
        now_s = time.monotonic()
        if waiting and now_s - told_s >= _PROGRESS_EVERY_S:
            told_s = now_s
            for process in waiting:
                does, (did, at_s) = doing(process), told.get(process.name, ("", 0.0))
                # The same words again only to show that waiting goes on.
                if does != did or now_s - at_s >= _REPEAT_AFTER_S:
                    told[process.name] = (does, now_s)
                    reporter.status(f"{process.name} ({now_s - started_s:.0f} s): {does}")
        if waiting:
            await asyncio.sleep(_POLL_S)


async def is_healthy(
    client: httpx.AsyncClient,
    processes: Sequence[ProcessPlan],
    within_s: float = _HEALTH_TIMEOUT_S,
) -> list[bool]:
    """Whether each of these answers at its health address now."""
    asked = (_is_healthy(client, process, within_s) for process in processes)
    return list(await asyncio.gather(*asked))


async def _is_healthy(
    client: httpx.AsyncClient, process: ProcessPlan, within_s: float = _HEALTH_TIMEOUT_S
) -> bool:
    try:
        response = await client.get(process.health_url, timeout=within_s)
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK


async def prove(plan: DeploymentPlan, client: httpx.AsyncClient, reporter: Reporter) -> KvMovement:
    """Send requests through the router until KV has moved by the recipe's mode, or raise."""
    before = await movement(plan, client)
    prefill, decode = plan.of_role("prefill"), plan.of_role("decode")
    # The router dispatches the legs one after the other until it knows a prefill engine, and both
    # at once from then on: each pair shall have seen both.
    requests = 2 * max(len(prefill), len(decode))
    for attempt in range(_PROOF_ROUNDS):
        for _ in range(requests if attempt == 0 else 1):
            await _request(plan, client)
        deadline_s = time.monotonic() + _COUNTER_DELAY_S
        while time.monotonic() < deadline_s:
            moved = (await movement(plan, client)).since(before)
            if moved.bytes_moved > 0 and moved.transfers_completed > 0:
                reporter.status(
                    f"KV moved by {plan.mode}: {moved.bytes_moved / 1024:.0f} KiB in "
                    f"{moved.transfers_completed:.0f} transfers"
                )
                return moved
            await asyncio.sleep(_POLL_S)
    raise PdError(
        f"requests are answered, but no KV moved by {plan.mode}: decode computes prompts itself",
        where=f"counters of {', '.join(process.name for process in (*prefill, *decode))}",
        next_step="look for nixl in the logs of both engines: "
        f"pdlaunch logs {plan.name}; or try --set transfer.mode=pull",
    )


async def movement(plan: DeploymentPlan, client: httpx.AsyncClient) -> KvMovement:
    """What both sides of a deployment count now."""
    prefill, decode = plan.of_role("prefill"), plan.of_role("decode")
    metrics = await scrape_all(client, plan.engines)
    return kv_movement(
        plan.mode,
        [metrics[process.name] for process in prefill],
        [metrics[process.name] for process in decode],
    )


async def _request(plan: DeploymentPlan, client: httpx.AsyncClient) -> None:
    # A beginning that nobody sent before, so that no prefix cache answers; at least one token a
    # word, so that whole blocks move.
    words = secrets.token_hex(8) + " and" * plan.largest_block_tokens
    body = {"model": plan.served_name, "prompt": words, "max_tokens": 2, "temperature": 0}
    try:
        response = await client.post(
            f"{plan.router_url}/v1/completions",
            json=body,
            headers=headers(),
            timeout=plan.request_s,
        )
    except httpx.HTTPError as error:
        raise PdError(
            f"the first request got no answer: {type(error).__name__} {error}".rstrip(),
            where=plan.router_url,
            next_step=f"pdlaunch logs {plan.name} router, then prefill-0 and decode-0",
        ) from error
    if response.status_code != httpx.codes.OK:
        raise PdError(
            f"the first request failed with HTTP {response.status_code}: {response.text[:300]}",
            where=plan.router_url,
            next_step=f"pdlaunch logs {plan.name} router, then prefill-0 and decode-0",
        )
