"""The only module that prints: data to stdout, status to stderr, plain lines without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from pdlaunch.errors import PdError

_WIDEST = 10_000


class Bar(Protocol):
    """One long-running piece of work, as seen by the code that does it."""

    def advance(self, amount: int) -> None: ...


class Reporter(Protocol):
    """What library modules may say while they work. Terminal implements it; tests use a fake."""

    def status(self, message: str) -> None: ...

    def warning(self, message: str) -> None: ...

    def work(self, label: str, total_bytes: int | None = None) -> AbstractContextManager[Bar]: ...


class _RichBar:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: int) -> None:
        self._progress.advance(self._task, amount)


class _NullBar:
    def advance(self, amount: int) -> None:
        pass


class Terminal:
    """rich behind one class. Honours NO_COLOR (rich does) and pipes."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)

    @property
    def interactive(self) -> bool:
        return self._err.is_terminal

    def data(self, text: str) -> None:
        """Plain text for stdout, never styled or wrapped: scripts read it."""
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()

    def stream(self, text: str) -> None:
        """A piece of streamed output for stdout."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def show(self, renderable: RenderableType) -> None:
        """A rich renderable (table, panel) for stdout, as wide as it is: figures are never cut."""
        options = self._out.options.update(max_width=_WIDEST)
        width = Measurement.get(self._out, options, renderable).maximum
        # A console makes nothing wider than itself.
        Console(highlight=False, width=max(width, self._out.width)).print(renderable)

    def draw(self, renderable: RenderableType) -> None:
        """A rich renderable for stderr, as wide as it is."""
        options = self._err.options.update(max_width=_WIDEST)
        width = Measurement.get(self._err, options, renderable).maximum
        Console(stderr=True, highlight=False, width=max(width, self._err.width)).print(renderable)

    @contextmanager
    def live(self) -> Iterator[Callable[[RenderableType], None] | None]:
        """What replaces what stdout shows by something new; None where stdout is no terminal."""
        if not self._out.is_terminal:
            yield None
            return
        with Live(console=Console(highlight=False), auto_refresh=False) as screen:
            yield lambda renderable: screen.update(renderable, refresh=True)

    def status(self, message: str) -> None:
        self._err.print(f"[dim]•[/dim] {escape(message)}")

    def success(self, message: str) -> None:
        self._err.print(f"[green]✓[/green] {escape(message)}")

    def warning(self, message: str) -> None:
        self._err.print(f"[yellow]warning:[/yellow] {escape(message)}")

    def error(self, error: PdError) -> None:
        self._err.print(f"[red]error:[/red] {escape(str(error))}")

    @contextmanager
    def work(self, label: str, total_bytes: int | None = None) -> Iterator[Bar]:
        """A progress bar on a terminal, one line at the start on a pipe."""
        if not self.interactive:
            self.status(label)
            yield _NullBar()
            return
        columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
        if total_bytes is not None:
            columns += [BarColumn(), DownloadColumn()]
        columns.append(TimeElapsedColumn())
        with Progress(*columns, console=self._err, transient=True) as progress:
            task = progress.add_task(escape(label), total=total_bytes)
            yield _RichBar(progress, task)
        self.status(label)
