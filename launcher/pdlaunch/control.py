"""Carries a user's wish to the supervisor of a running deployment, and its progress back.

A Unix socket in the deployment's folder, which its owner alone can enter: one wish a connection, as
a line of JSON, answered by lines of JSON until the supervisor closes it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pdlaunch import deployments, messages
from pdlaunch.console import Reporter
from pdlaunch.errors import PdError
from pdlaunch.messages import Done, Failed, Message, Said, Telling
from pdlaunch.plan import DeploymentPlan

_SOCKET = "control"
# A plan of many replicas is one line.
_LINE_BYTES = 16 * 2**20


class Wish(BaseModel):
    """Restart these processes, one after the other."""

    model_config = ConfigDict(frozen=True)

    processes: tuple[str, ...]
    # By this plan from now on. None: by the one they have.
    plan: DeploymentPlan | None = None


# Does what is wished; the last argument tells whether somebody still waits for it.
Handler = Callable[[Wish, Reporter, Callable[[], bool]], Awaitable[None]]


@asynccontextmanager
async def listening(name: str, handle: Handler) -> AsyncIterator[None]:
    """Take wishes for a deployment, for as long as the context lasts."""
    serving: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_serve(reader, writer, handle))
        serving.add(task)
        task.add_done_callback(serving.discard)

    with _reachable(name) as path:
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(begin, path, limit=_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        (deployments.folder(name) / _SOCKET).unlink(missing_ok=True)
        under_way = tuple(serving)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def ask(name: str, wish: Wish, reporter: Reporter) -> None:
    """Have a supervisor do something; return when it is done.

    Raises:
        PdError: it failed, or there is nobody who could.
    """
    ended = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            with _reachable(name) as path:
                connection.connect(str(path))
        except OSError as error:
            raise PdError(
                f"the supervisor of {name} takes no wishes",
                where=str(deployments.folder(name) / _SOCKET),
                next_step=f"see whether it is ready: pdlaunch status {name}",
            ) from error
        with suppress(OSError), connection.makefile("rwb") as lines:
            lines.write(wish.model_dump_json().encode() + b"\n")
            lines.flush()
            for line in lines:
                message = messages.parse(line)
                if isinstance(message, Said):
                    message.repeat(reporter)
                elif isinstance(message, Failed):
                    raise message.error()
                else:
                    ended = True
    if not ended:
        raise PdError(
            f"the supervisor of {name} ended before it was done",
            where=str(deployments.log_dir(name)),
            next_step=f"pdlaunch status {name}",
        )


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handler
) -> None:
    def answer(message: Message) -> None:
        if not writer.is_closing():
            writer.write(message.line())

    try:
        line = await reader.readline()
        if not line:
            return
        wish = Wish.model_validate_json(line)
        # Whoever asked says no more: an end of the stream is that they are gone.
        gone = asyncio.ensure_future(reader.read())
        try:
            await handle(wish, Telling(answer), lambda: not gone.done())
            answer(Done())
        except PdError as error:
            answer(Failed.by(error))
        finally:
            gone.cancel()
    finally:
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()


@contextmanager
def _reachable(name: str) -> Iterator[Path]:
    """The socket's path, short enough for the kernel's 107 bytes wherever the state is."""
    folder = os.open(deployments.folder(name), os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{folder}/{_SOCKET}")
    finally:
        os.close(folder)
