"""`pdlaunch build`: the patched artefacts."""

from __future__ import annotations

from pathlib import Path

import click

from pdlaunch import containers, image, packages
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.errors import UsageError
from pdlaunch.upstream import VARIANTS, Variant
from pdlaunch.wheel import build_wheel


@click.group(
    epilog=parameters.examples(
        "pdlaunch build wheel --variant cuda", "pdlaunch build image --tag pdlaunch:latest"
    )
)
def build() -> None:
    """Build the patched wheel or the image."""


@build.command(
    epilog=parameters.examples(
        "pdlaunch build wheel --variant cpu",
        "pdlaunch build wheel --variant cuda --arch aarch64 --out /tmp/wheels",
    )
)
@click.option("--variant", type=click.Choice(VARIANTS), required=True, help="What it runs on.")
@click.option(
    "--out",
    "out_dir",
    metavar="DIR",
    default=Path("dist"),
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to put it (default: dist).",
)
@click.option("--arch", metavar="ARCH", help="x86_64 or aarch64 (default: this machine's).")
def wheel(variant: Variant, out_dir: Path, arch: str | None) -> None:
    """Apply the series to the published wheel; prints the new wheel's path."""
    terminal = Terminal()
    built = build_wheel(variant, out_dir, terminal, arch=arch)
    terminal.success(f"sha256 {packages.sha256_of(built)}")
    terminal.data(str(built))


@build.command(
    "image",
    epilog=parameters.examples(
        "pdlaunch build image",
        "pdlaunch build image --base-image vllm/vllm-openai:v0.32.0-cu129 --efa-version 1.48.0",
        "pdlaunch build image --variant cpu",
    ),
)
@click.option(
    "--variant",
    type=click.Choice(VARIANTS),
    default="cuda",
    show_default=True,
    help="What it runs on.",
)
@click.option("--tag", help="The image's name. [default: pdlaunch:latest, for cpu pdlaunch:cpu]")
@click.option("--arch", metavar="ARCH", help="x86_64 or aarch64 (default: this machine's).")
@click.option(
    "--base-image",
    metavar="IMAGE",
    help="For cuda an image of the same vLLM, whose tag decides the CUDA; for cpu a Python.",
)
@click.option("--efa-version", metavar="VERSION", help="EFA's installer (cuda); 1.47 or later.")
@click.option("--efa-sha256", metavar="HASH", help="What its archive must have.")
@click.option("--nixl-version", metavar="VERSION", help="NIXL; 1.3.1 or later for EFA.")
def build_image(
    *,
    variant: Variant,
    tag: str | None,
    arch: str | None,
    base_image: str | None,
    efa_version: str | None,
    efa_sha256: str | None,
    nixl_version: str | None,
) -> None:
    """Build the image with the patched wheel, with docker. The build checks what it made."""
    if variant == "cpu" and (efa_version or efa_sha256):
        raise UsageError(
            "the image for CPUs has no EFA",
            where="--efa-version" if efa_version else "--efa-sha256",
            next_step="leave it out, or build --variant cuda",
        )
    asked = {
        "BASE_IMAGE": base_image,
        "EFA_INSTALLER_VERSION": efa_version,
        "EFA_INSTALLER_SHA256": efa_sha256,
        "NIXL_VERSION": nixl_version,
    }
    chosen = {name: value for name, value in asked.items() if value is not None}
    terminal = Terminal()
    tag = tag or containers.OWN_IMAGES[variant]
    image.build(tag, terminal, variant=variant, arch=arch, chosen=chosen)
    terminal.success(f"built {tag}")
