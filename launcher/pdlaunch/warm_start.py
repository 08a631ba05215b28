"""Makes every prefill and decode engine meet before users do. Asks; starts and stops nothing.

Engines shake hands when a request first brings them together, and that request waits for it. One
request for each pair, past the router, moves a little KV and leaves both connected.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from pdlaunch import deployments, readiness
from pdlaunch.console import Reporter
from pdlaunch.engine_metrics import KvMovement, kv_movement, scrape_all
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan

_POLL_S = 0.1
# Engines publish their counters with a later step than the one that ended the request.
_COUNTER_DELAY_S = 5.0
# What routers ask of prefill; its response says where decode finds it.
_PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}

Pair = tuple[ProcessPlan, ProcessPlan]


async def introduce(plan: DeploymentPlan, client: httpx.AsyncClient, reporter: Reporter) -> None:
    """Have every prefill engine hand one prompt over to every decode engine.

    Raises:
        PdError: a pair could not; names both engines and their logs.
    """
    started_s = time.monotonic()
    count = 0
    for pairs in rounds(plan.of_role("prefill"), plan.of_role("decode")):
        results = await asyncio.gather(
            *(_introduce(plan, pair, client) for pair in pairs), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        count += len(pairs)
    pairs_of = "pair" if count == 1 else "pairs"
    took_s = time.monotonic() - started_s
    reporter.status(f"{count} {pairs_of} of prefill and decode connected in {took_s:.1f} s")


def rounds(
    prefill: tuple[ProcessPlan, ...], decode: tuple[ProcessPlan, ...]
) -> Iterator[list[Pair]]:
    """Every pair once, in rounds in which no engine is in two."""
    longest = max(len(prefill), len(decode))
    for shift in range(longest):
        yield [
            (prefill[i], decode[j])
            for i in range(len(prefill))
            if (j := (i + shift) % longest) < len(decode)
        ]


async def _introduce(plan: DeploymentPlan, pair: Pair, client: httpx.AsyncClient) -> None:
    prefill, decode = pair
    before = await _movement(plan, pair, client)
    # A beginning that nobody sent before, so that no prefix cache answers; at least one token a
    # word, so that whole blocks move.
    body: dict[str, Any] = {
        "model": plan.served_name,
        "prompt": secrets.token_hex(8) + " and" * plan.largest_block_tokens,
        "max_tokens": 1,
        "temperature": 0,
    }
    request_id = f"warm-start-{secrets.token_hex(8)}"
    answer = await _leg(
        plan,
        pair,
        prefill,
        body | {"kv_transfer_params": _PREFILL_ONLY},
        request_id=request_id,
        client=client,
    )
    named = answer.get("kv_transfer_params")
    if not isinstance(named, Mapping):
        raise _failed(plan, pair, f"{prefill.name} did not say where its KV is")
    await _leg(
        plan,
        pair,
        decode,
        body | {"max_tokens": 2, "kv_transfer_params": dict(named)},
        request_id=request_id,
        client=client,
    )
    deadline_s = time.monotonic() + _COUNTER_DELAY_S
    while True:
        moved = (await _movement(plan, pair, client)).since(before)
        if moved.bytes_moved > 0 and moved.transfers_completed > 0:
            return
        if time.monotonic() >= deadline_s:
            raise _failed(plan, pair, f"both answer, but no KV moved by {plan.mode}")
        await asyncio.sleep(_POLL_S)


async def _movement(plan: DeploymentPlan, pair: Pair, client: httpx.AsyncClient) -> KvMovement:
    prefill, decode = pair
    metrics = await scrape_all(client, pair)
    return kv_movement(plan.mode, [metrics[prefill.name]], [metrics[decode.name]])


async def _leg(
    plan: DeploymentPlan,
    pair: Pair,
    engine: ProcessPlan,
    body: Mapping[str, Any],
    *,
    request_id: str,
    client: httpx.AsyncClient,
) -> Mapping[str, Any]:
    try:
        response = await client.post(
            f"{engine.url}/v1/completions",
            json=body,
            headers={**readiness.headers(), "X-Request-Id": request_id},
            timeout=plan.request_s,
        )
    except httpx.HTTPError as error:
        how = f"{type(error).__name__} {error}".rstrip()
        raise _failed(plan, pair, f"{engine.name} gave no answer: {how}") from error
    if response.status_code != httpx.codes.OK:
        how = f"HTTP {response.status_code}: {response.text[:300]}"
        raise _failed(plan, pair, f"{engine.name} answered {how}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, Mapping):
        raise _failed(plan, pair, f"{engine.name} answered {response.text[:300]}")
    return answer


def _failed(plan: DeploymentPlan, pair: Pair, why: str) -> PdError:
    prefill, decode = pair
    logs = deployments.log_dir(plan.name)
    return PdError(
        f"{prefill.name} could not hand a prompt over to {decode.name}: {why}",
        where=", ".join(
            str(logs / engine.log_name)
            if engine in plan.own
            else f"{engine.log_name} on {engine.host}"
            for engine in pair
        ),
        next_step=f"look for nixl in both logs: pdlaunch logs {plan.name} {prefill.name}, then "
        f"pdlaunch logs {plan.name} {decode.name}; or try --set transfer.mode=pull",
    )
