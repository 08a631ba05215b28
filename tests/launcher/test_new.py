"""`pdlaunch new`: recipes that hold, from flags and from questions."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdlaunch import new_recipe, recipe_loader
from pdlaunch.cli import cli
from pdlaunch.errors import PdError, UsageError
from pdlaunch.new_recipe import Answers, Place, RoleAnswers
from pdlaunch.recipe import Recipe
from pdlaunch.recipe_checks import ROLES

MODEL = "embedded:smollm2-135m-instruct"
HOSTS = ("--prefill-host", "10.0.0.1", "--decode-host", "10.0.0.2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def new(*args: str) -> Result:
    return CliRunner().invoke(cli, ["new", *args])


def made(*args: str) -> Recipe:
    """The recipe that the command wrote, as `up` would read it."""
    result = new(*args)
    assert result.exit_code == 0, result.exception
    return recipe_loader.load(Path(result.stdout.strip())).recipe


def refusal(*args: str) -> str:
    result = new(*args)
    assert isinstance(result.exception, UsageError)
    assert result.stdout == ""
    return str(result.exception)


def test_on_a_cpu(folder: Path) -> None:
    recipe = made("mine", "--model", MODEL, "--where", "cpu", "--decode-replicas", "2")
    assert (folder / "mine.yaml").is_file()
    assert (recipe.name, recipe.engine.variant, recipe.decode.replicas) == ("mine", "cpu", 2)


def test_on_one_gpu_that_both_roles_share() -> None:
    recipe = made("a.yml", "--model", "Org/M", "--where", "one-gpu", "--prefill-replicas", "2")
    assert recipe.prefill.devices == ((0,), (0,))
    assert recipe.decode.devices == ((0,),)
    assert recipe.prefill.gpu_memory_fraction == recipe.decode.gpu_memory_fraction == 0.3


def test_on_gpus_of_this_machine() -> None:
    recipe = made("a", "--model", "Org/M", "--where", "gpus", "--prefill-tp", "2", "--port", "8000")
    assert (recipe.prefill.tensor_parallel, recipe.prefill.devices) == (2, None)
    assert recipe.router.port == 8000


@pytest.mark.parametrize(
    ("instance", "interfaces"), [(None, 8), ("p5en.48xlarge", 8), ("p5.48xlarge", 16)]
)
def test_on_two_instances_with_efa(instance: str | None, interfaces: int) -> None:
    chosen = ("--instance-type", instance) if instance else ()
    sizes = ("--prefill-tp", "4", "--prefill-replicas", "2", "--decode-tp", "8")
    recipe = made("a", "--model", "Org/M", "--where", "efa", *HOSTS, *sizes, *chosen)
    assert recipe.transfer.backends == ("LIBFABRIC",)
    assert recipe.prefill.devices == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert recipe.prefill.efa_interfaces == interfaces
    assert recipe.decode.efa_interfaces == 2 * interfaces
    assert (recipe.prefill.host, recipe.decode.host) == ("10.0.0.1", "10.0.0.2")
    assert recipe.router.host == recipe.prefill.host


def test_name_for_clients_and_size_of_blocks(folder: Path) -> None:
    told = ("--served-name", "ours", "--block-size", "96")
    recipe = made("a", "--model", MODEL, "--where", "cpu", *told)
    assert recipe.client_model_name == "ours"
    assert recipe.prefill.block_size_tokens == recipe.decode.block_size_tokens == 96


@pytest.mark.parametrize("file", ["a", "recipes/a"])
def test_path_of_the_model_is_relative_to_the_working_directory(folder: Path, file: str) -> None:
    (folder / "recipes").mkdir()
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text('{"num_attention_heads": 8}')
    assert made(file, "--model", "./mine", "--where", "cpu").model == str(folder / "mine")


@pytest.mark.parametrize(
    ("args", "origin"),
    [
        (("--prefill-tp", "3", "--decode-tp", "2"), "--decode-tp: decode.tensor_parallel: 2 and"),
        (("--set", "prefill.devices=[[0, 1]]"), "--set prefill.devices=[[0, 1]]: prefill.devices:"),
        (("--set", "decode.kv_cache_gib=0"), "--set decode.kv_cache_gib=0: decode.kv_cache_gib:"),
    ],
)
def test_errors_name_what_was_told_and_not_a_file_that_is_not_written(
    args: tuple[str, ...], origin: str
) -> None:
    message = refusal("a", "--model", "Org/M", "--where", "gpus", *args)
    assert f"  {origin}" in message
    assert "a.yaml" not in message


def test_any_other_key_can_be_set(folder: Path) -> None:
    shape = "model_shape={attention_heads: 64, kv_heads: 8}"
    given = ("--set", "timeouts.ready_s=3600", "--set", shape)
    recipe = made("a", "--model", "Org/M", "--where", "gpus", *given)
    assert recipe.timeouts.ready_s == 3600
    assert list(yaml.safe_load((folder / "a.yaml").read_text()))[:3] == [
        "name",
        "model",
        "model_shape",
    ]


def test_every_key_is_explained_once(folder: Path) -> None:
    new("a", "--model", "Org/M", "--where", "efa", *HOSTS)
    lines = (folder / "a.yaml").read_text().splitlines()
    assert max(map(len, lines)) <= 100
    decode = range(lines.index("decode:") + 1, lines.index("router:") - 2)
    for number, line in enumerate(lines):
        if line and not line.strip().startswith("#"):
            # What both roles have is explained at prefill.
            assert lines[number - 1].strip().startswith("#") == (number not in decode), line


def test_next_commands_are_told() -> None:
    result = new("a", "--model", "Org/M", "--where", "gpus")
    assert "next: pdlaunch doctor a.yaml, then pdlaunch up a.yaml" in result.stderr
    assert "the shape of Org/M is not known here" in result.stderr
    assert "--only router" in new("b", "--model", "Org/M", "--where", "efa", *HOSTS).stderr


def test_file_that_is_there_is_kept_unless_forced(folder: Path) -> None:
    (folder / "a.yaml").write_text("precious")
    given = ("a", "--model", MODEL, "--where", "cpu")
    assert "a.yaml is there already" in refusal(*given)
    assert (folder / "a.yaml").read_text() == "precious"
    assert made(*given, "--force").name == "a"


def test_what_is_missing_is_named_where_nobody_can_be_asked() -> None:
    assert "not told: FILE, --model, --where" in refusal()
    assert "not told: --decode-host" in refusal(
        "a", "--model", "Org/M", "--where", "efa", "--prefill-host", "10.0.0.1"
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--where", "cpu", "--prefill-tp", "2"), "2 does not divide the 9 attention heads"),
        (("--where", "cpu", "--set", "prefill.tensor_paralel=2"), "did you mean tensor_parallel"),
        (("--where", "cpu", "--set", "name.x=1"), "name has no keys below it"),
        (("--where", "cpu", "--prefill-host", "10.0.0.1"), "choose --where efa"),
        (("--where", "gpus", "--instance-type", "p5.48xlarge"), "choose --where efa"),
        (("--where", "one-gpu", "--decode-tp", "2"), "choose --where gpus"),
        (("--where", "efa", *HOSTS, "--decode-tp", "9"), "decode needs 9 GPUs"),
    ],
)
def test_what_does_not_hold_is_not_written(
    folder: Path, args: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal("a", "--model", MODEL, *args)
    assert not list(folder.iterdir())


def test_folder_that_is_not_there_is_explained() -> None:
    result = new("nowhere/a", "--model", MODEL, "--where", "cpu")
    assert isinstance(result.exception, PdError)
    assert "cannot write nowhere/a.yaml" in str(result.exception)


def test_questions_on_a_terminal(folder: Path) -> None:
    asking, answering = pty.openpty()
    command = [sys.executable, "-m", "pdlaunch", "new", "--decode-tp", "4"]
    with os.fdopen(asking, "wb"), os.fdopen(answering) as stdin:
        os.write(asking, b"tpu\ngpus\n\n2\nmine\n")
        done = subprocess.run(
            command, stdin=stdin, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mine.yaml\n"
    for question in ("Where", "Model", "GPUs of a prefill engine", "File"):
        assert question in done.stderr
    assert "GPUs of a decode engine" not in done.stderr
    recipe = recipe_loader.load(folder / "mine.yaml").recipe
    assert recipe.model == new_recipe.SUGGESTED_MODELS["gpus"]
    assert (recipe.prefill.tensor_parallel, recipe.decode.tensor_parallel) == (2, 4)


SIZES = st.builds(
    RoleAnswers,
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    replicas=st.integers(1, 4),
    host=st.sampled_from(["10.0.0.1", "p.example"]),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    place=st.sampled_from(list(new_recipe.PLACES)),
    model=st.text("aN9é -#'\"{[&*!?,|>%@\n\x1f", max_size=8).map(lambda name: f"Org/{name}"),
    prefill=SIZES,
    decode=SIZES,
)
def test_whatever_is_answered_the_recipe_holds_or_the_answers_are_refused(
    place: Place, model: str, prefill: RoleAnswers, decode: RoleAnswers
) -> None:
    answers = Answers("a", model, place, prefill, RoleAnswers(**{**vars(decode), "host": "d"}))
    try:
        text = new_recipe.text(answers)
    except UsageError:
        assert place in ("one-gpu", "efa")
        return
    data: dict[str, Any] = yaml.safe_load(text)
    assert data["model"] == model
    recipe = recipe_loader.loads(text, Path("a.yaml"), environ={"HF_HOME": "nowhere"}).recipe
    for role in ROLES:
        assert recipe.role(role).replicas == answers.role(role).replicas
        assert recipe.role(role).tensor_parallel == answers.role(role).tensor_parallel
