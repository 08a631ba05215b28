"""Fifteen minutes of everything at once, and ten deaths of either engine: `make soak`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from answers import Failed
from checks import LIVENESS_TIMEOUT_S, kill
from faults import Faults
from pdlaunch.engine_metrics import scrape_all
from pdlaunch.plan import ProcessPlan
from questions import EVERYTHING, Question
from serving import TINY, Connection, Deployment, Reference, deployed

pytestmark = pytest.mark.soak
REQUESTS = 500
MINUTES = 15
AT_ONCE = 4
KILLS = 10
SEED = 20261130
ENDED_WITHIN_S = LIVENESS_TIMEOUT_S + 5
# Engines die in the first part only: what is flat is seen in the rest.
DEATHS_UNTIL = 0.4
GROWTH_AT_MOST = 1.05
BACK_WITHIN_S = 120.0
GAUGES = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:nixl_push_num_registrations",
    "vllm:nixl_push_num_prefills_held",
    "vllm:nixl_push_num_writes_in_flight",
)
# With longer ones, a fifth of all would take most of the time.
QUESTIONS = tuple(each for each in EVERYTHING if len(each.prompt) <= 2000)


@dataclass
class Outcomes:
    """How requests ended, and what must not have happened."""

    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


@pytest.fixture
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Faults]:
    folder = tmp_path_factory.mktemp("soak-faults")
    return {role: Faults(role, folder / role) for role in ("prefill", "decode")}


@pytest.fixture
def pair(
    reference: Reference,
    faults: dict[str, Faults],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    settings = [setting for each in faults.values() for setting in each.settings]
    folder = tmp_path_factory.mktemp("soak")
    with deployed(TINY, "e2e-soak", folder, "restarts_per_hour=100", *settings) as deployment:
        yield deployment


async def ask(
    connection: Connection,
    reference: Reference,
    question: Question,
    outcomes: Outcomes,
    *,
    stream: bool,
    leave_after_s: float | None,
) -> str:
    """Ask and judge one question: right, failed or aborted."""
    began_s = time.monotonic()
    asking = asyncio.create_task(connection.ask(question, stream=stream))
    done, _ = await asyncio.wait((asking,), timeout=leave_after_s)
    if not done:
        asking.cancel()
        with suppress(asyncio.CancelledError, Failed, httpx.HTTPError):
            await asking
        outcomes.ended["aborted"] += 1
        return "aborted"
    took_s = time.monotonic() - began_s
    try:
        answer = asking.result()
    except (Failed, httpx.HTTPError) as error:
        if took_s > ENDED_WITHIN_S:
            outcomes.late.append(f"{question.name}: {took_s:.1f} s, {error!r}")
        outcomes.ended["failed"] += 1
        return "failed"
    outcomes.wrong += reference.differences((question,), [answer])
    outcomes.ended["answered"] += 1
    return "answered"


def test_everything_at_once(
    pair: Deployment, faults: dict[str, Faults], reference: Reference
) -> None:
    chosen = random.Random(SEED)
    outcomes = Outcomes()
    happened: Counter[str] = Counter()

    async def work(connection: Connection) -> None:
        began_s = time.monotonic()
        length_s = MINUTES * 60
        memory: list[dict[int, int]] = []

        async def asks(numbers: AsyncIterator[int]) -> None:
            async for number in numbers:
                await ask(
                    connection,
                    reference,
                    chosen.choice(QUESTIONS).salted(f"soak {number % 50}"),
                    outcomes,
                    stream=chosen.random() < 0.5,
                    leave_after_s=chosen.uniform(0, 3) if chosen.random() < 0.25 else None,
                )

        async def evenly() -> AsyncIterator[int]:
            for number in range(REQUESTS):
                due_s = began_s + length_s * number / REQUESTS
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                yield number

        async def harm() -> None:
            while (at := (time.monotonic() - began_s) / length_s) < 0.95:
                await asyncio.sleep(chosen.uniform(5, 25))
                engine = chosen.choice((pair.prefill, pair.decode))
                kinds = ["check_xfer_state.error", "transfer.raise", "send_notif.raise", "stop"]
                kind = chosen.choice(kinds + (["kill"] * 2 if at < DEATHS_UNTIL else []))
                happened[kind] += 1
                if kind == "kill":
                    before = kill(pair, engine)
                    await _restarted(connection, engine, before.restarts.get(engine.name, 0))
                elif kind == "stop":
                    group = pair.record().pids[engine.name]
                    os.killpg(group, signal.SIGSTOP)
                    await asyncio.sleep(chosen.uniform(0.5, 8))
                    os.killpg(group, signal.SIGCONT)
                else:
                    faults[engine.name.split("-")[0]].once(kind)

        async def watch() -> None:
            while True:
                memory.append(resident(pair))
                await asyncio.sleep(10)

        watching = asyncio.create_task(watch())
        harming = asyncio.create_task(harm())
        numbers = evenly()
        shared = _shared(numbers)
        await asyncio.gather(*(asks(shared()) for _ in range(AT_ONCE)))
        await harming
        watching.cancel()
        for each in faults.values():
            each.clear()
        await all_at_zero(connection)
        memory.append(resident(pair))

        print(f"\nrequests: {dict(outcomes.ended)}; harm: {dict(happened)}")
        settled = memory[int(len(memory) * (DEATHS_UNTIL + 0.2))]
        grown = {pid: (kib, memory[-1][pid]) for pid, kib in settled.items() if pid in memory[-1]}
        print(f"resident memory in MiB, then and at the end: {grown}")
        assert not outcomes.wrong
        assert not outcomes.late
        assert sum(outcomes.ended.values()) == REQUESTS
        assert outcomes.ended["answered"] >= REQUESTS / 2
        assert grown
        for pid, (then, now) in grown.items():
            assert now <= then * GROWTH_AT_MOST, f"process {pid}: {then} to {now} MiB"

    pair.run(work)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ten_deaths(pair: Deployment, reference: Reference, role: str) -> None:
    outcomes = Outcomes()
    engine = getattr(pair, role)

    async def work(connection: Connection) -> None:
        others = {name: pid for name, pid in pair.record().pids.items() if name != engine.name}
        chosen = random.Random(SEED)
        number = 0

        async def load() -> None:
            nonlocal number
            while True:
                number += 1
                await ask(
                    connection,
                    reference,
                    chosen.choice(QUESTIONS).salted(f"deaths {role} {number}"),
                    outcomes,
                    stream=False,
                    leave_after_s=None,
                )

        loads = [asyncio.create_task(load()) for _ in range(2)]
        back_s = []
        for death in range(KILLS):
            await asyncio.sleep(chosen.uniform(1, 4))
            before = kill(pair, engine)
            began_s = time.monotonic()
            await _restarted(connection, engine, before.restarts.get(engine.name, 0))
            first = QUESTIONS[death].salted(f"back {role} {death}")
            # The router looks at engines every few seconds, the engine is there before.
            while (
                await ask(
                    connection, reference, first, Outcomes(), stream=False, leave_after_s=None
                )
                != "answered"
            ):
                assert time.monotonic() - began_s < BACK_WITHIN_S
                await asyncio.sleep(0.2)
            back_s.append(round(time.monotonic() - began_s, 1))
            for each in QUESTIONS[:3]:
                after = each.salted(f"after {role} {death}")
                found = await ask(
                    connection, reference, after, outcomes, stream=False, leave_after_s=None
                )
                assert found == "answered", f"death {death}: {after.name}"
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        print(f"\nrequests: {dict(outcomes.ended)}; {role} was back after {back_s} s")
        assert not outcomes.wrong
        assert not outcomes.late
        now = pair.record()
        assert {name: now.pids[name] for name in others} == others
        assert now.restarts[engine.name] == KILLS
        await all_at_zero(connection)

    pair.run(work)


def resident(pair: Deployment) -> dict[int, int]:
    """The resident memory of each engine process, in MiB."""
    found = {}
    for name, group in pair.record().pids.items():
        if name == "router":
            continue
        with suppress(psutil.NoSuchProcess):
            for each in (process := psutil.Process(group), *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    found[each.pid] = each.memory_info().rss >> 20
    return found


async def all_at_zero(connection: Connection) -> None:
    """No block, no request, no entry of a table and no WRITE is left."""
    deadline_s = time.monotonic() + ENDED_WITHIN_S + 30
    while True:
        metrics = await scrape_all(connection.client, connection.deployment.plan.engines)
        silent = [name for name, each in metrics.items() if not each.samples]
        left: dict[str, object] = {"no answer": silent} if silent else {}
        left |= {
            f"{engine} {gauge}": each.value(gauge)
            for engine, each in metrics.items()
            for gauge in GAUGES
            if each.value(gauge)
        }
        if not left:
            return
        assert time.monotonic() < deadline_s, left
        await asyncio.sleep(0.5)


async def _restarted(connection: Connection, engine: ProcessPlan, restarts: int) -> None:
    deadline_s = time.monotonic() + BACK_WITHIN_S
    while True:
        assert time.monotonic() < deadline_s, f"{engine.name} is not back"
        await asyncio.sleep(0.2)
        if connection.deployment.record().restarts.get(engine.name, 0) == restarts:
            continue
        with suppress(httpx.HTTPError):
            if (await connection.client.get(f"{engine.url}/health")).status_code == httpx.codes.OK:
                return


def _shared(numbers: AsyncIterator[int]) -> Callable[[], AsyncIterator[int]]:
    """One source of numbers for several takers."""
    gate = asyncio.Lock()

    async def take() -> AsyncIterator[int]:
        while True:
            async with gate:
                try:
                    number = await anext(numbers)
                except StopAsyncIteration:
                    return
            yield number

    return take
