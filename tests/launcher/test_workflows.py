"""The workflows, as far as they can be checked away from their runners."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_lines import commands, parse

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
EVERY = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
# What comes with a runner, a shell or a Python.
PROGRAMS = {"docker", "echo", "exit", "make", "pdlaunch", "pip", "tee", "test"}


def loaded(workflow: Path) -> dict[Any, Any]:
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def triggers(workflow: Path) -> dict[str, Any]:
    # YAML 1.1 takes the key `on` for a boolean.
    found = loaded(workflow)[True]
    assert isinstance(found, dict)
    return found


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    found = loaded(workflow)["jobs"]
    assert isinstance(found, dict)
    return found


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(workflow).values() for step in job["steps"]]


def run_by(workflow: Path) -> list[list[str]]:
    lines = [line for step in steps(workflow) for line in step.get("run", "").splitlines()]
    return [words for line in lines for words in commands(line)]


def test_there_are_the_three() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "forecast", "image"]


@EVERY
def test_what_is_run_exists(workflow: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert run_by(workflow)
    for program, *rest in run_by(workflow):
        if "/" in program:
            assert os.access(ROOT / program, os.X_OK), program
            continue
        assert program in PROGRAMS
        if program == "pdlaunch":
            parse(with_variant(workflow, rest), incomplete=False)
        elif program == "make":
            assert {word for word in rest if not word.startswith("-")} <= set(targets)


def with_variant(workflow: Path, words: list[str]) -> list[str]:
    """The words with a value of the jobs' matrix where the variable for it stands."""
    (variants,) = {tuple(job["strategy"]["matrix"]["variant"]) for job in jobs(workflow).values()}
    return [re.sub(r"\$VARIANT", variants[0], word) for word in words]


@EVERY
def test_actions_are_pinned_to_a_major_version(workflow: Path) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"(actions|docker)/[a-z-]+@v\d+", action), action


@EVERY
def test_a_job_may_read_and_no_more_and_ends(workflow: Path) -> None:
    assert loaded(workflow)["permissions"] == {"contents": "read"}
    for job in jobs(workflow).values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 120
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}


@EVERY
def test_nothing_of_an_event_is_pasted_into_a_shell(workflow: Path) -> None:
    for step in steps(workflow):
        assert "${{" not in step.get("run", "")
    assert "pull_request_target" not in triggers(workflow)


def test_ci_runs_what_a_change_must_pass_on_the_oldest_python_and_a_newer_one() -> None:
    ci = next(path for path in WORKFLOWS if path.stem == "ci")
    assert {"push", "pull_request"} == triggers(ci).keys()
    runs = {name: [step.get("run") for step in job["steps"]] for name, job in jobs(ci).items()}
    assert ".ci/run" in runs["test"]
    assert "make lint" in runs["lint"]
    oldest, newest = jobs(ci)["test"]["strategy"]["matrix"]["python-version"]
    required = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert required and oldest == required[1]
    assert int(newest.split(".")[1]) > int(oldest.split(".")[1])


def test_images_are_pushed_for_a_tag_only_and_secrets_are_for_that_job_alone() -> None:
    image = next(path for path in WORKFLOWS if path.stem == "image")
    found = jobs(image)
    assert found["push"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert found["push"]["environment"] == "release"
    assert found["build"]["if"] == "!startsWith(github.ref, 'refs/tags/')"
    for workflow in WORKFLOWS:
        for name, job in jobs(workflow).items():
            text = yaml.safe_dump(job)
            assert ("secrets." in text or "docker push" in text) == (name == "push")


def test_the_series_is_tried_every_week_on_the_newest() -> None:
    forecast = next(path for path in WORKFLOWS if path.stem == "forecast")
    ((schedule,), *_) = (triggers(forecast)["schedule"],)
    assert re.fullmatch(r"\d+ \d+ \* \* [0-6]", schedule["cron"])
    makefile = (ROOT / "Makefile").read_text()
    assert "forecast: $(SET_UP)\n\t$(BIN)/pdlaunch patch check --against newest\n" in makefile
