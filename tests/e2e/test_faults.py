"""Known failures of P/D serving, on one pair: each test is named by the id of docs/faults.md."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from answers import PREFILL_ONLY, Failed, at_once, new_id
from checks import kill, wait_until_used
from faults import ENDS_WITHIN_S, LEASE_S, REGISTRATION_WAIT_S, Case, Pairs
from questions import Question, words

pytestmark = pytest.mark.fault
MANY = 20


@pytest.fixture(scope="module")
def pairs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pairs]:
    folder = tmp_path_factory.mktemp("faults")
    settings = (
        # Below that of decode, for what prefill alone refuses.
        "prefill.max_model_len_tokens=3600",
        "decode.args.max-num-seqs=4",
        # Leases are renewed between steps of decode, which must be shorter than those leases.
        "decode.args.max-num-batched-tokens=512",
    )
    found = Pairs(request.config, "e2e-faults", folder, *settings)
    yield found
    found.take_down()


def question(name: str, tokens: int = 1000, answer_tokens: int = 4) -> Question:
    return Question(
        name, prompt=words(tokens, name), answer_tokens=answer_tokens, salt=f"{name} {new_id()}"
    )


async def given_up(leg: asyncio.Task[Any]) -> None:
    leg.cancel()
    with suppress(asyncio.CancelledError):
        await leg


# ---------- Hangs, leaks, aborts ----------


@pytest.mark.slow
def test_a1_decode_aborts_while_it_waits(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        legs = [
            asyncio.create_task(case.legs.decode_leg(question(f"a1 {n}", 200), new_id()))
            for n in range(MANY)
        ]
        await wait_until_used(case.connection, case.pair.decode.name)
        await asyncio.sleep(0.5)
        for leg in legs:
            await given_up(leg)
        await case.freed(10)

    pairs.run(work)


def test_a2_registrations_that_never_get_a_prefill(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        for number in range(MANY):
            leg = case.legs.decode_leg(question(f"a2 {number}", 100), new_id())
            waiting = asyncio.create_task(leg)
            await asyncio.sleep(0.1)
            await given_up(waiting)
        await case.freed(10)
        # Stock has no such metric: what it keeps cannot be seen from outside.
        sent = await case.counted(case.pair.decode, "registrations_total", side="sent")
        assert sent >= MANY
        await asyncio.sleep(2)
        metrics = (await case.connection.metrics())[case.pair.prefill.name]
        assert metrics.value("vllm:nixl_push_num_registrations") == 0

    pairs.run(work)


def test_a3_an_older_registration_with_the_same_id(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked, request_id = question("a3"), new_id()
        expected = await case.expected(asked)
        old = asyncio.create_task(case.legs.decode_leg(asked, request_id))
        await wait_until_used(case.connection, case.pair.decode.name)
        await given_up(old)
        async with asyncio.TaskGroup() as group:
            new = group.create_task(case.legs.decode_leg(asked, request_id))
            group.create_task(case.legs.prefill_leg(asked, request_id))
        assert new.result() == expected

    pairs.run(work)


@pytest.mark.slow
def test_a4_prefill_refuses_its_leg(pairs: Pairs) -> None:
    async def refused(case: Case, asked: Question, **changes: Any) -> None:
        request_id = new_id()
        expected = await case.expected(asked)
        waiting = asyncio.create_task(case.legs.decode_leg(asked, request_id))
        await wait_until_used(case.connection, case.pair.decode.name)
        body = asked.body(case.legs.model) | {
            "max_tokens": 1,
            "kv_transfer_params": PREFILL_ONLY,
            **changes,
        }
        response = await case.connection.client.post(
            case.pair.prefill.url + asked.path, json=body, headers={"X-Request-Id": request_id}
        )
        assert response.status_code == httpx.codes.BAD_REQUEST
        # P's engine never hears of the request. It waits for one, but not for ever.
        assert not await case.right_or_failed(waiting, expected, REGISTRATION_WAIT_S + 5)

    async def work(case: Case) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refused(case, question("a4 min_tokens"), min_tokens=4))
            group.create_task(refused(case, question("a4 too long", 3800)))

    pairs.run(work)


@pytest.mark.slow
def test_a5_prefill_cannot_reach_decode(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        before = kill(case.pair.deployment, case.pair.decode)
        await back(case, before)
        asked = question("a5")
        expected = await case.expected(asked)
        with case.pair.of_prefill.during("zmq_connect.lost"):
            # So long that P knows it will never reach D.
            await case.right_or_failed(case.decode_first(asked), expected, ENDS_WITHIN_S + 10)
            await case.freed()

    pairs.run(work)


def test_a6_a_write_fails(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked = question("a6")
        expected = await case.expected(asked)
        case.pair.of_prefill.once("check_xfer_state.error")
        answered = await case.right_or_failed(case.decode_first(asked), expected)
        assert not answered, "answered, though prefill was told that its WRITE has failed"

    pairs.run(work)


def test_a8_decode_is_queued_longer_than_the_lease(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked, request_id = question("a8"), new_id()
        expected = await case.expected(asked)
        # They fill D's cache, so that nothing can be allocated for one more.
        busy = [
            asyncio.create_task(case.occupy(case.pair.decode, tokens, 1050))
            for tokens in (3000, 3000, 1500)
        ]
        await wait_until_used(case.connection, case.pair.decode.name)
        named = await case.legs.prefill_leg(asked, request_id)
        began_s = time.monotonic()
        leg = asyncio.create_task(case.legs.decode_leg(asked, request_id, named))
        while time.monotonic() - began_s < LEASE_S * 2:
            assert not leg.done()
            await asyncio.sleep(0.2)
        for each in busy:
            await given_up(each)
        assert await leg == expected

    pairs.run(work)


def test_a9_decode_has_all_of_the_prompt(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked = question("a9", 1025)
        expected = await case.connection.ask_engine(case.pair.decode, asked)
        assert await case.legs.in_sequence(asked) == expected
        # Long before the lease ends.
        await case.freed(LEASE_S / 2)

    pairs.run(work)


@pytest.mark.slow
def test_a11_prefill_dies_while_decode_waits(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked = question("a11")
        expected = await case.expected(asked)
        leg = asyncio.create_task(case.legs.decode_leg(asked, new_id()))
        await wait_until_used(case.connection, case.pair.decode.name)
        before = kill(case.pair.deployment, case.pair.prefill)
        assert not await case.right_or_failed(leg, expected)
        await back(case, before)

    pairs.run(work)


def test_a12_prefill_releases_its_blocks_on_completion(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked = question("a12", 2000)
        expected = await case.expected(asked)
        assert await case.decode_first(asked) == expected
        await case.freed(LEASE_S / 2)

    pairs.run(work)


# ---------- Wrong data ----------


@pytest.mark.slow
def test_b1_a_write_outlasts_the_lease(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked, request_id = question("b1"), new_id()
        expected = await case.expected(asked)
        with case.pair.of_prefill.during("transfer.hold"):
            leg = asyncio.create_task(case.legs.decode_leg(asked, request_id))
            await wait_until_used(case.connection, case.pair.decode.name)
            await case.legs.prefill_leg(asked, request_id)
            await asyncio.sleep(LEASE_S + 2)
            assert await case.held(case.pair.prefill) > 0
            await case.overwrite(case.pair.prefill)
        await case.right_or_failed(leg, expected)

    pairs.run(work)


@pytest.mark.slow
def test_b2_a_handshake_outlasts_the_lease(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        before = kill(case.pair.deployment, case.pair.decode)
        await back(case, before)
        asked, request_id = question("b2"), new_id()
        expected = await case.expected(asked)
        with case.pair.of_prefill.during("add_remote_agent.delay", LEASE_S + 3):
            leg = asyncio.create_task(case.legs.decode_leg(asked, request_id))
            await wait_until_used(case.connection, case.pair.decode.name)
            await case.legs.prefill_leg(asked, request_id)
            await case.overwrite(case.pair.prefill)
            await case.right_or_failed(leg, expected)

    pairs.run(work)


def test_b3_two_requests_with_one_id(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        for number in range(4):
            asked = [question(f"b3 {number} {n}", 500) for n in range(2)]
            expected = [await case.expected(each) for each in asked]
            request_id = new_id()
            legs = [case.legs.decode_leg(each, request_id) for each in asked]
            async with asyncio.TaskGroup() as group:
                answers = [
                    group.create_task(case.right_or_failed(leg, right))
                    for leg, right in zip(legs, expected, strict=True)
                ]
                await asyncio.sleep(0.2)
                for each in reversed(asked):
                    group.create_task(case.legs.prefill_leg(each, request_id))
            assert all(answer.result() for answer in answers)

    pairs.run(work)


def test_b4_the_prompts_differ_in_length(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        longer = question("b4", 1025)
        shorter = Question("b4", prompt=longer.prompt[:1024], salt=longer.salt)
        expected, request_id = await case.expected(longer), new_id()
        leg = asyncio.create_task(case.legs.decode_leg(longer, request_id))
        await wait_until_used(case.connection, case.pair.decode.name)
        await case.legs.prefill_leg(shorter, request_id)
        assert not await case.right_or_failed(leg, expected)

    pairs.run(work)


@pytest.mark.slow
def test_b8_parameters_are_used_again(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked, request_id = question("b8"), new_id()
        expected = await case.expected(asked)
        named = await case.legs.prefill_leg(asked, request_id)
        assert await case.legs.decode_leg(asked, request_id, named) == expected
        await case.freed()
        for engine in (case.pair.prefill, case.pair.decode):
            await case.overwrite(engine)
        again = case.legs.decode_leg(asked, request_id, named)
        assert not await case.right_or_failed(again, expected)

    pairs.run(work)


@pytest.mark.parametrize("hit", [32, 500, 992])
def test_b11_decode_has_a_part_of_the_prompt(pairs: Pairs, hit: int) -> None:
    async def work(case: Case) -> None:
        asked = question(f"b11 {hit}")
        expected = await case.expected(asked)
        part = Question("part", prompt=asked.prompt[:hit], answer_tokens=1, salt=asked.salt)
        await case.connection.ask_engine(case.pair.decode, part)
        assert await case.legs.in_sequence(asked) == expected

    pairs.run(work)


# ---------- Crashes ----------


@pytest.mark.parametrize("kept", [(), ("remote_engine_id", "remote_host", "remote_port")])
def test_c_1_and_c_2_parameters_that_lack_most(pairs: Pairs, kept: tuple[str, ...]) -> None:
    async def work(case: Case) -> None:
        asked, request_id = question(f"c1 {len(kept)}"), new_id()
        expected = await case.expected(asked)
        named = await case.legs.prefill_leg(asked, request_id)
        few = {"do_remote_prefill": True, **{key: named[key] for key in kept}}
        await case.right_or_failed(case.legs.decode_leg(asked, request_id, few), expected)
        # P keeps its blocks to the lease's end, where nobody has said that they are unwanted.
        await case.freed()

    pairs.run(work)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["prefill", "decode"])
def test_c_4_notifications_that_are_none(pairs: Pairs, to: str) -> None:
    async def work(case: Case) -> None:
        engine = case.pair.prefill if to == "prefill" else case.pair.decode
        await case.hostile("notifications", engine=case.pair.side_channel(engine), count=200)

    pairs.run(work)


@pytest.mark.slow
def test_c_5_clients_leave_when_their_kv_arrives(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        began_s = time.monotonic()
        await case.legs.in_sequence(question("c5 usual", 400))
        usual_s = time.monotonic() - began_s

        async def left(number: int) -> None:
            leg = asyncio.create_task(case.legs.in_sequence(question(f"c5 {number}", 400)))
            await asyncio.sleep(usual_s * (0.5 + number / MANY))
            await given_up(leg)

        await at_once(left, range(MANY), 2)
        await case.freed(10)

    pairs.run(work)


# ---------- Restart, handshake, side channel ----------


@pytest.mark.slow
@pytest.mark.parametrize("to", ["prefill", "decode"])
def test_d1_frames_that_are_no_handshake(pairs: Pairs, to: str) -> None:
    async def work(case: Case) -> None:
        engine = case.pair.prefill if to == "prefill" else case.pair.decode
        await case.hostile("garbage", **case.pair.side_channel(engine))
        await case.hostile("listening", **case.pair.side_channel(engine))

    pairs.run(work)


@pytest.mark.slow
def test_d3_prefill_is_replaced(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        before = kill(case.pair.deployment, case.pair.prefill)
        await back(case, before)
        # The first request to the new engine is like any other.
        await case.works()

    pairs.run(work)


@pytest.mark.slow
def test_d4_dead_peers_beside_a_new_one(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        before = kill(case.pair.deployment, case.pair.prefill)
        await back(case, before)
        asked = question("d4", 300)
        expected = await case.expected(asked)
        with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
            params = case.legs.known_of_prefill(new_id()) | {
                "remote_port": silent.getsockname()[1],
                "remote_engine_id": "dead",
                "remote_request_id": "none",
                "remote_block_ids": [[1, 2]],
            }
            dead = [
                asyncio.create_task(
                    case.legs.decode_leg(question(f"d4 {n}", 100), new_id(), params)
                )
                for n in range(3)
            ]
            await asyncio.sleep(0.5)
            began_s = time.monotonic()
            assert await asyncio.wait_for(case.legs.in_sequence(asked), ENDS_WITHIN_S) == expected
            assert time.monotonic() - began_s < 4
            for each in dead:
                with pytest.raises(Failed):
                    await asyncio.wait_for(each, ENDS_WITHIN_S)

    pairs.run(work)


@pytest.mark.slow
def test_d5_bad_messages_beside_good_ones(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        asked = [question(f"d5 {n}", 300) for n in range(12)]
        expected = [await case.expected(each) for each in asked]
        async with asyncio.TaskGroup() as group:
            for engine in (case.pair.prefill, case.pair.decode):
                where = case.pair.side_channel(engine)
                group.create_task(case.hostile("notifications", engine=where, count=2000))
            await asyncio.sleep(3)
            answers = await asyncio.wait_for(at_once(case.legs.in_sequence, asked, 4), 90)
        assert answers == expected

    pairs.run(work)


def test_d6_hostile_registrations_change_no_byte(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        computed, waiting = question("d6 computed"), question("d6 waiting", 700)
        expected = [await case.expected(each) for each in (computed, waiting)]
        ids = new_id(), new_id()
        leg = asyncio.create_task(case.legs.decode_leg(waiting, ids[1]))
        await wait_until_used(case.connection, case.pair.decode.name)
        # D says that it is queued there, so that the lease does not end.
        named = await case.legs.prefill_leg(computed, ids[0])
        prefill, decode = (
            case.pair.side_channel(case.pair.prefill),
            case.pair.side_channel(case.pair.decode),
        )
        before = case.pair.of_prefill.memory(), case.pair.of_decode.memory()
        victims = [
            {
                "transfer_id": ids[0],
                "peer_request_id": named["remote_request_id"],
                "registration_id": f"cmpl-{ids[0]}-0",
                "num_tokens": len(computed.prompt) - 1,
            },
            {
                "transfer_id": ids[1],
                "registration_id": f"cmpl-{ids[1]}-0",
                "num_tokens": len(waiting.prompt) - 1,
            },
        ]
        printed = await case.hostile(
            "registrations", prefill=prefill, decode=decode, victims=victims
        )
        assert json.loads(printed.splitlines()[-1]) == {"bytes_got": 0}
        after = case.pair.of_prefill.memory(), case.pair.of_decode.memory()
        assert after == before
        # What was attacked is served as ever; the first may have outlived its lease.
        await case.legs.prefill_leg(waiting, ids[1])
        assert await leg == expected[1]
        await case.right_or_failed(case.legs.decode_leg(computed, ids[0], named), expected[0])

    pairs.run(work)


# ---------------------------------------------------------------------------


async def back(case: Case, before: Any) -> None:
    """The engine that was killed answers again."""
    deployment = case.pair.deployment
    deadline_s = time.monotonic() + 300
    while deployment.record().restarts == before.restarts:
        assert time.monotonic() < deadline_s, "the engine that was killed is not started again"
        await asyncio.sleep(0.2)
    healthy: list[bool] = []
    while not healthy or not all(healthy):
        assert time.monotonic() < deadline_s, "an engine does not become healthy again"
        await asyncio.sleep(0.2)
        healthy = []
        for engine in (case.pair.prefill, case.pair.decode):
            with suppress(httpx.HTTPError):
                response = await case.connection.client.get(f"{engine.url}/health")
                healthy.append(response.status_code == httpx.codes.OK)
        healthy.append(len(healthy) == 2)
