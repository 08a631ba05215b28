"""The image: what docker is called with, and what is said when it cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fake_upstream import FakeReporter, FakeUpstream
from pdlaunch import image, wheel
from pdlaunch.cli import cli
from pdlaunch.errors import PdError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(image, "patches_dir", lambda: upstream.patches)
    monkeypatch.setattr(wheel, "load_series", upstream.series)
    return upstream.patches.parent


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker that notes its arguments and the files of its context."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    notes = tmp_path / "notes"
    program.write_text(
        f'#!/bin/sh\necho "$*" > {notes}\nfor last; do :; done\n'
        f'cd "$last" && find . -type f | sort >> {notes}\ntest ! -e {tmp_path}/fail || exit 7\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return notes


def test_context_holds_dockerfile_and_wheel(checkout: Path, docker: Path) -> None:
    (checkout / "Dockerfile").write_text("FROM scratch\n")
    image.build("pd:1", FakeReporter(), arch="x86_64")
    called, *files = docker.read_text().splitlines()
    assert called.startswith("build --platform linux/amd64 --tag pd:1 ")
    assert "BASE_IMAGE" not in called and "NIXL_VERSION" not in called
    version = "0.32.0+pd.0.h"
    assert f"--build-arg VLLM_VERSION=0.32.0 --build-arg ENGINE_VERSION={version}" in called
    assert files[0] == "./Dockerfile"
    assert files[1].startswith(f"./dist/vllm-{version}")
    assert files[2:] == ["./launcher/pdlaunch/engine_scripts/verify_image.py"]


def test_versions_are_arguments_of_the_build(
    checkout: Path, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "Dockerfile").write_text("FROM scratch\n")
    options = ["--arch", "x86_64", "--base-image", "mine:1", "--efa-version", "1.48.0"]
    options += ["--efa-sha256", "abc", "--nixl-version", "1.6.0"]
    result = CliRunner().invoke(cli, ["build", "image", *options])
    assert result.exit_code == 0, result.output
    called = docker.read_text().splitlines()[0]
    assert "--tag pdlaunch:latest" in called
    for name, value in (
        ("BASE_IMAGE", "mine:1"),
        ("EFA_INSTALLER_VERSION", "1.48.0"),
        ("EFA_INSTALLER_SHA256", "abc"),
        ("NIXL_VERSION", "1.6.0"),
    ):
        assert f"--build-arg {name}={value} " in called
        assert re.search(rf"^ARG {name}=", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


def test_image_for_cpus_has_a_file_and_a_wheel_of_its_own(checkout: Path, docker: Path) -> None:
    (checkout / "Dockerfile.cpu").write_text("FROM scratch\n")
    result = CliRunner().invoke(cli, ["build", "image", "--variant", "cpu", "--arch", "x86_64"])
    assert result.exit_code == 0, result.output
    called, *files = docker.read_text().splitlines()
    assert "--tag pdlaunch:cpu" in called and "/Dockerfile.cpu " in called
    assert files[0] == "./Dockerfile.cpu"
    assert files[1].startswith("./dist/vllm-0.32.0+cpu.pd.")


def test_image_for_cpus_has_no_efa() -> None:
    result = CliRunner().invoke(cli, ["build", "image", "--variant", "cpu", "--efa-version", "1"])
    assert isinstance(result.exception, UsageError)


def test_failed_build_passes_dockers_exit_code_on(
    checkout: Path, docker: Path, tmp_path: Path
) -> None:
    (checkout / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "fail").touch()
    with pytest.raises(PdError, match="docker build failed") as caught:
        image.build("pd:1", FakeReporter(), arch="x86_64")
    assert caught.value.exit_code == 7


def test_missing_docker_says_what_to_do(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PdError, match=r"docker is not installed(?s:.)*pdlaunch build wheel"):
        image.build("pd:1", FakeReporter())


def test_missing_dockerfile_asks_for_a_checkout(checkout: Path, docker: Path) -> None:
    with pytest.raises(PdError, match=r"Dockerfile is not here(?s:.)*checkout of pdlaunch"):
        image.build("pd:1", FakeReporter())
