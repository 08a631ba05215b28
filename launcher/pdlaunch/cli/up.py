"""`pdlaunch up`: bring a deployment up."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import get_args

import click

from pdlaunch import control, deployments, detached, preparation, recipe_loader
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.control import Wish
from pdlaunch.deployments import Record
from pdlaunch.differences import differences
from pdlaunch.doctor import examination
from pdlaunch.errors import Interrupted, UsageError
from pdlaunch.plan import DeploymentPlan, ProcessRole
from pdlaunch.recipe import BACKENDS
from pdlaunch.render import shell
from pdlaunch.supervisor import SIGNALS, Signals, supervise


@click.command(
    epilog=parameters.examples(
        "pdlaunch up smollm2-135m-cpu",
        "pdlaunch up tiny-qwen3-cpu --set transfer.mode=pull --detach",
        "pdlaunch up tiny-qwen3-2p2d-cpu --set decode.kv_cache_gib=2 --apply",
        "pdlaunch up qwen3-32b-p5en --dry-run",
        "pdlaunch up qwen3-0.6b-gpu --backend docker --set docker.image=mine:1",
        "pdlaunch up qwen3-32b-p5en --only decode --set decode.host=10.0.0.12",
    )
)
@parameters.recipe
@parameters.overrides
@click.option("--name", help="Name of the deployment. [default: the recipe's]")
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help="Run processes, or containers. [default: the recipe's]",
)
@click.option(
    "--only",
    type=click.Choice(get_args(ProcessRole)),
    help="Start this role alone: a deployment over several hosts has one command on each.",
)
@click.option(
    "--trace",
    "is_traced",
    is_flag=True,
    help="Have both engines stamp each transfer; `pdlaunch ask` then draws its request.",
)
@click.option("--detach", is_flag=True, help="Return when it is ready, and leave it running.")
@click.option(
    "--apply",
    "is_applied",
    is_flag=True,
    help="Where it runs already by another recipe: restart what that changes, one by one.",
)
@click.option("--dry-run", is_flag=True, help="Print each host's commands; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run or --detach: as JSON.")
def up(
    *,
    recipe: str,
    overrides: tuple[str, ...],
    name: str | None,
    backend: str | None,
    only: ProcessRole | None,
    is_traced: bool,
    detach: bool,
    is_applied: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Build the engine if needed, start prefill, decode and router, wait until they answer.

    RECIPE is a file or the name of a shipped recipe. Stays in the foreground and takes everything
    down at Ctrl-C, unless told to --detach.

    Where it runs already: says so, or what RECIPE would change and whether --apply can change it
    while it runs. Restarts then go as with `pdlaunch restart`.
    """
    terminal = Terminal()
    if as_json and not (dry_run or detach):
        raise UsageError("--json goes with --dry-run or --detach", where="--json")
    if name is not None:
        overrides = (*overrides, f"name={json.dumps(name)}")
    if backend is not None:
        overrides = (*overrides, f"backend={backend}")
    with interruptible():
        loaded = recipe_loader.load(recipe_loader.find(recipe), overrides)
        plan = preparation.planned(loaded, only, is_traced=is_traced)
        if dry_run:
            terminal.data(plan.model_dump_json(indent=2) if as_json else shell.commands(plan))
            return
        running = deployments.read(plan.name)
        if running is not None and running.supervisor() is not None:
            wanted = preparation.planned(loaded, only, is_traced=is_traced, running=running.plan)
            _up_again(terminal, running, wanted, is_applied=is_applied)
            if as_json:
                _tell_json(terminal, running.plan)
            return
        preparation.check_startable(plan)
        for note in plan.notes:
            terminal.warning(note)
        for finding in examination.before_start(loaded.recipe, plan):
            terminal.warning(f"{finding.evidence}: {finding.remedy}")
        preparation.provide(loaded.recipe, plan, terminal)
    terminal.status(f"starting {plan.name}: {plan.served_name}, KV by {plan.mode}")
    signals = Signals()
    with signals.caught():
        if detach:
            detached.start(plan, terminal, signals)
            _announce(terminal, plan, f"pdlaunch down {plan.name}")
        else:
            supervise(plan, terminal, signals, lambda: _announce(terminal, plan, "Ctrl-C"))
    if as_json:
        _tell_json(terminal, plan)


def _tell_json(terminal: Terminal, plan: DeploymentPlan) -> None:
    terminal.data(json.dumps({"name": plan.name, "url": plan.router_url}))


def _up_again(
    terminal: Terminal, running: Record, wanted: DeploymentPlan, *, is_applied: bool
) -> None:
    name = running.name
    if running.state != "ready":
        raise deployments.already_up(name)
    found = differences(running.plan, wanted)
    if not found:
        terminal.success(f"{name} runs already by this recipe: {wanted.router_url}/v1")
        return
    for change in found.changes:
        old, new = json.dumps(change.old), json.dumps(change.new)
        note = "" if change.is_applicable else " (not while it runs)"
        terminal.status(f"{change.key}: {old} -> {new}{note}")
    if found.engines is not None:
        terminal.status("engine: {} -> {} (not while it runs)".format(*found.engines))
    terminal.status(f"it would restart: {', '.join(found.processes) or 'nothing'}")
    anew = f"pdlaunch down {name}, then the same command again"
    if found.in_the_way:
        raise UsageError(
            f"{name} runs already, and this cannot be changed while it runs: "
            f"{', '.join(found.in_the_way)}",
            next_step=f"{anew}; or start another beside it with --name",
        )
    if not is_applied:
        raise UsageError(
            f"{name} runs already, by another recipe",
            next_step=f"the same command with --apply changes it while it runs; or {anew}",
        )
    control.ask(name, Wish(processes=found.processes, plan=wanted), terminal)
    terminal.success(f"{name} runs by this recipe now: {wanted.router_url}/v1")


def _announce(terminal: Terminal, plan: DeploymentPlan, end: str) -> None:
    if plan.only not in (None, "router"):
        urls = ", ".join(process.url for process in plan.own)
        terminal.success(f"{plan.name} is up: {urls}; {end} takes it down")
        return
    terminal.success(f"{plan.name} is ready: {plan.router_url}/v1, model {plan.served_name}")
    terminal.status(
        f'try: pdlaunch ask {plan.name} "What is the capital of France?"; {end} takes it down'
    )


class _Stopped(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """While only builds and checks run: any signal ends them where they are."""
    arrived: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
        # Python drops what is raised while it destroys something.
        if arrived:
            raise Interrupted(arrived[0])
    except _Stopped as stopped:
        raise Interrupted(stopped.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
