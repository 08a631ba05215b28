"""Recipes for Trainium: they hold, and nothing is started, rendered or built from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pdlaunch import engine, recipe_loader
from pdlaunch.cli import cli
from pdlaunch.errors import UsageError
from pdlaunch.recipe import NEURON_VLLM_VERSION

RECIPES = [
    name
    for name, path in recipe_loader.shipped().items()
    if recipe_loader.load(path).recipe.engine.variant == "neuron"
]


@pytest.fixture(autouse=True)
def folder(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_there_is_one_for_each_kind_of_buffer() -> None:
    assert set(RECIPES) == {"qwen3-32b-trn2", "qwen3-32b-trn2-host-buffer"}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_holds_and_says_that_it_cannot_be_started(name: str) -> None:
    result = CliRunner().invoke(cli, ["recipe", "validate", name])
    assert result.exit_code == 0
    assert f"it cannot be started: engine.variant neuron is vLLM {NEURON_VLLM_VERSION}" in " ".join(
        result.stderr.split()
    )
    assert f"vLLM {NEURON_VLLM_VERSION};" in recipe_loader.find(name).read_text()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "command",
    [
        ("up",),
        ("up", "--detach"),
        ("up", "--dry-run"),
        ("bench",),
        ("render", "k8s"),
        ("render", "compose"),
        ("render", "monitoring"),
    ],
    ids=" ".join,
)
def test_whatever_would_start_it_stops_with_the_versions(
    name: str, command: tuple[str, ...], folder: Path
) -> None:
    result = CliRunner().invoke(cli, [*command, name])
    assert isinstance(result.exception, UsageError)
    assert result.stdout == ""
    base = engine.planned("cpu").version.partition("+")[0]
    message = str(result.exception)
    assert f"vLLM {NEURON_VLLM_VERSION}; the patch series is for vLLM {base}" in message
    assert "where: engine.variant" in message
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_doctor_finds_it(name: str) -> None:
    result = CliRunner().invoke(cli, ["doctor", name, "--json"])
    assert result.exit_code == 1
    assert "needs the vllm-neuron plugin" in result.stdout
