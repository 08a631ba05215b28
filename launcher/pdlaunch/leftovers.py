"""Finds and removes what a launch may leave: processes, shared memory, temporary files.

Works from what the kernel knows, not from memory, so that anybody can clean up after anybody.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
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
# Address, permissions, offset, device, inode, path.
_MAPPED = re.compile(rb"^(?:\S+ ){4}(\d+)\s+/dev/shm/", re.MULTILINE)


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


def born_s(process: psutil.Process) -> float:
    """When a process began, in seconds after boot: no step of the machine's clock changes it."""
    # In this order: what psutil knows of the boot may be from before a step.
    booted_s = psutil.boot_time()
    return process.create_time() - booted_s


def launch_of(process: psutil.Process) -> str | None:
    """The launch that a process belongs to, if to any."""
    with suppress(psutil.Error):
        return process.environ().get(TAG)
    return None


def holders(path: Path) -> list[psutil.Process]:
    """Other processes of this user that have a file open: this one, or one in this folder."""
    # As the kernel names it.
    real = path.resolve()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_open = any(Path(each.path).is_relative_to(real) for each in process.open_files())
            if is_open and process.pid != os.getpid():
                found.append(process)
    return found


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in shared memory that these processes use."""
    used: set[int] = set()
    for process in processes:
        used |= _shared_inodes_of(process.pid)
    return {path for path, inode in shared_files() if inode in used}


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
    wanted = set(files)
    left = {path: inode for path, inode in shared_files() if path in wanted}
    if not left:
        return
    used: set[int] = set()
    for pid in _pids():
        used |= _shared_inodes_of(pid)
    for path, inode in left.items():
        if inode not in used:
            with suppress(OSError):
                path.unlink()


def shared_files() -> Iterator[tuple[Path, int]]:
    """This user's files in shared memory, and their inodes."""
    with suppress(OSError):
        for path in _SHARED_MEMORY.iterdir():
            with suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
                    yield path, status.st_ino


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208


def _shared_inodes_of(pid: int) -> set[int]:
    """Inodes, for a semaphore is mapped under a temporary name that is gone at once."""
    inodes: set[int] = set()
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_bytes()
        inodes.update(int(inode) for inode in _MAPPED.findall(maps))
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if descriptor.readlink().parent == _SHARED_MEMORY:
                    inodes.add(descriptor.stat().st_ino)
    return inodes
