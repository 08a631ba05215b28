"""How a process that should not end ended, as users are told. Notices none."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from pdlaunch.errors import PdError
from pdlaunch.logs import telling_lines


@dataclass(frozen=True)
class Death:
    """A process that ended by itself."""

    name: str
    # Below 0: the signal that killed it.
    code: int
    log: Path
    lived_s: float
    # Where the code does not tell.
    how: str | None = None

    @property
    def how_it_ended(self) -> str:
        how = self.how or (
            f"was killed by {signal.Signals(-self.code).name}"
            if self.code < 0
            else f"exited with code {self.code}"
        )
        return f"{how} after {self.lived_s:.0f} s"

    def error(self, deployment: str, recipe: str) -> PdError:
        lines = [f"  | {line}" for line in telling_lines(self.log)]
        return PdError(
            "\n".join([f"{self.name} {self.how_it_ended}", *lines]),
            where=str(self.log),
            next_step=f"pdlaunch logs {deployment} {self.name}; pdlaunch doctor {recipe}",
            exit_code=128 - self.code if self.code < 0 else self.code or 1,
        )
