"""Known failures of P/D serving that need several ranks: one of prefill's two fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from answers import new_id
from checks import wait_until_used
from faults import ENDS_WITHIN_S, Case, Pair, faulty, scope
from questions import Question, words
from serving import Connection

pytestmark = [pytest.mark.fault, pytest.mark.slow]


@pytest.fixture(scope=scope)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("rank-faults")
    with faulty(request.config, "e2e-ranks", folder, "prefill.tensor_parallel=2") as found:
        yield found


def question(name: str) -> Question:
    return Question(name, prompt=words(1000, name), answer_tokens=4, salt=f"{name} {new_id()}")


async def recovered(case: Case) -> None:
    await case.freed()
    await case.works()
    await case.freed()


def test_a7_a_registration_reaches_one_rank_only(pair: Pair) -> None:
    async def work(connection: Connection) -> None:
        case = Case(pair, connection)
        asked = question("a7")
        expected = await case.expected(asked)
        pair.of_decode.once("send_notif.raise")
        # It is sent again: the request succeeds.
        assert await case.decode_first(asked) == expected
        await recovered(case)

    pair.deployment.run(work)


def test_b6_one_rank_fails_while_the_other_still_writes(pair: Pair) -> None:
    async def work(connection: Connection) -> None:
        case = Case(pair, connection)
        asked, others = question("b6"), [question(f"b6 {n}") for n in range(3)]
        expected = [await case.expected(each) for each in (asked, *others)]
        request_id = new_id()
        with pair.of_prefill.during("transfer.hold"):
            leg = asyncio.create_task(case.legs.decode_leg(asked, request_id))
            await wait_until_used(connection, pair.decode.name)
            pair.of_prefill.once("transfer.raise")
            await case.legs.prefill_leg(asked, request_id)
            await asyncio.sleep(3)
            # The other rank has not begun: D's blocks are not for others yet.
            assert await case.held(pair.decode) > 0
            for each, right in zip(others, expected[1:], strict=True):
                assert await connection.ask_engine(pair.decode, each) == right
        assert not await case.right_or_failed(leg, expected[0])
        for each, right in zip(others, expected[1:], strict=True):
            assert await connection.ask_engine(pair.decode, each) == right
        await recovered(case)

    pair.deployment.run(work)


def test_c2_one_rank_cannot_post_its_write(pair: Pair) -> None:
    async def work(connection: Connection) -> None:
        case = Case(pair, connection)
        asked = question("c2")
        expected = await case.expected(asked)
        pair.of_prefill.once("transfer.raise")
        assert not await case.right_or_failed(case.decode_first(asked), expected, ENDS_WITHIN_S)
        await recovered(case)

    pair.deployment.run(work)
