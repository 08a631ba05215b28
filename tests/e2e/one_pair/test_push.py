"""Streaming push with prefix caching: same answers, KV on its way early, nothing left behind.

The last of this folder: engines die in it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress

import pytest

from answers import Failed, at_once, new_id
from checks import (
    ENDED_WITHIN_S,
    LIVENESS_TIMEOUT_S,
    check_answers,
    kill,
    stopped,
    usage,
    wait_until_back,
    wait_until_counted,
    wait_until_freed,
    wait_until_used,
)
from pdlaunch.engine_metrics import KvMovement
from pdlaunch.trace import Timeline
from questions import EVERYTHING, HALVES, Question, salted, some, words
from serving import AT_ONCE, Connection, Deployment, Reference, pdlaunch

EARLY = 3
# Behind the router decode may get its leg late: a router that lost a connection may ask again, one
# leg after the other, and a loaded machine may hold decode up. A leg that came first has no excuse.
LATE_AT_MOST = {"both legs at once": 2, "decode": 0}
ABORTS = 50
ABORTS_AT_ONCE = 5


def test_a_trace_shows_both_engines_from_the_arrival_to_the_token(pair: Deployment) -> None:
    # One whose first token is text: without, there is nothing for a client to see.
    prompt = "The quick brown fox jumps over the lazy dog. " * 100
    told = pdlaunch(pair.state, "ask", pair.plan.name, prompt, "--max-tokens", "4", "--json")
    data = json.loads(told)
    line = Timeline.model_validate(data["timeline"])
    assert [span.what for span in line.handover] == [
        "samples, ends its leg",
        "sends the token",
        "the worker hears it",
        "the scheduler takes it",
        "the token gets to the client",
    ]
    took_s = (line.handover[-1].end_ns - line.handover[0].begin_ns) / 1e9
    assert 0 < took_s < data["timing"]["ttft_s"]
    spans = {span.what: span for span in line.spans}
    assert spans["registers them with prefill"].end_ns < line.handover[0].begin_ns
    chunks = [span for what, span in spans.items() if what.startswith("computes tokens")]
    writes = [span for what, span in spans.items() if what.startswith("WRITEs")]
    assert len(chunks) == len(writes) > 1
    pairs = zip(chunks, writes, strict=True)
    assert all(chunk.end_ns <= write.begin_ns for chunk, write in pairs)


@pytest.mark.parametrize("first", LATE_AT_MOST)
def test_kv_moves_while_the_prompt_is_computed(pair: Deployment, first: str) -> None:
    async def one(connection: Connection, number: int) -> KvMovement:
        prompt = words(2000, f"{first} {number}")
        question = Question("2000 tokens", prompt=prompt, answer_tokens=2)
        before = await connection.moved()
        if first == "decode":
            await connection.legs.decode_first(question)
        else:
            await connection.ask(question)
        moved = await connection.moved_since(before, lambda moved: moved.transfers_completed > 0)
        assert moved.transfers_completed == 1
        return moved

    async def work(connection: Connection) -> None:
        early = 0
        asked = EARLY + LATE_AT_MOST[first]
        for number in range(asked):
            moved = await one(connection, number)
            if moved.registrations_before_prefill_end:
                assert moved.bytes_during_prefill >= 0.85 * moved.bytes_moved > 0, moved
                early += 1
            if early == EARLY:
                return
        pytest.fail(f"decode registered in time for {early} of {asked} prompts")

    pair.run(work)


def test_answers_are_those_of_one_engine(pair: Deployment, reference: Reference) -> None:
    async def work(connection: Connection) -> None:
        # Twice: the second time, both engines find the prompts in their prefix caches.
        for stream in (False, True):
            answers = await connection.ask_all(salted(EVERYTHING, "all"), stream=stream)
            assert reference.differences(EVERYTHING, answers) == []

    pair.run(work)


def test_answers_with_legs_one_after_the_other(pair: Deployment, reference: Reference) -> None:
    asked = some(4)

    async def work(connection: Connection) -> None:
        answers = await at_once(connection.legs.in_sequence, salted(asked, "sequence"), AT_ONCE)
        assert reference.differences(asked, answers) == []

    pair.run(work)


def test_answers_with_decode_first(pair: Deployment, reference: Reference) -> None:
    asked = some(4)

    async def work(connection: Connection) -> None:
        legs = connection.legs
        answers = await at_once(legs.decode_first, salted(asked, "decode first"), AT_ONCE)
        assert reference.differences(asked, answers) == []

    pair.run(work)


def test_answers_to_one_prompt_that_many_ask_at_once(
    pair: Deployment, reference: Reference
) -> None:
    # Prefill computes them in one step, where each hits the blocks of the one before.
    asked = [each for each in some(6) for _ in range(AT_ONCE // 2)]

    async def work(connection: Connection) -> None:
        for number in range(3):
            answers = await connection.ask_all(salted(asked, f"many {number}"))
            assert reference.differences(asked, answers) == []

    pair.run(work)


@pytest.mark.parametrize("cached_on", ["prefill", "decode"])
def test_answers_when_one_side_has_a_prefix_cached(
    pair: Deployment, reference: Reference, cached_on: str
) -> None:
    asked = salted(HALVES, f"cached on {cached_on}")
    engine = pair.prefill if cached_on == "prefill" else pair.decode

    async def work(connection: Connection) -> None:
        for each in asked:
            half = each.prompt[: len(each.prompt) // 2]
            await connection.ask_engine(engine, Question("half", prompt=half, salt=each.salt))
        before = await connection.moved()
        answers = await connection.ask_all(asked)
        assert reference.differences(asked, answers) == []
        moved = await connection.moved_since(
            before, lambda moved: moved.transfers_completed >= len(asked)
        )
        assert moved.transfers_completed == len(asked)

    pair.run(work)


def test_aborted_requests_leave_nothing(pair: Deployment, reference: Reference) -> None:
    moments = random.Random(5)

    async def work(connection: Connection) -> None:
        began_s = time.monotonic()
        await connection.ask(Question("usual", prompt=words(1500, "usual")))
        usual_s = time.monotonic() - began_s

        async def aborted(number: int) -> bool:
            question = Question(
                f"abort {number}", prompt=words(moments.randint(1, 3000), f"abort {number}")
            )
            asking = asyncio.create_task(connection.ask(question, stream=number % 2 == 0))
            await asyncio.sleep(moments.uniform(0, usual_s * 1.5))
            in_time = not asking.done()
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
            return in_time

        were_aborted = await at_once(aborted, range(ABORTS), ABORTS_AT_ONCE)
        assert sum(were_aborted) >= ABORTS / 2
        await wait_until_freed(connection)
        await check_answers(connection, reference, "after aborts")

    pair.run(work)


def test_a_decode_leg_alone_leaves_nothing(pair: Deployment, reference: Reference) -> None:
    async def work(connection: Connection) -> None:
        question = Question("alone", prompt=words(1000, "decode alone"))
        leg = asyncio.create_task(connection.legs.decode_leg(question, new_id()))
        await wait_until_used(connection, pair.decode.name)
        for engine, state in (
            (pair.decode, "waiting_for_kv"),
            (pair.prefill, "waiting_for_prefill"),
        ):
            await wait_until_counted(connection, engine, 1, "num_registrations", state=state)
        leg.cancel()
        with suppress(asyncio.CancelledError):
            await leg
        await wait_until_freed(connection)
        for engine in (pair.decode, pair.prefill):
            await wait_until_counted(connection, engine, 0, "num_registrations")
        await check_answers(connection, reference, "after a decode leg")

    pair.run(work)


def test_an_aborted_prefill_leg_leaves_nothing(pair: Deployment, reference: Reference) -> None:
    async def work(connection: Connection) -> None:
        question = Question("alone", prompt=words(6000, "prefill alone"))
        leg = asyncio.create_task(connection.legs.prefill_leg(question, new_id()))
        await wait_until_used(connection, pair.prefill.name)
        leg.cancel()
        with suppress(asyncio.CancelledError):
            await leg
        await wait_until_freed(connection)
        await check_answers(connection, reference, "after a prefill leg")

    pair.run(work)


def test_prefill_stopped_while_decode_waits_fails_the_request(
    pair: Deployment, reference: Reference
) -> None:
    """It may still write, once it continues: the request ends first, its blocks later."""

    async def work(connection: Connection) -> None:
        with stopped(pair, pair.prefill.name):
            leg = connection.legs.decode_leg(Question("late", prompt=words(1000, "late")), new_id())
            began_s = time.monotonic()
            with pytest.raises(Failed) as failure:
                await asyncio.wait_for(leg, ENDED_WITHIN_S)
            assert failure.value.status >= 500
            assert time.monotonic() - began_s < LIVENESS_TIMEOUT_S + 5
            local = some(9)[0]
            answer = await connection.ask_engine(pair.decode, local.salted("beside"))
            assert reference.differences((local,), [answer]) == []
            assert (await usage(connection, pair.decode))[pair.decode.name] > 0
        await wait_until_freed(connection)
        answer = await connection.legs.in_sequence(local.salted("continued"))
        assert reference.differences((local,), [answer]) == []

    pair.run(work)


def test_prefill_killed_while_decode_waits_fails_the_request(
    pair: Deployment, reference: Reference
) -> None:
    """Prefill is another process afterwards."""

    async def work(connection: Connection) -> None:
        waiting = asyncio.create_task(
            connection.legs.decode_leg(Question("lost", prompt=words(1000, "lost")), new_id())
        )
        await wait_until_used(connection, pair.decode.name)
        before = kill(pair, pair.prefill)
        began_s = time.monotonic()
        with pytest.raises(Failed) as failure:
            await asyncio.wait_for(waiting, ENDED_WITHIN_S)
        assert failure.value.status >= 500
        lines = pair.log(pair.decode.name).read_text("utf-8").splitlines()
        failures = [line for line in lines if " failed on decode" in line]
        assert "(peer_gone)" in failures[-1]
        assert all(word in failures[-1] for word in ("Prefill engine", "decode engine", "request"))
        local = some(9)[0]
        answer = await connection.ask_engine(pair.decode, local.salted("local"))
        assert reference.differences((local,), [answer]) == []
        assert time.monotonic() - began_s < ENDED_WITHIN_S
        await wait_until_back(connection, reference, before)

    pair.run(work)


@pytest.mark.slow
def test_decode_killed_is_served_again_after_its_restart(
    pair: Deployment, reference: Reference
) -> None:
    """Last in this file: both engines are other processes afterwards."""

    async def work(connection: Connection) -> None:
        before = kill(pair, pair.decode)
        await wait_until_back(connection, reference, before)
        await wait_until_freed(connection)

    pair.run(work)
