"""Builds the container image: lays out the build context and calls docker."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from pdlaunch.console import Reporter
from pdlaunch.errors import PdError
from pdlaunch.paths import patches_dir
from pdlaunch.series import Series
from pdlaunch.series import load as load_series
from pdlaunch.upstream import Variant
from pdlaunch.wheel import build_wheel, version_of

_DOCKERFILES: Mapping[Variant, str] = {"cuda": "Dockerfile", "cpu": "Dockerfile.cpu"}
# Where the checkout has it, so that the context is the same without this module.
_CHECK = Path("launcher/pdlaunch/engine_scripts/verify_image.py")
_DOCKER_PLATFORM = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


def build(
    tag: str,
    reporter: Reporter,
    *,
    variant: Variant = "cuda",
    arch: str | None = None,
    chosen: Mapping[str, str] | None = None,
) -> None:
    """Builds an image from the checkout's Dockerfile and the patched wheel.

    Args:
        chosen: build arguments over the Dockerfile's defaults.

    Raises:
        PdError: there is no docker, no checkout, or the build failed; its check is part of it.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise PdError(
            "docker is not installed",
            next_step="install docker, or take the wheel alone: "
            f"pdlaunch build wheel --variant {variant}",
        )
    series = load_series(patches_dir())
    with tempfile.TemporaryDirectory() as tmp:
        context = Path(tmp)
        lay_out(context, series, reporter, variant=variant, arch=arch)
        arguments = {**build_arguments(series, variant), **(chosen or {})}
        call = command(docker, tag, context / _DOCKERFILES[variant], arch, arguments)
        result = subprocess.run(call, check=False)
    if result.returncode:
        raise PdError(
            "docker build failed", next_step="see its output above", exit_code=result.returncode
        )


def lay_out(
    context: Path,
    series: Series,
    reporter: Reporter,
    *,
    variant: Variant = "cuda",
    arch: str | None = None,
) -> None:
    """The context is what a checkout with a built wheel has: Dockerfile, its check and dist/."""
    dockerfile = patches_dir().parent / _DOCKERFILES[variant]
    if not dockerfile.is_file():
        raise PdError(
            "the Dockerfile is not here",
            where=str(dockerfile),
            next_step="run this from a checkout of pdlaunch",
        )
    shutil.copyfile(dockerfile, context / dockerfile.name)
    check = context / _CHECK
    check.parent.mkdir(parents=True)
    check.write_bytes(files("pdlaunch.engine_scripts").joinpath(_CHECK.name).read_bytes())
    build_wheel(variant, context / "dist", reporter, arch=arch, series=series)


def build_arguments(series: Series, variant: Variant) -> dict[str, str]:
    """What the Dockerfile takes from the series: its base, its labels, what it checks for."""
    return {
        "VLLM_VERSION": series.upstream.version,
        "ENGINE_VERSION": version_of(series, variant),
        "SERIES_HASH": series.hash,
    }


def command(
    docker: str, tag: str, dockerfile: Path, arch: str | None, arguments: Mapping[str, str]
) -> list[str]:
    """The call of docker; the Dockerfile lies in its context."""
    platform = ["--platform", _DOCKER_PLATFORM.get(arch, arch)] if arch else []
    given = [
        word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")
    ]
    where = ["--file", str(dockerfile), str(dockerfile.parent)]
    return [docker, "build", *platform, "--tag", tag, *given, *where]
