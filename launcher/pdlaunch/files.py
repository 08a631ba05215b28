"""Writes the files that users ask for, and explains where that fails. Nothing else is written."""

from __future__ import annotations

from pathlib import Path

from pdlaunch.errors import PdError, UsageError


def write(path: Path, text: str, *, may_replace: bool = True) -> None:
    """Write a text file, UTF-8.

    Raises:
        UsageError: it is there, and must not be replaced.
        PdError: it cannot be written.
    """
    try:
        with path.open("w" if may_replace else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} is there already", where=str(path), next_step="name another, or give --force"
        ) from None
    except OSError as error:
        raise PdError(
            f"cannot write {path}: {error.strerror or error}",
            where=str(path.parent),
            next_step="name a file in a folder that one can write to",
        ) from error
