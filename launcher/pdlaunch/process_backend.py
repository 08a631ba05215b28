"""Carries a plan out as processes of this machine: start, notice deaths, stop. Decides nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from pdlaunch import leftovers
from pdlaunch.death import Death
from pdlaunch.errors import PdError
from pdlaunch.plan import ProcessPlan

_POLL_S = 0.1
# A leader that has ended gives its own children this long before they are asked themselves.
_ORPHAN_GRACE_S = 3.0


@dataclass(frozen=True)
class _Child:
    plan: ProcessPlan
    popen: subprocess.Popen[bytes]
    log: Path
    started_s: float
    is_to_end: bool = False


class ProcessBackend:
    """The processes of one launch."""

    def __init__(
        self,
        launch_id: str,
        log_dir: Path,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._launch_id = launch_id
        self._log_dir = log_dir
        self._environ = environ
        self._children: dict[str, _Child] = {}
        self._shared_memory: set[Path] = set()
        self._shared_files: set[tuple[Path, int]] = set()
        # Descendants that dropped the tag are found through parents, so only while those live.
        self._seen: set[psutil.Process] = set()

    @property
    def started(self) -> tuple[str, ...]:
        return tuple(self._children)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.popen.pid for name, child in self._children.items()}

    def log(self, name: str) -> Path:
        return self._children[name].log

    def lived_s(self, name: str) -> float:
        return time.monotonic() - self._children[name].started_s

    def start(self, process: ProcessPlan) -> None:
        """Start one process in a session of its own, its output in a log file."""
        self._start(process, "wb")

    def restart(self, process: ProcessPlan) -> None:
        """Start a process again that has ended, after what it left; its log goes on."""
        leftovers.kill(self._launch_id, process.name)
        self._start(process, "ab")

    def end(self, name: str, stop_s: float) -> None:
        """End one process and all that it started."""
        child = self._children[name]
        self._children[name] = replace(child, is_to_end=True)
        with suppress(ProcessLookupError):
            child.popen.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.popen.wait(timeout=stop_s)
        leftovers.kill(self._launch_id, name)
        child.popen.wait()

    def _start(self, process: ProcessPlan, log_mode: Literal["wb", "ab"]) -> None:
        log = self._log_dir / process.log_name
        scratch = leftovers.scratch_dir(self._launch_id)
        scratch.mkdir(mode=0o700, exist_ok=True)
        with log.open(log_mode) as output:
            log.chmod(0o600)
            try:
                popen = subprocess.Popen(
                    process.argv,
                    env=self._environment(process, scratch),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise PdError(
                    f"cannot start {process.name}: {error.strerror or error}",
                    where=process.argv[0],
                    next_step="check the engine: pdlaunch engine repair cpu (or cuda)",
                ) from error
        self._children[process.name] = _Child(process, popen, log, time.monotonic())

    def deaths(self) -> list[Death]:
        """Processes that have ended, which none may before `stop` or `end`."""
        self._note_new_shared_memory()
        return [
            Death(name, code, child.log, time.monotonic() - child.started_s)
            for name, child in self._children.items()
            if not child.is_to_end and (code := child.popen.poll()) is not None
        ]

    async def stop(self, stop_s: float, in_a_hurry: Callable[[], bool]) -> list[str]:
        """End all processes, politely first; those that would not die even so."""
        kill_at_s = time.monotonic() + stop_s
        ask_orphans_at_s: float | None = None
        self._members()
        self._signal_leaders(signal.SIGTERM)
        while members := self._members():
            now_s = time.monotonic()
            if in_a_hurry() or now_s >= kill_at_s:
                break
            leaders_ended = all(child.popen.poll() is not None for child in self._children.values())
            if leaders_ended and ask_orphans_at_s is None:
                ask_orphans_at_s = now_s + _ORPHAN_GRACE_S
            elif ask_orphans_at_s is not None and now_s >= ask_orphans_at_s:
                ask_orphans_at_s = float("inf")
                # Their leader is gone: what they would have waited for cannot come.
                kill_at_s = min(kill_at_s, now_s + _ORPHAN_GRACE_S)
                for member in members:
                    with suppress(psutil.Error):
                        member.terminate()
            await asyncio.sleep(_POLL_S)
        give_up_at_s = time.monotonic() + leftovers.KILL_BOUND_S
        while (members := self._members()) and time.monotonic() < give_up_at_s:
            for member in members:
                with suppress(psutil.Error):
                    member.kill()
            await asyncio.sleep(_POLL_S)
        survivors = await asyncio.to_thread(
            leftovers.sweep, self._launch_id, frozenset(self._shared_memory)
        )
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.popen.wait(timeout=1)
        return [f"process {pid}" for pid in survivors]

    def _environment(self, process: ProcessPlan, scratch: Path) -> dict[str, str]:
        env = environment(process, self._environ)
        env["TMPDIR"] = str(scratch)
        env[leftovers.TAG] = self._launch_id
        env[leftovers.PROCESS_TAG] = process.name
        # vLLM renames its processes, which would otherwise overwrite the tag in their memory.
        env["SPT_NOENV"] = "1"
        return env

    def _note_new_shared_memory(self) -> None:
        # Whose it is can be told while its process lives only, and that may end by itself.
        if (files := set(leftovers.shared_files())) != self._shared_files:
            self._shared_files = files
            self._members()

    def _signal_leaders(self, number: signal.Signals) -> None:
        for child in self._children.values():
            if child.popen.poll() is None:
                with suppress(ProcessLookupError):
                    child.popen.send_signal(number)

    def _members(self) -> list[psutil.Process]:
        """All living processes of the launch: by tag, and by descent where a tag was dropped."""
        self._seen.update(leftovers.tagged(self._launch_id))
        for child in self._children.values():
            with suppress(psutil.Error):
                leader = psutil.Process(child.popen.pid)
                self._seen.update((leader, *leader.children(recursive=True)))
        self._seen = {process for process in self._seen if leftovers.is_alive(process)}
        self._shared_memory |= leftovers.shared_memory_of(self._seen)
        return list(self._seen)


def environment(process: ProcessPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """What a plan makes of an inherited environment."""
    env = {name: value for name, value in environ.items() if name not in process.env_unset}
    env |= process.env
    for name, value in process.env_prepend.items():
        env[name] = f"{value}:{env[name]}" if env.get(name) else value
    return env
