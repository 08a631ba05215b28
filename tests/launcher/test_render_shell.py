"""Commands of a dry run, run by a shell: they make the environment that `pdlaunch up` makes."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from golden_files import loaded, planned
from pdlaunch.process_backend import environment
from pdlaunch.render import shell


@pytest.mark.parametrize("inherited", [{}, {"PYTHONPATH": "/mine"}])
@pytest.mark.parametrize("unset", [(), ("PYTHONPATH",)])
@pytest.mark.parametrize("recipes", [{}, {"PYTHONPATH": "/the recipe's"}])
def test_a_variable_that_is_prepended_to(
    inherited: dict[str, str], unset: tuple[str, ...], recipes: dict[str, str]
) -> None:
    plan = planned(loaded("tiny-qwen3-cpu"), "192.0.2.1", gpus=0)
    changes: dict[str, Any] = {
        "argv": ("printenv", "PYTHONPATH"),
        "env": recipes,
        "env_prepend": {"PYTHONPATH": "/ours"},
        "env_unset": unset,
    }
    process = plan.processes[0].model_copy(update=changes)
    text = shell.commands(plan.model_copy(update={"processes": (process,)}))
    environ = {"PATH": os.environ["PATH"], **inherited}
    printed = subprocess.run(
        ["sh", "-c", text], env=environ, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == environment(process, environ)["PYTHONPATH"]
