"""What pip is configured with: indexes, find-links, certificates. Reads; never changes it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pypi_simple import PYPI_SIMPLE_ENDPOINT


@dataclass(frozen=True)
class Sources:
    """Where pip would look, in its order: links first, then the indexes."""

    find_links: tuple[str, ...]
    indexes: tuple[str, ...]
    cert: str | None = None
    timeout_s: float = 15.0


def configured_sources(environ: Mapping[str, str] = os.environ) -> Sources:
    """pip's own settings: files, environment and defaults, merged as pip merges them."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        env=dict(environ),
    )
    settings = parse_listing(listing.stdout) if listing.returncode == 0 else {}
    # An environment without pip still has the variables that pip would read.
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            settings[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return sources_of(settings)


def parse_listing(listing: str) -> dict[str, str]:
    """The settings in `pip config list`: a command's section wins over the global one."""
    settings: dict[str, str] = {}
    for section in ("global", "install", "download"):
        for line in listing.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return settings


def sources_of(settings: Mapping[str, str]) -> Sources:
    indexes = [
        *settings.get("index-url", PYPI_SIMPLE_ENDPOINT).split(),
        *settings.get("extra-index-url", "").split(),
    ]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        indexes = []
    return Sources(
        find_links=tuple(settings.get("find-links", "").split()),
        indexes=tuple(indexes),
        cert=settings.get("cert"),
        timeout_s=float(settings.get("timeout", settings.get("default-timeout", "15"))),
    )
