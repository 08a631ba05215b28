"""Holds the answers of P/D to one engine's. Where they part, asks how close a call it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import httpx

from pdlaunch import readiness
from pdlaunch.bench.results import Difference, Measurement
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan

_REQUEST_TIMEOUT_S = 300.0


def differences(
    measurements: Iterable[Measurement], reference: Iterable[Measurement]
) -> list[Difference]:
    """Where answers of one load in one round differ; requests without an answer are left out."""
    known = {(one.load, one.round): one for one in reference}
    return [
        Difference(
            subject=one.subject,
            load=one.load,
            round=one.round,
            request=number,
            answer=got.text,
            expected=expected.text,
        )
        for one in measurements
        if (one.load, one.round) in known
        for number, (got, expected) in enumerate(
            zip(one.requests, known[one.load, one.round].requests, strict=True)
        )
        if got.ok
        and expected.ok
        and (got.text, got.answer_tokens) != (expected.text, expected.answer_tokens)
    ]


def gap_where_parted(steps: Sequence[tuple[str, float]], answer: str) -> float:
    """By how much one engine preferred its own token where an answer parts from its answer.

    Args:
        steps: for each of its tokens, the text it added and the lead over the second best in log
            probability. Bytes of an unfinished character add none: any of them may be the one.
        answer: the other answer.
    """
    text = ""
    close: list[float] = []
    for piece, gap in steps:
        close.append(gap)
        text += piece
        if not answer.startswith(text):
            return min(close)
        if piece:
            close = []
    return min(close or [gap for _, gap in steps[-1:]], default=0.0)


async def steps(
    client: httpx.AsyncClient,
    plan: DeploymentPlan,
    prompt: Sequence[int],
    answer_tokens: int,
) -> list[tuple[str, float]]:
    """Token by token what one engine answers, and how far ahead of the second best each was."""
    body = {
        "model": plan.served_name,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "logprobs": 2,
        # Two tokens may look the same as text.
        "return_tokens_as_token_ids": True,
    }
    (engine,) = plan.engines
    found: list[tuple[str, float]] = []
    async with client.stream(
        "POST",
        f"{engine.url}/v1/completions",
        json=body,
        headers=readiness.headers(),
        timeout=_REQUEST_TIMEOUT_S,
    ) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise PdError(
                f"one engine does not say how close a call was: HTTP {response.status_code}",
                where=engine.url,
                next_step=f"pdlaunch logs {plan.name}",
            )
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            for choice in json.loads(data).get("choices", ()):
                found += _steps_of(choice)
    return found


def _steps_of(choice: dict[str, object]) -> list[tuple[str, float]]:
    logprobs = choice.get("logprobs")
    tops = logprobs.get("top_logprobs", []) if isinstance(logprobs, dict) else []
    gaps = []
    for top in tops:
        first, second, *_ = sorted(top.values(), reverse=True)
        gaps.append(first - second)
    text = str(choice.get("text") or "")
    # A piece of several tokens is that of the last of them.
    return [("", gap) for gap in gaps[:-1]] + [(text, gap) for gap in gaps[-1:]]
