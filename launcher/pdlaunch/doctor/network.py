"""Tries, from here, the ports of a deployment's processes on other hosts. Sends nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from pdlaunch.doctor.facts import Peer
from pdlaunch.plan import DeploymentPlan, ProcessPlan

CONNECT_TIMEOUT_S = 3.0
_AT_ONCE = 16


def peers(plan: DeploymentPlan, timeout_s: float = CONNECT_TIMEOUT_S) -> tuple[Peer, ...]:
    """Every port of a process elsewhere, tried once."""
    wanted = [each for process in plan.processes for each in _ports(process)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return tuple(
            pool.map(
                lambda each: Peer(
                    process=each[0].name,
                    host=each[0].host,
                    port=each[1],
                    is_side_channel=each[1] == each[0].side_channel_port,
                    problem=tried(each[0].host, each[1], timeout_s),
                ),
                wanted,
            )
        )


def tried(host: str, port: int, timeout_s: float) -> str | None:
    """What connecting ended in: None where something accepts, "refused" where nothing does."""
    try:
        with socket.create_connection((host, port), timeout_s):
            return None
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except socket.gaierror as error:
        return f"the name does not resolve: {error.strerror}"
    except OSError as error:
        return error.strerror or str(error)


def _ports(process: ProcessPlan) -> Iterator[tuple[ProcessPlan, int]]:
    if process.is_here:
        return
    yield process, process.port
    if process.side_channel_port is not None:
        yield process, process.side_channel_port
