"""Builds the patched wheel: the published one, the series applied to its Python files.

No compiler and no build backend; the same base and series give the same bytes anywhere.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.tags import parse_tag

from pdlaunch import archive, git, packages
from pdlaunch.console import Reporter
from pdlaunch.errors import PdError
from pdlaunch.series import Patch, Series
from pdlaunch.series import load as load_series
from pdlaunch.upstream import Variant

_PACKAGE = "vllm/"
_VERSION_FILE = "vllm/_version.py"
# Published for CUDA only: beside CPU torch they break the import of transformers' models.
_NOT_ON_CPU = frozenset({"torchaudio", "torchcodec", "torchvision"})


def version_of(series: Series, variant: Variant) -> str:
    """The patched build's version. vLLM takes itself for a CPU build if it contains `cpu`."""
    label = "cpu." if variant == "cpu" else ""
    return f"{series.upstream.version}+{label}{series.version_suffix}"


def build_wheel(
    variant: Variant,
    out_dir: Path,
    reporter: Reporter,
    *,
    arch: str | None = None,
    series: Series | None = None,
) -> Path:
    """Builds the patched wheel of a variant into a folder; downloads its base if need be."""
    series = series or load_series()
    published = series.upstream.wheel(variant, arch)
    base = packages.fetch(published, reporter)
    names = _Names.of(published.filename, version_of(series, variant))
    out_dir.mkdir(parents=True, exist_ok=True)
    target = out_dir / names.wheel
    with reporter.work(f"building {target.name}"), tempfile.TemporaryDirectory(dir=out_dir) as tmp:
        part = Path(tmp) / target.name
        _write(base, part, names, variant, series)
        part.replace(target)
    return target


@dataclass(frozen=True)
class _Names:
    """What the published and the patched wheel call themselves and their metadata folder."""

    version: str
    tag: str
    old_info: str
    info: str

    @classmethod
    def of(cls, published: str, version: str) -> _Names:
        project, old_version, *_, python, abi, platform = published.removesuffix(".whl").split("-")
        return cls(
            version=version,
            tag=f"{python}-{abi}-{platform}",
            old_info=f"{project}-{old_version}.dist-info/",
            info=f"vllm-{version}.dist-info/",
        )

    @property
    def wheel(self) -> str:
        return f"vllm-{self.version}-{self.tag}.whl"

    def renamed(self, name: str) -> str:
        if name.startswith(self.old_info):
            return self.info + name.removeprefix(self.old_info)
        return name


def _write(base: Path, target: Path, names: _Names, variant: Variant, series: Series) -> None:
    with ZipFile(base) as published:
        before = [name for name in published.namelist() if not name.endswith("/")]
        patched = _patched_files(published, series.patches)
        added = {name: content for name, content in patched.items() if content is not None}
        added[_VERSION_FILE] = _stamp(
            added.get(_VERSION_FILE, published.read(_VERSION_FILE)), names.version
        )
        metadata = _metadata(published.read(names.old_info + "METADATA"), names.version, variant)
        added[names.info + "METADATA"] = metadata
        added[names.info + "WHEEL"] = _wheel_file(
            published.read(names.old_info + "WHEEL"), names.tag
        )
        records = _read_record(published.read(names.old_info + "RECORD"))

    removed = {name for name, content in patched.items() if content is None}
    keep = {names.renamed(name): name for name in before if name not in removed}
    record = names.info + "RECORD"
    order = sorted({*keep, *added} - {record}, key=lambda name: (name.startswith(names.info), name))
    added[record] = _record(
        {name: _digest(added[name]) if name in added else records[keep[name]] for name in order},
        record,
    )
    archive.rewrite(base, target, keep=keep, add=added, order=[*order, record])


def _patched_files(published: ZipFile, patches: tuple[Patch, ...]) -> dict[str, bytes | None]:
    """What the series makes of the package's files it touches; None for a removed one."""
    touched = sorted({t.path for patch in patches for t in patch.touched if _packaged(t.path)})
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in set(touched) & set(published.namelist()):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(published.read(name))
        for patch in patches:
            _apply(patch, tree)
        return {name: _content(tree / name) for name in touched}


def _packaged(path: str) -> bool:
    return path.startswith(_PACKAGE)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _apply(patch: Patch, tree: Path) -> None:
    paths = [t.path for t in patch.touched if _packaged(t.path)]
    if not paths:
        return
    before = {path: _content(tree / path) for path in paths}
    result = git.run(tree, ["apply", f"--include={_PACKAGE}*", "-"], input_bytes=patch.data)
    unchanged = [path for path in paths if _content(tree / path) == before[path]]
    if result.returncode or unchanged:
        raise PdError(
            f"{patch.name}: does not apply to the published wheel",
            where=git.complaint(result) or f"{unchanged[0]} did not change",
            next_step="rework the patch: pdlaunch patch checkout, edit, pdlaunch patch export",
        )


def _stamp(version_file: bytes, version: str) -> bytes:
    """Makes vllm.__version__ say what the metadata says; handshakes compare it."""
    text = version_file.decode()
    release, _, local = version.partition("+")
    numbers = ", ".join(release.split("."))
    text, strings = re.subn(r"(version = )'[^']+'", rf"\1'{version}'", text)
    text, tuples = re.subn(r"(version_tuple = )\([^)]*\)", rf"\1({numbers}, '{local}')", text)
    if not strings or not tuples:
        raise PdError(
            "the published wheel states its version in an unknown way", where=_VERSION_FILE
        )
    return text.encode()


def _metadata(metadata: bytes, version: str, variant: Variant) -> bytes:
    head, blank, description = metadata.decode().partition("\n\n")
    lines = []
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == "Requires-Dist" and variant == "cpu" and Requirement(value).name in _NOT_ON_CPU:
            continue
        lines.append({"Name": "Name: vllm", "Version": f"Version: {version}"}.get(key, line))
    return ("\n".join(lines) + blank + description).encode()


def _wheel_file(wheel: bytes, tag: str) -> bytes:
    """The file name's tags: the ones inside say plain linux, which installers don't check."""
    lines = [line for line in wheel.decode().strip().splitlines() if not line.startswith("Tag:")]
    lines += sorted(f"Tag: {each}" for each in parse_tag(tag))
    return ("\n".join(lines) + "\n").encode()


def _read_record(record: bytes) -> dict[str, tuple[str, str]]:
    rows = csv.reader(io.StringIO(record.decode()))
    return {name: (digest, size) for name, digest, size in rows}


def _digest(content: bytes) -> tuple[str, str]:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"sha256={digest}", str(len(content))


def _record(entries: Mapping[str, tuple[str, str]], record: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows((name, *entry) for name, entry in entries.items())
    writer.writerow((record, "", ""))
    return out.getvalue().encode()
