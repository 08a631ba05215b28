"""Carries a schedule out: deployments one after the other, each under all loads."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from pdlaunch import __version__, engine, preparation, readiness
from pdlaunch.bench import answers, counters
from pdlaunch.bench.answers import Parting
from pdlaunch.bench.client import Client, client
from pdlaunch.bench.results import (
    FLOOR,
    Difference,
    Idle,
    Measured,
    Measurement,
    Results,
)
from pdlaunch.bench.running import Running, running
from pdlaunch.bench.schedule import ONE_ENGINE, Schedule, Subject, Visit, alone
from pdlaunch.bench.workload import Load, scattering
from pdlaunch.console import Reporter
from pdlaunch.engine_metrics import scrape_all
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan, ProcessRole
from pdlaunch.recipe_loader import Loaded
from pdlaunch.supervisor import Signals

_SETTLE_S = 2.0
_IDLE_S = 4.0
_WARM_UP_REQUESTS = 2
# No load's prompts: they are drawn from rounds from 0.
_WARM_UP_SEED = 1_000_003
_BUSY_PROMPT_TOKENS, _BUSY_ANSWER_TOKENS = 16, 2048
# What computes log probabilities is compiled on first use, for a minute, unless told not to.
_NO_COMPILATION = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass
class _Found:
    measurements: list[Measurement] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)
    cores: dict[str, tuple[int, ...]] = field(default_factory=dict)


def run(
    loaded: Loaded,
    schedule: Schedule,
    settings: Sequence[str],
    *,
    reporter: Reporter,
    interrupts: Signals,
    keep: Callable[[Results], None],
) -> Results:
    """Measure; everything is taken down again, however it ends.

    Args:
        keep: called after each deployment with what there is so far, for a run may take an hour.
    """
    started_unix_s, started_s = time.time(), time.monotonic()
    built = engine.planned(loaded.recipe.engine.variant)

    def results(found: _Found, differences: Sequence[Difference] | None) -> Results:
        return Results(
            pdlaunch_version=__version__,
            engine_version=built.version,
            recipe=loaded.recipe.name,
            settings=tuple(settings),
            model=loaded.recipe.model,
            machine=machine(),
            cores=found.cores,
            started_unix_s=started_unix_s,
            took_s=time.monotonic() - started_s,
            rounds=schedule.rounds,
            modes=schedule.modes,
            loads={load.name: load for load in schedule.loads},
            measurements=tuple(found.measurements),
            idle=tuple(found.idle),
            is_complete=differences is not None,
            differences=tuple(differences or ()),
        )

    with (
        tempfile.TemporaryDirectory(prefix="pdlaunch-bench-") as folder,
        client(built, Path(folder)) as sender,
    ):
        carried_out = _Run(loaded, schedule, sender, reporter, interrupts)
        for found in carried_out.measure():
            keep(results(found, None))
        return results(carried_out.found, carried_out.differences())


def plan_of(loaded: Loaded, subject: Subject) -> DeploymentPlan:
    """The deployment of a subject: a pair of one mode, or the prefill engine as one engine."""
    recipe = loaded.recipe
    update: dict[str, object] = {"name": f"bench-{subject}"}
    if subject != ONE_ENGINE:
        update["transfer"] = recipe.transfer.model_copy(update={"mode": subject})
    changed = Loaded(recipe.model_copy(update=update), loaded.path, loaded.notes)
    plan = preparation.planned(changed, None)
    preparation.check_startable(changed, plan)
    return alone(plan) if subject == ONE_ENGINE else plan


def machine() -> str:
    """What ran it, in a line."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    cpu = f"{len(names)} x {names[0]}" if names else platform.machine()
    return f"{cpu}, {platform.system()} {platform.release()}"


class _Run:
    """All visits of a schedule, and what they found."""

    def __init__(
        self,
        loaded: Loaded,
        schedule: Schedule,
        sender: Client,
        reporter: Reporter,
        interrupts: Signals,
    ) -> None:
        self._loaded = loaded
        self._schedule = schedule
        self._sender = sender
        self._reporter = reporter
        self._interrupts = interrupts
        self.found = _Found()

    def measure(self) -> Iterator[_Found]:
        """Visit by visit; what there is after each."""
        started_s = time.monotonic()
        for done, visit in enumerate(self._schedule.visits):
            self._reporter.status(_progress(self._schedule, done, time.monotonic() - started_s))
            plan = plan_of(self._loaded, visit.subject)
            self.found.cores |= {process.name: process.cores for process in plan.engines}
            with self._running(plan) as up:
                measured = _Visit(visit, up.plan, self._sender, self._reporter, self.found)
                up.run(measured.measure(self._schedule))
            yield self.found

    def differences(self) -> list[Difference]:
        """Compare all answers; bring one engine up again to ask about those that differ."""
        found = self.found.measurements
        parted = answers.partings(
            (one for one in found if one.subject in self._schedule.modes),
            (one for one in found if one.subject == ONE_ENGINE),
        )
        if not parted:
            return []
        self._reporter.warning(
            f"{len(parted)} answers differ from one engine's; asking it how close a call that was"
        )
        plan = plan_of(self._loaded, ONE_ENGINE)
        (process,) = plan.processes
        process = process.model_copy(update={"env": {**process.env, **_NO_COMPILATION}})
        with self._running(plan.model_copy(update={"processes": (process,)})) as up:
            return up.run(self._judge(up.plan, parted))

    async def _judge(self, plan: DeploymentPlan, parted: Sequence[Parting]) -> list[Difference]:
        loads = {load.name: load for load in self._schedule.loads}
        prompts: dict[int, list[list[int]]] = {}
        judged = []
        async with httpx.AsyncClient() as http:
            for one in parted:
                load = loads[one.load]
                seed = self._schedule.seed(load, one.round)
                if seed not in prompts:
                    prompts[seed] = await self._sender.prompts(load, plan, seed=seed)
                prompt = prompts[seed][one.request]
                steps = await answers.steps(http, plan, prompt, load.answer_tokens)
                judged.append(one.judged(answers.gap_where_parted(steps, one.answer)))
        return judged

    def _running(self, plan: DeploymentPlan) -> AbstractContextManager[Running]:
        return running(plan, self._reporter, self._interrupts)


class _Visit:
    """One deployment that is up, and all that is measured on it."""

    def __init__(
        self, visit: Visit, plan: DeploymentPlan, sender: Client, reporter: Reporter, found: _Found
    ) -> None:
        self._visit = visit
        self._plan = plan
        self._sender = sender
        self._reporter = reporter
        self._found = found
        self._is_pair = visit.subject != ONE_ENGINE
        self._is_scattered = False

    async def measure(self, schedule: Schedule) -> None:
        # First, for it also waits until the client's imports no longer take a core.
        await self._warm_up(schedule.loads[0])
        await self._idle()
        for load in schedule.loads:
            seed = schedule.seed(load, self._visit.round)
            if not self._is_pair:
                await self._load(load, seed, FLOOR)
            await self._load(load, seed, self._visit.subject)

    async def _idle(self) -> None:
        await asyncio.sleep(_SETTLE_S)
        before, started_s = counters.cpu_s(self._plan), time.monotonic()
        await asyncio.sleep(_IDLE_S)
        after, took_s = counters.cpu_s(self._plan), time.monotonic() - started_s
        self._found.idle.append(
            Idle(
                subject=self._visit.subject,
                round=self._visit.round,
                seconds=took_s,
                cpu_s=counters.cpu_since(before, after),
            )
        )

    async def _warm_up(self, load: Load) -> None:
        few = replace(
            load, requests=_WARM_UP_REQUESTS, at_once=_WARM_UP_REQUESTS, requests_per_s=None
        )
        await self._sender.run(few, self._url, self._plan, seed=_WARM_UP_SEED, salt=_salt())

    async def _load(self, load: Load, seed: int, subject: Measured) -> None:
        salt = _salt()
        sent = load
        if subject == FLOOR:
            # Several at a time would wait for each other, and be no floor.
            sent = replace(load, at_once=1, requests_per_s=None, answer_tokens=1)
        # What decode has cached does not help prefill alone.
        if load.cached_by is not None and (subject, load.cached_by) != (FLOOR, "decode"):
            begun = replace(load, prompt_tokens=load.cached_tokens, answer_tokens=1)
            engine = self._engine_of(is_decode=load.cached_by == "decode")
            await self._sender.run(begun, engine.url, self._plan, seed=seed, salt=salt)
        if load.scattered and not self._is_scattered:
            await self._scatter(salt)
        async with httpx.AsyncClient() as http, self._busy(http, load.busy_decodes, subject):
            before = await scrape_all(http, self._plan.engines)
            cpu_before, others_before_s = self._cpu()
            took_s, requests = await self._sender.run(
                sent, self._url, self._plan, seed=seed, salt=salt
            )
            cpu_after, others_after_s = self._cpu()
            measurement = Measurement(
                subject=subject,
                load=load.name,
                round=self._visit.round,
                took_s=took_s,
                requests=tuple(requests),
                cpu_s=counters.cpu_since(cpu_before, cpu_after),
                others_cpu_s=round(max(0.0, others_after_s - others_before_s), 3),
            )
            if self._is_pair:
                after = await counters.settled(http, self._plan, before, load.requests)
                measurement = measurement.model_copy(
                    update={
                        "prefill": counters.legs(self._plan, "prefill", before, after),
                        "decode": counters.legs(self._plan, "decode", before, after),
                        "moved": counters.moved(self._plan, before, after),
                    }
                )
        self._found.measurements.append(measurement)
        self._reporter.status(_told(measurement))

    def _cpu(self) -> tuple[dict[ProcessRole, float], float]:
        """CPU seconds so far: ours by role, and those of everybody else."""
        every_s = counters.all_cpu_s()
        ours = counters.cpu_s(self._plan)
        client_s = counters.cpu_s_of((os.getpid(), self._sender.pid))
        return ours, every_s - sum(ours.values()) - client_s

    async def _scatter(self, salt: str) -> None:
        """Go through all blocks of each engine's cache once."""
        async with httpx.AsyncClient() as http:
            metrics = await scrape_all(http, self._plan.engines)
        for process in self._plan.engines:
            block_tokens, blocks = counters.cache_size(metrics[process.name])
            if not blocks:
                raise PdError(
                    f"{process.name} does not say how many blocks its cache has",
                    where=f"{process.url}/metrics",
                    next_step="leave the workload scattered out",
                )
            self._reporter.status(f"scattering the {blocks} blocks of {process.name}")
            load = scattering(block_tokens, blocks)
            await self._sender.run(load, process.url, self._plan, seed=_WARM_UP_SEED, salt=salt)
        self._is_scattered = True

    @property
    def _url(self) -> str:
        return self._plan.router_url if self._is_pair else self._plan.engines[0].url

    def _engine_of(self, *, is_decode: bool) -> ProcessPlan:
        return self._plan.engines[-1 if is_decode else 0]

    @asynccontextmanager
    async def _busy(
        self, http: httpx.AsyncClient, count: int, subject: Measured
    ) -> AsyncIterator[None]:
        """Keep decode busy with long answers; the floor is that of an idle engine."""
        if not count or subject == FLOOR:
            yield
            return
        tasks = [asyncio.create_task(self._decode_long(http)) for _ in range(count)]
        try:
            await asyncio.sleep(_SETTLE_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for each in ended:
            if isinstance(each, Exception):
                raise each

    async def _decode_long(self, http: httpx.AsyncClient) -> None:
        engine = self._engine_of(is_decode=True)
        body = {
            "model": self._plan.served_name,
            "prompt": [3] * _BUSY_PROMPT_TOKENS,
            "max_tokens": _BUSY_ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 1,
        }
        while True:
            response = await http.post(
                f"{engine.url}/v1/completions",
                json=body,
                headers=readiness.headers(),
                timeout=None,
            )
            if response.status_code != httpx.codes.OK:
                raise PdError(
                    f"{engine.name} refuses the long answers that keep it busy: "
                    f"HTTP {response.status_code} {response.text[:200]}",
                    where=engine.url,
                    next_step=f"pdlaunch logs {self._plan.name} {engine.name}",
                )


def _progress(schedule: Schedule, done: int, took_s: float) -> str:
    visit, all_of = schedule.visits[done], len(schedule.visits)
    left_s = took_s / done * (all_of - done) if done else schedule.expected_s
    return (
        f"{done + 1} of {all_of}: {visit.subject}, round {visit.round + 1} of {schedule.rounds}; "
        f"about {left_s / 60:.0f} min left"
    )


def _told(one: Measurement) -> str:
    answered = one.answered
    if not answered:
        return f"{one.subject}, {one.load}: no request was answered"
    mean_ms = 1e3 * sum(request.ttft_s for request in answered) / len(answered)
    return (
        f"{one.subject}, {one.load}: {len(answered)} of {len(one.requests)} requests in "
        f"{one.took_s:.1f} s, mean TTFT {mean_ms:.0f} ms"
    )


def _salt() -> str:
    return secrets.token_hex(8)
