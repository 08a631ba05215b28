"""A link between two network namespaces: real where they are allowed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launching import until
from pdlaunch import preparation, recipe_loader
from pdlaunch.bench import link
from pdlaunch.bench.link import Link
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan

SEND = """
import socket, sys, time
to = socket.create_connection((sys.argv[1], 5000), timeout=10)
data = bytes(2**16)
began = time.monotonic()
for _ in range(int(sys.argv[2])):
    to.sendall(data)
to.shutdown(socket.SHUT_WR)
to.recv(1)
print(time.monotonic() - began)
"""
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    while connection.recv(2**20):
        pass
    connection.sendall(b"x")
"""


@pytest.fixture
def plan() -> DeploymentPlan:
    loaded = recipe_loader.load(recipe_loader.find("tiny-qwen3-cpu"), ())
    return preparation.planned(loaded, None)


@pytest.fixture
def needs_namespaces() -> None:
    reason = link.refusal()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = devices()
    yield
    assert until(lambda: devices() <= before, within_s=10)
    assert not [child for child in psutil.Process().children() if child.name() == "cat"]


def devices() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def inside(process: ProcessPlan) -> tuple[str, ...]:
    """What enters the namespace that a process of a plan is to run in."""
    return process.argv[: process.argv.index("--") + 1]


def engines(plan: DeploymentPlan) -> tuple[ProcessPlan, ProcessPlan]:
    prefill, decode = plan.engines
    return prefill, decode


@contextmanager
def receiving(at: ProcessPlan, address: str) -> Iterator[None]:
    command = [*inside(at), sys.executable, "-c", RECEIVE, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
        yield
        assert process.wait(30) == 0


def sending_s(frm: ProcessPlan, to: ProcessPlan, mib: int) -> float:
    address = to.env["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    with receiving(to, address):
        command = [*inside(frm), sys.executable, "-c", SEND, address, str(16 * mib)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return float(done.stdout)


@pytest.mark.usefixtures("needs_namespaces")
def test_the_link_lets_no_more_through_than_its_rate(plan: DeploymentPlan) -> None:
    with link.link(2000) as between:
        prefill, decode = engines(between.joined(plan))
        # 32 MiB at 160 Mb/s take 1.7 s, less the burst and the queue.
        between.limit(160)
        assert 1.4 < sending_s(prefill, decode, 32) < 4
        assert 1.4 < sending_s(decode, prefill, 32) < 4
        between.limit(2000)
        assert sending_s(prefill, decode, 32) < 1.2


@pytest.mark.usefixtures("needs_namespaces")
def test_clients_reach_both_ends_and_not_over_the_link(plan: DeploymentPlan) -> None:
    with link.link(1) as between:
        for process in between.joined(plan).engines:
            with receiving(process, process.host):
                command = [sys.executable, "-c", SEND, process.host, "160"]
                subprocess.run(command, check=True, capture_output=True, timeout=20)


@pytest.mark.usefixtures("needs_namespaces")
def test_programs_find_the_link_where_they_look_for_devices(plan: DeploymentPlan) -> None:
    with link.link(100) as between:
        for process in between.joined(plan).engines:
            device = f"/sys/class/net/{process.env['UCX_NET_DEVICES']}/mtu"
            subprocess.run([*inside(process), "cat", device], check=True, capture_output=True)


@pytest.mark.usefixtures("needs_namespaces")
def test_ends_are_gone_when_it_fails() -> None:
    with pytest.raises(RuntimeError, match="broken"), link.link(100):
        raise RuntimeError("broken")


@pytest.mark.usefixtures("needs_namespaces")
def test_ends_are_gone_when_their_owner_is_killed() -> None:
    before = devices()
    script = (
        "import time\nfrom pdlaunch.bench.link import link\n"
        "with link(100):\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert devices() - before
        process.send_signal(signal.SIGKILL)
    assert until(lambda: devices() <= before, within_s=10)


def test_a_plan_has_its_engines_at_the_ends_and_its_router_here(plan: DeploymentPlan) -> None:
    ends = {
        end: link._Namespace(end, 7 + place, f"10.0.0.{place}", "", f"10.0.1.{place}", "any")
        for place, end in enumerate(link.ENDS)
    }
    joined = Link(dict(ends)).joined(plan)
    for process, was, end in zip(joined.engines, plan.engines, ends.values(), strict=True):
        assert inside(process) == (
            *("nsenter", f"--net=/proc/{end.pid}/ns/net", f"--mount=/proc/{end.pid}/ns/mnt"),
            "--",
        )
        assert process.url == f"http://{end.address}:{was.port}"
        assert process.argv[process.argv.index("--host") + 1] == end.address
        assert process.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == end.link_address
        assert (process.env["UCX_TLS"], process.cores) == ("tcp", was.cores)
    (router,), (before,) = joined.of_role("router"), plan.of_role("router")
    assert [word for word in router.argv if word.startswith("http")] == [
        process.url for process in joined.engines
    ]
    assert router.url == before.url


def test_where_it_is_not_allowed_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    told = link.refusal()
    assert told is not None and "Operation not permitted" in told
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    told = link.refusal()
    assert told is not None and "unshare: No such file" in told
    with pytest.raises(PdError, match="no network namespaces"), link.link(100):
        pass
