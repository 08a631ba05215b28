"""How the series would fare on another vLLM than its base: which patch fails there, and where.

Reads the published source; changes neither the series nor its base, and runs nothing of it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from pdlaunch import git, packages, patch_check, sdist
from pdlaunch.console import Reporter
from pdlaunch.errors import UsageError
from pdlaunch.patch_check import Problem
from pdlaunch.series import Patch, Series
from pdlaunch.upstream import PublishedFile

NEWEST = "newest"

_HUNK = re.compile(r"^error: patch failed: (.+):(\d+)$", re.MULTILINE)
_MISSING = re.compile(r"^error: (.+): No such file or directory$", re.MULTILINE)
_EXISTS = re.compile(r"^error: (.+): already exists in working directory$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """One patch on the other vLLM. It applies where there is no problem."""

    patch: Patch
    problems: tuple[Problem, ...]


def source_of(series: Series, version: str) -> PublishedFile:
    """The published source distribution of a version of vLLM, or of the newest one.

    Args:
        version: as on the package index, or `newest`: releases only, no candidates.

    Raises:
        UsageError: there is no such version.
    """
    published = packages.published_sdists(series.upstream.sdist.project)
    if version == NEWEST:
        releases = [each for each in published if not each.is_prerelease]
        return published[max(releases or published)]
    try:
        return published[Version(version)]
    except (InvalidVersion, KeyError):
        near = ", ".join(str(each) for each in sorted(published)[-5:])
        raise UsageError(
            f"there is no source distribution of vLLM {version}",
            next_step=f"the last ones: {near}",
        ) from None


def forecast(series: Series, source: PublishedFile, reporter: Reporter) -> list[Outcome]:
    """Applies the series patch by patch, without fuzz, to a published source distribution.

    Of a patch that fails, the hunks that fit are kept, so that the next ones are judged on what
    they would meet.
    """
    archive = packages.fetch(source, reporter)
    with (
        reporter.work(f"applying {len(series.patches)} patches to {source.filename}"),
        tempfile.TemporaryDirectory() as tmp,
    ):
        tree = Path(tmp) / "vllm"
        sdist.unpack(archive, tree, only=patch_check.paths(series.patches))
        return list(_outcomes(series.patches, tree))


def _outcomes(patches: Sequence[Patch], tree: Path) -> Iterator[Outcome]:
    unsound: dict[str, str] = {}  # a file that lacks something to the first patch it lacks
    for patch in patches:
        if _applies(patch, tree):
            git.output(tree, ["apply", "-"], input_bytes=patch.data)
            found = [Problem(patch.name, what) for what in patch_check.tree_problems(patch, tree)]
        elif _applies(patch, tree, "--reverse"):
            found = [Problem(patch.name, "upstream has it: drop it")]
        else:
            found = [*_failures(patch, tree, unsound)] or [Problem(patch.name, "does not apply")]
        yield Outcome(patch, tuple(found))


def _applies(patch: Patch, tree: Path, *options: str) -> bool:
    call = ["apply", "--check", *options, "-"]
    return git.run(tree, call, input_bytes=patch.data).returncode == 0


def _failures(patch: Patch, tree: Path, unsound: dict[str, str]) -> Iterator[Problem]:
    """Each place that does not fit; leaves the tree with what fits."""
    there = _complaints(patch, tree, "--check", "--reverse")
    here = _complaints(patch, tree)
    for rejected in tree.rglob("*.rej"):
        rejected.unlink()
    for file in patch.diff:
        if file.path in _MISSING.findall(here):
            yield Problem(patch.name, f"{file.path}: is not there any more")
        elif file.path in _EXISTS.findall(here):
            yield Problem(patch.name, f"{file.path}: upstream has a file of that name")
        else:
            failed = {int(line) for path, line in _HUNK.findall(here) if path == file.path}
            absent = {int(line) for path, line in _HUNK.findall(there) if path == file.path}
            for number, hunk in enumerate(file, start=1):
                if hunk.source_start not in failed:
                    continue
                what = f"{file.path}:{hunk.source_start}: hunk {number} of {len(file)}"
                if hunk.target_start not in absent:
                    yield Problem(patch.name, f"{what} is in upstream already")
                    continue
                after = unsound.get(file.path)
                note = f", as may follow from {after}" if after else ""
                yield Problem(patch.name, f"{what} does not apply{note}")
    for path in {path for path, _ in _HUNK.findall(here)} | set(_MISSING.findall(here)):
        unsound.setdefault(path, patch.name)


def _complaints(patch: Patch, tree: Path, *options: str) -> str:
    """What git says of every hunk and file: with `--reject` it does not stop at the first."""
    call = ["apply", "--reject", *options, "-"]
    return git.run(tree, call, input_bytes=patch.data).stderr.decode("utf-8", "replace")
