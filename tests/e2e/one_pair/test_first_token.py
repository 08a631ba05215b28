"""The first token goes from prefill to decode's client, unless decode has to sample it itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from answers import REQUEST_TIMEOUT_S, Answer
from checks import wait_until_freed
from questions import Question, words
from serving import Connection, Deployment

EOS = 2
COUNTER = "vllm:nixl_push_first_tokens_total"
TAKEN = {"taken": 1}
REFUSED = {"refused": 1}
COMPUTED: dict[str, int] = {}
COUNTED_WITHIN_S = 10.0
NOTHING_COUNTED_FOR_S = 1.5


@dataclass(frozen=True)
class Asked(Question):
    """A question with further parameters of a request."""

    more: tuple[tuple[str, Any], ...] = ()

    def body(self, model: str) -> dict[str, Any]:
        return super().body(model) | dict(self.more)


def asked(name: str, more: Mapping[str, Any] | None = None, tokens: int = 8) -> Asked:
    return Asked(
        name,
        prompt=words(150, "first token"),
        answer_tokens=tokens,
        more=tuple((more or {}).items()),
    )


async def _counts(connection: Connection) -> dict[str, int]:
    metrics = await connection.metrics()
    return metrics[connection.deployment.decode.name].counts(COUNTER, "outcome")


async def _counted_since(
    connection: Connection, before: dict[str, int], expected: dict[str, int]
) -> dict[str, int]:
    """What was counted since; an engine publishes it with the step after."""
    if not expected:
        await asyncio.sleep(NOTHING_COUNTED_FOR_S)
    deadline_s = time.monotonic() + COUNTED_WITHIN_S
    while True:
        since = {
            outcome: count - before.get(outcome, 0)
            for outcome, count in (await _counts(connection)).items()
            if count > before.get(outcome, 0)
        }
        if since == expected or time.monotonic() > deadline_s:
            return since
        await asyncio.sleep(0.2)


async def _both(connection: Connection, question: Question) -> tuple[Answer, Answer]:
    """What decode answers alone, and what the pair answers."""
    decode = connection.deployment.decode
    alone = await connection.ask_engine(decode, question.salted(f"alone {question.name}"))
    return alone, await connection.ask(question.salted(f"pair {question.name}"))


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (asked("greedy"), TAKEN),
        (asked("one token", tokens=1), TAKEN),
        (asked("two tokens", tokens=2), TAKEN),
        (
            asked(
                "penalties",
                {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
            ),
            TAKEN,
        ),
        (asked("biased", {"logit_bias": {"300": 100, "301": 100}}), TAKEN),
        (asked("allowed", {"allowed_token_ids": [300, 301, 302]}), TAKEN),
        (asked("bad words", {"bad_words": ["token", "rav"]}), TAKEN),
        (asked("at least four", {"min_tokens": 4}), TAKEN),
        (asked("ends at once", {"logit_bias": {str(EOS): 100}}), TAKEN),
        (
            asked("may not end at once", {"logit_bias": {str(EOS): 100}, "min_tokens": 4}),
            REFUSED,
        ),
        (
            asked("never ends", {"logit_bias": {str(EOS): 100}, "ignore_eos": True}),
            TAKEN,
        ),
        (
            asked("stop token", {"logit_bias": {"300": 100}, "stop_token_ids": [300]}),
            TAKEN,
        ),
        (asked("stop string", {"stop": ["e", "6", " "]}), TAKEN),
        (asked("seed", {"temperature": 0.9, "seed": 11}), COMPUTED),
        (asked("greedy with a seed", {"seed": 11}), TAKEN),
        (asked("log probabilities", {"logprobs": 1}), COMPUTED),
        (
            asked("structured", {"structured_outputs": {"choice": ["river", "lighthouse"]}}),
            COMPUTED,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Question) else "",
)
def test_answers_are_those_of_one_engine(
    pair: Deployment, question: Asked, expected: dict[str, int]
) -> None:
    async def work(connection: Connection) -> None:
        before = await _counts(connection)
        alone, answer = await _both(connection, question)
        assert answer == alone
        assert await _counted_since(connection, before, expected) == expected
        await wait_until_freed(connection)

    pair.run(work)


def test_a_sampled_answer_goes_on_from_prefills_token(pair: Deployment) -> None:
    question = asked("sampled", {"temperature": 1.0, "ignore_eos": True})

    async def work(connection: Connection) -> None:
        before = await _counts(connection)
        answer = await connection.ask(question)
        assert len(answer.tokens) == question.answer_tokens
        assert await _counted_since(connection, before, TAKEN) == TAKEN

    pair.run(work)


def test_several_answers_to_one_request(pair: Deployment) -> None:
    question = asked("several", {"n": 2, "temperature": 1.0, "logit_bias": {"300": 100}})

    async def choices(connection: Connection, url: str, salt: str) -> list[list[int]]:
        body = question.salted(salt).body(connection.deployment.plan.served_name)
        response = await connection.client.post(
            url + question.path, json=body, timeout=REQUEST_TIMEOUT_S
        )
        assert response.is_success, response.text
        return [choice["token_ids"] for choice in response.json()["choices"]]

    async def work(connection: Connection) -> None:
        plan = connection.deployment.plan
        before = await _counts(connection)
        alone = await choices(connection, connection.deployment.decode.url, "alone")
        assert await choices(connection, plan.router_url, "pair") == alone
        assert await _counted_since(connection, before, COMPUTED) == COMPUTED
        await wait_until_freed(connection)

    pair.run(work)


@pytest.mark.parametrize("order", ["decode first", "in sequence"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_legs_in_any_order(pair: Deployment, order: str, tokens: int) -> None:
    question = asked(f"{order} {tokens}", tokens=tokens)

    async def work(connection: Connection) -> None:
        legs = connection.legs
        before = await _counts(connection)
        alone = await connection.ask_engine(pair.decode, question.salted("alone"))
        send = legs.decode_first if order == "decode first" else legs.in_sequence
        assert await send(question.salted(order)) == alone
        assert await _counted_since(connection, before, TAKEN) == TAKEN
        await wait_until_freed(connection)

    pair.run(work)
