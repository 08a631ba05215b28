"""Fetches published files by exact name and hash, from where pip is configured to look.

Never installs anything and never trusts an index: only the pinned hash decides.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from filelock import FileLock
from packaging.version import InvalidVersion, Version
from pypi_simple import (
    NoSuchProjectError,
    ProjectPage,
    PyPISimple,
    UnsupportedContentTypeError,
)

from pdlaunch.console import Bar, Reporter
from pdlaunch.errors import PdError
from pdlaunch.paths import cache_dir
from pdlaunch.pip_config import Sources, configured_sources
from pdlaunch.upstream import PublishedFile


def fetch(file: PublishedFile, reporter: Reporter, sources: Sources | None = None) -> Path:
    """The file in the cache, downloaded if it is not there yet."""
    target = cached_path(file)
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / "lock"):
        if not target.is_file():
            _download(file, target, sources or configured_sources(), reporter)
    return target


def published_sdists(project: str, sources: Sources | None = None) -> dict[Version, PublishedFile]:
    """The source distributions of a project, by version, without withdrawn ones.

    Nobody has pinned these: their hashes are what the source itself states. Where two sources have
    a version, the first counts.

    Raises:
        PdError: no source has any.
    """
    sources = sources or configured_sources()
    found: dict[Version, PublishedFile] = {}
    failures: list[str] = []
    listings = [
        *((link, _listed_by_link) for link in sources.find_links),
        *((index, _listed_by_index) for index in sources.indexes),
    ]
    for source, listed in listings:
        try:
            for version, file in listed(project, source, sources):
                found.setdefault(version, file)
        except (OSError, UnsupportedContentTypeError) as error:
            failures.append(f"{source}: {_short(error)}")
    if not found:
        raise PdError(
            f"no source distribution of the package {project} is to be found",
            where="; ".join(failures) or None,
            next_step="set PIP_INDEX_URL to an index that has it, or PIP_FIND_LINKS to a folder",
        )
    return found


def _listed_by_link(
    project: str, link: str, sources: Sources
) -> Iterator[tuple[Version, PublishedFile]]:
    local = _local_path(link)
    if local is None or not local.is_dir():
        with _client(sources) as client:
            yield from _sdists_of(project, _page_of_link(client, project, link, sources))
        return
    for path in sorted(local.glob(f"{project}-*.tar.gz")):
        version = _version(path.name.removeprefix(f"{project}-").removesuffix(".tar.gz"))
        if version:
            yield version, PublishedFile(project, path.name, sha256_of(path))


def _listed_by_index(
    project: str, index: str, sources: Sources
) -> Iterator[tuple[Version, PublishedFile]]:
    with _client(sources, index) as client:
        page = _page_of_index(client, project, index, sources)
        if page is not None:
            yield from _sdists_of(project, page)


def _sdists_of(project: str, page: ProjectPage) -> Iterator[tuple[Version, PublishedFile]]:
    for package in page.packages:
        version, digest = _version(package.version or ""), package.digests.get("sha256")
        if package.package_type == "sdist" and not package.is_yanked and version and digest:
            yield version, PublishedFile(project, package.filename, digest)


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def cached_path(file: PublishedFile) -> Path:
    """Where the file lies once fetched. The hash is in the path, so a name is never stale."""
    return cache_dir() / "downloads" / file.sha256[:12] / file.filename


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(file: PublishedFile, target: Path, sources: Sources, reporter: Reporter) -> None:
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / file.filename
        getter = _Getter(file, part, sources, reporter)
        attempts: list[tuple[str, Callable[[str], bool]]] = [
            *((link, getter.from_link) for link in sources.find_links),
            *((index, getter.from_index) for index in sources.indexes),
        ]
        for source, get in attempts:
            try:
                found = get(source)
            except (OSError, UnsupportedContentTypeError) as error:
                failures.append(f"{source}: {_short(error)}")
                continue
            if not found:
                failures.append(f"{source}: not there")
            elif sha256_of(part) != file.sha256:
                failures.append(f"{source}: has another file of that name (sha256 differs)")
            else:
                part.replace(target)
                return
    raise PdError(
        f"cannot get {file.filename} of the package {file.project}",
        where="; ".join(failures) or "pip is configured with no package source",
        next_step="set PIP_INDEX_URL to an index that has it or PIP_FIND_LINKS to a folder "
        f"that holds it, or copy the file to {target}",
    )


@dataclass(frozen=True)
class _Getter:
    """Gets one file into `part` from a source; False when the source does not have it."""

    file: PublishedFile
    part: Path
    sources: Sources
    reporter: Reporter

    def from_link(self, link: str) -> bool:
        local = _local_path(link)
        if local is not None and local.is_dir():
            return self._copy(local / self.file.filename)
        with _client(self.sources) as client:
            page = _page_of_link(client, self.file.project, link, self.sources)
            return self._from_page(client, page)

    def from_index(self, index: str) -> bool:
        with _client(self.sources, index) as client:
            page = _page_of_index(client, self.file.project, index, self.sources)
            return page is not None and self._from_page(client, page)

    def _from_page(self, client: PyPISimple, page: ProjectPage) -> bool:
        package = next((p for p in page.packages if p.filename == self.file.filename), None)
        if package is None:
            return False
        local = _local_path(package.url.partition("#")[0])
        if local is not None:
            return self._copy(local)
        client.download_package(
            package,
            self.part,
            verify=False,  # ours is the hash that counts, and it is checked afterwards
            progress=self._progress,
            timeout=self.sources.timeout_s,
        )
        return True

    def _copy(self, source: Path) -> bool:
        if not source.is_file():
            return False
        with self.reporter.work(f"copying {source.name}"):
            shutil.copyfile(source, self.part)
        return True

    def _progress(self, size_bytes: int | None) -> _Tracker:
        return _Tracker(self.reporter, f"downloading {self.file.filename}", size_bytes)


def _client(sources: Sources, index: str = "") -> PyPISimple:
    client = PyPISimple(index)
    if sources.cert:
        client.s.verify = sources.cert
    return client


def _page_of_link(client: PyPISimple, project: str, link: str, sources: Sources) -> ProjectPage:
    local = _local_path(link)
    if local is not None:
        return ProjectPage.from_html(project, local.read_bytes(), local.as_uri())
    response = client.s.get(link, timeout=sources.timeout_s)
    response.raise_for_status()
    return ProjectPage.from_html(project, response.content, link)


def _page_of_index(
    client: PyPISimple, project: str, index: str, sources: Sources
) -> ProjectPage | None:
    """What an index lists of a project; None when it does not know it."""
    local = _local_path(index)
    if local is not None:
        listing = local / project / "index.html"
        if not listing.is_file():
            return None
        return ProjectPage.from_html(project, listing.read_bytes(), listing.as_uri())
    try:
        return client.get_project_page(project, timeout=sources.timeout_s)
    except NoSuchProjectError:
        return None


class _Tracker:
    """pypi-simple's protocol for progress, told to our reporter."""

    def __init__(self, reporter: Reporter, label: str, size_bytes: int | None) -> None:
        self._work = reporter.work(label, size_bytes)
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        self._bar = self._work.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return self._work.__exit__(exc_type, exc_val, exc_tb)

    def update(self, increment: int) -> None:
        if self._bar is not None:
            self._bar.advance(increment)


def _local_path(url: str) -> Path | None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in ("http", "https") else Path(url).expanduser()


def _short(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    # Connection errors nest their causes; the innermost one is what a person can act on.
    return text.rsplit("Caused by ", 1)[-1][:200]
