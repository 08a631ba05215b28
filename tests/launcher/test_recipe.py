"""Recipes: what is refused, in which words, and that the shipped ones hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from checkpoints import write_weights
from pdlaunch import model_shape, recipe_loader
from pdlaunch.cli import cli
from pdlaunch.errors import UsageError
from pdlaunch.paths import recipes_dir
from pdlaunch.recipe import Recipe

MINIMAL = "name: small\nmodel: random:tiny-qwen3\nengine: {variant: cpu}\n"


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return recipe_loader.load(path, overrides, environ={"HF_HOME": str(folder)}).recipe


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load(folder, text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_minimal_recipe_gets_defaults(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    assert recipe.transfer.mode == "push"
    assert recipe.prefill.replicas == 1
    assert recipe.client_model_name == "tiny-qwen3"


def test_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    with pytest.raises(ValidationError):
        recipe.prefill.replicas = 2  # type: ignore[misc]


def test_unknown_key_names_nearest_key_path_and_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "prefill:\n  tensor_paralel: 2\n")
    assert f"{tmp_path}/recipe.yaml:5: prefill.tensor_paralel: unknown key" in message
    assert "did you mean tensor_parallel?" in message
    assert len(message.splitlines()) <= 4


def test_key_of_another_section_is_named_with_its_path(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "tensor_parallel: 2\n")
    assert "did you mean prefill.tensor_parallel?" in message


def test_unknown_key_far_from_all_lists_the_known_ones(tmp_path: Path) -> None:
    assert "known here: policy, host, port" in refusal(tmp_path, MINIMAL + "router: {zzz: 1}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefill: {replicas: two}", 'prefill.replicas: should be a whole number, found "two"'),
        ("prefill: {replicas: '2'}", 'prefill.replicas: should be a whole number, found "2"'),
        ("prefill: {replicas: 0}", "prefill.replicas: should be greater than or equal to 1"),
        ("prefill: 3", "prefill: should be a mapping of keys to values, found 3"),
        ("decode: {pipeline_parallel: 2}", "decode.pipeline_parallel: unknown key"),
        ("transfer: {mode: psh}", "transfer.mode: should be 'push', 'pull' or 'push-upstream'"),
        ("transfer: {backends: UCX}", "transfer.backends: should be a list"),
        ("transfer: {extra: {push_impl: x}}", "push_impl is decided by transfer.mode"),
        ("prefill: {env: {A: true}}", 'prefill.env.A: write a quoted string such as "1"'),
        ("prefill: {env: {HF_TOKEN: x}}", "HF_TOKEN looks like a secret"),
        ("prefill: {env: {CUDA_VISIBLE_DEVICES: 0}}", "is decided by devices"),
        ("engine: {variant: cpu, args: {port: 1}}", "--port is decided by prefill.port"),
        ("engine: {variant: cpu, args: {api_key: x}}", "--api-key would show a secret"),
        ("prefill: {block_size_tokens: 48}", "a multiple of 32, found 48"),
        ("prefill: {tensor_parallel: 3}", "prefill.tensor_parallel: 3 does not divide the 8"),
        ("prefill: {devices: [[0]]}", "engine.variant cpu has no devices"),
        ("prefill: {cores: [[0], [1]]}", "needs one list a replica: 1, found 2"),
        ("prefill: {cores: [[0]], tensor_parallel: 2}", "each replica needs at least 2 cores"),
        ("prefill: {cores: [[0]]}\ndecode: {cores: [[0]]}", "0 is already given to prefill"),
        ("prefill: {pipeline_parallel: 9}", "9 stages for the 8 layers"),
        ("prefill: {port: 9000}\ndecode: {port: 9000}", "port 9000 is already taken by prefill"),
        ("prefill: {port: 65535, replicas: 2}", "end above port 65535"),
        ("prefill: {host: 0.0.0.0}", "0.0.0.0 is no address that the other role can reach"),
        (
            "prefill: {host: localhost}\ndecode: {host: 192.0.2.7}",
            "localhost means another machine to 192.0.2.7",
        ),
        ("prefill: {block_size_tokens: 128}", "transfer.mode push needs them equal"),
        (
            "transfer: {mode: pull}\nprefill: {block_size_tokens: 96}",
            "one must divide the other",
        ),
        (
            "engine: {variant: cuda}\nprefill: {efa_interfaces: 2}",
            "transfer.backends: prefill.efa_interfaces is 2",
        ),
        ("transfer: {buffer: host}", "transfer.buffer: engine.variant cpu has its KV in host"),
        ("prefill: {env: {NEURON_RT_VISIBLE_CORES: 0}}", "is decided by devices"),
        ("model_shape: {attention_heads: 8}", "model_shape.kv_heads: is required"),
        ("timeouts: {ready_s: .nan}", "timeouts.ready_s: should be a finite number"),
    ],
)
def test_wrong_value_is_refused_in_plain_words(tmp_path: Path, text: str, expected: str) -> None:
    data = yaml.safe_load(MINIMAL) | yaml.safe_load(text)
    message = refusal(tmp_path, yaml.safe_dump(data))
    assert expected in message
    assert "Traceback" not in message


SHARED = """
name: shared
model: random:tiny-qwen3
prefill: {devices: [[0]], kv_cache_gib: 2, gpu_memory_fraction: 0.5}
decode: {devices: [[0]], kv_cache_gib: 2, gpu_memory_fraction: 0.5}
"""


def test_engines_may_share_a_device_that_is_shared_out(tmp_path: Path) -> None:
    assert load(tmp_path, SHARED).decode.devices == ((0,),)


@pytest.mark.parametrize(
    "override",
    [
        "prefill.kv_cache_gib=null",
        "decode.kv_cache_gib=null",
        "decode.gpu_memory_fraction=null",
        "decode.gpu_memory_fraction=0.51",
    ],
)
def test_device_that_is_not_shared_out_is_given_once(tmp_path: Path, override: str) -> None:
    message = refusal(tmp_path, SHARED, override)
    assert "decode.devices: 0 is already given to prefill replica 0; engines that share" in message


def test_every_engine_on_a_device_counts(tmp_path: Path) -> None:
    two = ("prefill.replicas=2", "prefill.devices=[[0], [0]]", "prefill.gpu_memory_fraction=0.3")
    assert "decode.devices: 0 is already given" in refusal(tmp_path, SHARED, *two)
    assert load(tmp_path, SHARED, *two, "decode.gpu_memory_fraction=0.4").prefill.replicas == 2


def test_tp_that_does_not_divide_the_heads_of_the_real_model(tmp_path: Path) -> None:
    text = MINIMAL.replace("random:tiny-qwen3", "embedded:smollm2-135m-instruct")
    message = refusal(tmp_path, text, "prefill.tensor_parallel=2")
    assert (
        "--set prefill.tensor_parallel=2: prefill.tensor_parallel: 2 does not divide the 9 "
        "attention heads" in message
    )


def test_prefill_tp_above_decode_tp_is_bounded_by_kv_heads(tmp_path: Path) -> None:
    text = "name: a\nmodel: Org/Model\nmodel_shape: {attention_heads: 16, kv_heads: 2}\n"
    message = refusal(tmp_path, text, "prefill.tensor_parallel=4")
    assert "up to the 2 KV heads" in message
    assert load(tmp_path, text, "decode.tensor_parallel=4").decode.tensor_parallel == 4


def test_missing_model_folder_names_the_key_and_the_place(tmp_path: Path) -> None:
    message = refusal(tmp_path, "name: a\nmodel: ./nowhere\n")
    assert f"recipe.yaml:2: model: no model folder at {tmp_path}/nowhere" in message


@pytest.mark.parametrize(
    "told",
    [
        "model_shape: {attention_heads: 32, kv_heads: 8}\n",
        "prefill: {host: 10.0.0.11}\ndecode: {host: 10.0.0.12}\n",
    ],
)
def test_a_recipe_may_be_written_where_its_model_is_not(tmp_path: Path, told: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: a\nmodel: /nowhere/acme\n{told}")
    loaded = recipe_loader.load(path)
    assert any("no model folder at /nowhere/acme on this machine" in note for note in loaded.notes)


def test_folder_without_config_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refusal(tmp_path, "name: a\nmodel: ./empty\n")


def model_folder(at: Path, **changes: object) -> Path:
    at.mkdir(parents=True)
    config = {"num_attention_heads": 8, "max_position_embeddings": 4096, **changes}
    (at / "config.json").write_text(json.dumps(config))
    write_weights(at / "model.safetensors", 1000)
    return at


LOCAL = "name: a\nmodel: ./mine\nengine: {variant: cpu}\n"


def test_broken_config_is_refused(tmp_path: Path) -> None:
    (model_folder(tmp_path / "mine") / "config.json").write_text("{broken")
    assert "recipe.yaml:2: model: " in refusal(tmp_path, LOCAL)
    assert "mine/config.json is not JSON" in refusal(tmp_path, LOCAL)


def test_folder_without_whole_weights_is_noted_where_they_are_loaded(tmp_path: Path) -> None:
    file = model_folder(tmp_path / "mine") / "model.safetensors"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(LOCAL)
    assert recipe_loader.load(recipe).notes == ()
    file.write_bytes(b"cut")
    (note,) = recipe_loader.load(recipe).notes
    assert "ends within its header" in note
    file.unlink()
    (note,) = recipe_loader.load(recipe).notes
    assert "holds no weights" in note
    assert recipe_loader.load(recipe, ("engine.args.load-format=dummy",)).notes == ()


def test_requests_longer_than_the_models_limit_are_refused_once(tmp_path: Path) -> None:
    model_folder(tmp_path / "mine")
    message = refusal(tmp_path, LOCAL + "max_model_len_tokens: 4097\n")
    assert "the recipe has a problem" in message
    assert "recipe.yaml:4: max_model_len_tokens: 4097 tokens, and the limit of" in message
    assert "4096" in message
    assert "decode.max_model_len_tokens: 4097" in refusal(
        tmp_path, LOCAL + "decode: {max_model_len_tokens: 4097}\n"
    )
    for allowed in (
        "engine.env.VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
        "engine.args.hf-overrides={max_position_embeddings: 8192}",
    ):
        load(tmp_path, LOCAL + "max_model_len_tokens: 4097\n", allowed)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear"}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn"}}, None),
        ({"max_position_embeddings": 4096, "rope_parameters": {"f": {"rope_type": "yarn"}}}, None),
        ({"max_position_embeddings": 4096, "model_max_length": 8192}, None),
        ({}, None),
    ],
)
def test_limit_is_told_only_where_it_is_certain(
    config: dict[str, object], limit: int | None
) -> None:
    assert model_shape.longest(config) == limit


def test_folder_that_is_written_like_a_hub_id_is_hinted_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "name: a\nmodel: models/mine\nengine: {variant: cpu}\n"
    load(tmp_path, text)
    model_folder(tmp_path / "models" / "mine")
    assert "write ./models/mine for the folder" in refusal(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    assert f"write {tmp_path}/models/mine for" in refusal(tmp_path / "elsewhere", text)


def test_model_path_on_the_command_line_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder(tmp_path / "here" / "mine").parent)
    model = load(tmp_path, MINIMAL, "model=./mine").model
    assert model == str(tmp_path / "here" / "mine")


def test_model_path_is_relative_to_the_recipe_and_its_shape_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    config = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"text_config": config}))
    text = "name: a\nmodel: ./mine\nengine: {variant: cpu}\n"
    recipe = load(tmp_path, text)
    assert recipe.model == str(tmp_path / "mine")
    assert recipe.client_model_name == "mine"
    assert "does not divide the 6 attention heads" in refusal(
        tmp_path, text, "decode.tensor_parallel=4"
    )


def test_shape_of_a_cached_hub_model_is_read(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--Org--Model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text('{"num_attention_heads": 5}')
    assert "the 5 attention heads" in refusal(
        tmp_path, "name: a\nmodel: Org/Model\n", "prefill.tensor_parallel=2"
    )


def test_unknown_shape_is_a_note_not_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: a\nmodel: Org/Model\n")
    (note,) = recipe_loader.load(path, environ={"HF_HOME": str(tmp_path)}).notes
    assert "Org/Model" in note


def test_unknown_model_of_ours_names_the_nearest(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL.replace("tiny-qwen3", "tiny-qwen"))
    assert "did you mean random:tiny-qwen3?" in message


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "prefill: {replica: 1}\ndecode: {replicas: x}\nzz: 1\n")
    assert message.startswith("the recipe has 3 problems")


def test_duplicate_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "prefill:\n  replicas: 1\n  replicas: 2\n")
    assert "recipe.yaml:6: prefill.replicas: stands twice, first on line 5" in message


def test_set_reaches_below_sections_that_the_file_lacks(tmp_path: Path) -> None:
    recipe = load(
        tmp_path, MINIMAL, "transfer.mode=pull", "engine.args.seed=3", "prefill.cores=[[0, 1]]"
    )
    assert recipe.transfer.mode == "pull"
    assert recipe.engine.args == {"seed": 3}
    assert recipe.prefill.cores == ((0, 1),)


def test_set_is_validated_like_the_file(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL, "transfer.mod=pull")
    assert "--set transfer.mod=pull: transfer.mod: unknown key; did you mean mode?" in message


@pytest.mark.parametrize(
    "override", ["transfer.mode", "=x", "a..b=1", "name=[", "name.x=1", "name=&a [*a]"]
)
def test_malformed_set_is_a_usage_error(tmp_path: Path, override: str) -> None:
    assert f"--set {override}" in refusal(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(
    "text",
    ["a: [", "[]", "", "just text", "? [a, b]\n: 1", "a: &x [*x]", "\t", "a: 2026-99-99", "1: 2"],
)
def test_what_is_no_recipe_is_refused_without_a_traceback(tmp_path: Path, text: str) -> None:
    assert "recipe.yaml" in refusal(tmp_path, text)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(alphabet="ab:{}[]&*-?|>\n '\"1.,~!#%", max_size=60))
def test_any_text_gives_a_recipe_or_a_usage_error(tmp_path: Path, text: str) -> None:
    try:
        load(tmp_path, text)
    except UsageError as error:
        assert len(str(error).splitlines()) < 20


def test_missing_file_names_the_nearest_shipped_recipe() -> None:
    with pytest.raises(UsageError, match="no recipe smollm2-135m-cp") as caught:
        recipe_loader.find("smollm2-135m-cp")
    assert "did you mean smollm2-135m-cpu?" in str(caught.value)


def test_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        recipe_loader.load(path)


@pytest.mark.parametrize("path", sorted(recipes_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_hold_and_are_named_as_their_files(path: Path) -> None:
    assert recipe_loader.load(path).recipe.name == path.stem
    assert recipe_loader.find(path.stem) == path


@pytest.mark.parametrize("name", recipe_loader.shipped())
def test_a_shipped_recipe_that_is_shown_is_a_copy_to_edit(name: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(cli, ["recipe", "show", name])
    assert load(tmp_path, shown.stdout) == recipe_loader.load(recipe_loader.find(name)).recipe


def test_commands_take_the_name_of_a_loaded_recipe(tmp_path: Path) -> None:
    own = tmp_path / "tiny-qwen3-cpu.yaml"
    own.write_text(MINIMAL)
    for named in ("tiny-qwen3-cpu", str(own)):
        assert recipe_loader.load(recipe_loader.find(named)).name == named


def test_reference_recipe_mentions_every_key() -> None:
    data = yaml.safe_load((recipes_dir() / "reference.yaml").read_text())
    for key_path in recipe_loader.all_keys(Recipe):
        at = data
        for part in key_path:
            assert isinstance(at, dict) and part in at, ".".join(key_path)
            at = at[part]


def test_reference_recipe_shows_defaults_where_it_does_not_say_otherwise() -> None:
    lines = (recipes_dir() / "reference.yaml").read_text().splitlines()
    defaults = Recipe(name="reference", model="Qwen/Qwen3-0.6B").model_dump(mode="json")
    shown = recipe_loader.load(recipes_dir() / "reference.yaml").recipe.model_dump(mode="json")
    for section in ("transfer", "router", "timeouts"):
        for key, value in shown[section].items():
            if isinstance(value, dict):
                continue
            assert value == defaults[section][key], f"{section}.{key}"
    assert sum("Default: none" in line for line in lines) >= 6


def test_own_models_are_the_shapes_that_the_loader_accepts(tmp_path: Path) -> None:
    for model in model_shape.OWN_MODELS:
        recipe = load(tmp_path, f"name: a\nmodel: {model}\nengine: {{variant: cpu}}\n")
        assert model_shape.find(recipe) == model_shape.OWN_MODELS[model]
