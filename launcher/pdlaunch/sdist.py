"""Unpacks the published source distribution, whole or only the files that are asked for."""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path

from pdlaunch.errors import PdError


def unpack(archive: Path, target: Path, only: Collection[str] | None = None) -> None:
    """Unpacks the tree, without its top folder, into a folder.

    Args:
        archive: the `.tar.gz` as published.
        target: where to; made if it is missing.
        only: paths inside the tree; what the archive lacks is not an error.
    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(target, members=_members(tar, only), filter="data")
    except tarfile.TarError as error:
        raise PdError(
            f"the source distribution is broken: {error}",
            where=str(archive),
            next_step="delete it and run this again",
        ) from error


def _members(tar: tarfile.TarFile, only: Collection[str] | None) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        _, _, name = member.name.partition("/")
        if name and (only is None or name in only):
            yield member.replace(name=name, deep=False)
