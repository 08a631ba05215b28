"""The JSON Schema of recipes: it takes what the loader takes, and tells what an editor shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from pdlaunch import recipe_loader, recipe_schema
from pdlaunch.cli import cli
from pdlaunch.errors import PdError
from pdlaunch.paths import recipes_dir
from pdlaunch.recipe import Recipe

SCHEMA = recipe_schema.schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
UNITS = {"_s": "Seconds ", "_tokens": " in tokens", "_gib": " in GiB"}


KEYS = {".".join(path): part for path, part in recipe_schema.described_keys()}
LEAVES = {key: part for key, part in KEYS.items() if "properties" not in part}


def test_schema_is_one() -> None:
    VALIDATOR.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_schema_has_every_key_of_a_recipe() -> None:
    assert list(KEYS) == [".".join(path) for path in recipe_loader.all_keys(Recipe)]


@pytest.mark.parametrize("path", sorted(recipes_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_hold(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


def test_every_key_is_described() -> None:
    assert not [key for key, part in KEYS.items() if not part.get("description")]
    assert not [key for key, part in KEYS.items() if "title" in part]


@pytest.mark.parametrize("suffix", UNITS)
def test_keys_with_a_unit_say_it(suffix: str) -> None:
    told = {key: part["description"] for key, part in LEAVES.items() if key.endswith(suffix)}
    assert told
    assert not [key for key, text in told.items() if UNITS[suffix] not in f" {text}"]


@pytest.mark.parametrize("key", [key for key, part in LEAVES.items() if "enum" not in part])
def test_keys_without_a_choice_have_examples_that_hold(key: str) -> None:
    examples = LEAVES[key]["examples"]
    assert examples
    whole: dict[str, Any] = {"name": "a", "model": "b"}
    for example in examples:
        data: Any = example
        for part in reversed(key.split(".")):
            data = {part: data}
        if key.startswith("model_shape."):
            data["model_shape"] = {"attention_heads": 8, "kv_heads": 8} | data["model_shape"]
        VALIDATOR.validate(whole | data)
        Recipe.model_validate_json(json.dumps(whole | data))


@pytest.mark.parametrize(
    "text",
    [
        "prefill: {tensor_paralel: 2}",
        "decode: {pipeline_parallel: 2}",
        "prefill: {replicas: two}",
        "prefill: {replicas: 0}",
        "prefill: 3",
        "transfer: {mode: psh}",
        "transfer: {backends: UCX}",
        "transfer: {extra: {push_impl: x}}",
        "prefill: {env: {A: true}}",
        "prefill: {env: {CUDA_VISIBLE_DEVICES: 0}}",
        "engine: {args: {port: 1}}",
        "router: {args: {policy: random}}",
        "model_shape: {attention_heads: 8}",
        "name: Upper",
    ],
)
def test_what_one_key_must_not_say_is_refused_by_both(text: str) -> None:
    data = {"name": "a", "model": "b", **yaml.safe_load(text)}
    assert not VALIDATOR.is_valid(data)
    with pytest.raises(ValueError):
        Recipe.model_validate_json(json.dumps(data))


@pytest.mark.parametrize("text", ["engine: {env: {A: 1, B: 0.5, C: x}}", "timeouts: {stop_s: 3}"])
def test_what_the_loader_reads_in_more_than_one_type_holds(text: str) -> None:
    data = {"name": "a", "model": "b", **yaml.safe_load(text)}
    VALIDATOR.validate(data)
    Recipe.model_validate_json(json.dumps(data))


def test_command_prints_the_schema() -> None:
    result = CliRunner().invoke(cli, ["recipe", "schema"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, SCHEMA)


def test_command_writes_a_file_and_tells_the_line_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "recipe.schema.json"
    for _ in range(2):
        result = CliRunner().invoke(cli, ["recipe", "schema", "--output", str(file)])
        assert (result.exit_code, result.stdout) == (0, "")
        assert "# yaml-language-server: $schema=recipe.schema.json" in result.stderr
        assert json.loads(file.read_text()) == SCHEMA


def test_file_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "schema.json"
    result = CliRunner().invoke(cli, ["recipe", "schema", "--output", str(file)])
    assert isinstance(result.exception, PdError)
    assert f"cannot write {file}" in str(result.exception)
