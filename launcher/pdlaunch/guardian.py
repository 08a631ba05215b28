"""Outlives a supervisor that is killed, and takes its launch down. Starts nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pdlaunch import backend, leftovers
from pdlaunch.errors import PdError

_LOOK_EVERY_S = 20.0
_DONE = b"done\n"


class Guardian:
    """The supervisor's end: a process that holds a pipe and acts when the pipe breaks."""

    def __init__(self, launch_id: str, endpoints: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdlaunch.guardian", launch_id, *endpoints],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A Ctrl-C or a hang-up of the terminal is for the supervisor.
            start_new_session=True,
            cwd="/",
        )
        # Nothing may start before somebody watches.
        if self._process.stdout is None or not self._process.stdout.readline():
            raise PdError(
                "the process that would clean up after a crash does not start",
                where=f"{sys.executable} -m pdlaunch.guardian",
                next_step="reinstall pdlaunch: pip install --force-reinstall pdlaunch",
            )

    def dismiss(self) -> None:
        """All is down: let the guardian end without acting."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(_DONE, timeout=30)


def watch(launch_id: str, endpoints: Sequence[str]) -> None:
    """Wait for the pipe to end; without a farewell, sweep the launch."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    files: set[Path] = set()
    said = b""
    while True:
        readable, _, _ = select.select([0], [], [], _LOOK_EVERY_S)
        if not readable:
            # A killed process no longer tells what it had mapped.
            files |= leftovers.shared_memory_of(leftovers.tagged(launch_id))
            continue
        chunk = os.read(0, 64)
        said += chunk
        if not chunk:
            break
    # Also after a farewell: a member that could not be killed then may be dead by now, and shared
    # memory of children that died early is known here only.
    if said == _DONE:
        leftovers.remove_shared_memory(files)
    else:
        backend.sweep(launch_id, endpoints, files)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2:])
