"""The simulator of the push protocol: a short run of what `make sim` does at length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent / "simulation" / "run.py"


SHORT = ("--histories", "3000")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param(SHORT, 0, id="no history breaks an invariant"),
        pytest.param((*SHORT, "--mutant", "digest_is_not_compared"), 1, id="a mutant is caught"),
    ],
)
def test_random_histories(options: tuple[str, ...], code: int) -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
