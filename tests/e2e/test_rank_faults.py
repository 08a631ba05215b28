"""Known failures of P/D serving that need several ranks: one of prefill's two fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from answers import new_id
from checks import wait_until_used
from faults import ENDS_WITHIN_S, Case, Pairs
from questions import Question, words

pytestmark = [pytest.mark.fault, pytest.mark.slow]


@pytest.fixture(scope="module")
def pairs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pairs]:
    folder = tmp_path_factory.mktemp("rank-faults")
    found = Pairs(request.config, "e2e-ranks", folder, "prefill.tensor_parallel=2")
    yield found
    found.take_down()


def question(name: str) -> Question:
    return Question(name, prompt=words(1000, name), answer_tokens=4, salt=f"{name} {new_id()}")


def test_a7_a_registration_reaches_one_rank_only(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked = question("a7")
        expected = await case.expected(asked)
        case.pair.of_decode.once("send_notif.raise")
        # It is sent again: the request succeeds.
        assert await case.decode_first(asked) == expected

    pairs.run(work)


def test_b6_one_rank_fails_while_the_other_still_writes(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked, others = question("b6"), [question(f"b6 {n}") for n in range(3)]
        expected = [await case.expected(each) for each in (asked, *others)]
        request_id = new_id()
        with case.pair.of_prefill.during("transfer.hold"):
            leg = asyncio.create_task(case.legs.decode_leg(asked, request_id))
            await wait_until_used(case.connection, case.pair.decode.name)
            case.pair.of_prefill.once("transfer.raise")
            await case.legs.prefill_leg(asked, request_id)
            await asyncio.sleep(3)
            # The other rank has not begun: D's blocks are not for others yet.
            assert await case.held(case.pair.decode) > 0
            for each, right in zip(others, expected[1:], strict=True):
                assert await case.connection.ask_engine(case.pair.decode, each) == right
        assert not await case.right_or_failed(leg, expected[0])
        for each, right in zip(others, expected[1:], strict=True):
            assert await case.connection.ask_engine(case.pair.decode, each) == right

    pairs.run(work)


def test_c2_one_rank_cannot_post_its_write(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked = question("c2")
        expected = await case.expected(asked)
        case.pair.of_prefill.once("transfer.raise")
        assert not await case.right_or_failed(case.decode_first(asked), expected, ENDS_WITHIN_S)

    pairs.run(work)
