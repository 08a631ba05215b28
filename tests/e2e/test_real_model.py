"""A real model: what comes over push is what decode answers by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from questions import Question, salted
from serving import Connection, Deployment, deployed, pdlaunch

# `make demo` asks the same model, and is among the tests of every change.
pytestmark = pytest.mark.slow
_STORY = "Once upon a time there was a lighthouse keeper who counted the stars every night. "
QUESTIONS = (
    Question("capital", chat="What is the capital of France?", answer_tokens=10),
    Question("hello", chat="Hello!", answer_tokens=10),
    Question("rivers", chat="Name a river in Germany.", answer_tokens=10),
    Question("a long one", chat=f"Summarise this in one sentence. {_STORY * 25}", answer_tokens=10),
    Question("tokens", prompt=tuple(range(1000, 1065)), answer_tokens=10),
    Question("more tokens", prompt=tuple(range(2000, 2300)), answer_tokens=10),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed("smollm2-135m-cpu", "e2e-real", tmp_path_factory.mktemp("real")) as deployment:
        yield deployment


def test_ask_answers_and_shows_that_kv_was_pushed(pair: Deployment) -> None:
    said = json.loads(
        pdlaunch(pair.state, "ask", pair.plan.name, "What is the capital of France?", "--json")
    )
    assert "Paris" in said["text"]
    assert said["transfer_mode"] == "push"
    assert said["kv"]["bytes_moved"] > 0
    assert 0 < said["timing"]["ttft_s"] <= said["timing"]["total_s"]


def test_answers_are_those_of_one_engine(pair: Deployment) -> None:
    async def work(connection: Connection) -> None:
        alone = [
            await connection.ask_engine(pair.decode, each) for each in salted(QUESTIONS, "alone")
        ]
        assert "Paris" in alone[0].text
        before = await connection.moved()
        assert await connection.ask_all(salted(QUESTIONS, "pushed")) == alone
        assert await connection.ask_all(salted(QUESTIONS, "streamed"), stream=True) == alone
        moved = await connection.moved_since(
            before, lambda moved: moved.transfers_completed >= 2 * len(QUESTIONS)
        )
        assert moved.transfers_completed == 2 * len(QUESTIONS)

    pair.run(work)
