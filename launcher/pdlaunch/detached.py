"""A supervisor that outlives the command that started it, and the pipe between the two.

Down the pipe go the plan and, once the starter knows that all is ready, a word to keep going. Up
come what happens and how it ended. A starter that vanishes early takes the deployment with it.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from pdlaunch import deployments, messages
from pdlaunch.console import Reporter
from pdlaunch.errors import Interrupted, PdError
from pdlaunch.logs import telling_lines
from pdlaunch.messages import Done, Failed, Message, Said, Telling
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
        end = _follow(plan, supervisor, reporter, signals)
        if isinstance(end, Done):
            # Ready, and told to keep going: it is not ours to wait for.
            supervisor.returncode = 0
            return
    if end is not None:
        raise end
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
) -> Done | PdError | None:
    """How it ended: ready, by what the supervisor or a signal of ours says, or without a word."""
    down, up = supervisor.stdin, supervisor.stdout
    if down is None or up is None:
        raise RuntimeError("a pipe that was asked for is missing")
    failure: PdError | None = None
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
                failure = Interrupted(number)
            if not selector.select(_LOOK_EVERY_S):
                continue
            chunk = os.read(up.fileno(), 65536)
            if not chunk:
                break
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                message = messages.parse(line)
                if isinstance(message, Said):
                    message.repeat(reporter)
                elif isinstance(message, Failed):
                    failure = message.error()
                elif (number := signals.pop()) is not None:
                    # Interrupted at the last moment is interrupted.
                    supervisor.send_signal(number)
                    failure = Interrupted(number)
                elif failure is None:
                    down.write(_KEEP)
                    down.flush()
                    return message
    return failure


def _tell_the_starter(message: Message) -> None:
    """Up the pipe while somebody listens; else what goes on belongs in the supervisor's log."""
    try:
        os.write(1, message.line())
    except BrokenPipeError:
        if isinstance(message, Said):
            sys.stderr.write(f"{time.strftime('%F %T')} {message.text}\n")
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
        # Not by sys.stdin: an interpreter that ends while a thread waits there dies of it.
        if os.read(0, len(_KEEP)) != _KEEP:
            # Gone without a word: the same as a terminal that hangs up.
            self._signals.put(signal.SIGHUP)
        self._answered.set()


def main() -> int:
    """The detached supervisor."""
    signals = Signals()
    with signals.caught():
        try:
            starter = _Starter(signals)

            def on_ready() -> None:
                _tell_the_starter(Done())
                starter.wait_for_word()

            supervise(starter.plan, Telling(_tell_the_starter), signals, on_ready)
        except PdError as error:
            _tell_the_starter(Failed.by(error))
            if not isinstance(error, Interrupted):
                sys.stderr.write(f"{error}\n")
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
