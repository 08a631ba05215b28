"""Facts about the machine, read from the real one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlaunch import hosts
from pdlaunch.recipe import Recipe


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as server:
        # What vLLM does, and what would let a second server in beside it.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_taken_port_names_key_port_and_holder(listener: int) -> None:
    recipe = Recipe.model_validate(
        {"name": "a", "model": "Org/Model", "router": {"port": listener}}
    )
    facts = hosts.facts_for(recipe, "x")
    (found,) = hosts.unusable_ports(recipe, facts, ["router"])
    assert (found.key, found.port) == ("router.port", listener)
    assert found.why.startswith(f"is taken by process {os.getpid()} ")
    assert hosts.unusable_ports(recipe, facts, ["prefill", "decode"]) == ()


def test_every_taken_port_of_replicas_is_named(listener: int) -> None:
    recipe = Recipe.model_validate(
        {"name": "a", "model": "Org/Model", "decode": {"port": listener - 1, "replicas": 3}}
    )
    found = hosts.unusable_ports(recipe, hosts.facts_for(recipe, "x"), ["decode"])
    assert listener in [each.port for each in found]


def test_ports_of_other_hosts_are_not_checked_here(listener: int) -> None:
    recipe = Recipe.model_validate(
        {"name": "a", "model": "Org/Model", "decode": {"host": "203.0.113.9", "port": listener}}
    )
    assert hosts.unusable_ports(recipe, hosts.facts_for(recipe, "x"), ["decode"]) == ()


def test_address_that_is_not_ours_is_told_apart_from_a_taken_port() -> None:
    assert "cannot be used" in str(hosts.why_not_free("203.0.113.9", 20000))


def test_free_ports_are_distinct_and_free() -> None:
    ports = hosts.free_ports(40)
    assert len(set(ports)) == 40
    assert all(hosts.is_free("127.0.0.1", port) for port in ports)


def test_cores_are_those_one_may_use() -> None:
    assert hosts.cores() == tuple(sorted(os.sched_getaffinity(0)))


def test_devices_follow_an_inherited_choice(tmp_path: Path) -> None:
    assert hosts.gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}) == ("2", "GPU-ab")
    assert hosts.gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert hosts.gpus({"PATH": str(tmp_path)}) is None


def test_devices_are_counted_by_the_drivers_tool(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\necho 'GPU 1: H200 (UUID: GPU-2)'\n"
    )
    tool.chmod(0o755)
    assert hosts.gpus({"PATH": str(tmp_path)}) == ("0", "1")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert hosts.gpus({"PATH": str(tmp_path)}) is None


def test_routable_address_is_one_of_ours() -> None:
    assert hosts.routable_address() in hosts.local_addresses()
    assert hosts.routable_address("127.0.0.1") == "127.0.0.1"
