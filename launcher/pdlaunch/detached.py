"""A supervisor that outlives the command that started it, and the pipe between the two.

Down the pipe go the plan and, once the starter knows that all is ready, a word to keep going. Up
come what happens and how it ended. A starter that vanishes early takes the deployment with it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pdlaunch import deployments
from pdlaunch.console import Bar, Reporter
from pdlaunch.errors import Interrupted, PdError
from pdlaunch.logs import telling_lines
from pdlaunch.plan import DeploymentPlan
from pdlaunch.supervisor import Signals, supervise

_KEEP = b"keep\n"
_LOOK_EVERY_S = 0.1


def start(plan: DeploymentPlan, reporter: Reporter, signals: Signals) -> None:
    """Start a deployment under a supervisor of its own; return when it is ready, else raise."""
    deployments.create_folder(plan.name)
    log = deployments.log_dir(plan.name) / "supervisor.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "pdlaunch.detached"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as supervisor,
    ):
        failure = _follow(plan, supervisor, reporter, signals)
        if failure is None:
            # Ready, and told to keep going: it is not ours to wait for.
            supervisor.returncode = 0
            return
    if failure.get("signal"):
        raise Interrupted(failure["signal"])
    if failure:
        raise PdError(
            failure["what"],
            where=failure["where"],
            next_step=failure["next_step"],
            exit_code=failure["exit_code"],
        )
    raise PdError(
        "\n".join(["the supervisor died", *(f"  | {line}" for line in telling_lines(log))]),
        where=str(log),
        next_step=f"pdlaunch down {plan.name}, then try again",
    )


def _follow(
    plan: DeploymentPlan,
    supervisor: subprocess.Popen[bytes],
    reporter: Reporter,
    signals: Signals,
) -> dict[str, Any] | None:
    """None when ready; else how it ended: what the supervisor said, our signal, or nothing."""
    down, up = supervisor.stdin, supervisor.stdout
    if down is None or up is None:
        raise RuntimeError("a pipe that was asked for is missing")
    failure: dict[str, Any] = {}
    buffered = b""
    with suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
        selector.register(up, selectors.EVENT_READ)
        down.write(plan.model_dump_json().encode() + b"\n")
        down.flush()
        while True:
            number = signals.pop()
            if number is not None:
                supervisor.send_signal(number)
                # It may die of it before it can say so: it is still only importing then.
                failure = {"signal": number}
            if not selector.select(_LOOK_EVERY_S):
                continue
            chunk = os.read(up.fileno(), 65536)
            if not chunk:
                break
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message["kind"] == "status":
                    reporter.status(message["text"])
                elif message["kind"] == "warning":
                    reporter.warning(message["text"])
                elif message["kind"] == "failed":
                    failure = message
                elif (number := signals.pop()) is not None:
                    # Interrupted at the last moment is interrupted.
                    supervisor.send_signal(number)
                    failure = {"signal": number}
                elif not failure:
                    down.write(_KEEP)
                    down.flush()
                    return None
    return failure


class _Upwards:
    """The supervisor's reporter: what it says goes up the pipe while somebody listens."""

    def status(self, message: str) -> None:
        self.send(kind="status", text=message)

    def warning(self, message: str) -> None:
        self.send(kind="warning", text=message)

    @contextmanager
    def work(self, label: str, total_bytes: int | None = None) -> Iterator[Bar]:
        self.status(label)
        yield self

    def advance(self, amount: int) -> None:
        pass

    def send(self, **message: object) -> None:
        try:
            os.write(1, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            # Nobody listens any more: what happens later belongs in the supervisor's log.
            if "text" in message:
                sys.stderr.write(f"{time.strftime('%F %T')} {message['text']}\n")
                sys.stderr.flush()


class _Starter:
    """Whoever started us, as seen through the pipe."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._answered = threading.Event()
        line = sys.stdin.buffer.readline()
        if not line:
            raise Interrupted(signal.SIGHUP)
        self.plan = DeploymentPlan.model_validate_json(line)
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_for_word(self) -> None:
        # A starter that was interrupted passes the signal on instead.
        while not self._signals.pending and not self._answered.wait(_LOOK_EVERY_S):
            pass

    def _listen(self) -> None:
        if sys.stdin.buffer.readline() != _KEEP:
            # Gone without a word: the same as a terminal that hangs up.
            self._signals.put(signal.SIGHUP)
        self._answered.set()


def main() -> int:
    """The detached supervisor."""
    signals, upwards = Signals(), _Upwards()
    with signals.caught():
        try:
            starter = _Starter(signals)

            def on_ready() -> None:
                upwards.send(kind="ready")
                starter.wait_for_word()

            supervise(starter.plan, upwards, signals, on_ready)
        except PdError as error:
            upwards.send(
                kind="failed",
                what=error.what,
                where=error.where,
                next_step=error.next_step,
                exit_code=error.exit_code,
            )
            if not isinstance(error, Interrupted):
                sys.stderr.write(f"{error}\n")
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
