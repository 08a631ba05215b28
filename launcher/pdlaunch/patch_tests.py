"""Runs each patch's own tests without it and with it: one must fail, then all must pass."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from pdlaunch import overlay
from pdlaunch.console import Reporter
from pdlaunch.engine import Engine
from pdlaunch.patch_check import Problem
from pdlaunch.series import Patch, Series


def check(
    series: Series, engine: Engine, reporter: Reporter, only: Collection[str] = ()
) -> Iterator[Problem]:
    """Goes through the series patch by patch.

    Args:
        series: what to check.
        engine: whose compiled files and packages to run on.
        reporter: hears of each run.
        only: names of the patches to test; the others are just applied. Empty: all.
    """
    tools = overlay.ensure_test_tools(engine, reporter)
    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp) / "vllm"
        overlay.lay_out(tree, series.upstream, engine, reporter)
        run = _Run(tree, engine, tools, reporter)
        for patch in series.patches:
            tested = not only or patch.name in only
            overlay.apply(patch, tree, "--include=tests/*")
            # One failure shows enough, and some take their time to fail: a timeout each.
            without = run.tests(patch, "without", "--exitfirst") if tested else None
            overlay.apply(patch, tree, "--exclude=tests/*")
            if without is not None:
                yield from _judged(patch, without, run.tests(patch, "with"))


@dataclass(frozen=True)
class _Outcome:
    """What one run of pytest showed."""

    passed: frozenset[str]
    all_passed: bool
    summary: str


def _judged(patch: Patch, before: _Outcome, after: _Outcome) -> Iterator[Problem]:
    if not after.all_passed or not after.passed:
        yield Problem(patch.name, f"its tests do not pass with it: {after.summary}")
    elif after.passed <= before.passed:
        yield Problem(patch.name, f"its tests pass without it: {before.summary}")


class _Run:
    """pytest in the tree."""

    def __init__(self, tree: Path, engine: Engine, tools: Path, reporter: Reporter) -> None:
        self._tree = tree
        self._engine = engine
        self._environment = overlay.environment(tree, tools)
        self._reporter = reporter

    def tests(self, patch: Patch, how: str, *options: str) -> _Outcome:
        report = self._tree.with_name("report.xml")
        report.unlink(missing_ok=True)
        arguments = [f"--junitxml={report}", "--tb=line", *options, *patch.tests]
        # A file, not a pipe: an engine that a test leaves behind would keep a pipe open.
        log = self._tree.with_name("pytest.log")
        with self._reporter.work(f"{patch.name}: its tests {how} it"), log.open("wb") as output:
            code = subprocess.run(
                overlay.pytest_command(self._engine, arguments),
                cwd=self._tree,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return _Outcome(_passed(report), code == 0, lines[-1] if lines else "pytest was silent")


def _passed(report: Path) -> frozenset[str]:
    """The tests that passed: a skipped, failed or broken one has an element that says so."""
    if not report.is_file():
        return frozenset()
    cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 - pytest wrote it
    return frozenset(
        f"{case.get('classname')}::{case.get('name')}" for case in cases if len(case) == 0
    )
