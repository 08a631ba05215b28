"""What is known of deployments, on disk: one folder each, a record, logs, a lock.

Reads and writes state, and takes down what a dead supervisor left; starts nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict

from pdlaunch import backend, leftovers
from pdlaunch.console import Reporter
from pdlaunch.containers import OWNER_LABEL
from pdlaunch.errors import PdError, UsageError
from pdlaunch.paths import state_dir
from pdlaunch.plan import DeploymentPlan
from pdlaunch.transport import Transport

_RECORD = "deployment.json"
_POLL_S = 0.1
# What a supervisor needs beyond its processes' own time: sweeping and writing.
_STOP_MARGIN_S = 30.0
# For a supervisor of which nobody knows how much time its processes have.
_UNREAD_STOP_S = 300.0

State = Literal["starting", "ready", "stopping"]
Condition = State | Literal["crashed"]


class Event(BaseModel):
    """Something that happened to a process of a running deployment."""

    model_config = ConfigDict(frozen=True)

    at_unix_s: float
    process: str
    what: str


class Unreadable(PdError):
    """A record that says nothing: damaged, or of another version of pdlaunch."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(
            f"the record of {name} cannot be read",
            where=str(path),
            next_step=f"pdlaunch down {name} ends what runs of it",
        )


class Record(BaseModel):
    """A deployment that was started and not taken down."""

    model_config = ConfigDict(frozen=True)

    plan: DeploymentPlan
    state: State
    supervisor_pid: int
    # A pid alone may be somebody else's by now.
    supervisor_born_s: float
    started_unix_s: float
    pids: dict[str, int]
    # Of the last hour, by process.
    restarts: dict[str, int]
    # What engines of this machine's launch said at their last start, by process.
    transports: dict[str, Transport] = {}
    # The last ones, the oldest first.
    events: tuple[Event, ...] = ()

    @property
    def name(self) -> str:
        return self.plan.name

    def supervisor(self) -> psutil.Process | None:
        """The process that owns the deployment, if it still lives."""
        with suppress(psutil.Error):
            process = psutil.Process(self.supervisor_pid)
            same = abs(leftovers.born_s(process) - self.supervisor_born_s) < 1
            return process if same and leftovers.is_alive(process) else None
        return None

    def condition(self) -> Condition:
        """What it is in now: a dead supervisor writes no state."""
        return self.state if self.supervisor() is not None else "crashed"


def folder(name: str) -> Path:
    return state_dir() / "deployments" / name


def log_dir(name: str) -> Path:
    return folder(name) / "logs"


def trace_folder(name: str) -> Path:
    """Where the engines of a deployment stamp their transfers; roles started apart share it."""
    return folder(name) / "trace"


def owner(name: str) -> str:
    """What tells this machine's deployment of a name from those of other machines and users."""
    try:
        machine = Path("/etc/machine-id").read_text("utf-8").strip()
    except OSError:
        machine = ""
    # The id itself is not to be told to others.
    told = f"{machine} {socket.gethostname()} {folder(name)}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def create_folder(name: str) -> Path:
    """A deployment's folder, readable by its owner only: logs may hold prompts."""
    log_dir(name).mkdir(parents=True, exist_ok=True)
    folder(name).chmod(0o700)
    return folder(name)


def lock(name: str) -> FileLock:
    """Held by the supervisor for as long as it lives; the kernel frees it when it is killed."""
    return FileLock(folder(name) / "lock", timeout=0)


def acquire(name: str) -> FileLock:
    """Take a deployment's name, or say who has it."""
    create_folder(name)
    held = lock(name)
    try:
        held.acquire()
    except Timeout:
        raise already_up(name) from None
    return held


def already_up(name: str) -> UsageError:
    return UsageError(
        f"a deployment named {name} is up already, or on its way",
        where=str(folder(name)),
        next_step=f"pdlaunch down {name}, or start another beside it with --name",
    )


def write(record: Record) -> None:
    """Write a record so that readers see the old one or the new one."""
    target = folder(record.name) / _RECORD
    draft = target.with_name(f"{_RECORD}.{os.getpid()}")
    draft.write_text(record.model_dump_json(indent=2), "utf-8")
    draft.chmod(0o600)
    draft.replace(target)


def read(name: str) -> Record | None:
    path = folder(name) / _RECORD
    try:
        return Record.model_validate_json(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Unreadable(name, path) from error


def remove_record(name: str) -> None:
    (folder(name) / _RECORD).unlink(missing_ok=True)


def names() -> list[str]:
    """Deployments that were started and not taken down."""
    return sorted(path.parent.name for path in state_dir().glob(f"deployments/*/{_RECORD}"))


def logged_names() -> list[str]:
    """Deployments that there are logs of, also when they are down."""
    return sorted(path.parent.name for path in state_dir().glob("deployments/*/logs"))


def last_logged() -> str | None:
    """The deployment whose logs were written last, also when it is down."""
    logs = state_dir().glob("deployments/*/logs/*.log")
    last = max(logs, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if last is None else last.parents[1].name


def all_records() -> tuple[list[Record], list[Unreadable]]:
    """Of all deployments that are up: the records, and what is wrong with the others."""
    records, unreadable = [], []
    for name in names():
        try:
            record = read(name)
        except Unreadable as error:
            unreadable.append(error)
        else:
            records += [record] if record is not None else []
    return records, unreadable


def find(name: str) -> Record | None:
    """The deployment of a name from the command line, if it is up."""
    # A name from the command line must not lead out of the state folder.
    return read(name) if name and Path(name).name == name and name not in (".", "..") else None


def the_only() -> str | None:
    """The deployment that a user means who names none; None where nothing is up."""
    up = names()
    if len(up) > 1:
        raise UsageError(
            f"{len(up)} deployments are up",
            where="NAME",
            next_step=f"name one of: {', '.join(up)}",
        )
    return up[0] if up else None


def need(name: str | None) -> Record:
    """The deployment that a user means, for commands that make no sense without one."""
    name = name if name is not None else the_only()
    if name is None:
        raise UsageError(
            "nothing is up", next_step="start a deployment: pdlaunch up smollm2-135m-cpu --detach"
        )
    record = find(name)
    if record is None:
        raise _unknown(name)
    return record


def _unknown(name: str) -> UsageError:
    up = names()
    near = difflib.get_close_matches(name, up, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UsageError(
        f"no deployment {name} is up",
        where="NAME",
        next_step=f"{hint}up now: {', '.join(up) or 'none'}",
    )


def take_down(name: str, reporter: Reporter) -> None:
    """End a deployment, whatever state it is in; harmless when it has ended already."""
    try:
        record = read(name)
    except Unreadable as error:
        reporter.warning(f"{error.what}: {error.where}")
        try:
            _take_down_unread(name, reporter)
        except OSError as refused:
            raise PdError(
                f"{name} cannot be taken down: {refused}",
                where=error.where,
                next_step=f"see that nothing of it runs, then delete {folder(name)}",
            ) from refused
        return
    if record is not None:
        supervisor = record.supervisor()
        if supervisor is not None:
            _end(supervisor, name, record.plan.stop_s + _STOP_MARGIN_S, reporter)
        clear(record)


def _take_down_unread(name: str, reporter: Reporter) -> None:
    """End a deployment that only its open files tell of: the supervisor's lock, and logs."""
    supervisors = leftovers.holders(folder(name) / "lock")
    for supervisor in supervisors:
        _end(supervisor, name, _UNREAD_STOP_S, reporter)
    held = acquire(name)
    try:
        writers = leftovers.holders(log_dir(name))
        launches = sorted({launch for each in writers if (launch := leftovers.launch_of(each))})
        _check_gone(name, [left for launch in launches for left in backend.sweep(launch, ())])
        remove_record(name)
    finally:
        held.release()
    if not supervisors:
        reporter.warning(
            f"its containers, if it had any, are not known: see docker ps --all "
            f"--filter label={OWNER_LABEL}={owner(name)}"
        )


def _end(supervisor: psutil.Process, name: str, within_s: float, reporter: Reporter) -> None:
    with suppress(psutil.Error):
        supervisor.terminate()
    deadline_s = time.monotonic() + within_s
    while leftovers.is_alive(supervisor) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    if leftovers.is_alive(supervisor):
        reporter.warning(f"the supervisor of {name} does not stop; killing it")
        with suppress(psutil.Error):
            supervisor.kill()


def clear(record: Record) -> None:
    """Remove what a dead supervisor left of its launch, and the record."""
    _check_gone(record.name, backend.sweep(record.plan.launch_id, record.plan.endpoints))
    current = read(record.name)
    # Somebody may have started it again meanwhile.
    if current is not None and current.plan.launch_id == record.plan.launch_id:
        remove_record(record.name)


def _check_gone(name: str, survivors: list[str]) -> None:
    if survivors:
        raise PdError(
            f"not all of {name} can be killed: {', '.join(survivors)}",
            where=str(log_dir(name)),
            next_step="a process may wait for a device or a disk; try pdlaunch down again later. "
            f"If it is gone with its host, delete {folder(name) / _RECORD}",
        )
