"""Completion in the shell: recipes, deployments and processes; with a real bash at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete

from pdlaunch import deployments, recipe_loader
from pdlaunch.cli import cli
from test_help import COMMANDS

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def items(*words: str) -> list[CompletionItem]:
    """What the shell is offered for the last word."""
    shell = ShellComplete(cli, {}, "pdlaunch", "_PDLAUNCH_COMPLETE")
    return shell.get_completions(list(words[:-1]), words[-1])


def values(*words: str) -> list[str]:
    return [item.value for item in items(*words)]


def up(name: str) -> None:
    """Something of this name is up, as far as names go."""
    (deployments.create_folder(name) / "deployment.json").write_text("not read")


WITH_RECIPE = [
    path
    for path, command in COMMANDS.items()
    if any(each.name == "recipe" for each in command.params)
]


def test_many_commands_take_a_recipe() -> None:
    assert len(WITH_RECIPE) >= 8


@pytest.mark.parametrize("path", WITH_RECIPE, ids=" ".join)
def test_recipes_are_completed(path: tuple[str, ...]) -> None:
    assert values(*path, "") == sorted(recipe_loader.shipped())
    assert values(*path, "qwen3-32b-p5e") == ["qwen3-32b-p5en"]


def test_recipe_files_here_are_completed_too(folder: Path) -> None:
    for name in ("mine.yaml", "my.yml", "notes.txt"):
        (folder / name).touch()
    assert values("up", "m") == ["mine.yaml", "my.yml"]


def test_other_folders_are_left_to_the_shell() -> None:
    (item,) = items("up", "./recipes/t")
    assert (item.type, item.value) == ("file", "./recipes/t")


@pytest.mark.parametrize("command", ["ask", "status", "down"])
def test_deployments_that_are_up_are_completed(command: str) -> None:
    deployments.create_folder("ended")
    for name in ("one", "other"):
        up(name)
    assert values(command, "") == ["one", "other"]
    assert values(command, "ot") == ["other"]


def test_logs_of_what_is_down_are_completed_with_their_processes() -> None:
    deployments.create_folder("ended")
    for process in ("prefill-0", "decode-0", "router"):
        (deployments.log_dir("ended") / f"{process}.log").touch()
    assert values("logs", "") == ["ended"]
    assert values("logs", "ended", "") == ["decode-0", "prefill-0", "router"]
    assert values("logs", "nothing", "") == []


def test_monitoring_is_of_recipes_and_of_deployments() -> None:
    up("running")
    assert values("render", "monitoring", "") == ["running", *sorted(recipe_loader.shipped())]


def test_nothing_is_there_yet() -> None:
    assert values("status", "") == []


def test_every_deployment_argument_is_completed() -> None:
    for path, command in COMMANDS.items():
        for each in command.params:
            if isinstance(each, click.Argument) and each.name in ("name", "process", "recipe"):
                assert each._custom_shell_complete is not None, path


def test_the_line_of_the_readme_makes_bash_complete(folder: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"^(eval .*bash_source pdlaunch\)\")", README.read_text(), re.MULTILINE)
    program = tmp_path / "bin" / "pdlaunch"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom pdlaunch.cli import main\nmain()\n")
    program.chmod(0o755)
    (folder / "mine.yaml").touch()
    script = f"""
    {line}
    complete -p pdlaunch
    COMP_WORDS=(pdlaunch up mi) COMP_CWORD=2
    _pdlaunch_completion pdlaunch
    echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "_pdlaunch_completion" in done.stdout
    assert done.stdout.splitlines()[-1] == "mine.yaml"
