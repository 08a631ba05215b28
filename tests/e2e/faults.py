"""Pairs whose engines can be made to fail, in NIXL and by a hostile peer.

With --stock they run upstream's connector. After a test that fails, the next one gets a new pair.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from answers import Answer, Failed, new_id
from checks import LIVENESS_TIMEOUT_S, NoMetricsError, usage, wait_until_freed, wait_until_used
from pdlaunch.plan import ProcessPlan
from questions import Question, words
from serving import TINY, Connection, Deployment, deployed

HERE = Path(__file__).parent
# Small caches: tests overwrite all of them. Short leases: tests outlast them.
LEASE_S = 4
REGISTRATION_WAIT_S = 60
ENDS_WITHIN_S = LIVENESS_TIMEOUT_S + 5
_SETTINGS = (
    "max_model_len_tokens=4096",
    "prefill.kv_cache_gib=0.5",
    "decode.kv_cache_gib=0.5",
    f"transfer.extra.kv_lease_duration={LEASE_S}",
    f"transfer.extra.push_registration_wait_s={REGISTRATION_WAIT_S}",
)
_HOSTILE_S = 120.0
# An engine that has nothing to do wakes up once a second at most to say it.
_TOLD_WITHIN_S = 5.0
_DUMPED_WITHIN_S = 60.0


@dataclass
class Faults:
    """The faults of one role's engines."""

    role: str
    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def settings(self) -> tuple[str, ...]:
        """What a recipe needs so that its engines of this role can be made to fail."""
        self.folder.mkdir(parents=True)
        return (
            f"{self.role}.env.PYTHONPATH={HERE / 'injection'}",
            f"{self.role}.env.PDLAUNCH_TEST_FAULTS={self.folder}",
        )

    def once(self, fault: str) -> None:
        """Fail one call, of whichever process comes first."""
        (self.folder / f"{fault}.{next(self._numbers)}").touch()

    @contextmanager
    def during(self, fault: str, value: float | None = None) -> Iterator[None]:
        path = self.folder / fault
        path.write_text("" if value is None else str(value))
        try:
            yield
        finally:
            path.unlink()

    def clear(self) -> None:
        """Forget faults that nothing has taken."""
        for path in self.folder.glob("*.*.*"):
            path.unlink()

    def memory(self) -> list[str]:
        """A digest of each page of memory that the workers have registered with NIXL."""
        with self.during("memory.dump"):
            deadline_s = time.monotonic() + _DUMPED_WITHIN_S
            while not (found := [*self.folder.glob("memory.[0-9]*")]):
                assert time.monotonic() < deadline_s, "no engine has written its memory"
                time.sleep(0.05)
        (path,) = found
        pages = path.read_text().split()
        path.unlink()
        # So that every process has seen that the file is gone.
        time.sleep(0.2)
        return pages


@dataclass(frozen=True)
class Pair:
    """One prefill and one decode engine, and their faults."""

    deployment: Deployment
    of_prefill: Faults
    of_decode: Faults
    # Of prefill, as a router learns it from the first response.
    engine_id: str

    @property
    def prefill(self) -> ProcessPlan:
        return self.deployment.prefill

    @property
    def decode(self) -> ProcessPlan:
        return self.deployment.decode

    def side_channel(self, engine: ProcessPlan) -> dict[str, Any]:
        return {"host": engine.host, "port": engine.side_channel_port}


async def _engine_id_of_prefill(connection: Connection) -> str:
    named = await connection.legs.prefill_leg(Question("who", prompt=words(8, "who")), new_id())
    # Nobody comes for it.
    await wait_until_freed(connection)
    return str(named["remote_engine_id"])


class Pairs:
    """Gives each test of a module a whole pair: the one that is up, or a new one."""

    def __init__(self, config: pytest.Config, name: str, folder: Path, *settings: str) -> None:
        self._mode = "push-upstream" if config.getoption("--stock") else "push"
        self._name = name
        self._folder = folder
        self._settings = settings
        self._pair: Pair | None = None
        self._up = ExitStack()
        self._number = 0

    @contextmanager
    def whole(self) -> Iterator[Pair]:
        """A pair, which is taken down if what is done with it fails."""
        if self._pair is None:
            self._pair = self._bring_up()
        try:
            yield self._pair
        except BaseException:
            self.take_down()
            raise
        self._pair.of_prefill.clear()
        self._pair.of_decode.clear()

    def _bring_up(self) -> Pair:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        of_prefill, of_decode = (
            Faults(role, folder / f"faults-{role}") for role in ("prefill", "decode")
        )
        settings = (
            *_SETTINGS,
            f"transfer.mode={self._mode}",
            *of_prefill.settings,
            *of_decode.settings,
            *self._settings,
        )
        deployment = self._up.enter_context(deployed(TINY, self._name, folder, *settings))
        return Pair(deployment, of_prefill, of_decode, deployment.run(_engine_id_of_prefill))

    def take_down(self) -> None:
        self._pair = None
        self._up.close()

    def run(self, work: Callable[[Case], Awaitable[None]]) -> None:
        """Run a test, after which the pair has to be as whole as before."""

        with self.whole() as pair:

            async def checked(connection: Connection) -> None:
                case = Case(pair, connection)
                await work(case)
                await case.freed()
                await case.works()
                await case.freed()

            pair.deployment.run(checked)


class Case:
    """What a test of one fault does with its pair."""

    def __init__(self, pair: Pair, connection: Connection) -> None:
        self.pair = pair
        self.connection = connection
        self.legs = replace(connection.legs, engine_id=pair.engine_id)

    async def expected(self, question: Question) -> Answer:
        """What decode answers without prefill."""
        local = question.salted(f"expected {new_id()}")
        return await self.connection.ask_engine(self.pair.decode, local)

    async def right_or_failed(
        self, work: Awaitable[Answer], expected: Answer, within_s: float = ENDS_WITHIN_S
    ) -> bool:
        """Whether the request succeeded. It must not hang, and not succeed with another answer."""
        try:
            answer = await asyncio.wait_for(work, within_s)
        except Failed:
            return False
        assert answer == expected
        return True

    async def decode_first(self, question: Question) -> Answer:
        """Both legs; what became of D's."""
        request_id = new_id()
        answer = asyncio.create_task(self.legs.decode_leg(question, request_id))
        await wait_until_used(self.connection, self.pair.decode.name)
        with suppress(Failed):
            await self.legs.prefill_leg(question, request_id)
        return await answer

    async def works(self) -> None:
        """The pair answers from pushed KV, and holds nothing afterwards."""
        question = Question("works", prompt=words(300, new_id()), answer_tokens=4)
        expected = await self.expected(question)
        before = await self.connection.moved()
        answer = await asyncio.wait_for(self.legs.in_sequence(question), ENDS_WITHIN_S)
        assert answer == expected
        moved = await self.connection.moved_since(before, lambda now: now.bytes_moved > 0)
        assert moved.bytes_moved > 0

    async def occupy(self, engine: ProcessPlan, prompt_tokens: int, answer_tokens: int) -> None:
        """Have an engine give an answer of exactly so many tokens."""
        asked = Question("busy", prompt=words(prompt_tokens, new_id()), answer_tokens=answer_tokens)
        body = asked.body(self.legs.model) | {"ignore_eos": True}
        await self.connection.client.post(engine.url + asked.path, json=body, timeout=120)

    async def overwrite(self, engine: ProcessPlan) -> None:
        """Compute so many other prompts that every free block of an engine is used again."""
        for number in range(3):
            prompt = words(3500, f"overwrite {new_id()}")
            await self.connection.ask_engine(
                engine, Question(f"other {number}", prompt=prompt, answer_tokens=1)
            )

    async def hostile(self, what: str, **arguments: Any) -> str:
        """Run hostile.py with an engine's Python; what it printed."""
        python = Path(self.pair.prefill.argv[0]).with_name("python")
        process = await asyncio.create_subprocess_exec(
            str(python),
            str(HERE / "hostile.py"),
            what,
            json.dumps(arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, complaints = await asyncio.wait_for(process.communicate(), _HOSTILE_S)
        assert process.returncode == 0, complaints.decode()[-2000:]
        return printed.decode()

    async def counted(self, engine: ProcessPlan, name: str, **labels: str) -> float:
        """What an engine's metric of push says, once it has had time to say it."""
        deadline_s = time.monotonic() + _TOLD_WITHIN_S
        while True:
            metrics = (await self.connection.metrics())[engine.name]
            value = metrics.value(f"vllm:nixl_push_{name}", **labels)
            if value or time.monotonic() > deadline_s:
                return value
            await asyncio.sleep(0.2)

    async def held(self, engine: ProcessPlan) -> float:
        """The share of an engine's KV blocks that requests hold."""
        return (await usage(self.connection, engine))[engine.name]

    async def freed(self, within_s: float = ENDS_WITHIN_S) -> None:
        """Both engines hold nothing any more."""
        deadline_s = time.monotonic() + within_s
        while True:
            held: object = "not told"
            with suppress(NoMetricsError):
                held = await usage(self.connection)
                if not any(held.values()):
                    return
            assert time.monotonic() < deadline_s, f"still held: {held}"
            await asyncio.sleep(0.2)
