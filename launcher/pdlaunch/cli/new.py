"""`pdlaunch new`: a recipe from flags, or from a few questions."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import click

from pdlaunch import files, new_recipe, recipe_loader
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.errors import UsageError
from pdlaunch.new_recipe import Answers, InstanceType, Place, RoleAnswers
from pdlaunch.recipe import is_path
from pdlaunch.recipe_checks import ROLES
from pdlaunch.recipe_loader import KeyPath

_COUNT = click.IntRange(min=1)
_INSTANCE_TYPES = click.Choice(get_args(InstanceType))
_PLACES = click.Choice(get_args(Place))
# What decides keys of the recipe; the place does for all others.
_DECIDED_BY: Mapping[KeyPath, str] = {
    ("name",): "FILE",
    ("model",): "--model",
    ("served_name",): "--served-name",
    ("max_model_len_tokens",): "--max-model-len",
    ("router", "port"): "--port",
    **{(role, "tensor_parallel"): f"--{role}-tp" for role in ROLES},
    **{(role, "replicas"): f"--{role}-replicas" for role in ROLES},
    **{(role, "host"): f"--{role}-host" for role in ROLES},
    **{(role, "block_size_tokens"): "--block-size" for role in ROLES},
}


@click.command(
    epilog=parameters.examples(
        "pdlaunch new",
        "pdlaunch new mine --model Qwen/Qwen3-8B --where gpus --prefill-tp 1 --decode-tp 2",
        "pdlaunch new mine --model Qwen/Qwen3-32B --where efa \\",
        "    --prefill-host 10.0.0.11 --decode-host 10.0.0.12 --prefill-tp 4 --decode-tp 4",
    )
)
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", help="A hub id (Org/Name), a folder (./mine), or one that pdlaunch makes.")
@click.option(
    "--where",
    "place",
    type=_PLACES,
    help="; ".join(f"{name}: {what}" for name, what in new_recipe.PLACES.items()) + ".",
)
@click.option("--prefill-tp", type=_COUNT, help="GPUs, or CPU workers, of a prefill engine.")
@click.option("--decode-tp", type=_COUNT, help="GPUs, or CPU workers, of a decode engine.")
@click.option("--prefill-replicas", type=_COUNT, default=1, show_default=True)
@click.option("--decode-replicas", type=_COUNT, default=1, show_default=True)
@click.option("--prefill-host", metavar="ADDRESS", help="With efa: prefill's instance.")
@click.option("--decode-host", metavar="ADDRESS", help="With efa: decode's instance.")
@click.option("--instance-type", type=_INSTANCE_TYPES, help="With efa. [default: p5en.48xlarge]")
@click.option("--port", type=click.IntRange(1, 65535), help="Where clients reach the router.")
@click.option("--max-model-len", type=_COUNT, metavar="TOKENS", help="Longest prompt plus answer.")
@click.option("--block-size", type=_COUNT, metavar="TOKENS", help="Tokens in a KV block.")
@click.option("--served-name", metavar="NAME", help="Name in a client's `model` field.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Any other key.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def new(
    *,
    file: Path | None,
    model: str | None,
    place: Place | None,
    prefill_tp: int | None,
    decode_tp: int | None,
    prefill_replicas: int,
    decode_replicas: int,
    prefill_host: str | None,
    decode_host: str | None,
    instance_type: InstanceType | None,
    port: int | None,
    max_model_len: int | None,
    block_size: int | None,
    served_name: str | None,
    overrides: tuple[str, ...],
    force: bool,
) -> None:
    """Write a recipe to FILE, with comments; prints the file's path.

    Asks for what it must know and was not told, if there is somebody to ask. The deployment is
    named as the file. What was written has passed the checks of `pdlaunch recipe validate`.
    """
    terminal = Terminal()
    needed: dict[str, object] = {"FILE": file, "--model": model, "--where": place}
    if place == "efa":
        needed |= {"--prefill-host": prefill_host, "--decode-host": decode_host}
    elif place is not None:
        _refuse(place, prefill_host, decode_host, instance_type)
    missing = [name for name, value in needed.items() if value is None]
    if missing and not sys.stdin.isatty():
        raise UsageError(
            f"not told: {', '.join(missing)}",
            where="the command line",
            next_step="give them, or run it on a terminal, where it asks",
        )
    ask = _Interview(is_open=bool(missing))
    if ask.is_open and place is None:
        for name, what in new_recipe.PLACES.items():
            terminal.status(f"{name}: {what}")
    chosen: Place = ask("Where", place, "cpu", _PLACES)
    model = ask("Model", model, new_recipe.SUGGESTED_MODELS[chosen])
    if chosen == "efa":
        prefill_host = ask("Address of prefill's instance", prefill_host)
        decode_host = ask("Address of decode's instance", decode_host)
        instance_type = ask("Instance type", instance_type, "p5en.48xlarge", _INSTANCE_TYPES)
    if chosen in ("gpus", "efa"):
        prefill_tp = ask("GPUs of a prefill engine", prefill_tp, 1, _COUNT)
        decode_tp = ask("GPUs of a decode engine", decode_tp, prefill_tp, _COUNT)
    file = _with_suffix(Path(ask("File", file, f"{_name_of(model.rpartition('/')[2])}-{chosen}")))
    answers = Answers(
        name=_name_of(file.stem),
        model=_beside(file, model),
        place=chosen,
        prefill=RoleAnswers(prefill_tp or 1, prefill_replicas, prefill_host or ""),
        decode=RoleAnswers(decode_tp or 1, decode_replicas, decode_host or ""),
        instance_type=instance_type or "p5en.48xlarge",
        port=port,
        served_name=served_name,
        max_model_len_tokens=max_model_len,
        block_size_tokens=block_size,
    )
    text = new_recipe.text(answers, overrides)
    set_by = {tuple(each.partition("=")[0].split(".")): f"--set {each}" for each in overrides}
    origins = {(): f"--where {chosen}", **_DECIDED_BY, **set_by}
    for note in recipe_loader.loads(text, file, origins=origins).notes:
        terminal.warning(note)
    files.write(file, text, may_replace=force)
    terminal.data(str(file))
    quoted = shlex.quote(str(file))
    terminal.success(f"{file} holds; nobody has run it yet")
    if chosen == "efa":
        terminal.status(
            f"next, on each instance: pdlaunch doctor {quoted} --only prefill (or decode), then "
            f"pdlaunch up {quoted} --only prefill (or decode), and where prefill is --only router"
        )
    else:
        terminal.status(f"next: pdlaunch doctor {quoted}, then pdlaunch up {quoted}")


class _Interview:
    """Asks for what was not told; closed, it takes what it would suggest."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open

    def __call__(
        self,
        question: str,
        told: Any,
        suggested: Any = None,
        kind: click.ParamType[Any] | None = None,
    ) -> Any:
        if told is not None or not self.is_open:
            return suggested if told is None else told
        return click.prompt(question, default=suggested, type=kind, err=True)


def _refuse(place: Place, *of_efa: str | None) -> None:
    if any(value is not None for value in of_efa):
        raise UsageError(
            f"hosts and instance types are for two instances, and {place} is this machine",
            where="--prefill-host, --decode-host, --instance-type",
            next_step="leave them out, or choose --where efa",
        )


def _beside(file: Path, model: str) -> str:
    """A path that was told here as the recipe is to have it, to which it is relative."""
    if not is_path(model) or Path(model).is_absolute() or file.parent == Path():
        return model
    return f"./{os.path.relpath(model, file.parent)}"


def _with_suffix(file: Path) -> Path:
    return file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")


def _name_of(text: str) -> str:
    """A name for a deployment, from that of a file or of a model."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip(".-")[:63] or "mine"
