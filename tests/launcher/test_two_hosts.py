"""A deployment over two hosts, which are two network namespaces joined by a cable."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from launching import Launcher, fake_processes, until


class Hosts(NamedTuple):
    prefill: str
    decode: str


ADDRESSES = Hosts("10.213.71.1", "10.213.71.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Names of two namespaces that reach each other and nobody else."""
    names = Hosts(f"pdl-p{os.getpid()}", f"pdl-d{os.getpid()}")
    try:
        ip("netns", "add", names.prefill)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    try:
        ip("netns", "add", names.decode)
        veth = [*("name", "pdl0", "netns", names.prefill), "type", "veth"]
        ip("link", "add", *veth, *("peer", "name", "pdl0", "netns", names.decode))
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "pdl0")
            ip("-n", name, "link", "set", "pdl0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_each_host_starts_its_roles_and_the_router_proves_the_whole(
    launcher: Launcher, hosts: Hosts
) -> None:
    recipe = launcher.recipe(
        "a",
        f"prefill: {{host: {ADDRESSES.prefill}}}\n"
        f"decode: {{host: {ADDRESSES.decode}}}\n"
        f"router: {{host: {ADDRESSES.prefill}}}\n",
    )
    code, _, err = launcher.run("up", recipe, "--only", "decode", namespace=hosts.prefill)
    assert code == 2 and f"belongs to {ADDRESSES.decode}" in err
    for role, host in (
        ("decode", hosts.decode),
        ("prefill", hosts.prefill),
        ("router", hosts.prefill),
    ):
        code, _, err = launcher.run("up", recipe, "--only", role, "--detach", namespace=host)
        assert code == 0, err
    assert "KV moved by push" in err
    _, out, _ = launcher.run("status", "a-router", "--json", namespace=hosts.decode)
    assert json.loads(out)["is_healthy"] is True
    code, out, _ = launcher.run("ask", "a-router", "Capital?", namespace=hosts.decode)
    assert (code, out) == (0, "Paris\n")
    assert launcher.run("down", "--all")[0] == 0
    assert until(lambda: not fake_processes())


def test_local_is_a_routable_address_when_the_other_role_is_elsewhere(
    launcher: Launcher, hosts: Hosts
) -> None:
    recipe = launcher.recipe("a", f"decode: {{host: {ADDRESSES.decode}}}\n")
    _, out, _ = launcher.run("up", recipe, "--dry-run", "--json", namespace=hosts.prefill)
    prefill = json.loads(out)["processes"][0]
    assert prefill["url"] == f"http://{ADDRESSES.prefill}:8100"
    assert prefill["env"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == ADDRESSES.prefill


def test_doctor_tells_a_host_that_waits_from_one_that_cannot_be_reached(
    launcher: Launcher, hosts: Hosts
) -> None:
    recipe = launcher.recipe(
        "a",
        f"prefill: {{host: {ADDRESSES.prefill}}}\n"
        f"decode: {{host: {ADDRESSES.decode}}}\n"
        f"router: {{host: {ADDRESSES.prefill}}}\n",
    )

    def reachability() -> list[dict[str, str]]:
        _, out, _ = launcher.run("doctor", recipe, "--json", namespace=hosts.prefill)
        return [each for each in json.loads(out)["findings"] if each["check"] == "reachability"]

    waiting = reachability()
    assert [each["state"] for each in waiting] == ["ok", "ok"]
    assert "side channel 5700 of decode-0" in waiting[1]["evidence"]
    assert all("nothing listens there yet" in each["evidence"] for each in waiting)

    code, _, err = launcher.run(
        "up", recipe, "--only", "decode", "--detach", namespace=hosts.decode
    )
    assert code == 0, err
    assert "accepts TCP connections" in reachability()[0]["evidence"]
    assert launcher.run("down", "--all")[0] == 0

    ip("-n", hosts.decode, "link", "set", "pdl0", "down")
    cut = reachability()
    assert [each["state"] for each in cut] == ["error", "error"]
    assert all("security group" in each["remedy"] for each in cut)
