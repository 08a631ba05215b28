"""`pdlaunch build`: the patched artefacts."""

from __future__ import annotations

from pathlib import Path

import click

from pdlaunch import image, packages
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
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
        "pdlaunch build image", "pdlaunch build image --tag registry.example/pdlaunch:1"
    ),
)
@click.option("--tag", default="pdlaunch:latest", show_default=True, help="The image's name.")
@click.option("--arch", metavar="ARCH", help="x86_64 or aarch64 (default: this machine's).")
def build_image(tag: str, arch: str | None) -> None:
    """Build the CUDA image with the patched wheel, with docker."""
    terminal = Terminal()
    image.build(tag, terminal, arch=arch)
    terminal.success(f"built {tag}")
