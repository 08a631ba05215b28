"""The patch series as data: order, messages, touched files, hash. Reads; never writes or runs git.

A patch is a mail made by `git format-patch`; its file name follows from its subject.
"""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from unidiff import PatchSet, UnidiffParseError

from pdlaunch import upstream as upstream_file
from pdlaunch.errors import PdError
from pdlaunch.paths import patches_dir
from pdlaunch.upstream import Upstream

REQUIRED_TRAILERS = ("Forwarded", "Origin", "Wire", "Test", "Retire-When", "Signed-off-by")

_TRAILER = re.compile(r"([A-Za-z][A-Za-z-]*):\s+(\S.*)")


@dataclass(frozen=True)
class Touched:
    """One file of the upstream tree that a patch adds, changes or removes."""

    path: str
    added: bool
    removed: bool


@dataclass(frozen=True)
class Patch:
    """One patch of the series, as its file has it."""

    name: str
    data: bytes

    @cached_property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="surrogateescape")

    @cached_property
    def diff(self) -> PatchSet:
        try:
            return PatchSet(self.text)
        except UnidiffParseError as error:
            raise PdError(
                f"{self.name}: not a unified diff: {error}",
                next_step="make it with: pdlaunch patch export",
            ) from error

    @cached_property
    def touched(self) -> tuple[Touched, ...]:
        return tuple(Touched(f.path, f.is_added_file, f.is_removed_file) for f in self.diff)

    @cached_property
    def subject(self) -> str:
        message = email.message_from_bytes(self.data, policy=email.policy.default)
        return str(message["Subject"] or "").strip()

    @cached_property
    def body(self) -> str:
        """The message below the subject, trailers included, without the diff."""
        _, _, rest = self.text.partition("\n\n")
        message, _, _ = rest.partition("\n---\n")
        # Without a diffstat git leaves out the `---` line.
        return re.split(r"^diff --git ", message, maxsplit=1, flags=re.MULTILINE)[0].strip()

    @cached_property
    def trailers(self) -> Mapping[str, tuple[str, ...]]:
        """The last paragraph's `Key: value` lines; indented lines continue the one above."""
        found: dict[str, list[str]] = {}
        values: list[str] | None = None
        for line in re.split(r"\n\s*\n", self.body)[-1].splitlines():
            if line[:1].isspace() and values:
                values[-1] += " " + line.strip()
            elif match := _TRAILER.fullmatch(line):
                values = found.setdefault(match[1], [])
                values.append(match[2].strip())
            else:
                values = None
        return MappingProxyType({key: tuple(values) for key, values in found.items()})

    @property
    def tests(self) -> tuple[str, ...]:
        """The pytest files and node ids that its `Test:` trailers name."""
        names = " ".join(self.trailers.get("Test", ())).replace(",", " ").split()
        return tuple(names)


@dataclass(frozen=True)
class Series:
    upstream: Upstream
    patches: tuple[Patch, ...]
    hash: str

    @property
    def version_suffix(self) -> str:
        """The local version of everything built from this series: how many, and which.

        The `h` keeps a hash of digits only from being read as a number.
        """
        return f"pd.{len(self.patches)}.h{self.hash[:8]}"


def file_name(subject: str) -> str:
    """A patch's file name: the subject in kebab-case, its tags (the areas) in front.

    `[NIXL] Harden handshake listener` becomes `nixl-harden-handshake-listener.patch`.
    """
    plain = unicodedata.normalize("NFKD", subject).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", plain.lower())
    return "-".join(words) + ".patch"


def names_in_order(series_text: str) -> tuple[str, ...]:
    """The names in a `series` file: one a line, `#` starts a group's heading."""
    lines = (line.partition("#")[0].strip() for line in series_text.splitlines())
    return tuple(line for line in lines if line)


def load(folder: Path | None = None) -> Series:
    """The series in a folder, by default the one that pdlaunch ships."""
    folder = folder or patches_dir()
    base = folder / "UPSTREAM"
    upstream = upstream_file.load(base)
    patches = tuple(_read(folder, name) for name in _order(folder))
    return Series(upstream, patches, _hash(base.read_bytes(), patches))


def _order(folder: Path) -> tuple[str, ...]:
    path = folder / "series"
    if not path.is_file():
        raise PdError(
            "the order of the patches is missing",
            where=str(path),
            next_step="write one patch name a line into it",
        )
    names = names_in_order(path.read_text(encoding="utf-8"))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PdError(f"{twice[0]}: named twice in the series", where=str(path))
    return names


def _read(folder: Path, name: str) -> Patch:
    path = folder / name
    if not path.is_file():
        raise PdError(
            f"{name}: named in the series, but there is no such file",
            where=str(folder),
            next_step="remove the line from the series file, or restore the patch",
        )
    return Patch(name, path.read_bytes())


def _hash(base: bytes, patches: tuple[Patch, ...]) -> str:
    """Identifies what gets built: the base and every patch, in order, to the byte."""
    digest = hashlib.sha256(hashlib.sha256(base).digest())
    for patch in patches:
        digest.update(hashlib.sha256(patch.data).digest())
    return digest.hexdigest()
