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

import httpx
import psutil

from pdlaunch import backend, deployments, readiness, trace, transport, warm_start
from pdlaunch.console import Reporter
from pdlaunch.death import Death
from pdlaunch.deployments import Record, State
from pdlaunch.errors import Interrupted, PdError
from pdlaunch.guardian import Guardian
from pdlaunch.logs import doing
from pdlaunch.plan import DeploymentPlan, ProcessPlan

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCH_EVERY_S = 0.1
_DEATH_EXPLAINS_S = 5.0
_HOUR_S = 3600.0


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
        self._restarts_s: dict[str, list[float]] = {}
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        self._transports: dict[str, transport.Transport] = {}
        # A log goes on after a restart: where in it a process's present life begins.
        self._born_byte: dict[str, int] = {}

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
            survivors = await self._backend.stop(
                self._plan.stop_s, lambda: self._signals.pop() is not None
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
                await self._answer(death)
            await asyncio.sleep(_WATCH_EVERY_S)

    async def _answer(self, death: Death) -> None:
        """Start a process again that died in a running deployment; what dies too often ends it."""
        now_s = time.monotonic()
        recent = [at for at in self._restarts_s.get(death.name, ()) if now_s - at < _HOUR_S]
        if not self._is_ready or len(recent) >= self._plan.restarts_per_hour:
            raise death.error()
        self._restarts_s[death.name] = [*recent, now_s]
        if death.name in self._recoveries:
            self._recoveries.pop(death.name).cancel()
        self._reporter.warning(f"{death.error()}\n  starting {death.name} again")
        self._transports.pop(death.name, None)
        self._born_byte[death.name] = death.log.stat().st_size if death.log.exists() else 0
        await asyncio.to_thread(self._backend.restart, death.name)
        self._record("ready")
        again = [process for process in self._plan.own if process.name == death.name]
        self._recoveries[death.name] = asyncio.create_task(self._recover(again))

    async def _recover(self, processes: Sequence[ProcessPlan]) -> None:
        async with httpx.AsyncClient() as client:
            await readiness.wait_until_healthy(processes, self._reporter, self._doing, client)
        self._read_transports(processes)
        self._record("ready")

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

    def _record(self, state: State) -> None:
        deployments.write(
            Record(
                plan=self._plan,
                state=state,
                supervisor_pid=os.getpid(),
                supervisor_created_s=psutil.Process().create_time(),
                started_unix_s=self._started_unix_s,
                pids=dict(self._backend.pids),
                restarts={name: len(times) for name, times in self._restarts_s.items()},
                transports=dict(self._transports),
            )
        )
