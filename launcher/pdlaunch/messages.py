"""What a supervisor tells a command that listens to it: one message a line, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from pdlaunch.console import Bar, Reporter
from pdlaunch.errors import PdError


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class Said(_Message):
    """What goes on meanwhile."""

    kind: Literal["said"] = "said"
    text: str
    warning: bool = False

    def repeat(self, reporter: Reporter) -> None:
        if self.warning:
            reporter.warning(self.text)
        else:
            reporter.status(self.text)


class Done(_Message):
    """It is as was wished."""

    kind: Literal["done"] = "done"


class Failed(_Message):
    """It is not, and why."""

    kind: Literal["failed"] = "failed"
    what: str
    where: str | None
    next_step: str | None
    exit_code: int

    @classmethod
    def by(cls, error: PdError) -> Failed:
        return cls(
            what=error.what,
            where=error.where,
            next_step=error.next_step,
            exit_code=error.exit_code,
        )

    def error(self) -> PdError:
        return PdError(
            self.what, where=self.where, next_step=self.next_step, exit_code=self.exit_code
        )


Message = Said | Done | Failed

_ONE_OF_THEM: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def parse(line: bytes) -> Message:
    """The message of one line.

    Raises:
        pydantic.ValidationError: it is none.
    """
    return _ONE_OF_THEM.validate_json(line)


class Telling:
    """A reporter that says everything to whoever listens."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self.send = send

    def status(self, message: str) -> None:
        self.send(Said(text=message))

    def warning(self, message: str) -> None:
        self.send(Said(text=message, warning=True))

    @contextmanager
    def work(self, label: str, total_bytes: int | None = None) -> Iterator[Bar]:
        self.status(label)
        yield self

    def advance(self, amount: int) -> None:
        pass
