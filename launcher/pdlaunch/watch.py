"""Looks at deployments again and again: how they are, and what their engines did meanwhile.

Shows nothing, and holds no opinion on what is gone: it may come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from pdlaunch import deployments, status
from pdlaunch.rates import WINDOW_S, History, Rates, counters
from pdlaunch.status import DeploymentStatus

# An engine that is stuck must not keep the others from being seen.
_ANSWER_WITHIN_S = 2.0


@dataclass(frozen=True)
class View:
    """One deployment at one moment of being watched."""

    name: str
    # None: it is down.
    status: DeploymentStatus | None
    # By engine, of those that have answered twice.
    rates: Mapping[str, Rates]


class Watch:
    """What was seen of some deployments in the last seconds."""

    def __init__(
        self, names: Sequence[str], client: httpx.AsyncClient, window_s: float = WINDOW_S
    ) -> None:
        self._names = tuple(names)
        self._client = client
        self._window_s = window_s
        # By launch: another one of the same name has other engines.
        self._histories: dict[str, History] = {}

    async def look(self) -> tuple[View, ...]:
        """All of them now, at once."""
        return tuple(await asyncio.gather(*(self._look(name) for name in self._names)))

    async def _look(self, name: str) -> View:
        record = deployments.find(name)
        if record is None:
            return View(name, None, {})
        plan = record.plan
        seen = await status.look(plan, self._client, _ANSWER_WITHIN_S)
        history = self._histories.setdefault(plan.launch_id, History(self._window_s))
        rates = {
            engine.name: history.add(
                engine.name,
                counters(plan.mode, seen.metrics[engine.name], seen.at_s[engine.name]),
            )
            for engine in plan.engines
        }
        return View(
            name,
            status.summary(record, seen),
            {engine: each for engine, each in rates.items() if each is not None},
        )
