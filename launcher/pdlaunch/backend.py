"""The two ways to carry a plan out, processes and containers, behind one interface.

The only place that knows that there are two. Docker's SDK is an extra, and slow to import: nothing
asks for it but what is planned as containers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pdlaunch import leftovers
from pdlaunch.death import Death
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.process_backend import ProcessBackend


class Backend(Protocol):
    """What one launch runs as. A name is that of a process of the plan."""

    @property
    def started(self) -> Collection[str]:
        """Names of what was started."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Of what is a process of this machine, by name."""

    def log(self, name: str) -> Path:
        """Where its output goes, on this machine."""

    def start(self, process: ProcessPlan) -> None:
        """Start it; raises a PdError where that cannot be."""

    def restart(self, process: ProcessPlan) -> None:
        """Start what died or was ended again, maybe by another plan; its log goes on."""

    def end(self, name: str, stop_s: float) -> None:
        """End one, politely first, which is no death; it may be started again."""

    def deaths(self) -> list[Death]:
        """What has ended, which none may before `stop` or `end`. Returns at once."""

    async def stop(self, stop_s: float, in_a_hurry: Callable[[], bool]) -> list[str]:
        """End all of it, politely first; what would not go even so, in words."""


def of(plan: DeploymentPlan, log_dir: Path) -> Backend:
    """What carries this plan out."""
    if not plan.endpoints:
        return ProcessBackend(plan.launch_id, log_dir)
    with _docker_extra():
        from pdlaunch.docker_backend import DockerBackend  # noqa: PLC0415

    return DockerBackend(plan.launch_id, log_dir)


def sweep(
    launch_id: str, endpoints: Iterable[str], shared_memory: Iterable[Path] = ()
) -> list[str]:
    """Kill what is left of a launch, remove what it left behind; what would not go, in words."""
    left = [f"process {pid}" for pid in leftovers.sweep(launch_id, shared_memory)]
    for endpoint in endpoints:
        with _docker_extra():
            from pdlaunch import docker_daemon  # noqa: PLC0415

        left += docker_daemon.sweep(endpoint, launch_id)
    return left


def docker_here() -> str:
    """The endpoint of this machine's Docker daemon."""
    with _docker_extra():
        from pdlaunch import docker_daemon  # noqa: PLC0415

    return docker_daemon.here()


def image_labels(endpoint: str, image: str) -> Mapping[str, str]:
    """The labels of an image where a Docker daemon has it; raises a PdError where it does not."""
    with _docker_extra():
        from pdlaunch import docker_daemon  # noqa: PLC0415

    return docker_daemon.image_labels(endpoint, image)


@contextmanager
def _docker_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise PdError(
            f"containers need Docker's SDK: {error}",
            next_step="pip install 'pdlaunch[docker]'",
        ) from error
