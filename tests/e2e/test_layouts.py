"""Engines with several ranks: over push they give what one engine answers."""

from __future__ import annotations

import pytest

from checks import check_answers, wait_until_freed
from questions import Question, words
from serving import TINY, Connection, Reference, deployed

pytestmark = pytest.mark.slow
# 2,000 tokens of the tiny model, in whole blocks, and how much of that moves however it is divided.
TOKENS = 2016
KIB_A_TOKEN = 64


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("decode.tensor_parallel=2",), id="TP 1 to 2"),
        pytest.param(("prefill.tensor_parallel=2",), id="TP 2 to 1"),
        pytest.param(("prefill.tensor_parallel=2", "decode.tensor_parallel=2"), id="TP 2 to 2"),
        pytest.param(("prefill.pipeline_parallel=2",), id="PP 2 to 1"),
    ],
)
def test_answers_are_those_of_one_engine(
    settings: tuple[str, ...], reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with deployed(TINY, "e2e-layout", tmp_path_factory.mktemp("layout"), *settings) as pair:

        async def work(connection: Connection) -> None:
            before = await connection.moved()
            question = Question("2000 tokens", prompt=words(TOKENS, "layout"), answer_tokens=2)
            await connection.ask(question)
            moved = await connection.moved_since(
                before, lambda moved: moved.bytes_moved >= TOKENS * KIB_A_TOKEN * 1024
            )
            assert moved.bytes_moved == TOKENS * KIB_A_TOKEN * 1024
            await check_answers(connection, reference, "layout")
            await wait_until_freed(connection)

        pair.run(work)
