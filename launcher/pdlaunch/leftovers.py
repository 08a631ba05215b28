"""Finds and removes what a launch may leave: processes, shared memory, temporary files.

Works from what the kernel knows, not from memory, so that anybody can clean up after anybody.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

# Every process of a launch inherits this; it finds the ones that left their group and parent.
TAG = "PDLAUNCH_LAUNCH_ID"
PROCESS_TAG = "PDLAUNCH_PROCESS"

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - read to find what children left there
KILL_BOUND_S = 30.0
_MAPPED = re.compile(rb"\s(/dev/shm/[^\n]+)")


def scratch_dir(launch_id: str) -> Path:
    """TMPDIR of a launch's processes: sockets and files in there go when the launch ends."""
    return Path(tempfile.gettempdir()) / f"pdlaunch-{launch_id}"


def tagged(launch_id: str, name: str | None = None) -> list[psutil.Process]:
    """All living processes of a launch, or those that one process of its plan started."""
    wanted = [f"\0{TAG}={launch_id}\0".encode()]
    if name is not None:
        wanted.append(f"\0{PROCESS_TAG}={name}\0".encode())
    found = []
    for pid in _pids():
        if pid == os.getpid():
            continue
        with suppress(OSError, psutil.Error):
            environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
            if all(tag in environ for tag in wanted):
                found.append(psutil.Process(pid))
    return found


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in shared memory that these processes use."""
    return {path for process in processes for path in _shared_memory_of(process.pid)}


def sweep(launch_id: str, shared_memory: Iterable[Path] = ()) -> list[int]:
    """Kill what is left of a launch and remove what it left behind; the pids that would not die."""
    survivors = kill(launch_id, shared_memory=shared_memory)
    shutil.rmtree(scratch_dir(launch_id), ignore_errors=True)
    return survivors


def kill(
    launch_id: str, name: str | None = None, *, shared_memory: Iterable[Path] = ()
) -> list[int]:
    """Kill what is left of a launch, or of one of its processes; the pids that would not die."""
    files = set(shared_memory)
    deadline = time.monotonic() + KILL_BOUND_S
    # One pass is not enough: what is killed may have forked meanwhile. And a large process takes
    # its time to end: it has no memory and so no tag any more, and still holds its files.
    dying: set[psutil.Process] = set()
    while True:
        alive = tagged(launch_id, name)
        files |= shared_memory_of(alive)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        dying = {process for process in dying.union(alive) if is_alive(process)}
        if not dying or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    remove_shared_memory(files)
    return sorted(process.pid for process in dying)


def is_alive(process: psutil.Process) -> bool:
    """Whether it is the same process still, and not merely waiting to be reaped."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove files of ours that no living process uses any more."""
    left = {path for path in files if _is_ours(path)}
    if not left:
        return
    for pid in _pids():
        left -= set(_shared_memory_of(pid))
    for path in left:
        with suppress(OSError):
            path.unlink()


def _is_ours(path: Path) -> bool:
    with suppress(OSError):
        return path.lstat().st_uid == os.getuid() and path.is_file()
    return False


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def _shared_memory_of(pid: int) -> Iterator[Path]:
    with suppress(OSError):
        for match in set(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_bytes())):
            yield Path(os.fsdecode(match))
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = descriptor.readlink()
                if target.parent == _SHARED_MEMORY:
                    yield target
