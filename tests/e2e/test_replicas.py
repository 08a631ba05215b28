"""Two prefill and two decode engines: answers, deaths under load, restarts that lose nothing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

import serving
from answers import Failed, Legs
from checks import kill
from pdlaunch.engine_metrics import Metrics
from questions import EVERYTHING
from serving import Connection, Deployment, Reference, deployed, pdlaunch

pytestmark = pytest.mark.slow
REQUESTS = 200
IN_LOAD = 2
SETTLED_WITHIN_S = 10.0
BACK_WITHIN_S = 240.0
# Every sort of question, and none that takes seconds: four engines share the cores.
QUESTIONS = tuple(each for each in EVERYTHING if len(each.prompt) <= 700)[::3]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one engine without P/D answers."""
    return serving.reference(QUESTIONS, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def four(alone: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("replicas")
    # In turn, each prefill engine would only ever meet the decode engine of its own number.
    with deployed(
        "tiny-qwen3-2p2d-cpu", "e2e-replicas", folder, "router.policy=random"
    ) as deployment:
        yield deployment


@dataclass
class Outcomes:
    """How the requests of a load ended."""

    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@asynccontextmanager
async def load(connection: Connection, alone: Reference, salt: str) -> AsyncIterator[Outcomes]:
    """Requests all the time, half of them streamed, until the context ends."""
    outcomes = Outcomes()
    numbers = itertools.count()
    is_over = False

    async def ask_on() -> None:
        while not is_over:
            number = next(numbers)
            question = QUESTIONS[number % len(QUESTIONS)].salted(f"{salt} {number}")
            try:
                answer = await connection.ask(question, stream=number % 2 == 0)
            except (Failed, httpx.HTTPError) as error:
                outcomes.ended["failed"] += 1
                outcomes.failed.append(f"{question.name}: {error!r}")
                # A router that knows of no engine answers at once.
                await asyncio.sleep(0.1)
            else:
                outcomes.ended["answered"] += 1
                outcomes.wrong += alone.differences((question,), [answer])

    tasks = [asyncio.create_task(ask_on()) for _ in range(IN_LOAD)]
    try:
        yield outcomes
    finally:
        is_over = True
        await asyncio.gather(*tasks)


def pushed(metrics: Metrics) -> float:
    return metrics.value("vllm:nixl_push_bytes_total")


def received(metrics: Metrics) -> float:
    return metrics.value("vllm:nixl_push_transfers_total", role="receiver", outcome="completed")


def test_answers_are_those_of_one_engine(four: Deployment, alone: Reference) -> None:
    asked = [
        QUESTIONS[number % len(QUESTIONS)].salted(f"answers {number}") for number in range(REQUESTS)
    ]

    async def work(connection: Connection) -> None:
        before = await connection.metrics()
        answers = await connection.ask_all(asked)
        assert alone.differences(asked, answers) == []
        await asyncio.sleep(2)
        after = await connection.metrics()
        moved = {
            engine.name: amount(after[engine.name]) - amount(before[engine.name])
            for role, amount in (("prefill", pushed), ("decode", received))
            for engine in four.plan.of_role(role)  # type: ignore[arg-type]
        }
        print(f"\n{len(answers)} answers; bytes pushed, transfers received: {moved}")
        assert all(moved.values()), moved

    four.run(work)


def test_every_prefill_engine_pushes_to_every_decode_engine(
    four: Deployment, alone: Reference
) -> None:
    question = max(QUESTIONS, key=lambda each: len(each.prompt))
    plan = four.plan

    async def work(connection: Connection) -> None:
        for prefill, decode in itertools.product(plan.of_role("prefill"), plan.of_role("decode")):
            asked = question.salted(f"{prefill.name} {decode.name}")
            before = await connection.metrics()
            legs = Legs(connection.client, plan.served_name, prefill, decode)
            answer = await legs.in_sequence(asked)
            assert alone.differences((asked,), [answer]) == []
            deadline_s = time.monotonic() + SETTLED_WITHIN_S
            grown: dict[str, float] = {}
            while time.monotonic() < deadline_s and len(grown) < 2:
                now = await connection.metrics()
                grown = {
                    name: more
                    for name in now
                    for amount in (pushed, received)
                    if (more := amount(now[name]) - amount(before[name]))
                }
                await asyncio.sleep(0.2)
            assert set(grown) == {prefill.name, decode.name}, grown

    four.run(work)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_restarts_under_load_without_a_failed_request(
    four: Deployment, alone: Reference, role: str
) -> None:
    before = four.record()

    async def work(connection: Connection) -> None:
        async with load(connection, alone, f"restart {role}") as outcomes:
            await asyncio.sleep(3)
            await asyncio.to_thread(pdlaunch, four.state, "restart", before.name, "--role", role)
            await asyncio.sleep(3)
        print(f"\n{role} restarted: {dict(outcomes.ended)}")
        assert outcomes.failed == []
        assert outcomes.wrong == []
        assert outcomes.ended["answered"] > 10

    four.run(work)
    now = four.record()
    changed = {name for name, pid in before.pids.items() if now.pids[name] != pid}
    assert changed == {f"{role}-0", f"{role}-1"}
    assert now.restarts == before.restarts


def test_a_prefill_and_a_decode_engine_die_under_load(four: Deployment, alone: Reference) -> None:
    victims = four.plan.of_role("prefill")[0], four.plan.of_role("decode")[1]

    async def work(connection: Connection) -> None:
        for victim in victims:
            async with load(connection, alone, f"death of {victim.name}") as outcomes:
                await asyncio.sleep(3)
                before = kill(four, victim)
                until_then = outcomes.ended["answered"]
                deadline_s = time.monotonic() + BACK_WITHIN_S
                while (back := events(four, victim.name)[-1:]) != ["answers again"]:
                    assert time.monotonic() < deadline_s, back
                    await asyncio.sleep(0.5)
                meanwhile = outcomes.ended["answered"] - until_then
            print(f"\n{victim.name} died: {dict(outcomes.ended)}, {meanwhile} answered meanwhile")
            assert outcomes.wrong == []
            # The other engine of the role goes on.
            assert meanwhile > 5
            now = four.record()
            assert now.restarts[victim.name] == before.restarts.get(victim.name, 0) + 1
            assert {name for name in now.pids if now.pids[name] != before.pids[name]} == {
                victim.name
            }
            # The router believes the second success.
            await asyncio.sleep(3)
            async with load(connection, alone, f"after {victim.name}") as outcomes:
                await asyncio.sleep(10)
            assert outcomes.failed == []
            assert outcomes.wrong == []

    four.run(work)
    told = pdlaunch(four.state, "status", four.plan.name)
    for victim in victims:
        assert f"{victim.name}: was killed by SIGKILL" in told
        assert f"{victim.name}: answers again" in told


def events(deployment: Deployment, process: str) -> list[str]:
    return [each.what for each in deployment.record().events if each.process == process]
