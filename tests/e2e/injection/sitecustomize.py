"""Loaded by every Python process of an engine under test: makes NIXL fail when it is told to.

Faults are files in the folder that PDLAUNCH_TEST_FAULTS names; `faults.py` writes them.
NAME.raise.N        the next call of NAME raises; the process that removes the file takes the fault
NAME.delay          every call of NAME takes so many seconds longer
check_xfer_state.error.N   the next look at a transfer says that it has failed
transfer.hold       transfers that are posted begin when the file is gone
zmq_connect.lost    the side channels of others are unreachable
memory.dump         every process that has registered memory writes memory.PID: a digest a page
"""

import ctypes
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["PDLAUNCH_TEST_FAULTS"])
PAGE_BYTES = 16 * 1024


def _taken(name: str) -> bool:
    for path in FOLDER.glob(f"{name}.*"):
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        return True
    return False


def _failing(name: str, call: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _taken(f"{name}.raise"):
            raise RuntimeError(f"{name} fails for a test")
        delay = FOLDER / f"{name}.delay"
        if delay.exists():
            time.sleep(float(delay.read_text()))
        return call(*args, **kwargs)

    return wrapped


def _sabotage(api: Any) -> None:
    agent = api.nixl_agent
    regions: list[tuple[int, int]] = []
    held: set[int] = set()
    lock = threading.Lock()
    transfer, check, release = agent.transfer, agent.check_xfer_state, agent.release_xfer_handle
    get_reg_descs = agent.get_reg_descs

    def post_later(self: Any, handle: Any, args: Any) -> None:
        while (FOLDER / "transfer.hold").exists():
            time.sleep(0.02)
        with lock:
            if id(handle) in held:
                held.discard(id(handle))
                transfer(self, handle, *args)

    def held_transfer(self: Any, handle: Any, *args: Any) -> Any:
        if not (FOLDER / "transfer.hold").exists():
            return transfer(self, handle, *args)
        with lock:
            held.add(id(handle))
        threading.Thread(target=post_later, args=(self, handle, args), daemon=True).start()
        return "PROC"

    def failing_check(self: Any, handle: Any) -> Any:
        with lock:
            if id(handle) in held:
                return "PROC"
        if _taken("check_xfer_state.error"):
            return "ERR"
        return check(self, handle)

    def failing_release(self: Any, handle: Any) -> Any:
        with lock:
            held.discard(id(handle))
        return release(self, handle)

    def noted_descs(self: Any, descs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(descs, list):
            regions.extend((each[0], each[1]) for each in descs if each[1])
        return get_reg_descs(self, descs, *args, **kwargs)

    def dump() -> None:
        done = False
        while True:
            wanted = (FOLDER / "memory.dump").exists()
            if wanted and not done and regions:
                digests = []
                for address, size in regions:
                    for at in range(0, size, PAGE_BYTES):
                        page = ctypes.string_at(address + at, min(PAGE_BYTES, size - at))
                        digests.append(hashlib.blake2b(page, digest_size=8).hexdigest())
                part = FOLDER / f"part.{os.getpid()}"
                part.write_text("\n".join(digests))
                part.rename(FOLDER / f"memory.{os.getpid()}")
            done = wanted
            time.sleep(0.05)

    agent.transfer = _failing("transfer", held_transfer)
    agent.check_xfer_state = _failing("check_xfer_state", failing_check)
    agent.release_xfer_handle = failing_release
    agent.get_reg_descs = noted_descs
    agent.send_notif = _failing("send_notif", agent.send_notif)
    agent.add_remote_agent = _failing("add_remote_agent", agent.add_remote_agent)
    threading.Thread(target=dump, daemon=True).start()


def _cut_off(zmq_socket: Any) -> None:
    connect = zmq_socket.Socket.connect

    def lost(self: Any, address: str) -> Any:
        if address.startswith("tcp:") and (FOLDER / "zmq_connect.lost").exists():
            address = "tcp://127.0.0.1:9"
        return connect(self, address)

    zmq_socket.Socket.connect = lost


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change: Callable[[Any], None]
        if re.fullmatch(r"nixl_\w+\._api", name):
            change = _sabotage
        elif name == "zmq.sugar.socket":
            change = _cut_off
        else:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def changed(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
