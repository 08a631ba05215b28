"""The series that pdlaunch ships, on the vLLM that is really published."""

from __future__ import annotations

import ast
import shutil
import time
from pathlib import Path
from zipfile import ZipFile

import pytest

from pdlaunch import (
    engine,
    git,
    packages,
    patch_branch,
    patch_check,
    patch_tests,
    series,
    upstream_branch,
)
from pdlaunch.console import Terminal
from pdlaunch.paths import patches_dir
from pdlaunch.series import Series
from pdlaunch.upstream import Variant
from pdlaunch.wheel import build_wheel

AUTHOR = "pdlaunch maintainers <maintainers@users.noreply.github.com>"


@pytest.fixture(scope="module")
def shipped() -> Series:
    return series.load()


def test_check_finds_nothing(shipped: Series) -> None:
    assert patch_check.check(shipped, patches_dir(), Terminal()) == []


def test_export_after_checkout_is_byte_identical(shipped: Series, tmp_path: Path) -> None:
    patch_branch.checkout(shipped, tmp_path / "vllm", Terminal())
    patches = shutil.copytree(patches_dir(), tmp_path / "patches")
    before = {path.name: path.read_bytes() for path in patches.iterdir()}
    done = patch_branch.export(shipped.upstream, tmp_path / "vllm", patches)
    assert {path.name: path.read_bytes() for path in patches.iterdir()} == before
    assert len(done.unchanged) == len(shipped.patches)


@pytest.fixture(scope="module")
def checkout(shipped: Series, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("series") / "vllm"
    patch_branch.checkout(shipped, folder, Terminal())
    return folder


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("nixl-harden-handshake-listener", True),
        ("nixl-give-the-first-token-to-its-client-during-a-step", False),
    ],
)
def test_branch_for_upstream_has_all_that_its_patch_needs(
    shipped: Series, checkout: Path, name: str, alone: bool
) -> None:
    done = upstream_branch.write(shipped, name, checkout, Terminal())
    assert alone == (not done.needs)
    range_ = f"{done.base}..{done.name}"
    messages = git.output(checkout, ["log", "--format=%B", range_]).decode().splitlines()
    keys = {line.partition(":")[0] for line in messages}
    assert not keys & upstream_branch.OUR_TRAILERS
    assert messages.count(f"Signed-off-by: {AUTHOR}") == len(done.needs) + 1

    listed = git.output(checkout, ["ls-tree", "-r", "--name-only", done.name]).decode()
    files = set(listed.splitlines())
    assert {test.partition("::")[0] for test in done.patch.tests} <= files
    new = {each.path for patch in shipped.patches for each in patch.touched if each.added}
    changed = git.output(checkout, ["diff", "--name-only", done.base, done.name]).decode()
    for path in changed.splitlines():
        if path.endswith(".py"):
            source = git.output(checkout, ["show", f"{done.name}:{path}"])
            missing = {each for each in _imported(source) if not _is_module(each, files)}
            # What the base's own files miss is made when vLLM is built.
            assert not {each for each in missing if _is_module(each, new)}, path


@pytest.mark.parametrize("variant", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_wheel_differs_from_the_published_one_by_the_series_only(
    shipped: Series, tmp_path: Path, variant: Variant
) -> None:
    published = packages.fetch(shipped.upstream.wheel(variant), Terminal())
    start_s = time.monotonic()
    built = build_wheel(variant, tmp_path / "first", Terminal(), series=shipped)
    assert time.monotonic() - start_s < 60
    again = build_wheel(variant, tmp_path / "second", Terminal(), series=shipped)
    assert packages.sha256_of(built) == packages.sha256_of(again)

    touched = {each.path for patch in shipped.patches for each in patch.touched}
    before, after = _checksums(published), _checksums(built)
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    expected = {name for name in touched if name.startswith("vllm/")} | {"vllm/_version.py"}
    assert changed == expected


@pytest.mark.slow
def test_tests_of_each_patch_fail_without_it_and_pass_with_it(shipped: Series) -> None:
    built = engine.ensure("cpu", Terminal())
    assert list(patch_tests.check(shipped, built, Terminal())) == []


def _imported(source: bytes) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in nodes if node.module and not node.level}
    return {module for module in modules if module.partition(".")[0] in ("vllm", "tests")}


def _is_module(name: str, files: set[str]) -> bool:
    path = name.replace(".", "/")
    return f"{path}.py" in files or f"{path}/__init__.py" in files


def _checksums(wheel: Path) -> dict[str, int]:
    with ZipFile(wheel) as archive:
        return {
            member.filename: member.CRC
            for member in archive.infolist()
            if ".dist-info/" not in member.filename and not member.is_dir()
        }
