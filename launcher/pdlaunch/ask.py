"""One chat request through the router, and what the engines counted meanwhile. Prints nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx

from pdlaunch import readiness
from pdlaunch.engine_metrics import KvMovement, Metrics, kv_movement, scrape_all
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan
from pdlaunch.trace import ClientTimes

# Engines publish their counters with a later step than the one that ended the request.
_COUNTERS_WITHIN_S = 3.0
_POLL_S = 0.1
_TIMED_PIECES = 2
_REQUEST_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Timing:
    """Where the time to the first token went; means where other requests ran meanwhile."""

    ttft_s: float
    total_s: float
    prefill_queue_s: float
    prefill_s: float
    decode_queue_s: float
    decode_ttft_s: float
    transfer_s: float

    @property
    def handover_s(self) -> float:
        """What is left of TTFT when the prefill engine's own time is taken off."""
        return max(0.0, self.ttft_s - self.prefill_queue_s - self.prefill_s)


@dataclass(frozen=True)
class Answer:
    """A whole answer, and the proof of how its KV came to the decode engine."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    transfer_mode: str
    timing: Timing
    kv: KvMovement
    had_company: bool
    # As the decode engine calls it, and for both the name of the transfer.
    request_id: str
    client: ClientTimes


async def ask(
    plan: DeploymentPlan,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    on_text: Callable[[str], None],
) -> Answer:
    """Send one prompt, hand pieces of the answer on as they come, and add the engines' view."""
    body = {
        "model": plan.served_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S) as client:
        before = await scrape_all(client, plan.engines)
        reply = _Reply()
        sent_ns, started_s = time.time_ns(), time.monotonic()
        try:
            async with client.stream(
                "POST",
                f"{plan.router_url}/v1/chat/completions",
                json=body,
                headers=readiness.headers(),
            ) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise _refused(plan, f"HTTP {response.status_code}: {response.text[:300]}")
                async for event in _events(response):
                    piece = reply.take(event, plan)
                    if piece:
                        reply.first_s = reply.first_s or time.monotonic() - started_s
                        if len(reply.pieces_ns) < _TIMED_PIECES:
                            reply.pieces_ns.append(time.time_ns())
                        on_text(piece)
        except httpx.HTTPError as error:
            raise _refused(plan, f"{type(error).__name__} {error}".rstrip()) from error
        total_s = time.monotonic() - started_s
        after = await _settled(client, plan, before)
    return reply.answer(plan, sent_ns, total_s, before, after)


class _Reply:
    def __init__(self) -> None:
        self.first_s: float | None = None
        # When the first two pieces came: a piece is a token unless the client was slow.
        self.pieces_ns: list[int] = []
        self._request_id = ""
        self._text: list[str] = []
        self._finish_reason: str | None = None
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def take(self, event: str, plan: DeploymentPlan) -> str:
        """One streamed event; what it adds to the text."""
        try:
            chunk = json.loads(event)
        except ValueError:
            raise _refused(plan, f"the answer is not JSON: {event[:200]}") from None
        if "error" in chunk:
            raise _refused(plan, str(chunk["error"])[:300])
        self._request_id = str(chunk.get("id") or self._request_id)
        usage = chunk.get("usage") or {}
        self._prompt_tokens = usage.get("prompt_tokens", self._prompt_tokens)
        self._completion_tokens = usage.get("completion_tokens", self._completion_tokens)
        piece = ""
        for choice in chunk.get("choices", ()):
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            piece += choice.get("delta", {}).get("content") or ""
        self._text.append(piece)
        return piece

    def answer(
        self,
        plan: DeploymentPlan,
        sent_ns: int,
        total_s: float,
        before: dict[str, Metrics],
        after: dict[str, Metrics],
    ) -> Answer:
        prefill = [process.name for process in plan.of_role("prefill")]
        decode = [process.name for process in plan.of_role("decode")]

        def mean(names: list[str], metric: str) -> float:
            count = _grown(names, f"{metric}_count", before, after)
            return _grown(names, f"{metric}_sum", before, after) / count if count else 0.0

        def moved(metrics: dict[str, Metrics]) -> KvMovement:
            return kv_movement(
                plan.mode,
                [metrics[name] for name in prefill],
                [metrics[name] for name in decode],
            )

        return Answer(
            text="".join(self._text),
            finish_reason=self._finish_reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            transfer_mode=plan.mode,
            timing=Timing(
                ttft_s=self.first_s if self.first_s is not None else total_s,
                total_s=total_s,
                prefill_queue_s=mean(prefill, "vllm:request_queue_time_seconds"),
                prefill_s=mean(prefill, "vllm:request_prefill_time_seconds"),
                decode_queue_s=mean(decode, "vllm:request_queue_time_seconds"),
                decode_ttft_s=mean(decode, "vllm:time_to_first_token_seconds"),
                transfer_s=moved(after).since(moved(before)).transfer_s,
            ),
            kv=moved(after).since(moved(before)),
            had_company=_finished(prefill, before, after) > 1,
            request_id=self._request_id,
            client=ClientTimes(sent_ns, *self.pieces_ns),
        )


def _grown(
    names: list[str], metric: str, before: dict[str, Metrics], after: dict[str, Metrics]
) -> float:
    return sum(after[name].value(metric) - before[name].value(metric) for name in names)


def _finished(names: list[str], before: dict[str, Metrics], after: dict[str, Metrics]) -> float:
    return _grown(names, "vllm:request_prefill_time_seconds_count", before, after)


async def _settled(
    client: httpx.AsyncClient, plan: DeploymentPlan, before: dict[str, Metrics]
) -> dict[str, Metrics]:
    """Metrics once both sides have counted the request, or when that takes too long."""
    deadline_s = time.monotonic() + _COUNTERS_WITHIN_S
    prefill = [process.name for process in plan.of_role("prefill")]
    decode = [process.name for process in plan.of_role("decode")]
    while True:
        after = await scrape_all(client, plan.engines)
        counted = _finished(prefill, before, after) > 0 and _finished(decode, before, after) > 0
        if counted or time.monotonic() > deadline_s:
            return after
        await asyncio.sleep(_POLL_S)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data and data != "[DONE]":
            yield data


def _refused(plan: DeploymentPlan, how: str) -> PdError:
    return PdError(
        f"the request got no answer: {how}",
        where=plan.router_url,
        next_step=f"pdlaunch status {plan.name}; pdlaunch logs {plan.name}",
    )
