"""Engines for the tests: deployments by the product's own command, and one engine without P/D."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from answers import Answer, Legs, ask, at_once
from pdlaunch import leftovers, preparation, readiness, recipe_loader
from pdlaunch.console import Terminal
from pdlaunch.deployments import Record
from pdlaunch.engine_metrics import KvMovement, Metrics, kv_movement, scrape_all
from pdlaunch.guardian import Guardian
from pdlaunch.logs import telling_lines
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.process_backend import ProcessBackend
from questions import Question

_T = TypeVar("_T")
TINY = "tiny-qwen3-cpu"
START_WITHIN_S = 900.0
AT_ONCE = 8
# Engines publish their counters with the step after the one that ended the request.
_SETTLED_WITHIN_S = 10.0
# A reference whose best two tokens are closer may answer either way: sums are rounded in another
# order when a prompt is cut elsewhere.
CLEAR_LOGPROB_GAP = 1e-3


@dataclass(frozen=True)
class Deployment:
    """A deployment that is up."""

    plan: DeploymentPlan
    state: Path

    @property
    def prefill(self) -> ProcessPlan:
        return self.plan.of_role("prefill")[0]

    @property
    def decode(self) -> ProcessPlan:
        return self.plan.of_role("decode")[0]

    def record(self) -> Record:
        return _record(self.state, self.plan.name)

    def log(self, process: str) -> Path:
        return self.state / "pdlaunch/deployments" / self.plan.name / "logs" / f"{process}.log"

    def run(self, work: Callable[[Connection], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine function with a connection to the deployment."""

        async def connected() -> _T:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(limits=limits) as client:
                return await work(Connection(self, client))

        return asyncio.run(connected())


@dataclass(frozen=True)
class Connection:
    """A client of one deployment."""

    deployment: Deployment
    client: httpx.AsyncClient

    @property
    def legs(self) -> Legs:
        plan = self.deployment.plan
        return Legs(self.client, plan.served_name, self.deployment.prefill, self.deployment.decode)

    async def ask(self, question: Question, *, stream: bool = False) -> Answer:
        plan = self.deployment.plan
        return await ask(self.client, plan.router_url, plan.served_name, question, stream=stream)

    async def ask_all(self, questions: Iterable[Question], *, stream: bool = False) -> list[Answer]:
        return await at_once(lambda each: self.ask(each, stream=stream), questions, AT_ONCE)

    async def ask_engine(self, engine: ProcessPlan, question: Question) -> Answer:
        """What one engine answers by itself."""
        return await ask(self.client, engine.url, self.deployment.plan.served_name, question)

    async def reference(self, questions: Iterable[Question], limit: int = AT_ONCE) -> Reference:
        """What the decode engine answers by itself. It needs TORCHDYNAMO_DISABLE in its
        environment: what computes log probabilities is compiled on first use, for a minute."""
        plan = self.deployment.plan
        return await _asked(
            self.client, self.deployment.decode, plan.served_name, tuple(questions), limit
        )

    async def metrics(self) -> dict[str, Metrics]:
        return await scrape_all(self.client, self.deployment.plan.engines)

    async def moved(self) -> KvMovement:
        deployment, metrics = self.deployment, await self.metrics()
        return kv_movement(
            deployment.plan.mode,
            [metrics[deployment.prefill.name]],
            [metrics[deployment.decode.name]],
        )

    async def moved_since(
        self, before: KvMovement, enough: Callable[[KvMovement], bool]
    ) -> KvMovement:
        """What was counted since, once that is enough or should have been long ago."""
        deadline_s = time.monotonic() + _SETTLED_WITHIN_S
        while True:
            moved = (await self.moved()).since(before)
            if enough(moved) or time.monotonic() > deadline_s:
                return moved
            await asyncio.sleep(0.1)


@contextmanager
def deployed(recipe: str, name: str, folder: Path, *settings: str) -> Iterator[Deployment]:
    """Bring a deployment up with state of its own and the user's cache; always take it down."""
    state = folder / "state"
    command = ["up", recipe, "--name", name, "--detach"]
    for setting in settings:
        command += ["--set", setting]
    try:
        pdlaunch(state, *command)
        plan = _record(state, name).plan
        yield Deployment(plan, state)
    finally:
        # Nothing to do where `up` failed, which takes down what it started.
        pdlaunch(state, "down", "--all")
    assert leftovers.tagged(plan.launch_id) == []


def pdlaunch(state: Path, *arguments: str) -> str:
    """Run a pdlaunch command; its output."""
    done = ran(state, *arguments)
    assert done.returncode == 0, f"pdlaunch {' '.join(arguments)}\n{done.stderr}"
    return done.stdout


def ran(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a pdlaunch command, whatever becomes of it."""
    return subprocess.run(
        [sys.executable, "-m", "pdlaunch", *arguments],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        capture_output=True,
        text=True,
        timeout=START_WITHIN_S,
        check=False,
    )


@dataclass(frozen=True)
class Reference:
    """What one engine without P/D answers."""

    answers: dict[str, Answer]
    gaps: dict[str, float]

    def is_clear(self, question: Question) -> bool:
        """Whether rounding cannot change the answer."""
        return self.gaps[question.name] > CLEAR_LOGPROB_GAP

    def differences(self, questions: Sequence[Question], answers: list[Answer]) -> list[str]:
        """Where answers are not the reference's, of those that rounding cannot change."""
        return [
            f"{question.name}: {answer} instead of {self.answers[question.name]}"
            for question, answer in zip(questions, answers, strict=True)
            if self.is_clear(question) and answer != self.answers[question.name]
        ]


def reference(questions: tuple[Question, ...], folder: Path) -> Reference:
    """Ask one engine that runs as prefill does, but without a connector, and stop it."""
    loaded = recipe_loader.load(recipe_loader.find(TINY), ())
    plan = preparation.planned(loaded, None)
    preparation.provide(loaded.recipe, plan, Terminal())
    prefill = plan.of_role("prefill")[0]
    at = prefill.argv.index("--kv-transfer-config")
    cores = sorted({core for engine in plan.engines for core in engine.cores})
    # Log probabilities are wanted from this engine only, and what computes them is compiled on
    # first use: a minute's work for nothing.
    engine = prefill.model_copy(
        update={
            "argv": prefill.argv[:at] + prefill.argv[at + 2 :],
            "env": {
                **prefill.env,
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "TORCHDYNAMO_DISABLE": "1",
            },
        }
    )
    with _running(plan, (engine,), folder):

        async def work() -> Reference:
            async with httpx.AsyncClient() as client:
                return await _asked(client, engine, plan.served_name, questions, AT_ONCE)

        return asyncio.run(work())


@contextmanager
def by_hand(
    changed: Callable[[ProcessPlan], ProcessPlan], name: str, folder: Path, *settings: str
) -> Iterator[Deployment]:
    """The tiny recipe's engines with commands that no recipe can say; there is no router."""
    loaded = recipe_loader.load(recipe_loader.find(TINY), (f"name={name}", *settings))
    plan = preparation.planned(loaded, None)
    preparation.provide(loaded.recipe, plan, Terminal())
    engines = tuple(changed(engine) for engine in plan.engines)
    deployment = Deployment(plan.model_copy(update={"processes": engines}), folder)
    logs = deployment.log("any").parent
    logs.mkdir(parents=True)
    with _running(plan, engines, logs):
        yield deployment


@contextmanager
def _running(plan: DeploymentPlan, engines: Sequence[ProcessPlan], logs: Path) -> Iterator[None]:
    """Engines that are healthy, started without the command; stopped in any case."""
    guardian = Guardian(plan.launch_id)
    backend = ProcessBackend(plan.launch_id, logs)
    try:
        for engine in engines:
            backend.start(engine)
        asyncio.run(_healthy(backend, engines))
        yield
    finally:
        survivors = asyncio.run(backend.stop(plan.stop_s, lambda: False))
        guardian.dismiss()
        assert survivors == []


async def _healthy(backend: ProcessBackend, engines: Sequence[ProcessPlan]) -> None:
    deadline_s = time.monotonic() + START_WITHIN_S
    async with httpx.AsyncClient() as client:
        while not all(await readiness.is_healthy(client, engines)):
            deaths = [f"{death.name} {death.how_it_ended}" for death in backend.deaths()]
            lines = [line for each in engines for line in telling_lines(backend.log(each.name))]
            assert not deaths and time.monotonic() < deadline_s, "\n".join([*deaths, *lines])
            await asyncio.sleep(0.25)


async def _asked(
    client: httpx.AsyncClient,
    engine: ProcessPlan,
    model: str,
    questions: tuple[Question, ...],
    limit: int,
) -> Reference:
    async def one(question: Question) -> tuple[Answer, float]:
        return await _with_gap(client, engine, model, question)

    found = await at_once(one, questions, limit)
    named = {each.name: both for each, both in zip(questions, found, strict=True)}
    return Reference(
        {name: answer for name, (answer, _) in named.items()},
        {name: gap for name, (_, gap) in named.items()},
    )


async def _with_gap(
    client: httpx.AsyncClient, engine: ProcessPlan, model: str, question: Question
) -> tuple[Answer, float]:
    """An answer, and by how much the second best token came short where that was closest."""
    wanted: dict[str, Any] = {"return_tokens_as_token_ids": True}
    wanted |= {"logprobs": True, "top_logprobs": 2} if question.chat else {"logprobs": 2}
    response = await client.post(
        engine.url + question.path, json=question.body(model) | wanted, timeout=START_WITHIN_S
    )
    assert response.status_code == httpx.codes.OK, response.text
    (choice,) = response.json()["choices"]
    if question.chat:
        text = choice["message"]["content"] or ""
        best = [
            [each["logprob"] for each in step["top_logprobs"]]
            for step in choice["logprobs"]["content"]
        ]
    else:
        text = choice["text"]
        best = [list(step.values()) for step in choice["logprobs"]["top_logprobs"]]
    gaps = [first - second for first, second, *_ in (sorted(step, reverse=True) for step in best)]
    return Answer(tuple(choice["token_ids"]), text, choice["finish_reason"]), min(gaps)


def _record(state: Path, name: str) -> Record:
    path = state / "pdlaunch/deployments" / name / "deployment.json"
    return Record.model_validate_json(path.read_text("utf-8"))


def told(log: Path) -> str:
    """The telling lines of a log, for an assertion's message."""
    return json.dumps(telling_lines(log), indent=1)
