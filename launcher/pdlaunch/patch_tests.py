"""Runs each patch's own tests without it and with it: they must fail, then pass."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from xml.etree import ElementTree

from pdlaunch import git, overlay
from pdlaunch.console import Reporter
from pdlaunch.engine import Engine
from pdlaunch.errors import PdError
from pdlaunch.patch_check import Problem
from pdlaunch.series import Patch, Series

# pytest's exit codes for failed tests and for files that cannot even be imported.
_FAILED = (1, 2)


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
        run = _Run(tree, engine, tools, Path(tmp) / "pytest.log")
        for patch in series.patches:
            tested = not only or patch.name in only
            _apply(patch, tree, "--include=tests/*")
            if tested:
                with reporter.work(f"{patch.name}: its tests without it"):
                    before = run.tests(patch)
                if before not in _FAILED:
                    yield Problem(patch.name, f"its tests do not fail without it: {run.summary()}")
            _apply(patch, tree, "--exclude=tests/*")
            if tested:
                with reporter.work(f"{patch.name}: its tests with it"):
                    after = run.tests(patch)
                if after or not run.passed():
                    yield Problem(patch.name, f"its tests do not pass with it: {run.summary()}")


class _Run:
    """pytest in the tree."""

    def __init__(self, tree: Path, engine: Engine, tools: Path, log: Path) -> None:
        self._tree = tree
        self._engine = engine
        self._environment = overlay.environment(tree, tools)
        self._log = log
        self._report = log.with_suffix(".xml")

    def tests(self, patch: Patch) -> int:
        self._report.unlink(missing_ok=True)
        arguments = [f"--junitxml={self._report}", "--tb=line", *patch.tests]
        with self._log.open("wb") as log:
            return subprocess.run(
                overlay.pytest_command(self._engine, arguments),
                cwd=self._tree,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode

    def passed(self) -> int:
        """How many tests ran and passed; a file of skipped tests shows nothing."""
        if not self._report.is_file():
            return 0
        cases = ElementTree.parse(self._report).iter("testcase")  # noqa: S314 - pytest wrote it
        return sum(1 for case in cases if len(case) == 0)

    def summary(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "pytest said nothing"


def _apply(patch: Patch, tree: Path, part: str) -> None:
    result = git.run(tree, ["apply", part, "-"], input_bytes=patch.data)
    if result.returncode:
        raise PdError(
            f"{patch.name}: does not apply: {git.complaint(result)}",
            next_step="run pdlaunch patch check first",
        )
