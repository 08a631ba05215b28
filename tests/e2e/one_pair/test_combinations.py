"""Requests of other kinds than a plain one: over push they get what one engine answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

import adapters
from answers import REQUEST_TIMEOUT_S, Answer, Failed, ask, at_once, or_failure
from checks import wait_until_freed
from questions import Question, words
from serving import Connection, Deployment

KINDS: dict[str, dict[str, Any]] = {
    "one token": {"max_tokens": 1},
    "several choices": {"n": 2, "temperature": 0.8, "seed": 5},
    "several prompts": {"prompt": [list(words(300, "first")), list(words(301, "second"))]},
    "log probabilities": {"logprobs": 3},
    "log probabilities of the prompt": {"prompt_logprobs": 1},
    # With log probabilities the router would add up those of both engines.
    "prompt echoed": {"echo": True},
    "sampled": {"temperature": 0.9, "seed": 7},
    "structured output": {"structured_outputs": {"regex": "[ab]{4}"}},
    "a least number of tokens": {"min_tokens": 5},
    "stop string": {"stop": ["e"]},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "prompt cut": {"truncate_prompt_tokens": 100},
    "prompt too long": {"prompt": list(words(9000, "too long"))},
}
# The recipe's budget of prefill.
CHUNK_TOKENS = 256
# Rounded otherwise when a prompt was cut elsewhere.
LOGPROB_TOLERANCE = 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_answer_is_that_of_one_engine(pair: Deployment, kind: str) -> None:
    async def work(connection: Connection) -> None:
        plan = pair.plan
        # vLLM's CPU engine ends when a prompt with a seed is cut into chunks, which happens where
        # those of several choices do not fit into one.
        length = CHUNK_TOKENS // 2 - 1 if "seed" in KINDS[kind] else 500
        question = Question(kind, prompt=words(length, kind), answer_tokens=6)
        body = question.body(plan.served_name) | KINDS[kind]

        async def asked(url: str, salt: str) -> Any:
            response = await connection.client.post(
                f"{url}/v1/completions", json=body | {"cache_salt": salt}, timeout=REQUEST_TIMEOUT_S
            )
            return _comparable(response)

        before = await connection.moved()
        pushed = await asked(plan.router_url, "pushed")
        local = await asked(pair.decode.url, "local")
        assert pushed == _about(local)
        moved = (await connection.moved()).since(before)
        assert not moved.transfers_failed
        await wait_until_freed(connection)

    pair.run(work)


def test_answers_with_an_adapter_are_those_of_one_engine(pair: Deployment) -> None:
    question = Question("adapters", prompt=words(CHUNK_TOKENS + 50, "adapters"), answer_tokens=6)

    async def work(connection: Connection) -> None:
        before = await connection.moved()
        answers = set()
        for model in (pair.plan.served_name, *adapters.SAME):
            # One salt for all: what one of them has cached is nothing to another.
            pushed = await ask(
                connection.client, pair.plan.router_url, model, question.salted("pushed")
            )
            local = await ask(connection.client, pair.decode.url, model, question.salted("local"))
            assert pushed == local
            answers.add(pushed)
        assert len(answers) == 1 + len(adapters.SAME)
        moved = (await connection.moved()).since(before)
        assert not moved.transfers_failed
        await wait_until_freed(connection)

    pair.run(work)


def test_adapter_on_one_leg_is_an_error_not_an_answer(pair: Deployment) -> None:
    plain, (first, second) = pair.plan.served_name, adapters.SAME
    other_weights = (adapters.AMBIGUOUS, adapters.AMBIGUOUS)
    cases = tuple(
        (models, order)
        for models in ((plain, first), (first, plain), (first, second), other_weights)
        for order in ("prefill first", "decode first")
    )

    async def work(connection: Connection) -> None:
        async def asked(case: tuple[tuple[str, str], str]) -> Answer | Failed:
            (on_prefill, on_decode), order = case
            question = Question("one leg", prompt=words(100, case), answer_tokens=6)
            legs = replace(connection.legs, model=on_prefill, decode_model=on_decode)
            leg = legs.in_sequence if order == "prefill first" else legs.decode_first
            return await or_failure(leg(question))

        before = await connection.moved()
        # All at once: it takes a while until it is clear that the right prompt does not follow.
        for answer in await at_once(asked, cases, len(cases)):
            assert isinstance(answer, Failed)
            assert answer.status == httpx.codes.INTERNAL_SERVER_ERROR
        moved = await connection.moved_since(
            before, lambda moved: moved.transfers_failed >= len(cases)
        )
        assert (moved.transfers_completed, moved.transfers_failed) == (0, len(cases))

    pair.run(work)


def _comparable(response: httpx.Response) -> Any:
    """A response without what differs from one request to the next."""
    if response.status_code != httpx.codes.OK:
        return response.status_code
    choices = response.json()["choices"]
    return sorted(choices, key=lambda choice: int(choice["index"]))


def _about(value: Any) -> Any:
    if isinstance(value, float):
        return pytest.approx(value, abs=LOGPROB_TOLERANCE)
    if isinstance(value, dict):
        return {key: _about(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_about(item) for item in value]
    return value
