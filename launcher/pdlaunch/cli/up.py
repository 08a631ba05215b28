"""`pdlaunch up`: bring a deployment up."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import get_args

import click

from pdlaunch import detached, preparation, recipe_loader
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
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
    dry_run: bool,
    as_json: bool,
) -> None:
    """Build the engine if needed, start prefill, decode and router, wait until they answer.

    RECIPE is a file or the name of a shipped recipe. Stays in the foreground and takes everything
    down at Ctrl-C, unless told to --detach.
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
        terminal.data(json.dumps({"name": plan.name, "url": plan.router_url}))


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

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    except _Stopped as stopped:
        raise Interrupted(stopped.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
