"""Checks the series with git alone: no engine, and only the upstream files that it touches."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unidiff import Hunk, PatchedFile

from pdlaunch import git, packages, patch_branch, register, sdist
from pdlaunch.console import Reporter
from pdlaunch.series import REQUIRED_TRAILERS, Patch, Series, file_name

_COLUMNS = 88
_SPDX = "# SPDX-License-Identifier: Apache-2.0"


@dataclass(frozen=True)
class Problem:
    """One thing to mend, in one line that starts with the patch's name."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def check(series: Series, folder: Path, reporter: Reporter) -> list[Problem]:
    """Everything that is wrong with the series, in the order of its patches."""
    problems = list(_folder_problems(series, folder))
    for patch in series.patches:
        problems += [Problem(patch.name, what) for what in _message_problems(patch)]
        problems += [Problem(patch.name, what) for what in _style_problems(patch)]
    archive = packages.fetch(series.upstream.sdist, reporter)
    with (
        reporter.work(f"applying {len(series.patches)} patches"),
        tempfile.TemporaryDirectory() as tmp,
    ):
        tree = Path(tmp) / "vllm"
        sdist.unpack(archive, tree, only=paths(series.patches))
        problems += _problems_in(series, tree)
    return problems


def paths(patches: Iterable[Patch]) -> set[str]:
    """The upstream files that the series touches or names: all that a check has to unpack."""
    touched = {each.path for patch in patches for each in patch.touched}
    return touched | {test.partition("::")[0] for patch in patches for test in patch.tests}


def _folder_problems(series: Series, folder: Path) -> Iterator[Problem]:
    names = {patch.name for patch in series.patches}
    for path in sorted(folder.glob("*.patch")):
        if path.name not in names:
            yield Problem(path.name, "lies in the folder but is not in the series")
    readme = (folder / "README.md").read_text(encoding="utf-8")
    if register.replaced(readme, series.patches) != readme:
        yield Problem("README.md", "its register is out of date: pdlaunch patch export")


def _message_problems(patch: Patch) -> Iterator[str]:
    if patch.name != file_name(patch.subject):
        yield f"its subject asks for the name {file_name(patch.subject)}"
    for trailer in REQUIRED_TRAILERS:
        if trailer not in patch.trailers:
            yield f"has no {trailer}: trailer"
    paragraphs = [part for part in patch.body.split("\n\n") if part.strip()]
    if len(paragraphs) < 2:
        yield "has no message above its trailers: the symptom, and why this change"


def _style_problems(patch: Patch) -> Iterator[str]:
    for file in patch.diff:
        if file.is_added_file and file.path.endswith(".py") and _first_line(file) != _SPDX:
            yield f"{file.path} does not start with the SPDX header"
        for hunk in file:
            if file.path.endswith(".py"):
                yield from _long_lines(file, hunk)
            if not (file.is_added_file or file.is_removed_file) and _is_cosmetic(hunk):
                yield f"{file.path}:{hunk.target_start} changes white space only"


def _first_line(file: PatchedFile) -> str:
    return next((line.value.rstrip("\r\n") for hunk in file for line in hunk), _SPDX)


def _long_lines(file: PatchedFile, hunk: Hunk) -> Iterator[str]:
    for line in hunk:
        if line.is_added and len(line.value.rstrip("\r\n")) > _COLUMNS:
            yield f"{file.path}:{line.target_line_no} is longer than {_COLUMNS} columns"


def _is_cosmetic(hunk: Hunk) -> bool:
    before = [line.value for line in hunk if line.is_removed]
    after = [line.value for line in hunk if line.is_added]
    return "".join("".join(before).split()) == "".join("".join(after).split())


def _problems_in(series: Series, tree: Path) -> Iterator[Problem]:
    patch_branch.commit_base(tree, series.upstream.version)
    for patch in series.patches:
        result = patch_branch.apply(tree, [patch])
        if result.returncode:
            yield Problem(patch.name, f"does not apply: {git.complaint(result)}")
            return  # what stands on it cannot be judged
        if patch_branch.formatted(tree, ["HEAD"]) != [patch.data]:
            yield Problem(patch.name, "is not in canonical form: pdlaunch patch export rewrites it")
        for what in tree_problems(patch, tree):
            yield Problem(patch.name, what)


def tree_problems(patch: Patch, tree: Path) -> Iterator[str]:
    """What is wrong in a tree that a patch has just been applied to."""
    yield from _broken_python(patch, tree)
    yield from _missing_tests(patch, tree)


def _broken_python(patch: Patch, tree: Path) -> Iterator[str]:
    for each in patch.touched:
        if each.path.endswith(".py") and not each.removed:
            try:
                compile((tree / each.path).read_bytes(), each.path, "exec", dont_inherit=True)
            except SyntaxError as error:
                yield f"{each.path}:{error.lineno} does not compile: {error.msg}"


def _missing_tests(patch: Patch, tree: Path) -> Iterator[str]:
    for test in patch.tests:
        path, *names = test.partition("[")[0].split("::")
        file = tree / path
        if not path.startswith("tests/") or not path.endswith(".py"):
            yield f"Test: {test} is not a file under tests/, or a test in one"
        elif not file.is_file():
            yield f"Test: there is no {path}"
        elif not _defines(ast.parse(file.read_bytes()), names):
            yield f"Test: {path} has no {'::'.join(names)}"


def _defines(node: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    return any(
        _defines(child, names[1:])
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and child.name == names[0]
    )
