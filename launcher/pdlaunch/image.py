"""Builds the container image: lays out the build context and calls docker."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from pdlaunch.console import Reporter
from pdlaunch.errors import PdError
from pdlaunch.paths import patches_dir
from pdlaunch.wheel import build_wheel

_DOCKER_PLATFORM = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


def build(tag: str, reporter: Reporter, *, arch: str | None = None) -> None:
    """Builds the CUDA image from the checkout's Dockerfile and the patched wheel."""
    docker = shutil.which("docker")
    if docker is None:
        raise PdError(
            "docker is not installed",
            next_step="install docker, or take the wheel alone: "
            "pdlaunch build wheel --variant cuda",
        )
    with tempfile.TemporaryDirectory() as tmp:
        context = Path(tmp)
        lay_out(context, reporter, arch=arch)
        result = subprocess.run(command(docker, tag, context, arch), check=False)
    if result.returncode:
        raise PdError(
            "docker build failed", next_step="see its output above", exit_code=result.returncode
        )


def lay_out(context: Path, reporter: Reporter, *, arch: str | None = None) -> None:
    """The context is what a checkout with a built wheel has: Dockerfile and dist/."""
    dockerfile = patches_dir().parent / "Dockerfile"
    if not dockerfile.is_file():
        raise PdError(
            "the Dockerfile is not here",
            where=str(dockerfile),
            next_step="run this from a checkout of pdlaunch",
        )
    shutil.copyfile(dockerfile, context / "Dockerfile")
    build_wheel("cuda", context / "dist", reporter, arch=arch)


def command(docker: str, tag: str, context: Path, arch: str | None) -> list[str]:
    platform = ["--platform", _DOCKER_PLATFORM.get(arch, arch)] if arch else []
    return [docker, "build", *platform, "--tag", tag, str(context)]
