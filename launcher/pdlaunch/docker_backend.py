"""Carries a plan out as containers: start, follow, notice deaths, stop. Decides nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from docker import APIClient
from docker.errors import APIError, NotFound

from pdlaunch import docker_daemon
from pdlaunch.containers import OWNER_LABEL, handed_over, request
from pdlaunch.death import Death
from pdlaunch.docker_daemon import FAILURES, explained
from pdlaunch.errors import PdError
from pdlaunch.plan import ContainerPlan, ProcessPlan

_POLL_S = 0.1
_RECONNECT_EVERY_S = 1.0
# A daemon that is only restarted, or a host behind a shaky line, gets so long.
_LOST_AFTER_S = 60.0
_CONFLICT = 409
_SIGNALLED = 128


@dataclass
class _Child:
    plan: ProcessPlan
    container: ContainerPlan
    id: str
    log: Path
    started_s: float = field(default_factory=time.monotonic)
    death: Death | None = None
    is_to_end: bool = False


class DockerBackend:
    """The containers of one launch, on one daemon or several."""

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
        self._clients: dict[str, APIClient] = {}
        # A restart runs beside whoever stops it all, and nothing may be made after that.
        self._making = threading.Lock()
        self._is_stopping = False

    @property
    def started(self) -> tuple[str, ...]:
        return tuple(self._children)

    @property
    def pids(self) -> dict[str, int]:
        """None of this machine, as far as anybody here can tell."""
        return {}

    def log(self, name: str) -> Path:
        return self._children[name].log

    def start(self, process: ProcessPlan) -> None:
        """Make and start one container; its output goes to a log file here."""
        log = self._log_dir / process.log_name
        with log.open("wb"):
            log.chmod(0o600)
        self._start(process, log)

    def restart(self, process: ProcessPlan) -> None:
        """Start a container anew that has ended, with nothing of the old one; its log goes on."""
        child = self._children[process.name]
        client = self._client(child.container)
        with (
            explained(f"cannot remove {child.container.name}", child.container.endpoint),
            suppress(NotFound),
        ):
            client.remove_container(child.id, force=True, v=True)
        self._start(process, child.log)

    def end(self, name: str, stop_s: float) -> None:
        """End one container and remove it."""
        child = self._children[name]
        child.is_to_end = True
        client = self._client(child.container)
        kill_at_s = time.monotonic() + stop_s
        with (
            explained(f"cannot end {child.container.name}", child.container.endpoint),
            # It may end, or be removed, at any moment.
            suppress(NotFound),
        ):
            if child.death is None:
                client.kill(child.id, "SIGTERM")
            while child.death is None and time.monotonic() < kill_at_s:
                time.sleep(_POLL_S)
            client.remove_container(child.id, force=True, v=True)

    def deaths(self) -> list[Death]:
        """Containers that have ended, which none may before `stop` or `end`."""
        children = [child for child in self._children.values() if not child.is_to_end]
        return [child.death for child in children if child.death is not None]

    async def stop(self, stop_s: float, in_a_hurry: Callable[[], bool]) -> list[str]:
        """End all containers, politely first, and remove them; what would not go."""
        await asyncio.to_thread(self._ask_to_stop)
        kill_at_s = time.monotonic() + stop_s
        while not in_a_hurry() and time.monotonic() < kill_at_s:
            if all(child.death is not None for child in self._children.values()):
                break
            await asyncio.sleep(_POLL_S)
        survivors = await asyncio.to_thread(self._remove_all)
        for client in self._clients.values():
            client.close()
        return survivors

    def _start(self, process: ProcessPlan, log: Path) -> None:
        container = process.container
        if container is None:
            raise ValueError(f"{process.name} is not planned as a container")
        with self._making:
            if self._is_stopping:
                return
            client = self._client(container)
            child = _Child(process, container, self._create(client, process, container), log)
            with explained(f"cannot start {process.name}", container.endpoint):
                packed = handed_over(process, self._environ)
                if packed is not None:
                    client.put_archive(child.id, "/", packed)
                client.start(child.id)
            self._children[process.name] = child
        threading.Thread(target=self._follow, args=(child,), daemon=True).start()

    def _create(self, client: APIClient, process: ProcessPlan, container: ContainerPlan) -> str:
        try:
            with explained(f"cannot make a container for {process.name}", container.endpoint):
                made = client.create_container_from_config(  # type: ignore[no-untyped-call]
                    request(process), container.name
                )
        except PdError as error:
            cause = error.__cause__
            if isinstance(cause, APIError) and cause.status_code == _CONFLICT:
                raise PdError(
                    f"a container {container.name} is there already, and not of this launcher",
                    where=container.endpoint,
                    next_step=f"choose another --name; or, if nobody needs it, "
                    f"docker -H {container.endpoint} rm -f {container.name}",
                ) from error
            raise
        return str(made["Id"])

    def _client(self, container: ContainerPlan) -> APIClient:
        endpoint = container.endpoint
        if endpoint not in self._clients:
            client = docker_daemon.connect(endpoint)
            self._clients[endpoint] = client
            # Whoever holds the deployment's lock is its only launcher: what is of another launch
            # was left by one that died. Two endpoints may be one daemon, with some of ours.
            owner = container.labels[OWNER_LABEL]
            with explained("cannot clear what a dead launcher left", endpoint):
                left = docker_daemon.remove(
                    client, OWNER_LABEL, owner, but_of_launch=self._launch_id
                )
            if left:
                raise PdError(
                    f"what a dead launcher left does not go: {', '.join(left)}", where=endpoint
                )
        return self._clients[endpoint]

    def _ask_to_stop(self) -> None:
        with self._making:
            self._is_stopping = True
        for child in self._children.values():
            if child.death is None:
                with suppress(*FAILURES):
                    self._clients[child.container.endpoint].kill(child.id, "SIGTERM")

    def _remove_all(self) -> list[str]:
        return [
            left
            for endpoint in self._clients
            for left in docker_daemon.sweep(endpoint, self._launch_id)
        ]

    def _follow(self, child: _Child) -> None:
        """Copy a container's output until it ends, and note how it ended."""
        endpoint = child.container.endpoint
        heard_s = time.monotonic()
        last = b""
        while child.death is None:
            try:
                # A stream keeps its connection to itself.
                with closing(docker_daemon.connect(endpoint)) as client, child.log.open("ab") as to:
                    heard_s = time.monotonic()
                    last = _copy(client, child.id, last, to)
                    state = client.inspect_container(child.id)["State"]
                    heard_s = time.monotonic()
                    if not state["Running"]:
                        child.death = self._death(child, state)
            except NotFound:
                child.death = self._death(child, {}, "was removed by somebody else")
            except (PdError, *FAILURES):
                if time.monotonic() - heard_s > _LOST_AFTER_S:
                    how = f"is out of reach: the Docker daemon at {endpoint} does not answer"
                    child.death = self._death(child, {}, how)
            if child.death is None:
                time.sleep(_RECONNECT_EVERY_S)

    def _death(self, child: _Child, state: Mapping[str, Any], how: str | None = None) -> Death:
        code = int(state.get("ExitCode", 1))
        if state.get("OOMKilled"):
            how = "was killed: its host, or its container, ran out of memory"
        with suppress(ValueError):
            # As a shell tells a death by signal.
            code = -signal.Signals(code - _SIGNALLED)
        return Death(child.plan.name, code, child.log, time.monotonic() - child.started_s, how)


def _copy(client: APIClient, container_id: str, last: bytes, to: IO[bytes]) -> bytes:
    """Copy what a container says from a time on; the time of the last it said."""
    # Whole seconds: rather hear the last ones again.
    since_s = int(datetime.fromisoformat(last.decode()).timestamp()) if last else None
    said = client.logs(container_id, stream=True, follow=True, timestamps=True, since=since_s)
    for entry in said:
        stamp, _, text = entry.partition(b" ")
        # They have as many digits each.
        if stamp > last:
            to.write(text)
            to.flush()
            last = stamp
    return last
