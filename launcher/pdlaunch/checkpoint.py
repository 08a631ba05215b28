"""Reads what lies in a model's folder: its config, and whether its weights are whole.

Of weights it reads headers and sizes alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_LENGTH_BYTES = 8
# What the format's own library accepts.
_LONGEST_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version "


@dataclass(frozen=True)
class Weights:
    """The model's weights on this machine."""

    folder: str
    total_bytes: int
    missing: tuple[str, ...]
    unreadable: tuple[str, ...]
    # Files that cannot be loaded, and why.
    damaged: Mapping[str, str]

    @property
    def problem(self) -> str | None:
        """What is wrong with them, the worst first; None where nothing is."""
        if self.missing:
            more = f" and {len(self.missing) - 1} more" if len(self.missing) > 1 else ""
            return f"{self.folder} lacks {self.missing[0]}{more}"
        for name, why in self.damaged.items():
            return f"{name} in {self.folder} {why}"
        if self.unreadable:
            return f"{self.unreadable[0]} in {self.folder} must not be read by this user"
        return None if self.total_bytes else f"{self.folder} holds no weights"


def read_config(file: Path | None) -> tuple[Mapping[str, Any] | None, str | None]:
    """The content of a config.json, or why it cannot be read; neither where it is not there."""
    try:
        content = json.loads(file.read_text("utf-8")) if file is not None else None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{file}: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return None, f"{file} is not JSON: {error}"
    if content is not None and not isinstance(content, dict):
        return None, f"{file} is no mapping of keys to values"
    return content, None


def read_weights(folder: Path) -> Weights:
    """The weights in a model's folder; what its index names and is not there is missing."""
    files = {path.name: path for path in sorted(folder.glob("*")) if path.suffix in _WEIGHTS}
    # The hub's cache links to files; one that was not fetched to its end leaves a link to nothing.
    there = {name: path for name, path in files.items() if path.exists()}
    indexed = [_indexed(index) for index in folder.glob("*.index.json")]
    # A repository may index several formats, of which one is enough.
    lacking = [names - set(there) for names in indexed]
    missing = min(lacking, key=len) if lacking else set(files) - set(there)
    readable = {name: path for name, path in there.items() if os.access(path, os.R_OK)}
    # What an index does not name is not loaded.
    loaded = set().union(*indexed) or set(readable)
    found = {
        name: damage(path)
        for name, path in readable.items()
        if path.suffix == ".safetensors" and name in loaded
    }
    return Weights(
        folder=str(folder),
        total_bytes=sum(path.stat().st_size for path in there.values()),
        missing=tuple(sorted(missing)),
        unreadable=tuple(sorted(set(there) - set(readable))),
        damaged={name: why for name, why in found.items() if why is not None},
    )


def damage(file: Path) -> str | None:
    """What keeps a safetensors file from being loaded, as far as its header and size tell."""
    try:
        with file.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if start == _LFS_POINTER:
                return "only points to a file that Git LFS has not fetched"
            if length > min(size_bytes - _LENGTH_BYTES, _LONGEST_HEADER_BYTES):
                return "is no safetensors file, or ends within its header"
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        wanted_bytes = _LENGTH_BYTES + length + max(ends, default=0)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return "has no header of a safetensors file"
    if size_bytes != wanted_bytes:
        return f"is {size_bytes} bytes long, and by its header {wanted_bytes}"
    return None


def _indexed(index: Path) -> set[str]:
    with suppress(OSError, KeyError, TypeError, ValueError, AttributeError):
        return set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    return set()
