"""`pdlaunch down`, `status`, `logs`, `restart`: the rest of a deployment's life."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, get_args

import click

from pdlaunch import control, deployments
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.control import Wish
from pdlaunch.engine_metrics import Failures
from pdlaunch.errors import UsageError
from pdlaunch.plan import ProcessRole
from pdlaunch.redaction import redact
from pdlaunch.status import DeploymentStatus, ProcessStatus, gather

_FOLLOW_EVERY_S = 0.2
_EVENTS_SHOWN = 10


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
    if everything:
        records = deployments.all_records()
    else:
        record = deployments.find(name) if name is not None else deployments.select(None)
        records = [] if record is None else [record]
    if not records:
        terminal.status(f"{name or 'nothing'} is {'not ' if name else ''}up")
    for record in records:
        terminal.status(f"taking {record.name} down")
        deployments.take_down(record, terminal)
        terminal.success(f"{record.name} is down")


@click.command(
    epilog=parameters.examples("pdlaunch status", "pdlaunch status smollm2-135m-cpu --json")
)
@parameters.optional_running
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def status(name: str | None, as_json: bool) -> None:
    """Show how a deployment is doing, how much KV moved by which mode, and what failed."""
    terminal = Terminal()
    records = [deployments.need(name)] if name is not None else deployments.all_records()
    found = [asyncio.run(gather(record)) for record in records]
    if as_json:
        data = [
            {**asdict(each), "events": [event.model_dump() for event in each.events]}
            for each in found
        ]
        terminal.data(json.dumps(data[0] if name is not None else data, indent=2))
        return
    if not found:
        terminal.status("nothing is up")
    for each in found:
        _show(terminal, each)


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
    """Print the logs of a deployment, or of one of its processes."""
    terminal = Terminal()
    folder = _log_dir(name)
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


def _log_dir(name: str | None) -> Path:
    # Logs outlive the deployment: after a failed start they are what one wants to read.
    if name is not None and deployments.find(name) is None:
        folder = deployments.log_dir(Path(name).name)
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


def _show(terminal: Terminal, status: DeploymentStatus) -> None:
    terminal.data(
        f"{status.name}: {status.state}, {status.url}/v1, model {status.model}, KV by "
        f"{status.transfer_mode}, vLLM {status.engine_version}, up {status.up_s:.0f} s"
    )
    runs_as = "container" if any(process.container for process in status.processes) else "pid"
    rows = [("process", runs_as, "restarts", "health", "KV cache", "running", "waiting", "address")]
    for process in status.processes:
        is_engine = process.role != "router"
        rows.append(
            (
                process.name,
                process.container or str(process.pid or "-"),
                str(process.restarts),
                "ok" if process.is_healthy else "no answer",
                f"{process.kv_cache_usage:.1%}" if is_engine else "",
                str(process.requests_running) if is_engine else "",
                str(process.requests_waiting) if is_engine else "",
                process.url,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminal.data("  " + "  ".join(cells).rstrip())
    kv = status.kv
    moved = f"KV moved: {kv.bytes_moved / 2**20:.2f} MiB in {kv.transfers_completed:.0f} transfers"
    if status.transfer_mode == "push":
        moved += (
            f" ({kv.bytes_during_prefill / 2**20:.2f} MiB during prefill, "
            f"{kv.bytes_after_prefill / 2**20:.2f} MiB after)"
        )
    terminal.data(
        f"{moved}; {kv.transfers_failed:.0f} failed, {kv.transfers_cancelled:.0f} cancelled"
    )
    for line in failure_lines(status.processes):
        terminal.data(line)
    if status.events:
        terminal.data("what happened, the last first:")
    for event in reversed(status.events[-_EVENTS_SHOWN:]):
        ago_s = time.time() - event.at_unix_s
        terminal.data(f"  {ago_s:.0f} s ago  {event.process}: {event.what}")


def failure_lines(processes: Iterable[ProcessStatus]) -> list[str]:
    """What has failed since each engine's start, an engine a line."""
    lines = []
    for process in processes:
        if process.role == "router":
            continue
        if process.failures is None:
            lines.append(f"  {process.name}: not known, it does not answer")
        elif process.failures:
            lines.append(f"  {process.name}: {_failure_text(process.failures)}")
    return ["failures since start:", *lines] if lines else ["no failed transfers"]


def _failure_text(failures: Failures) -> str:
    parts = []
    if failures.transfers:
        parts.append(_counted("failed transfer", failures.transfers))
    if failures.liveness:
        parts.append(f"{failures.liveness} lost to a silent or dead peer")
    if failures.hangs:
        parts.append(f"{failures.hangs} given up while prefill was silent")
    if failures.dropped_messages:
        parts.append(_counted("dropped message", failures.dropped_messages))
    return "; ".join(parts)


def _counted(what: str, by_reason: Mapping[str, int]) -> str:
    total = sum(by_reason.values())
    ordered = sorted(by_reason.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{reason} {count}" for reason, count in ordered)
    return f"{total} {what}{'' if total == 1 else 's'} ({reasons})"
