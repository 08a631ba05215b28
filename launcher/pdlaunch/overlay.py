"""Lays upstream's source tree over an engine's compiled files, to run upstream's tests in.

The engine itself is not touched: the tree's Python files shadow the installed ones.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from pdlaunch import engine_install, sdist
from pdlaunch import packages as published
from pdlaunch.console import Reporter
from pdlaunch.engine import Engine, packages_of
from pdlaunch.errors import PdError
from pdlaunch.upstream import Upstream

# What upstream's unit tests import beyond what an engine needs.
_TEST_TOOLS = ("pytest>=8,<10", "pytest-asyncio>=1,<2", "tblib>=3,<4")


def lay_out(tree: Path, upstream: Upstream, engine: Engine, reporter: Reporter) -> None:
    """Unpacks the source without any patch and adds what only a built wheel has."""
    archive = published.fetch(upstream.sdist, reporter)
    with reporter.work(f"unpacking vLLM {upstream.version}"):
        sdist.unpack(archive, tree)
    installed = engine_install.site_packages(engine.root) / "vllm"
    for path in installed.rglob("*"):
        target = tree / "vllm" / path.relative_to(installed)
        # A Python file that only the engine has is one that a patch adds.
        wanted = path.is_file() and path.suffix not in (".py", ".pyc")
        if wanted and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    # The version is what makes vLLM take itself for a CPU build.
    version_file = tree / "vllm" / "_version.py"
    version_file.write_bytes((installed / "_version.py").read_bytes())


def pytest_command(engine: Engine, arguments: Sequence[str]) -> list[str]:
    return [str(engine.python), "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]


def environment(tree: Path, tools: Path) -> dict[str, str]:
    """For tests in the tree: its vllm comes before the engine's, in child processes too."""
    return engine_install.clean_environment() | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join((str(tree), str(tools))),
        "VLLM_NO_USAGE_STATS": "1",
    }


def ensure_test_tools(engine: Engine, reporter: Reporter) -> Path:
    """pytest and its plugins, in a folder beside the engine's packages, not among them."""
    packages = packages_of(engine)
    tools = packages / "test-tools"
    done = tools / ".complete"
    with FileLock(packages / ".test-tools.lock"):
        if not done.exists():
            with reporter.work("installing pytest for upstream's tests"):
                command = ["-m", "pip", "install", "--upgrade", "--target", str(tools)]
                result = subprocess.run(
                    [str(packages / "bin" / "python"), *command, *_TEST_TOOLS],
                    capture_output=True,
                    text=True,
                    check=False,
                    env=engine_install.clean_environment(),
                )
            if result.returncode:
                raise PdError(
                    f"cannot install pytest: {result.stderr.strip().splitlines()[-1]}",
                    where=str(tools),
                    next_step="see where pip looks: pip config list",
                )
            done.touch()
    return tools
