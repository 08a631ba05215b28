"""`make demo` from a fresh clone, twice; its own target because it makes an environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from pdlaunch.paths import cache_dir

_ROOT = Path(__file__).parents[2]
_WITHIN_S = 1800.0
# Nothing can be downloaded or installed with these.
_NO_PACKAGES = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9"}


@pytest.mark.slow
def test_demo_answers_twice_and_leaves_nothing(tmp_path: Path) -> None:
    clone, state = tmp_path / "clone", tmp_path / "state"
    subprocess.run(["git", "clone", "--quiet", str(_ROOT), str(clone)], check=True)
    for environment in ({}, _NO_PACKAGES):
        cached, shared = _made(), _shared_memory()
        done = subprocess.run(
            ["make", "demo"],
            cwd=clone,
            env={**os.environ, "XDG_STATE_HOME": str(state), **environment},
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "Paris" in done.stdout
        assert "push" in said and "TTFT" in said
        assert _processes_with(state) == []
        assert _shared_memory() <= shared
    # Only the second run had everything.
    assert _made() == cached


def _made() -> set[Path]:
    """What builds and downloads have left in the cache."""
    return {
        path
        for kind in ("downloads", "wheels", "engines/*", "models/*")
        for path in cache_dir().glob(f"{kind}/*")
    }


def _shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def _processes_with(state: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        if environ.get("XDG_STATE_HOME") == str(state):
            found.append(process)
    return found
