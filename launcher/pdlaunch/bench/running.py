"""A deployment that is up while a block runs, brought up and taken down as `pdlaunch up` does it.

The supervisor runs in a thread of this process: where the process is killed, its guardian takes the
engines down.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pdlaunch.console import Reporter
from pdlaunch.errors import Interrupted, PdError
from pdlaunch.plan import DeploymentPlan, RestartPolicy
from pdlaunch.supervisor import Signals, supervise

_T = TypeVar("_T")
_LOOK_EVERY_S = 0.1


class Running:
    """A deployment under a supervisor of its own."""

    def __init__(self, plan: DeploymentPlan, reporter: Reporter, interrupts: Signals) -> None:
        # What died once measures nothing: no restarts.
        never = {role: RestartPolicy(policy="never") for role in plan.restart}
        self.plan = plan.model_copy(update={"restart": never})
        self._reporter = reporter
        self._interrupts = interrupts
        self._signals = Signals()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._supervise, name=plan.name)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine; raise what ends the deployment, or a signal, as soon as it comes."""

        async def watched() -> _T:
            task = asyncio.create_task(work)
            try:
                while not task.done():
                    await asyncio.wait((task,), timeout=_LOOK_EVERY_S)
                    self._check()
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
            return task.result()

        return asyncio.run(watched())

    def start(self) -> None:
        self._thread.start()
        while not self._ready.wait(_LOOK_EVERY_S):
            self._check()

    def stop(self) -> None:
        if self._thread.ident is None:
            return
        self._signals.put(signal.SIGTERM)
        while self._thread.is_alive():
            self._thread.join(_LOOK_EVERY_S)
            # Whoever is impatient is so with the engines.
            if (number := self._interrupts.pop()) is not None:
                self._signals.put(number)

    def _check(self) -> None:
        if (number := self._interrupts.pop()) is not None:
            raise Interrupted(number)
        if self._failure is not None:
            raise self._failure
        if not self._thread.is_alive():
            raise PdError(
                f"{self.plan.name} has ended", next_step=f"pdlaunch logs {self.plan.name}"
            )

    def _supervise(self) -> None:
        try:
            supervise(self.plan, self._reporter, self._signals, self._ready.set)
        except BaseException as error:
            self._failure = error


@contextmanager
def running(plan: DeploymentPlan, reporter: Reporter, interrupts: Signals) -> Iterator[Running]:
    """Bring a deployment up and, whatever happens, take it down."""
    deployment = Running(plan, reporter, interrupts)
    try:
        deployment.start()
        yield deployment
    finally:
        deployment.stop()
