"""Two network namespaces on this machine and a link of a given rate between them.

A pair in them is one on two hosts. Each namespace lives as long as the process that holds it and
what runs in it: nothing is left behind, however this process ends.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from pdlaunch import planner
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan, ProcessRole

End = Literal["prefill", "decode"]
ENDS: Final[tuple[End, End]] = ("prefill", "decode")

# Inside a namespace: the link between the two, and the way to everything else, which is not slow.
_LINK, _WAY_OUT = "pdlink", "pdhost"
_BURST_BYTES = 2**20
_QUEUE_MS = 50
_END_WITHIN_S = 10.0


@dataclass(frozen=True)
class _Namespace:
    """One end, and how to get in."""

    end: End
    pid: int
    # Its address for clients, ours at the other end of that way, and its address on the link.
    address: str
    our_address: str
    link_address: str
    # The end of the way that is on our side.
    device: str

    @property
    def enter(self) -> tuple[str, ...]:
        within = f"/proc/{self.pid}/ns"
        return ("nsenter", f"--net={within}/net", f"--mount={within}/mnt", "--")

    def run(self, *words: str) -> None:
        _run(*self.enter, *words)


class Link:
    """The two ends, and what is between them."""

    def __init__(self, namespaces: Mapping[ProcessRole, _Namespace]) -> None:
        self._namespaces = namespaces

    def limit(self, mbit_per_s: int) -> None:
        """Let no more through, in either direction."""
        for namespace in self._namespaces.values():
            namespace.run(
                *("tc", "qdisc", "replace", "dev", _LINK, "root", "tbf"),
                *("rate", f"{mbit_per_s}mbit", "burst", str(_BURST_BYTES)),
                *("latency", f"{_QUEUE_MS}ms"),
            )

    def joined(self, plan: DeploymentPlan) -> DeploymentPlan:
        """The plan with its engines at the ends; the router stays where its clients are."""
        moved = {process.url: self._at_its_end(process) for process in plan.engines}
        processes = [
            moved[process.url]
            if process.url in moved
            else process.model_copy(
                update={
                    "argv": tuple(
                        moved[word].url if word in moved else word for word in process.argv
                    )
                }
            )
            for process in plan.processes
        ]
        return plan.model_copy(update={"processes": tuple(processes)})

    def _at_its_end(self, process: ProcessPlan) -> ProcessPlan:
        namespace = self._namespaces[process.role]
        argv = list(process.argv)
        argv[argv.index("--host") + 1] = namespace.address
        env = {
            **process.env,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": namespace.link_address,
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": _LINK,
        }
        return process.model_copy(
            update={
                "argv": (*namespace.enter, *argv),
                "env": env,
                "host": namespace.address,
                "url": planner.url(namespace.address, process.port),
            }
        )


@contextmanager
def link(mbit_per_s: int) -> Iterator[Link]:
    """Make the namespaces and the link; they are gone when all that runs in them has ended.

    Raises:
        PdError: where that is not allowed, or a tool for it is missing.
    """
    with ExitStack() as stack:
        first, second = (stack.enter_context(_namespace(end)) for end in ENDS)
        _run(
            *("ip", "link", "add", _LINK, "netns", str(first.pid), "type", "veth"),
            *("peer", "name", _LINK, "netns", str(second.pid)),
        )
        for namespace in (first, second):
            namespace.run("ip", "addr", "add", f"{namespace.link_address}/30", "dev", _LINK)
            namespace.run("ip", "link", "set", _LINK, "up")
        made = Link({first.end: first, second.end: second})
        made.limit(mbit_per_s)
        yield made


def refusal() -> str | None:
    """Why there can be no link here; None where there can."""
    try:
        with link(1000):
            return None
    except PdError as error:
        return error.what


@contextmanager
def _namespace(end: End) -> Iterator[_Namespace]:
    place = ENDS.index(end)
    number = os.getpid()
    # A network that two benchmarks on a machine rarely share.
    network = f"10.214.{number % 256}"
    with _held() as pid:
        namespace = _Namespace(
            end,
            pid,
            address=f"{network}.{4 * place + 2}",
            our_address=f"{network}.{4 * place + 1}",
            link_address=f"{network}.{129 + place}",
            device=f"pdl{number}{end[0]}",
        )
        _run(
            *("ip", "link", "add", namespace.device, "type", "veth"),
            *("peer", "name", _WAY_OUT, "netns", str(pid)),
        )
        try:
            _run("ip", "addr", "add", f"{namespace.our_address}/30", "dev", namespace.device)
            _run("ip", "link", "set", namespace.device, "up")
            namespace.run("ip", "addr", "add", f"{namespace.address}/30", "dev", _WAY_OUT)
            namespace.run("ip", "link", "set", _WAY_OUT, "up")
            namespace.run("ip", "link", "set", "lo", "up")
            yield namespace
        finally:
            # It would go with the namespace, but only some time later.
            with suppress(PdError):
                _run("ip", "link", "del", namespace.device)


@contextmanager
def _held() -> Iterator[int]:
    """A network namespace, by the pid of a process in it that ends when we do."""
    # UCX looks for its devices in /sys, which shows those of the namespace that mounted it.
    script = "mount -t sysfs sysfs /sys && exec cat"
    command = ["unshare", "--net", "--mount", "sh", "-c", script]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A Ctrl-C of the terminal is for pdlaunch.
            start_new_session=True,
        )
    except OSError as error:
        raise _failed(command, error.strerror or str(error)) from error
    with process:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("a pipe that was asked for is missing")
        try:
            # What comes back has been through the namespace: it is there.
            with suppress(BrokenPipeError):
                process.stdin.write(b"\n")
                process.stdin.flush()
            if not process.stdout.read(1):
                raise _failed(command, process.stderr.read().decode("utf-8", "replace"))
            yield process.pid
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except OSError as error:
        raise _failed(words, error.strerror or str(error)) from error
    except subprocess.CalledProcessError as error:
        raise _failed(words, error.stderr) from error


def _failed(words: list[str] | tuple[str, ...], told: str) -> PdError:
    last = told.strip().rpartition("\n")[2] or "it says nothing"
    return PdError(
        f"no network namespaces with a slow link between them here: {words[0]}: {last}",
        where=shlex.join(words),
        next_step="run as root on Linux with iproute2 and util-linux, or choose other workloads",
    )
