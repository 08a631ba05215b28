"""How a deployment is shown: a report, a line at each look, one screen that changes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdlaunch.deployments import Event
from pdlaunch.engine_metrics import Failures
from pdlaunch.rates import Rates
from pdlaunch.status import DeploymentStatus, ProcessStatus
from pdlaunch.watch import View

_MIB = 2**20
_EVENTS_SHOWN = 10
_UNKNOWN = "-"
# Headings of two lines, so that it all fits in a terminal's usual width.
_COLUMNS = (
    "process",
    "health",
    "KV\ncache",
    "run-\nning",
    "wait-\ning",
    "prompt\ntok/s",
    "output\ntok/s",
    "TTFT\nms",
    "p90\nms",
    "KV\nMiB/s",
    "trans-\nfers/s",
)
# Of them, those that come first and are no figures.
_WORDS = 2


def report(status: DeploymentStatus) -> Iterator[str]:
    """All that is known of a deployment, line by line."""
    yield heading(status)
    yield from _processes(status)
    kv = status.kv
    moved = f"KV moved: {kv.bytes_moved / _MIB:.2f} MiB in {kv.transfers_completed:.0f} transfers"
    if status.transfer_mode == "push":
        moved += (
            f" ({kv.bytes_during_prefill / _MIB:.2f} MiB during prefill, "
            f"{kv.bytes_after_prefill / _MIB:.2f} MiB after)"
        )
    yield f"{moved}; {kv.transfers_failed:.0f} failed, {kv.transfers_cancelled:.0f} cancelled"
    yield from transport_lines(status.processes)
    yield from failure_lines(status.processes)
    yield from _event_lines(status.events, time.time())


def heading(status: DeploymentStatus) -> str:
    return (
        f"{status.name}: {status.state}, {status.url}/v1, model {status.model}, KV by "
        f"{status.transfer_mode}, vLLM {status.engine_version}, up {status.up_s:.0f} s"
    )


def transport_lines(processes: Iterable[ProcessStatus]) -> list[str]:
    """By what each engine moves KV, as it says itself, and how much it moved."""
    lines = ["NIXL's backends, as the engines say:"]
    for process in processes:
        if process.role == "router":
            continue
        # Nothing was started here, or it has not been ready since.
        said = process.transport or "not known"
        # The other side of a transfer counts nothing.
        moved = f", {process.nixl_bytes / _MIB:.2f} MiB moved" if process.nixl_bytes else ""
        lines.append(f"  {process.name}: {said}{moved}")
    return lines


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


def _event_lines(events: Sequence[Event], now_unix_s: float) -> Iterator[str]:
    """What happened to processes since the start, the last first."""
    if events:
        yield "what happened, the last first:"
    for event in reversed(events[-_EVENTS_SHOWN:]):
        yield f"  {now_unix_s - event.at_unix_s:.0f} s ago  {event.process}: {event.what}"


def doubts(status: DeploymentStatus) -> list[str]:
    """What speaks against KV moving as the recipe asks."""
    return [doubt for process in status.processes for doubt in process.doubts]


def advice(status: DeploymentStatus) -> Iterator[str]:
    """What to do about a deployment that is not as it should be."""
    name = status.name
    if status.state == "crashed":
        yield f"{name} has crashed: take down the rest: pdlaunch down {name}"
    elif status.is_amiss:
        silent = ", ".join(each.name for each in status.processes if not each.is_healthy)
        yield (
            f"no answer from {silent} of {name}: pdlaunch logs {name} PROCESS says why; what is "
            f"left dead starts again with pdlaunch restart {name} --process PROCESS"
        )


def screen(views: Sequence[View]) -> RenderableType:
    """All that is watched, as one picture."""
    parts: list[RenderableType] = []
    for view in views:
        if parts:
            parts.append(Text())
        parts += _picture(view)
    return Group(*parts)


def watch_lines(views: Sequence[View], clock: str) -> Iterator[str]:
    """A line for each process, of words that a script can split; `-` for what is not known.

    clock: the time of the look, of one word.
    """
    for view in views:
        if view.status is None:
            yield f"{clock} {view.name} state=down"
            continue
        for process in view.status.processes:
            words = [
                f"{clock} {view.name} {process.name} state={view.status.state}",
                f"health={'ok' if process.is_healthy else 'no_answer'}",
                f"restarts={process.restarts}",
            ]
            if process.role != "router":
                figures = _figures(process, view.rates.get(process.name))
                words += [f"{name}={value}" for name, value in figures.items()]
                words += _failure_words(process.failures)
            yield " ".join(words)


def _processes(status: DeploymentStatus) -> Iterator[str]:
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
        yield "  " + "  ".join(cells).rstrip()


def _picture(view: View) -> Iterator[RenderableType]:
    status = view.status
    if status is None:
        yield Text(f"{view.name} is down", style="bold")
        return
    yield Text(heading(status), style="bold")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(_COLUMNS):
        is_word = number < _WORDS
        table.add_column(column, justify="left" if is_word else "right", no_wrap=True)
    for process in status.processes:
        health = Text("ok" if process.is_healthy else "no answer")
        health.stylize("green" if process.is_healthy else "red")
        if process.restarts:
            health.append(f", {process.restarts} restarted")
        figures = _figures(process, view.rates.get(process.name))
        cells = figures.values() if process.role != "router" else ()
        table.add_row(process.name, health, *cells)
    yield table
    for line in (*transport_lines(status.processes), *failure_lines(status.processes)):
        yield Text(line)
    for doubt in doubts(status):
        yield Text(f"warning: {doubt}", style="yellow")


def _figures(process: ProcessStatus, rates: Rates | None) -> dict[str, str]:
    """What an engine does now; in the order of the screen's columns."""
    answers = process.failures is not None
    return {
        "kv_cache": f"{process.kv_cache_usage:.1%}" if answers else _UNKNOWN,
        "running": str(process.requests_running) if answers else _UNKNOWN,
        "waiting": str(process.requests_waiting) if answers else _UNKNOWN,
        "prompt_tokens_per_s": f"{rates.prompt_tokens_per_s:.1f}" if rates else _UNKNOWN,
        "output_tokens_per_s": f"{rates.generated_tokens_per_s:.1f}" if rates else _UNKNOWN,
        "ttft_ms": _ms(rates.ttft_mean_s if rates else None),
        "ttft_p90_ms": _ms(rates.ttft_p90_s if rates else None),
        "kv_mib_per_s": f"{rates.kv_bytes_per_s / _MIB:.2f}" if rates else _UNKNOWN,
        "transfers_per_s": f"{rates.transfers_per_s:.1f}" if rates else _UNKNOWN,
    }


def _ms(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * 1000:.0f}"


def _failure_words(failures: Failures | None) -> list[str]:
    if failures is None:
        return [f"failed={_UNKNOWN}", f"dropped_messages={_UNKNOWN}"]
    dropped = sum(failures.dropped_messages.values())
    return [f"failed={sum(failures.transfers.values())}", f"dropped_messages={dropped}"]


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
