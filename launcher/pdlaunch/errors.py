"""The one error that users see: what failed, where, and what to do. Never prints or exits."""

from __future__ import annotations

import signal


class PdError(Exception):
    """A failure explained to the user.

    Args:
        what: one sentence, no trailing period needed.
        where: key path, file and line, or process and log file.
        next_step: what the user should do, ideally a command.
        exit_code: 1 for ours, 2 for usage, a child's own code, 128+signal.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        next_step: str | None = None,
        exit_code: int = 1,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.next_step = next_step
        self.exit_code = exit_code

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.next_step:
            lines.append(f"  next:  {self.next_step}")
        return "\n".join(lines)


class UsageError(PdError):
    """The user's input is wrong: exit code 2."""

    def __init__(
        self, what: str, *, where: str | None = None, next_step: str | None = None
    ) -> None:
        super().__init__(what, where=where, next_step=next_step, exit_code=2)


class Interrupted(PdError):
    """Asked to stop: by a signal, or because whoever started us is gone. No failure of ours."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}", exit_code=128 + number)
