"""`pdlaunch doctor` and `pdlaunch up` against the real engine environment and the real NIXL."""

from __future__ import annotations

from pathlib import Path

import pytest

import serving
from pdlaunch import engine, recipe_loader
from pdlaunch.console import Terminal
from pdlaunch.doctor import examination
from pdlaunch.doctor.findings import Finding


def _findings(*overrides: str) -> dict[str, list[Finding]]:
    engine.ensure("cpu", Terminal())
    found: dict[str, list[Finding]] = {}
    for each in examination.examine(recipe_loader.find("tiny-qwen3-cpu"), overrides):
        found.setdefault(each.check, []).append(each)
    return found


def test_backends_of_the_engine_instantiate() -> None:
    found = _findings()
    assert [each.state for each in found["nixl-build"]] == ["ok"]
    assert {each.state for each in found["nixl-backend"]} == {"ok"}
    assert "UCX instantiates" in found["nixl-backend"][0].evidence


def test_backend_that_cannot_load_here_is_named_with_what_it_lacks() -> None:
    found = _findings("transfer.backends=[UCX, LIBFABRIC]")
    states = {each.evidence.split()[1]: each for each in found["nixl-backend"]}
    assert states["UCX"].state == "ok"
    fabric = states["LIBFABRIC"]
    if fabric.state == "ok":
        pytest.skip("this machine has all that LIBFABRIC needs")
    assert fabric.state == "error"
    assert "LIBFABRIC does not instantiate" in fabric.evidence
    assert "libplugin_LIBFABRIC.so needs lib" in fabric.evidence
    assert "/opt/amazon/efa/lib" in str(fabric.remedy)


@pytest.mark.parametrize(
    "backends", [pytest.param("[LIBFABRIC]", marks=pytest.mark.slow), "[UCX, LIBFABRIC]"]
)
def test_what_is_to_use_a_backend_that_cannot_load_never_serves(
    tmp_path: Path, backends: str
) -> None:
    asked = f"transfer.backends={backends}"
    (fabric,) = [
        each for each in _findings(asked)["nixl-backend"] if each.evidence.split()[1] == "LIBFABRIC"
    ]
    if fabric.state == "ok":
        pytest.skip("this machine has all that LIBFABRIC needs")
    done = serving.ran(tmp_path, "up", serving.TINY, "--name", "fabric", "--set", asked)
    assert done.returncode not in (0, 2), done.stderr
    assert "unsupported backend 'LIBFABRIC'" in done.stderr
    assert "libfabric.so.1: cannot open shared object file" in done.stderr
    assert "is ready" not in done.stderr and " is up " not in done.stderr
    assert serving.pdlaunch(tmp_path, "status", "--json") == "[]\n"
