"""Restarts a process of a running deployment, without losing a request where another can stand in.

Decides the order of steps; whoever owns the processes takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import httpx

from pdlaunch import draining, warm_start
from pdlaunch.console import Reporter
from pdlaunch.errors import PdError, UsageError
from pdlaunch.plan import DeploymentPlan, ProcessPlan

# The router looks every second and believes the third failure, and the second success.
_ROUTED_WITHIN_S = 30.0


class Hands(Protocol):
    """What a roll needs done. A name is that of a process of the plan."""

    def say(self, process: str, what: str) -> None:
        """Note what happens to a process, for whoever asks for its status."""

    async def end(self, process: str) -> None:
        """End it; that is no death."""

    async def start(self, process: ProcessPlan) -> None:
        """Start what has ended, by this plan."""

    def keep(self, process: ProcessPlan) -> None:
        """It runs by this plan from now on."""

    async def healthy(self, process: ProcessPlan) -> None:
        """Return when it answers.

        Raises:
            PdError: it died, or takes too long.
        """


async def restart(
    plan: DeploymentPlan, process: ProcessPlan, hands: Hands, reporter: Reporter
) -> None:
    """Restart one process by what is planned for it here, which may not be what it runs by.

    Args:
        plan: the deployment as it runs.

    Raises:
        PdError: it did not come back; or its only stand-in does not serve, and it was left alone.
    """
    async with httpx.AsyncClient() as client:
        await _restart(plan, process, hands, reporter, client)


async def _restart(
    plan: DeploymentPlan,
    process: ProcessPlan,
    hands: Hands,
    reporter: Reporter,
    client: httpx.AsyncClient,
) -> None:
    (running,) = (each for each in plan.processes if each.name == process.name)

    def say(what: str) -> None:
        hands.say(process.name, what)
        reporter.status(f"{process.name}: {what}")

    is_drained = await _take_out(plan, running, say, reporter, client)
    say("stopping")
    await hands.end(process.name)
    say("starting")
    comes_back_drained = is_drained and draining.is_drainable(process)
    try:
        await hands.start(draining.out_of_service(process) if comes_back_drained else process)
        await hands.healthy(process)
        if process.role != "router" and plan.only is None:
            await warm_start.introduce(plan, client, reporter, only=process.name)
    except PdError:
        if process == running:
            say("did not come back into service")
            raise
        say("did not come back by the new plan; starting it by the old one")
        await hands.end(process.name)
        await hands.start(running)
        await hands.healthy(running)
        raise
    hands.keep(process)
    if comes_back_drained:
        await draining.serve(client, process)
    if process.role != "router" and not await draining.wait_until_routed(
        client, plan, process, routed=True, within_s=_ROUTED_WITHIN_S
    ):
        reporter.warning(f"the router does not say that it sends to {process.name} again")
    say("back in service")


async def _take_out(
    plan: DeploymentPlan,
    process: ProcessPlan,
    say: Callable[[str], None],
    reporter: Reporter,
    client: httpx.AsyncClient,
) -> bool:
    """Have the router send nothing more to it, and wait until it is idle; whether that was so."""
    if not draining.is_drainable(process):
        why = (
            f"it is the only {process.role}"
            if not draining.has_stand_in(plan, process)
            else "what it runs as cannot be taken out of service first"
        )
        reporter.warning(f"requests fail until {process.name} is back: {why}")
        return False
    known = await draining.workers(client, plan)
    others = [each.name for each in plan.of_role(process.role) if each.name != process.name]
    own = known.get(process.name)
    if own is not None and not own.is_healthy:
        # Nobody is sent there as it is.
        return await draining.drain(client, process)
    if not any(known[name].is_healthy for name in others if name in known):
        raise UsageError(
            f"{process.name} is the only {process.role} that serves now",
            where=f"the router's workers: {', '.join(others)} are not healthy",
            next_step=f"see why: pdlaunch status {plan.name}; or name one of them with --process",
        )
    say("taking it out of service")
    if not await draining.drain(client, process):
        return False
    if not await draining.wait_until_routed(
        client, plan, process, routed=False, within_s=_ROUTED_WITHIN_S
    ):
        await draining.serve(client, process)
        raise PdError(
            f"the router goes on sending to {process.name}",
            where=f"{plan.router_url}/workers",
            next_step=f"read its log: pdlaunch logs {plan.name} router",
        )
    say("waiting for its requests to end")
    left = await draining.wait_until_idle(client, plan, process, plan.drain_s)
    if left is not None:
        reporter.warning(
            f"{process.name} is not idle after timeouts.drain_s, {plan.drain_s:g} s, and is "
            f"stopped all the same: {left}"
        )
    return True
