"""Owns one deployment from its first process to its last: start, wait, watch, take down.

Runs inside `pdlaunch up`, or detached as `python -m pdlaunch.supervisor`. Signal handlers enqueue.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import ParamSpec

import httpx
import psutil

from pdlaunch import (
    backend,
    control,
    deployments,
    leftovers,
    readiness,
    restart_policy,
    rolling,
    trace,
    transport,
    warm_start,
)
from pdlaunch.console import Reporter
from pdlaunch.control import Wish
from pdlaunch.death import Death
from pdlaunch.deployments import Event, Record, State
from pdlaunch.errors import Interrupted, PdError, UsageError
from pdlaunch.guardian import Guardian
from pdlaunch.logs import doing
from pdlaunch.plan import DeploymentPlan, ProcessPlan

_P = ParamSpec("_P")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCH_EVERY_S = 0.1
_DEATH_EXPLAINS_S = 5.0
_EVENTS_KEPT = 50
# What still starts has nothing to finish, and vLLM does not heed SIGTERM while it loads.
_UNREADY_STOP_S = 3.0


class Signals:
    """Signals as a queue. Arrivals before `pop` are kept, whatever runs meanwhile."""

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()

    @contextmanager
    def caught(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._enqueue) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def pending(self) -> bool:
        return bool(self._arrived)

    def put(self, number: int) -> None:
        self._arrived.append(number)

    def pop(self) -> int | None:
        return self._arrived.popleft() if self._arrived else None

    def _enqueue(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)


def supervise(
    plan: DeploymentPlan,
    reporter: Reporter,
    signals: Signals,
    on_ready: Callable[[], None],
) -> None:
    """Bring a deployment up and keep it up. Only ever ends by raising, with all taken down."""
    held = deployments.acquire(plan.name)
    try:
        before = deployments.read(plan.name)
        if before is not None:
            reporter.status(f"clearing what a crashed {plan.name} left")
            deployments.clear(before)
        if plan.trace_folder is not None:
            trace.clear(Path(plan.trace_folder))
        asyncio.run(_Supervisor(plan, reporter, signals).run(on_ready))
    finally:
        held.release()


class _Supervisor:
    def __init__(self, plan: DeploymentPlan, reporter: Reporter, signals: Signals) -> None:
        self._plan = plan
        self._reporter = reporter
        self._signals = signals
        self._backend = backend.of(plan, deployments.log_dir(plan.name))
        self._started_unix_s = time.time()
        self._is_ready = False
        self._deaths_s: dict[str, list[float]] = {}
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        self._transports: dict[str, transport.Transport] = {}
        # A log goes on after a restart: where in it a process's present life begins.
        self._born_byte: dict[str, int] = {}
        # What died and is not started again yet; of that, what nobody will start unless told to.
        self._dead: set[str] = set()
        self._left_dead: set[str] = set()
        # What a restart has in hand: its deaths are no surprise.
        self._in_hand: set[str] = set()
        # Of a running deployment, what was started again and does not answer yet.
        self._unready: set[str] = set()
        self._one_roll = asyncio.Lock()
        self._events: deque[Event] = deque(maxlen=_EVENTS_KEPT)

    async def run(self, on_ready: Callable[[], None]) -> None:
        guardian = Guardian(self._plan.launch_id, self._plan.endpoints)
        try:
            self._record("starting")
            await self._until_trouble(on_ready)
        finally:
            # Whatever fails here, a full disk or a closed terminal, the processes must end.
            with suppress(OSError):
                self._record("stopping")
                self._reporter.status(f"taking {self._plan.name} down")
            unready_stop_s = min(self._plan.stop_s, _UNREADY_STOP_S)
            for name in self._unready:
                # What fails here is tried again below.
                with suppress(PdError):
                    await _to_its_end(self._backend.end, name, unready_stop_s)
            survivors = await self._backend.stop(
                self._plan.stop_s if self._is_ready else unready_stop_s,
                lambda: self._signals.pop() is not None,
            )
            guardian.dismiss()
            if not survivors:
                deployments.remove_record(self._plan.name)
            else:
                self._reporter.warning(f"could not kill: {', '.join(survivors)}")

    async def _until_trouble(self, on_ready: Callable[[], None]) -> None:
        watching = asyncio.create_task(self._watch())
        starting = asyncio.create_task(self._start())
        try:
            await asyncio.wait((watching, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and starting.exception() is not None and self._backend.started:
                # A death explains a failed request, not the other way round, and a server takes
                # a moment to end after its engine has.
                await asyncio.wait((watching,), timeout=_DEATH_EXPLAINS_S)
            if watching.done():
                watching.result()
            starting.result()
            async with control.listening(self._plan.name, self._do):
                self._is_ready = True
                self._record("ready")
                on_ready()
                await watching
        finally:
            tasks = (watching, starting, *self._recoveries.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self) -> None:
        plan = self._plan
        try:
            async with asyncio.timeout(plan.ready_s), httpx.AsyncClient() as client:
                for stage in (plan.engines, plan.of_role("router")):
                    await self._start_stage(stage, client)
                if plan.only in (None, "router"):
                    await warm_start.introduce(plan, client, self._reporter)
                    await readiness.prove(plan, client, self._reporter)
            self._read_transports(plan.own)
        except TimeoutError:
            last = [f"{name}: {doing(self._backend.log(name))}" for name in self._backend.started]
            raise PdError(
                "\n  | ".join([f"not ready after {plan.ready_s:.0f} s", *last]),
                where=str(deployments.log_dir(plan.name)),
                next_step="if it was still loading, raise timeouts.ready_s",
            ) from None

    async def _start_stage(self, stage: Sequence[ProcessPlan], client: httpx.AsyncClient) -> None:
        own = [process for process in stage if process in self._plan.own]
        for process in own:
            self._backend.start(process)
            self._record("starting")
        # A router on a host of its own waits for engines that others start.
        awaited = stage if self._plan.only == "router" else own
        await readiness.wait_until_healthy(awaited, self._reporter, self._doing, client)

    def _doing(self, process: ProcessPlan) -> str:
        if process.name in self._backend.started:
            return doing(self._backend.log(process.name))
        return f"waiting for {process.url}"

    async def _watch(self) -> None:
        while True:
            number = self._signals.pop()
            if number is not None:
                raise Interrupted(number)
            for death in self._backend.deaths():
                if death.name not in self._dead | self._in_hand:
                    self._answer(death)
            for task in [task for task in self._recoveries.values() if task.done()]:
                task.result()
            await asyncio.sleep(_WATCH_EVERY_S)

    def _answer(self, death: Death) -> None:
        """Start a process again that died in a running deployment, or leave it, or end it all."""
        if not self._is_ready:
            raise self._error(death)
        plan = self._process(death.name)
        now_s = time.monotonic()
        earlier_s = self._deaths_s.get(death.name, [])
        wait_s = restart_policy.wait_s(self._plan.restart[plan.role], death.code, earlier_s, now_s)
        if recovery := self._recoveries.pop(death.name, None):
            recovery.cancel()
        self._dead.add(death.name)
        if wait_s is not None:
            self._deaths_s[death.name] = [*restart_policy.within_an_hour(earlier_s, now_s), now_s]
            then = f"starting {death.name} again" + (f" in {wait_s:.0f} s" if wait_s else "")
            self._recoveries[death.name] = asyncio.create_task(self._recover(plan, wait_s))
        else:
            self._left_dead.add(death.name)
            if self._left_dead.issuperset(
                each.name for each in self._plan.own if each.role == plan.role
            ):
                raise self._error(death)
            then = f"leaving {death.name} dead: {plan.role}.restart says so"
        self._reporter.warning(f"{self._error(death)}\n  {then}")
        self.say(death.name, f"{death.how_it_ended}; {then}")

    def _error(self, death: Death) -> PdError:
        return death.error(self._plan.name, self._plan.recipe_name)

    async def _recover(self, process: ProcessPlan, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        await self.start(process)
        async with httpx.AsyncClient() as client:
            await readiness.wait_until_healthy((process,), self._reporter, self._doing, client)
        self._unready.discard(process.name)
        self._read_transports((process,))
        self.say(process.name, "answers again")

    def _read_transports(self, processes: Iterable[ProcessPlan]) -> None:
        """Note and tell by what engines that are up move KV, and warn where it is not as asked."""
        for engine in processes:
            if engine.role == "router":
                continue
            log = self._backend.log(engine.name)
            seen = transport.read(log, self._born_byte.get(engine.name, 0))
            self._transports[engine.name] = seen
            self._reporter.status(f"{engine.name} moves KV by NIXL over: {seen}")
            for doubt in transport.doubts(engine, seen):
                self._reporter.warning(doubt)

    async def _do(self, wish: Wish, reporter: Reporter, is_wanted: Callable[[], bool]) -> None:
        """Restart what somebody wishes to be restarted."""
        if self._one_roll.locked():
            raise UsageError(
                f"a restart of {self._plan.name} is under way",
                next_step=f"wait for its end: pdlaunch status {self._plan.name}",
            )
        async with self._one_roll:
            planned = {each.name: each for each in (wish.plan or self._plan).own}
            for name in wish.processes:
                if not is_wanted():
                    reporter.warning(f"nobody waits any more: {name} is left as it is")
                    return
                self._in_hand.add(name)
                try:
                    # What waits to be started again is started here.
                    if recovery := self._recoveries.pop(name, None):
                        recovery.cancel()
                        await asyncio.gather(recovery, return_exceptions=True)
                    await rolling.restart(self._plan, planned[name], self, reporter)
                finally:
                    self._in_hand.discard(name)
            if wish.plan is not None:
                self._plan = wish.plan
                self._record("ready")

    def say(self, process: str, what: str) -> None:
        """Note what happens to a process, for whoever asks for its status."""
        self._events.append(Event(at_unix_s=time.time(), process=process, what=what))
        self._record("ready")

    async def end(self, process: str) -> None:
        """End a process; that is no death."""
        await _to_its_end(self._backend.end, process, self._plan.stop_s)

    async def start(self, process: ProcessPlan) -> None:
        """Start a process that has ended."""
        self._transports.pop(process.name, None)
        log = self._backend.log(process.name)
        self._born_byte[process.name] = log.stat().st_size if log.exists() else 0
        self._unready.add(process.name)
        await _to_its_end(self._backend.restart, process)
        self._dead.discard(process.name)
        self._left_dead.discard(process.name)
        self._record("ready")

    def keep(self, process: ProcessPlan) -> None:
        """A process runs by this plan from now on."""
        now = (process if each.name == process.name else each for each in self._plan.processes)
        self._plan = self._plan.model_copy(update={"processes": tuple(now)})
        self._record("ready")

    async def healthy(self, process: ProcessPlan) -> None:
        """Return when a process that was started answers.

        Raises:
            PdError: it died, or takes too long.
        """
        async with httpx.AsyncClient() as client:
            waiting = asyncio.create_task(
                readiness.wait_until_healthy((process,), self._reporter, self._doing, client)
            )
            try:
                async with asyncio.timeout(self._plan.ready_s):
                    while not waiting.done():
                        for death in self._backend.deaths():
                            if death.name == process.name:
                                raise self._error(death)
                        await asyncio.wait((waiting,), timeout=_WATCH_EVERY_S)
                waiting.result()
                self._unready.discard(process.name)
                self._read_transports((process,))
            except TimeoutError:
                raise PdError(
                    f"{process.name} is not ready after {self._plan.ready_s:.0f} s",
                    where=str(self._backend.log(process.name)),
                    next_step="if it was still loading, raise timeouts.ready_s",
                ) from None
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    def _process(self, name: str) -> ProcessPlan:
        (found,) = (process for process in self._plan.processes if process.name == name)
        return found

    def _record(self, state: State) -> None:
        deployments.write(
            Record(
                plan=self._plan,
                state=state,
                supervisor_pid=os.getpid(),
                supervisor_born_s=leftovers.born_s(psutil.Process()),
                started_unix_s=self._started_unix_s,
                pids=dict(self._backend.pids),
                restarts={name: len(times) for name, times in self._deaths_s.items()},
                transports=dict(self._transports),
                events=tuple(self._events),
            )
        )


async def _to_its_end(work: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Run it in a thread, which nobody can interrupt: nothing may start behind a stop's back."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
