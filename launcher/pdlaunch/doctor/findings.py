"""What an examination finds. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# error: it cannot work. warning: it works, but slower or less safely than meant.
State = Literal["ok", "warning", "error", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One answer of one check."""

    check: str
    state: State
    # What was seen.
    evidence: str
    # What to do; every warning and error has it.
    remedy: str | None = None
    # The recipe's key, where one decides it.
    where: str | None = None


def size(size_bytes: float) -> str:
    """A size for people, in binary units."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while size_bytes >= 1024 and power < len(units) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:.1f} {units[power]}" if power else f"{size_bytes:.0f} bytes"


def ok(check: str, evidence: str, *, where: str | None = None) -> Finding:
    return Finding(check, "ok", evidence, where=where)


def warning(check: str, evidence: str, remedy: str, *, where: str | None = None) -> Finding:
    return Finding(check, "warning", evidence, remedy, where)


def error(check: str, evidence: str, remedy: str, *, where: str | None = None) -> Finding:
    return Finding(check, "error", evidence, remedy, where)


def not_checked(check: str, evidence: str, remedy: str | None = None) -> Finding:
    return Finding(check, "not checked", evidence, remedy)
