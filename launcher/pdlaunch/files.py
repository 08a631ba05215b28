"""Writes the files that users ask for, and explains where that fails. Nothing else is written."""

from __future__ import annotations

from pathlib import Path

from pdlaunch.errors import PdError


def write(path: Path, text: str) -> None:
    """Write a text file, UTF-8.

    Raises:
        PdError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PdError(
            f"cannot write {path}: {error.strerror or error}",
            where=str(path.parent),
            next_step="name a file in a folder that one can write to",
        ) from error
