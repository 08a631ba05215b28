"""Sends questions to a router or an engine and reads the answers: plain, streamed, leg by leg."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from pdlaunch.plan import ProcessPlan
from questions import Question

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
REQUEST_TIMEOUT_S = 300.0
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Answer:
    """What matters of a response."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None


class Failed(Exception):
    """A response that is no answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status


@dataclass(frozen=True)
class Legs:
    """The two requests that a router makes of one, sent by hand."""

    client: httpx.AsyncClient
    model: str
    prefill: ProcessPlan
    decode: ProcessPlan
    # As a router that mixes legs up would: another model, or adapter, on D.
    decode_model: str | None = None
    # What a router has learnt from P's first response, if there was one.
    engine_id: str | None = None

    async def prefill_leg(self, question: Question, request_id: str) -> dict[str, Any]:
        """P computes; the kv_transfer_params of its response."""
        body = question.body(self.model) | {"max_tokens": 1, "kv_transfer_params": PREFILL_ONLY}
        response = await _post(self.client, self.prefill, question, body, request_id)
        named: dict[str, Any] = response["kv_transfer_params"]
        return named

    async def decode_leg(
        self, question: Question, request_id: str, named: Mapping[str, Any] | None = None
    ) -> Answer:
        """D answers from P's KV; `named` is what P's response said, else what a router knows."""
        body = question.body(self.decode_model or self.model) | {
            "kv_transfer_params": (
                dict(named) if named is not None else self.known_of_prefill(request_id)
            )
        }
        return _answer(await _post(self.client, self.decode, question, body, request_id))

    def known_of_prefill(self, request_id: str) -> dict[str, Any]:
        learnt = {"remote_engine_id": self.engine_id} if self.engine_id is not None else {}
        return learnt | {
            "remote_request_id": request_id,
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_host": self.prefill.host,
            "remote_port": self.prefill.side_channel_port,
            "tp_size": 1,
        }

    async def in_sequence(self, question: Question) -> Answer:
        """D's leg after P's response, with what that says."""
        request_id = new_id()
        named = await self.prefill_leg(question, request_id)
        return await self.decode_leg(question, request_id, named)

    async def decode_first(self, question: Question, lead_s: float = 0.3) -> Answer:
        """P's leg when D's has had time to register."""
        request_id = new_id()
        async with asyncio.TaskGroup() as both:
            answer = both.create_task(self.decode_leg(question, request_id))
            await asyncio.sleep(lead_s)
            await self.prefill_leg(question, request_id)
        return answer.result()


async def ask(
    client: httpx.AsyncClient, url: str, model: str, question: Question, *, stream: bool = False
) -> Answer:
    """One question to a router, or to an engine that answers alone."""
    body = question.body(model)
    if not stream:
        response = await client.post(url + question.path, json=body, timeout=REQUEST_TIMEOUT_S)
        return _answer(_json(response))
    tokens: list[int] = []
    text = ""
    finish_reason = None
    async with client.stream(
        "POST", url + question.path, json=body | {"stream": True}, timeout=REQUEST_TIMEOUT_S
    ) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise Failed(response.status_code, response.text)
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise Failed(response.status_code, data)
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or ()
                text += choice["text"] if "text" in choice else choice["delta"]["content"] or ""
                finish_reason = choice["finish_reason"] or finish_reason
    return Answer(tuple(tokens), text, finish_reason)


async def at_once(
    work: Callable[[_Item], Coroutine[Any, Any, _Result]], items: Iterable[_Item], limit: int
) -> list[_Result]:
    """The results of all items in order; never more than `limit` are worked on at a time."""
    gate = asyncio.Semaphore(limit)

    async def one(item: _Item) -> _Result:
        async with gate:
            return await work(item)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item)) for item in items]
    return [task.result() for task in tasks]


async def or_failure(answer: Awaitable[Answer]) -> Answer | Failed:
    """An answer, or the failure of one leg."""
    try:
        return await answer
    except Failed as failed:
        return failed
    except ExceptionGroup as group:
        (failure,) = group.exceptions
        if not isinstance(failure, Failed):
            raise
        return failure


def new_id() -> str:
    return uuid.uuid4().hex


async def _post(
    client: httpx.AsyncClient,
    process: ProcessPlan,
    question: Question,
    body: Mapping[str, Any],
    request_id: str,
) -> dict[str, Any]:
    response = await client.post(
        process.url + question.path,
        json=body,
        headers={"X-Request-Id": request_id},
        timeout=REQUEST_TIMEOUT_S,
    )
    return _json(response)


def _json(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != httpx.codes.OK:
        raise Failed(response.status_code, response.text)
    found: dict[str, Any] = response.json()
    return found


def _answer(found: Mapping[str, Any]) -> Answer:
    (choice,) = found["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    return Answer(tuple(choice["token_ids"]), text, choice["finish_reason"])
