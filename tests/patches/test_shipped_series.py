"""The series that pdlaunch ships, on the vLLM that is really published."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from zipfile import ZipFile

import pytest

from pdlaunch import engine, packages, patch_branch, patch_check, patch_tests, series
from pdlaunch.console import Terminal
from pdlaunch.paths import patches_dir
from pdlaunch.series import Series
from pdlaunch.upstream import Variant
from pdlaunch.wheel import build_wheel


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


def _checksums(wheel: Path) -> dict[str, int]:
    with ZipFile(wheel) as archive:
        return {
            member.filename: member.CRC
            for member in archive.infolist()
            if ".dist-info/" not in member.filename and not member.is_dir()
        }
