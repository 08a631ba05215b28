"""Carries a schedule out: deployments one after the other, each under all loads."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from pdlaunch import __version__, engine, preparation, readiness, recipe_loader
from pdlaunch.bench import answers, bars, counters, scatter, tracing
from pdlaunch.bench.client import Client, client
from pdlaunch.bench.link import Link, link
from pdlaunch.bench.results import (
    FLOOR,
    Difference,
    Idle,
    LeftOut,
    Measured,
    Measurement,
    Results,
)
from pdlaunch.bench.running import running
from pdlaunch.bench.schedule import MODES, ONE_ENGINE, Schedule, Subject, Visit, alone
from pdlaunch.bench.workload import AS_IS, Load, Setup
from pdlaunch.console import Reporter
from pdlaunch.doctor import examination
from pdlaunch.engine_metrics import scrape, scrape_all
from pdlaunch.errors import Interrupted, PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan, ProcessRole
from pdlaunch.recipe_loader import Loaded
from pdlaunch.supervisor import Signals
from pdlaunch.trace import Timeline

_SETTLE_S = 2.0
_IDLE_S = 6.0
_WARM_UP_REQUESTS = 2
# No load's prompts: they are drawn from rounds from 0.
_WARM_UP_SEED = 1_000_003
_BUSY_PROMPT_TOKENS, _BUSY_ANSWER_TOKENS = 16, 2048
# So slow that one transfer outlasts a look at what a pair takes while it waits: 100 MB take 20 s.
_CRAWL_MBIT_PER_S = 40
_CRAWL_PROMPT_TOKENS, _CRAWL_ANSWER_TOKENS = 2000, 2
_CRAWL_SETTLE_S, _CRAWL_S = 1.0, 5.0
_CRAWL_WITHIN_S = 120.0
_POLL_S = 0.1
# What computes log probabilities is compiled on first use, for a minute, unless told not to.
_NO_COMPILATION = {"TORCHDYNAMO_DISABLE": "1"}


@dataclass
class _Found:
    measurements: list[Measurement] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)
    bring_up_s: list[float] = field(default_factory=list)
    cores: dict[str, tuple[int, ...]] = field(default_factory=dict)


def run(
    loaded: Loaded,
    schedule: Schedule,
    settings: Sequence[str],
    *,
    left_out: Sequence[LeftOut],
    reporter: Reporter,
    interrupts: Signals,
    keep: Callable[[Results], None],
    with_timeline: bool = False,
) -> Results:
    """Measure; everything is taken down again, however it ends.

    Args:
        settings: KEY=VALUE of which the recipe was loaded.
        left_out: what was asked for and is no part of the schedule.
        keep: called after each deployment with what there is so far, for a run may take an hour.
        with_timeline: bring up one more pair by push, and trace one request of it.
    """
    started_unix_s, started_s = time.time(), time.monotonic()
    built = engine.planned(loaded.recipe.engine.variant)

    def results(found: _Found, differences: Sequence[Difference] | None) -> Results:
        made = Results(
            pdlaunch_version=__version__,
            engine_version=built.version,
            recipe=loaded.recipe.name,
            settings=tuple(settings),
            model=loaded.recipe.model,
            machine=machine(),
            cores=found.cores,
            started_unix_s=started_unix_s,
            took_s=time.monotonic() - started_s,
            rounds=len({one.round for one in found.measurements}),
            modes=schedule.modes,
            loads={load.name: load for load in schedule.loads},
            measurements=tuple(found.measurements),
            idle=tuple(found.idle),
            is_complete=differences is not None,
            differences=tuple(differences or ()),
            left_out=tuple(left_out),
            bring_up_s=tuple(found.bring_up_s),
        )
        return made.model_copy(update={"bars": bars.of(made)})

    with (
        tempfile.TemporaryDirectory(prefix="pdlaunch-bench-") as folder,
        client(built, Path(folder)) as sender,
    ):
        carried_out = _Run(
            loaded, settings, schedule, sender=sender, reporter=reporter, interrupts=interrupts
        )
        for found in carried_out.measure():
            keep(results(found, None))
        whole = results(carried_out.found, carried_out.differences())
        if not with_timeline or "push" not in schedule.modes:
            return whole
        keep(whole)
        return whole.model_copy(update={"timeline": carried_out.timeline()})


def plan_of(
    loaded: Loaded,
    settings: Sequence[str],
    subject: Subject,
    setup: Setup = AS_IS,
    *,
    is_traced: bool = False,
) -> DeploymentPlan:
    """The deployment of a subject: a pair of one mode, or the prefill engine as one engine."""
    if setup.settings:
        loaded = recipe_loader.load(loaded.path, (*settings, *setup.settings))
    recipe = loaded.recipe
    update: dict[str, object] = {"name": f"bench-{'traced' if is_traced else subject}"}
    if subject != ONE_ENGINE:
        update["transfer"] = recipe.transfer.model_copy(update={"mode": subject})
    changed = Loaded(recipe.model_copy(update=update), loaded.path, loaded.notes)
    plan = preparation.planned(changed, None, is_traced=is_traced)
    preparation.check_startable(plan)
    examination.before_start(changed.recipe, plan)
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
        settings: Sequence[str],
        schedule: Schedule,
        *,
        sender: Client,
        reporter: Reporter,
        interrupts: Signals,
    ) -> None:
        self._loaded = loaded
        self._settings = settings
        self._schedule = schedule
        self._sender = sender
        self._reporter = reporter
        self._interrupts = interrupts
        self.found = _Found()

    def measure(self) -> Iterator[_Found]:
        """Visit by visit; what there is after each."""
        started_s = time.monotonic()
        for done, visit in enumerate(self._schedule.visits):
            took_s = time.monotonic() - started_s
            begins = not done or visit.round > self._schedule.visits[done - 1].round
            if begins and not self._schedule.has_time_for(visit.round, took_s):
                self._reporter.warning(
                    f"round {visit.round + 1} is left out: it would end after more than "
                    f"{(self._schedule.within_s or 0.0) / 60:.0f} minutes"
                )
                return
            self._reporter.status(progress(self._schedule, done, took_s))
            self._visit(visit)
            yield self.found

    def _visit(self, visit: Visit) -> None:
        plan = plan_of(self._loaded, self._settings, visit.subject, visit.setup)
        with ExitStack() as stack:
            between: Link | None = None
            if visit.setup.link_mbit_per_s is not None:
                between = stack.enter_context(link(visit.setup.link_mbit_per_s))
                plan = between.joined(plan)
            self.found.cores |= {process.name: process.cores for process in plan.engines}
            started_s = time.monotonic()
            up = stack.enter_context(running(plan, self._reporter, self._interrupts))
            self.found.bring_up_s.append(round(time.monotonic() - started_s, 1))
            here = _Visit(
                visit,
                up.plan,
                between,
                sender=self._sender,
                reporter=self._reporter,
                found=self.found,
            )
            up.run(here.measure(self._schedule))

    def timeline(self) -> Timeline | None:
        """Trace one request; stamps cost little, but figures shall have cost nothing."""
        self._reporter.status("one more pair, to trace one request of push")
        load = tracing.load_of(self._schedule.loads)
        few = replace(load, requests=_WARM_UP_REQUESTS, requests_per_s=None)
        plan = plan_of(self._loaded, self._settings, "push", load.setup, is_traced=True)
        try:
            with running(plan, self._reporter, self._interrupts) as up:
                return up.run(self._trace(up.plan, few))
        except Interrupted:
            raise
        except PdError as error:
            self._reporter.warning(f"no timeline of a request: {error}")
            return None

    async def _trace(self, plan: DeploymentPlan, load: Load) -> Timeline | None:
        prompts = await self._sender.prompts(load, plan, seed=_WARM_UP_SEED)
        return await tracing.timeline(plan, prompts)

    def differences(self) -> list[Difference]:
        """Compare all answers; bring one engine up again to ask about those that differ."""
        found = self.found.measurements
        parted = answers.differences(
            (one for one in found if one.subject in self._schedule.modes),
            (one for one in found if one.subject == ONE_ENGINE),
        )
        loads = {load.name: load for load in self._schedule.loads}
        # How close a call was is known of a best token only, not of a drawn one.
        askable = [each for each in parted if not loads[each.load].temperature]
        if not askable:
            return parted
        self._reporter.warning(
            f"{len(parted)} answers differ from one engine's; asking it how close a call that was"
        )
        plan = plan_of(self._loaded, self._settings, ONE_ENGINE)
        (process,) = plan.processes
        process = process.model_copy(update={"env": {**process.env, **_NO_COMPILATION}})
        plan = plan.model_copy(update={"processes": (process,)})
        with running(plan, self._reporter, self._interrupts) as up:
            judged = up.run(self._judge(up.plan, loads, askable))
        return [each for each in parted if each not in askable] + judged

    async def _judge(
        self, plan: DeploymentPlan, loads: Mapping[str, Load], parted: Sequence[Difference]
    ) -> list[Difference]:
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
                gap = answers.gap_where_parted(steps, one.answer)
                judged.append(one.model_copy(update={"gap_logprob": gap}))
        return judged


class _Visit:
    """One deployment that is up, and all that is measured on it."""

    def __init__(
        self,
        visit: Visit,
        plan: DeploymentPlan,
        between: Link | None,
        *,
        sender: Client,
        reporter: Reporter,
        found: _Found,
    ) -> None:
        self._visit = visit
        self._plan = plan
        self._link = between
        self._sender = sender
        self._reporter = reporter
        self._found = found
        self._is_pair = visit.subject != ONE_ENGINE
        self._is_scattered = False

    async def measure(self, schedule: Schedule) -> None:
        # First, for it also waits until the client's imports no longer take a core.
        await self._warm_up(min(self._visit.loads, key=lambda load: load.longest_tokens))
        await asyncio.sleep(_SETTLE_S)
        self._found.idle.append(await self._at_rest(_IDLE_S, is_waiting=False))
        for load in self._visit.loads:
            seed = schedule.seed(load, self._visit.round)
            # A pair's own floors, before and after: a machine's pace changes from visit to visit.
            if not self._is_pair or load.is_one_at_a_time:
                await self._load(load, seed, FLOOR)
            await self._load(load, seed, self._visit.subject)
            if self._is_pair and load.is_one_at_a_time:
                await self._load(load, seed, FLOOR)
        if self._link is not None and self._visit.setup.link_mbit_per_s is not None:
            await self._wait_for_kv(self._link, self._visit.setup.link_mbit_per_s)

    async def _at_rest(self, seconds: float, *, is_waiting: bool) -> Idle:
        before, started_s = counters.cpu_s(self._plan), time.monotonic()
        await asyncio.sleep(seconds)
        after, took_s = counters.cpu_s(self._plan), time.monotonic() - started_s
        return Idle(
            subject=self._visit.subject,
            round=self._visit.round,
            seconds=took_s,
            cpu_s=counters.cpu_since(before, after),
            is_waiting=is_waiting,
        )

    async def _wait_for_kv(self, between: Link, mbit_per_s: int) -> None:
        """What a pair takes whose prefill has ended, and whose KV comes slowly."""
        prefill = self._engine_of(is_decode=False)
        between.limit(_CRAWL_MBIT_PER_S)
        try:
            async with httpx.AsyncClient() as http:
                ended = counters.legs_ended(await scrape(http, prefill))
                asked = asyncio.create_task(self._ask_long(http))
                try:
                    async with asyncio.timeout(_CRAWL_WITHIN_S):
                        while counters.legs_ended(await scrape(http, prefill)) <= ended:
                            await asyncio.sleep(_POLL_S)
                    await asyncio.sleep(_CRAWL_SETTLE_S)
                    found = await self._at_rest(_CRAWL_S, is_waiting=True)
                    if not asked.done():
                        self._found.idle.append(found)
                    else:
                        self._reporter.warning(
                            f"{self._visit.subject}: a slow transfer ended too soon; what a pair "
                            "takes meanwhile is not measured"
                        )
                    between.limit(mbit_per_s)
                    await asked
                finally:
                    asked.cancel()
        except (TimeoutError, httpx.HTTPError, PdError) as error:
            # The last of a visit, and of modes that are not ours too: no reason to lose the rest.
            self._reporter.warning(
                f"{self._visit.subject}: no transfer at {_CRAWL_MBIT_PER_S} Mb/s, what a pair "
                f"takes meanwhile is not measured: {type(error).__name__} {error}"
            )
        finally:
            between.limit(mbit_per_s)

    async def _ask_long(self, http: httpx.AsyncClient) -> None:
        body: dict[str, object] = {
            "model": self._plan.served_name,
            "prompt": [3] * _CRAWL_PROMPT_TOKENS,
            "max_tokens": _CRAWL_ANSWER_TOKENS,
            "ignore_eos": True,
            "cache_salt": _salt(),
        }
        await self._post(http, self._url, body, _CRAWL_WITHIN_S)

    async def _post(
        self, http: httpx.AsyncClient, url: str, body: dict[str, object], within_s: float | None
    ) -> None:
        response = await http.post(
            f"{url}/v1/completions", json=body, headers=readiness.headers(), timeout=within_s
        )
        if response.status_code != httpx.codes.OK:
            raise PdError(
                f"{self._plan.name} refuses a request: HTTP {response.status_code} "
                f"{response.text[:200]}",
                where=url,
                next_step=f"pdlaunch logs {self._plan.name}",
            )

    async def _warm_up(self, load: Load) -> None:
        few = replace(
            load,
            requests=_WARM_UP_REQUESTS,
            at_once=_WARM_UP_REQUESTS,
            requests_per_s=None,
            # vLLM on CPU cannot cut a prompt that has a seed, as two at a time would be.
            temperature=0.0,
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
            await self._scatter()
        async with httpx.AsyncClient() as http, self._busy(http, load.busy_decodes, subject):
            before = await scrape_all(http, self._plan.engines)
            started_s = time.monotonic()
            cpu_before, others_before_s = self._cpu()
            took_s, requests = await self._sender.run(
                sent, self._url_for(subject), self._plan, seed=seed, salt=salt
            )
            cpu_after, others_after_s = self._cpu()
            running_tpot_s = None
            if load.busy_decodes and subject != FLOOR:
                decode = self._engine_of(is_decode=True)
                generated = counters.tokens(await scrape(http, decode))
                generated -= counters.tokens(before[decode.name])
                generated -= sum(request.answer_tokens for request in requests)
                running_tpot_s = (
                    load.busy_decodes * (time.monotonic() - started_s) / max(1.0, generated)
                )
            mode = self._visit.subject
            measurement = Measurement(
                subject=subject,
                load=load.name,
                round=self._visit.round,
                took_s=took_s,
                requests=tuple(requests),
                cpu_s=counters.cpu_since(cpu_before, cpu_after),
                others_cpu_s=round(max(0.0, others_after_s - others_before_s), 3),
                running_tpot_s=running_tpot_s,
                beside=mode if subject == FLOOR and mode != ONE_ENGINE else None,
            )
            if subject in MODES:
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

    async def _scatter(self) -> None:
        """Leave the free blocks of each engine's cache in random order."""
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
                body: dict[str, object] = {
                    "model": self._plan.served_name,
                    "max_tokens": 1,
                    "ignore_eos": True,
                    "cache_salt": _salt(),
                }
                for prompts in scatter.batches(blocks, block_tokens, _WARM_UP_SEED):
                    await self._post(http, process.url, {**body, "prompt": prompts}, None)
        self._is_scattered = True

    @property
    def _url(self) -> str:
        return self._plan.router_url if self._is_pair else self._plan.engines[0].url

    def _url_for(self, subject: Measured) -> str:
        return self._engine_of(is_decode=False).url if subject == FLOOR else self._url

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
        body: dict[str, object] = {
            "model": self._plan.served_name,
            "prompt": [3] * _BUSY_PROMPT_TOKENS,
            "max_tokens": _BUSY_ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 1,
        }
        while True:
            await self._post(http, engine.url, body, None)


def progress(schedule: Schedule, done: int, took_s: float) -> str:
    """What comes next, and how long all may take at the pace so far."""
    visit = schedule.visits[done]
    left_s = sum(each.expected_s for each in schedule.visits[done:])
    if done:
        # This machine's pace, by what there was so far.
        left_s *= took_s / sum(each.expected_s for each in schedule.visits[:done])
    return (
        f"{done + 1} of {len(schedule.visits)}: {visit.subject}, {visit.setup}, "
        f"round {visit.round + 1} of {schedule.rounds}; about {left_s / 60:.0f} min left"
    )


def _told(one: Measurement) -> str:
    answered = one.answered
    if not answered:
        return f"{one.subject}, {one.load}: no request was answered"
    mean_ms = 1e3 * sum(request.ttft_s for request in answered) / len(answered)
    whose = f"{one.subject} beside {one.beside}" if one.beside else one.subject
    return (
        f"{whose}, {one.load}: {len(answered)} of {len(one.requests)} requests in "
        f"{one.took_s:.1f} s, mean TTFT {mean_ms:.0f} ms"
    )


def _salt() -> str:
    return secrets.token_hex(8)
