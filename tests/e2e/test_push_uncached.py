"""Streaming push without prefix caches, where decode recomputes what it cannot load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from answers import Failed, at_once, new_id
from checks import ENDED_WITHIN_S, kill, wait_until_freed, wait_until_used
from questions import COMPLETIONS, EVERYTHING, some
from serving import AT_ONCE, TINY, Connection, Deployment, Reference, deployed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(
        TINY,
        "e2e-uncached",
        tmp_path_factory.mktemp("uncached"),
        "engine.args.enable-prefix-caching=false",
        "transfer.load_failure_policy=recompute",
    ) as deployment:
        yield deployment


def test_answers_are_those_of_one_engine(pair: Deployment, reference: Reference) -> None:
    # Half of all: every one of them is asked with prefix caches on.
    streamed, plain = EVERYTHING[::4], EVERYTHING[1::4]
    asked = len(streamed) + len(plain)

    async def work(connection: Connection) -> None:
        before = await connection.moved()
        answers = await connection.ask_all(streamed, stream=True)
        assert reference.differences(streamed, answers) == []
        answers = await connection.ask_all(plain)
        assert reference.differences(plain, answers) == []
        moved = await connection.moved_since(
            before, lambda moved: moved.transfers_completed >= asked
        )
        assert moved.transfers_completed == asked

    pair.run(work)


def test_repeated_questions_move_their_kv_again(pair: Deployment, reference: Reference) -> None:
    asked = some(7)

    async def work(connection: Connection) -> None:
        before = await connection.moved()
        for _ in range(2):
            assert reference.differences(asked, await connection.ask_all(asked)) == []
        moved = await connection.moved_since(
            before, lambda moved: moved.transfers_completed >= 2 * len(asked)
        )
        assert moved.transfers_completed == 2 * len(asked)

    pair.run(work)


def test_answers_with_legs_one_after_the_other(pair: Deployment, reference: Reference) -> None:
    asked = some(7)

    async def work(connection: Connection) -> None:
        answers = await at_once(connection.legs.in_sequence, asked, AT_ONCE)
        assert reference.differences(asked, answers) == []

    pair.run(work)


def test_answers_with_decode_first(pair: Deployment, reference: Reference) -> None:
    asked = some(7)

    async def work(connection: Connection) -> None:
        answers = await at_once(connection.legs.decode_first, asked, AT_ONCE)
        assert reference.differences(asked, answers) == []

    pair.run(work)


def test_prefill_killed_while_it_pushes_is_recomputed(
    pair: Deployment, reference: Reference
) -> None:
    """Last in this file: prefill is another process afterwards."""
    (question,) = (each for each in COMPLETIONS if len(each.prompt) == 4000)

    async def work(connection: Connection) -> None:
        request_id = new_id()
        before = await connection.moved()
        decode = asyncio.create_task(connection.legs.decode_leg(question, request_id))
        await wait_until_used(connection, pair.decode.name)
        prefill = asyncio.create_task(connection.legs.prefill_leg(question, request_id))
        await connection.moved_since(before, lambda moved: moved.bytes_during_prefill > 0)
        kill(pair, pair.prefill)
        answer = await asyncio.wait_for(decode, ENDED_WITHIN_S)
        assert reference.differences((question,), [answer]) == []
        with suppress(Failed, httpx.HTTPError):
            await prefill
        await wait_until_freed(connection, pair.decode)

    pair.run(work)
