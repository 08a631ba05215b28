"""The base of the series, as patches/UPSTREAM states it. Parses; never downloads."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from pdlaunch.errors import PdError

Variant = Literal["cpu", "cuda"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True)
class PublishedFile:
    """One file of a project on a package index, pinned by hash."""

    project: str
    filename: str
    sha256: str


@dataclass(frozen=True)
class Upstream:
    version: str
    sdist: PublishedFile
    wheels: Mapping[Variant, Mapping[str, PublishedFile]]

    def wheel(self, variant: Variant, arch: str | None = None) -> PublishedFile:
        """The published wheel of a variant for an architecture, by default this machine's."""
        by_arch = self.wheels[variant]
        arch = arch or machine()
        if arch not in by_arch:
            raise PdError(
                f"vLLM {self.version} has no {variant} wheel for {arch}",
                where="patches/UPSTREAM",
                next_step=f"use one of: {', '.join(sorted(by_arch))}",
            )
        return by_arch[arch]


def machine() -> str:
    """This machine's architecture in the spelling of wheel tags on Linux."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def load(path: Path) -> Upstream:
    """Reads patches/UPSTREAM."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PdError(
            f"the base of the series cannot be read: {error}",
            where=str(path),
            next_step="compare it with the file of the last release",
        ) from error


def parse(text: str) -> Upstream:
    table = tomllib.loads(text)
    wheels = {
        variant: MappingProxyType(
            {arch: _file(entry) for arch, entry in table["wheel"][variant].items()}
        )
        for variant in VARIANTS
    }
    return Upstream(
        version=str(table["version"]),
        sdist=_file(table["sdist"]),
        wheels=MappingProxyType(cast("dict[Variant, Mapping[str, PublishedFile]]", wheels)),
    )


def _file(entry: Mapping[str, Any]) -> PublishedFile:
    return PublishedFile(
        project=str(entry["project"]),
        filename=str(entry["filename"]),
        sha256=str(entry["sha256"]),
    )
