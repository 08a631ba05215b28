"""The tables of known failures and of combinations against their tests and their pages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import combinations
from combinations import COMBINATIONS
from failures import KNOWN, PAIR, RANKS

from pdlaunch import series

ROOT = Path(__file__).parents[2]


def names_of_tests(source: str) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_failure_has_a_test_that_exists() -> None:
    shipped = {patch.name.removesuffix(".patch"): patch for patch in series.load().patches}
    for known in KNOWN:
        if known.patch:
            added = shipped[known.patch].text
            assert known.file in added and f"+def {known.test}(" in added, known.id
        else:
            source = (ROOT / known.file).read_text("utf-8")
            assert known.test in names_of_tests(source), known.id


def test_each_fault_test_belongs_to_a_failure() -> None:
    named = {known.test for known in KNOWN}
    for file in (PAIR, RANKS):
        assert names_of_tests((ROOT / file).read_text("utf-8")) <= named


def test_the_page_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "faults.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (\S+) \| .*? \| .*? \| `(\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE
    )
    assert [row[:2] for row in rows] == [(known.id, known.test) for known in KNOWN]
    for known, (_, _, stock, ours) in zip(KNOWN, rows, strict=True):
        assert ours.startswith("passes"), known.id
        assert stock.startswith(("fails", "not run")) or known.stock, f"{known.id}: why?"


def test_each_combination_has_a_test_that_exists() -> None:
    shipped = {patch.name.removesuffix(".patch"): patch for patch in series.load().patches}
    files = sorted({each.file for each in COMBINATIONS if not each.patch})
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for each in COMBINATIONS:
        if each.patch:
            added = shipped[each.patch].text
            assert each.file in added and f"+def {each.test}(" in added, each.what
        else:
            variant = f"[{each.variant}]" if each.variant else ""
            assert f"{each.file}::{each.test}{variant}" in listed, each.what


def test_the_page_of_combinations_is_up_to_date() -> None:
    assert combinations.PAGE.read_text("utf-8") == combinations.page()
