"""Reads what processes have written to their logs, without secrets. Writes nothing."""

from __future__ import annotations

import re
from pathlib import Path

from pdlaunch.redaction import redact

_TAIL_BYTES = 64 * 1024
_TAIL_LINES = 8
_CAUSE_LINES = 3
_LINE_CHARS = 300
# vLLM's prefix: process, level, date, time, source line.
_PREFIX = re.compile(r"^(\(\S+ pid=\d+\)\s*)?[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*")
_CAUSE = re.compile(
    r"\b\w*(Error|Exception)\b: \S|: error: "
    # NIXL's own exceptions carry a code and no more.
    r"|\] Failed to load plugin from \S+: \S|\] createBackend: \S"
)
# What follows from a cause and is logged after it.
_CONSEQUENCE = re.compile(r"See root cause above|CancelledError|WorkerProc initialization failed")


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log that say something, shortened and without secrets."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    kept = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return [redact(line)[:_LINE_CHARS] for line in kept[-lines:]]


def telling_lines(log: Path) -> list[str]:
    """What of a dead process's log tells why: its causes, then its last lines."""
    everything = tail(log, 1000)
    last = everything[-_TAIL_LINES:]
    causes = [
        line
        for line in everything
        if _CAUSE.search(line) and not _CONSEQUENCE.search(line) and line not in last
    ]
    return [*dict.fromkeys(causes[:_CAUSE_LINES]), *last]


def doing(log: Path) -> str:
    """What a process says it is doing: its last proper log line, without the logger's prefix."""
    lines = [_PREFIX.sub("", line).strip() for line in tail(log, 40) if _PREFIX.match(line)]
    said = [line for line in lines if line]
    return said[-1][:80] if said else "starting"
