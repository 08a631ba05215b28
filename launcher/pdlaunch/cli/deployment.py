"""`pdlaunch down`, `status`, `logs`, `restart`: the rest of a deployment's life."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Never, get_args

import click
import httpx

from pdlaunch import control, deployments
from pdlaunch.cli import parameters, showing
from pdlaunch.console import Terminal
from pdlaunch.control import Wish
from pdlaunch.errors import Interrupted, PdError, UsageError
from pdlaunch.plan import ProcessRole
from pdlaunch.redaction import redact
from pdlaunch.status import DeploymentStatus, gather
from pdlaunch.supervisor import SIGNALS
from pdlaunch.watch import Watch

_FOLLOW_EVERY_S = 0.2
_WATCH_EVERY_S = 1.0


@click.command(
    epilog=parameters.examples(
        "pdlaunch down", "pdlaunch down smollm2-135m-cpu", "pdlaunch down --all"
    )
)
@parameters.optional_running
@click.option("--all", "everything", is_flag=True, help="Every deployment of this user here.")
def down(name: str | None, everything: bool) -> None:
    """Take a deployment down, whatever state it is in. Harmless when nothing is up."""
    terminal = Terminal()
    up = deployments.names()
    if not everything:
        wanted = name if name is not None else deployments.the_only()
        up = [each for each in up if each == wanted]
    if not up:
        terminal.status(f"{name or 'nothing'} is {'not ' if name else ''}up")
    code = 0
    for each in up:
        terminal.status(f"taking {each} down")
        try:
            deployments.take_down(each, terminal)
        except PdError as error:
            # What is left over of one must not keep the others up.
            terminal.error(error)
            code = error.exit_code
        else:
            terminal.success(f"{each} is down")
    if code:
        sys.exit(code)


@click.command(
    epilog=parameters.examples(
        "pdlaunch status",
        "pdlaunch status smollm2-135m-cpu --json",
        "pdlaunch status smollm2-135m-cpu --watch",
        "pdlaunch status --watch --interval 5 > load.txt",
    )
)
@parameters.optional_running
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option(
    "--watch",
    "is_watched",
    is_flag=True,
    help="One screen that goes on until Ctrl-C; a line for each process where it is no terminal.",
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help=f"With --watch: time between two looks. [default: {_WATCH_EVERY_S:g}]",
)
def status(name: str | None, as_json: bool, is_watched: bool, interval_s: float | None) -> None:
    """Show how a deployment is doing, how much KV moved by which mode, and what failed.

    Exits with 1 where a deployment has crashed, a process of one that is ready does not answer, or
    a record cannot be read.
    """
    terminal = Terminal()
    if as_json and is_watched:
        raise UsageError("--json does not go with --watch", where="--json")
    if interval_s is not None and not is_watched:
        raise UsageError("--interval goes with --watch", where="--interval")
    records, unreadable = (
        ([deployments.need(name)], []) if name is not None else deployments.all_records()
    )
    for error in unreadable:
        terminal.warning(str(error))
    if is_watched and records:
        names = [record.name for record in records]
        asyncio.run(_watch(terminal, names, interval_s or _WATCH_EVERY_S))
    found = [asyncio.run(gather(record)) for record in records]
    if as_json:
        data = [
            {**asdict(each), "events": [event.model_dump() for event in each.events]}
            for each in found
        ]
        terminal.data(json.dumps(data[0] if name is not None else data, indent=2))
    elif found or unreadable:
        _report(terminal, found)
    else:
        terminal.status("nothing is up")
    for each in found:
        for advice in showing.advice(each):
            terminal.warning(advice)
    if unreadable or any(each.is_amiss for each in found):
        sys.exit(1)


def _report(terminal: Terminal, found: Iterable[DeploymentStatus]) -> None:
    for each in found:
        for line in showing.report(each):
            terminal.data(line)
        for doubt in showing.doubts(each):
            terminal.warning(doubt)


async def _watch(terminal: Terminal, names: Sequence[str], interval_s: float) -> None:
    """Look and show until a signal comes, which leaves the terminal as it was."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[int] = asyncio.Queue()
    for number in SIGNALS:
        loop.add_signal_handler(number, arrived.put_nowait, number)
    stop = asyncio.create_task(arrived.get())
    screen = asyncio.create_task(_show(terminal, names, interval_s))
    await asyncio.wait((stop, screen), return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        stop.cancel()
        screen.result()
    screen.cancel()
    await asyncio.gather(screen, return_exceptions=True)
    raise Interrupted(stop.result())


async def _show(terminal: Terminal, names: Sequence[str], interval_s: float) -> Never:
    with terminal.live() as show:
        async with httpx.AsyncClient() as client:
            watch = Watch(names, client)
            while True:
                next_s = time.monotonic() + interval_s
                views = await watch.look()
                if show is not None:
                    show(showing.screen(views))
                else:
                    for line in showing.watch_lines(views, time.strftime("%FT%T")):
                        terminal.data(line)
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))


@click.command(
    epilog=parameters.examples(
        "pdlaunch logs",
        "pdlaunch logs smollm2-135m-cpu -f",
        "pdlaunch logs smollm2-135m-cpu decode-0 -n 20",
    )
)
@parameters.optional_logged
@parameters.optional_log
@click.option("-f", "--follow", is_flag=True, help="Go on as the logs grow.")
@click.option("-n", "--lines", type=click.IntRange(min=0), help="Only the last lines of each.")
def logs(name: str | None, process: str | None, follow: bool, lines: int | None) -> None:
    """Print the logs of a deployment, or of one of its processes.

    They stay when it is down. Where nothing is up and no NAME is given: of the one that ran last.
    """
    terminal = Terminal()
    folder = _log_dir(terminal, name)
    paths = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if process is not None:
        if process not in paths:
            raise UsageError(
                f"no log of a process {process}",
                where=str(folder),
                next_step=f"one of: {', '.join(paths) or 'none yet'}",
            )
        paths = {process: paths[process]}
    _print_logs(terminal, paths, follow, lines)


@click.command(
    epilog=parameters.examples(
        "pdlaunch restart tiny-qwen3-2p2d-cpu",
        "pdlaunch restart tiny-qwen3-2p2d-cpu --role decode",
        "pdlaunch restart tiny-qwen3-2p2d-cpu --process prefill-1",
    )
)
@parameters.optional_running
@click.option("--role", type=click.Choice(get_args(ProcessRole)), help="All processes of a role.")
@click.option("--process", metavar="PROCESS", help="One process, such as decode-1.")
def restart(name: str | None, role: ProcessRole | None, process: str | None) -> None:
    """Restart the processes of a deployment, one after the other, while the others serve.

    Where a role has replicas, no request is lost: the router sends nothing more to the engine that
    goes, its requests end, it restarts, meets its peers, and serves again before the next one goes.
    Requests that need the only process of a role fail until it is back.

    Ctrl-C leaves the rest as it is; the restart under way is finished.
    """
    terminal = Terminal()
    if role is not None and process is not None:
        raise UsageError("--role and --process exclude each other", where="--process")
    record = deployments.need(name)
    own = record.plan.own
    chosen = [
        each.name for each in own if role in (None, each.role) and process in (None, each.name)
    ]
    if not chosen:
        raise UsageError(
            f"{record.name} has no {process or role} here",
            where="--process" if process else "--role",
            next_step=f"one of: {', '.join(each.name for each in own)}",
        )
    control.ask(record.name, Wish(processes=tuple(chosen)), terminal)
    terminal.success(f"{', '.join(chosen)} restarted")


def _log_dir(terminal: Terminal, name: str | None) -> Path:
    # Logs outlive the deployment: after a failed start they are what one wants to read.
    chosen = name if name is not None else deployments.the_only()
    if chosen is None and (chosen := deployments.last_logged()) is not None:
        terminal.status(f"nothing is up; these are the logs of {chosen}, which ran last")
    if chosen is not None:
        folder = deployments.log_dir(Path(chosen).name)
        if folder.is_dir():
            return folder
    return deployments.log_dir(deployments.need(name).name)


def _print_logs(
    terminal: Terminal, paths: Mapping[str, Path], follow: bool, lines: int | None
) -> None:
    prefixes = {name: f"{name} | " if len(paths) > 1 else "" for name in paths}
    files: dict[str, BinaryIO] = {name: path.open("rb") for name, path in paths.items()}
    try:
        for name, file in files.items():
            text = file.read().splitlines()
            for line in text if lines is None else text[len(text) - min(lines, len(text)) :]:
                _print_line(terminal, prefixes[name], line)
        while follow:
            grown = False
            for name, file in files.items():
                for line in file.read().splitlines():
                    grown = True
                    _print_line(terminal, prefixes[name], line)
            if not grown:
                time.sleep(_FOLLOW_EVERY_S)
    finally:
        for file in files.values():
            file.close()


def _print_line(terminal: Terminal, prefix: str, line: bytes) -> None:
    terminal.data(prefix + redact(line.decode("utf-8", "replace")))
