"""Makes every prefill and decode engine meet before users do. Asks; starts and stops nothing.

Engines shake hands when a request first brings them together, and that request waits for it. One
request for each pair, past the router, moves a little KV and leaves both connected.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from pdlaunch import deployments, readiness
from pdlaunch.console import Reporter
from pdlaunch.engine_metrics import KvMovement, failures, kv_movement, scrape_all
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan

_POLL_S = 0.1
# Engines publish their counters with a later step than the one that ended the request.
_COUNTER_DELAY_S = 5.0
# What routers ask of prefill; its response says where decode finds it.
_PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}

Pair = tuple[ProcessPlan, ProcessPlan]


async def introduce(
    plan: DeploymentPlan,
    client: httpx.AsyncClient,
    reporter: Reporter,
    *,
    only: str | None = None,
) -> None:
    """Have every prefill engine hand one prompt over to every decode engine.

    Args:
        only: the engine that is new; engines that do not answer are left out then.

    Raises:
        PdError: a pair could not; names every pair of its round that could not, which engine
            could not reach which as far as they tell, and the logs.
    """
    started_s = time.monotonic()
    count = 0
    for everybody in rounds(plan.of_role("prefill"), plan.of_role("decode")):
        pairs = everybody if only is None else await _with(only, everybody, client)
        results = await asyncio.gather(
            *(_introduce(plan, pair, client) for pair in pairs), return_exceptions=True
        )
        failed: list[_NoHandoverError] = []
        for result in results:
            if isinstance(result, _NoHandoverError):
                failed.append(result)
            elif isinstance(result, BaseException):
                raise result
        if failed:
            raise _explained(plan, failed)
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


async def _with(name: str, pairs: list[Pair], client: httpx.AsyncClient) -> list[Pair]:
    """Those of the pairs that have this engine, and an answer from the other."""
    found = []
    for pair in pairs:
        others = [each for each in pair if each.name != name]
        if len(others) == 1 and all(await readiness.is_healthy(client, others)):
            found.append(pair)
    return found


async def _introduce(plan: DeploymentPlan, pair: Pair, client: httpx.AsyncClient) -> None:
    prefill, decode = pair
    before = await _counts(plan, pair, client)
    body: dict[str, Any] = {
        "model": plan.served_name,
        # A beginning that nobody sent before, so that no prefix cache answers; at least one token
        # a word, so that whole blocks move.
        "prompt": secrets.token_hex(8) + " and" * plan.largest_block_tokens,
        "temperature": 0,
        # An answer that ends with its first token needs no KV on decode.
        "ignore_eos": True,
    }
    leg = partial(
        _leg,
        headers={**readiness.headers(), "X-Request-Id": f"warm-start-{secrets.token_hex(8)}"},
        timeout_s=plan.request_s,
        client=client,
    )
    try:
        answer = await leg(prefill, body | {"max_tokens": 1, "kv_transfer_params": _PREFILL_ONLY})
    except _NoAnswerError as error:
        raise _NoHandoverError(pair, str(error)) from error
    named = answer.get("kv_transfer_params")
    if not isinstance(named, Mapping):
        raise _NoHandoverError(pair, f"{prefill.name} did not say where its KV is")
    complaint = ""
    try:
        await leg(decode, body | {"max_tokens": 2, "kv_transfer_params": dict(named)})
    except _NoAnswerError as error:
        complaint = str(error)
    # Counters trail what they count: KV that moved, and why a transfer failed.
    deadline_s = time.monotonic() + _COUNTER_DELAY_S
    while True:
        seen = (await _counts(plan, pair, client)).since(before)
        moved = seen.moved.bytes_moved > 0 and seen.moved.transfers_completed > 0
        if moved and not complaint:
            return
        reason = _reason(pair, seen)
        if reason or time.monotonic() >= deadline_s:
            complaint = complaint or f"both answer, but no KV moved by {plan.mode}"
            raise _NoHandoverError(pair, f"{reason}; {complaint}" if reason else complaint)
        await asyncio.sleep(_POLL_S)


@dataclass(frozen=True)
class _Counts:
    """What a pair counts: KV that moved, and the transfers that failed on each side by reason."""

    moved: KvMovement
    prefill: Mapping[str, int]
    decode: Mapping[str, int]

    def since(self, earlier: _Counts) -> _Counts:
        return _Counts(
            self.moved.since(earlier.moved),
            _more(self.prefill, earlier.prefill),
            _more(self.decode, earlier.decode),
        )


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: more for key in now if (more := now[key] - before.get(key, 0)) > 0}


async def _counts(plan: DeploymentPlan, pair: Pair, client: httpx.AsyncClient) -> _Counts:
    metrics = await scrape_all(client, pair)
    sides = [metrics[engine.name] for engine in pair]
    prefill, decode = (
        found.transfers if (found := failures(plan.mode, side)) else {} for side in sides
    )
    return _Counts(kv_movement(plan.mode, sides[:1], sides[1:]), prefill, decode)


def _reason(pair: Pair, seen: _Counts) -> str:
    """Which engine could not reach which, where their counters tell; nothing where they do not."""
    prefill, decode = pair
    # Each side shakes hands by itself, at the side channel of the other.
    if "no_handshake" in seen.decode:
        return f"{decode.name} could not shake hands with {_at(prefill)}"
    if "no_handshake" in seen.prefill:
        return f"{prefill.name} could not shake hands with {_at(decode)}"
    if "peer_silent" in seen.decode:
        return (
            f"{decode.name} reached {prefill.name} and heard nothing back, as it is where "
            f"{prefill.name} cannot reach {_at(decode)}"
        )
    if reasons := {*seen.prefill, *seen.decode} - {"unknown"}:
        return f"the transfer failed ({', '.join(sorted(reasons))})"
    return ""


def _at(engine: ProcessPlan) -> str:
    return f"{engine.name} at {engine.host}:{engine.side_channel_port}"


async def _leg(
    engine: ProcessPlan,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    client: httpx.AsyncClient,
) -> Mapping[str, Any]:
    try:
        response = await client.post(
            f"{engine.url}/v1/completions", json=body, headers=headers, timeout=timeout_s
        )
    except httpx.HTTPError as error:
        how = f"{type(error).__name__} {error}".rstrip()
        raise _NoAnswerError(f"{engine.name} gave no answer: {how}") from error
    if response.status_code != httpx.codes.OK:
        how = f"HTTP {response.status_code}: {response.text[:300]}"
        raise _NoAnswerError(f"{engine.name} answered {how}")
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, Mapping):
        raise _NoAnswerError(f"{engine.name} answered {response.text[:300]}")
    return answer


class _NoAnswerError(Exception):
    """An engine did not answer its leg properly."""


class _NoHandoverError(Exception):
    """A pair could not hand a prompt over."""

    def __init__(self, pair: Pair, why: str) -> None:
        super().__init__(why)
        self.pair = pair


def _explained(plan: DeploymentPlan, failed: list[_NoHandoverError]) -> PdError:
    whats = []
    engines: dict[str, ProcessPlan] = {}
    for failure in failed:
        prefill, decode = failure.pair
        whats.append(f"{prefill.name} could not hand a prompt over to {decode.name}: {failure}")
        engines |= {prefill.name: prefill, decode.name: decode}
    prefill, decode = failed[0].pair
    logs = deployments.log_dir(plan.name)
    return PdError(
        "\n  | ".join(whats),
        where=", ".join(
            str(logs / engine.log_name)
            if engine in plan.own
            else f"{engine.log_name} on {engine.host}"
            for engine in engines.values()
        ),
        next_step=f"look for nixl in both logs: pdlaunch logs {plan.name} {prefill.name}, then "
        f"pdlaunch logs {plan.name} {decode.name}; or try --set transfer.mode=pull",
    )
