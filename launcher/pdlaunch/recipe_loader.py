"""Reads recipe files: YAML with positions, overrides, all problems at once. Starts nothing."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pdlaunch import checkpoint, model_shape, recipe_checks
from pdlaunch.errors import UsageError
from pdlaunch.paths import recipes_dir
from pdlaunch.recipe import LOCAL_HOST, NEURON_VLLM_VERSION, Recipe, is_path
from pdlaunch.recipe_checks import Problem

KeyPath = tuple[str, ...]
MAX_PROBLEMS_SHOWN = 12


@dataclass(frozen=True)
class Loaded:
    """A recipe that passed all checks, where it came from, and what could not be checked."""

    recipe: Recipe
    path: Path
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """What commands take for it: of a shipped recipe its name."""
        return self.path.stem if self.path in shipped().values() else str(self.path)


@dataclass(frozen=True)
class _Source:
    """Where each key stands, for messages."""

    path: Path
    origins: Mapping[KeyPath, str]
    overrides: Mapping[KeyPath, str]

    def locate(self, key_path: KeyPath) -> str:
        for length in range(len(key_path), -1, -1):
            prefix = key_path[:length]
            if prefix in self.overrides:
                return f"--set {self.overrides[prefix]}"
            if prefix in self.origins:
                return self.origins[prefix]
        return str(self.path)


def find(name: str) -> Path:
    """A recipe file by its path, or one of the shipped recipes by its name."""
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(
            f"{name} is a folder", where="RECIPE", next_step="name a recipe file in it"
        )
    known = shipped()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(path.stem, known, n=1)
    raise UsageError(
        f"no recipe {name}",
        where="RECIPE",
        next_step=(f"did you mean {near[0]}? " if near else "")
        + f"name a file, or one of: {', '.join(known)}",
    )


def shipped() -> dict[str, Path]:
    """The recipes that come with pdlaunch, by name."""
    return {file.stem: file for file in sorted(recipes_dir().glob("*.yaml"))}


def load(
    path: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Read, override, validate and check a recipe; raise one UsageError with all problems."""
    return loads(_read(path), path, overrides, environ)


def loads(
    text: str,
    path: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    origins: Mapping[KeyPath, str] | None = None,
) -> Loaded:
    """Like load, of a recipe that is in the file, or is to be written to it.

    Args:
        origins: where its keys come from, if no file has them yet.
    """
    data, lines, problems = _parse(text, path)
    set_lines: dict[KeyPath, str] = {}
    for override in overrides:
        problem = override_key(data, override, set_lines)
        if problem is not None:
            problems.append(problem)
    if origins is None:
        origins = {key_path: f"{path}:{line}" for key_path, line in lines.items()}
    source = _Source(path, origins, set_lines)
    recipe: Recipe | None = None
    try:
        # JSON mode keeps scalars strict and still takes a YAML list for a tuple.
        recipe = Recipe.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        problems += _translate(error.errors())
    if recipe is None:
        raise _refusal(problems, source)
    # A path on the command line is meant as the shell would take it.
    recipe, found = _locate_model(recipe, Path() if ("model",) in set_lines else path.parent)
    problems += found
    config, broken = checkpoint.read_config(model_shape.config_file(recipe, environ))
    shape = model_shape.find(recipe, config)
    problems += recipe_checks.check(recipe, shape)
    if config is not None and (limit := model_shape.longest(config)) is not None:
        problems += recipe_checks.over_limit(recipe, limit, environ)
    if broken is not None and is_path(recipe.model):
        problems.append(Problem(("model",), broken))
    if problems:
        raise _refusal(problems, source)
    notes: tuple[str, ...] = ()
    if recipe.engine.variant == "neuron":
        notes += (
            f"it cannot be started: engine.variant neuron is vLLM {NEURON_VLLM_VERSION}, to which "
            "the patch series does not apply",
        )
    if is_path(recipe.model) and not Path(recipe.model).exists():
        notes += (
            f"no model folder at {recipe.model} on this machine; each host of an engine needs it",
        )
    if is_path(recipe.model) and config and not recipe_checks.loads_otherwise(recipe):
        incomplete = checkpoint.read_weights(Path(recipe.model)).problem
        notes += (incomplete,) if incomplete is not None else ()
    if shape is None:
        notes += (
            f"the shape of {recipe.model} is not known here, so its heads were not checked "
            "against tensor_parallel; model_shape tells it",
        )
    return Loaded(recipe, path, notes)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read the recipe: {error.strerror or error}",
            where=str(path),
            next_step="name a readable recipe file",
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            "the recipe is not UTF-8 text", where=str(path), next_step="save it as UTF-8"
        ) from error


def _parse(text: str, path: Path) -> tuple[dict[str, Any], dict[KeyPath, int], list[Problem]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
        # Recipes travel as JSON from here on: no dates for keys, no mapping that holds itself.
        json.dumps(data, default=str)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise UsageError(
            f"the recipe is not valid YAML: {getattr(error, 'problem', None) or error}",
            where=f"{path}:{mark.line + 1}" if mark else str(path),
            next_step="mend the YAML; recipes/reference.yaml shows every key",
        ) from error
    if not isinstance(data, dict):
        raise UsageError(
            "a recipe is a mapping of keys to values",
            where=str(path),
            next_step="start from recipes/reference.yaml",
        )
    lines: dict[KeyPath, int] = {}
    problems: list[Problem] = []
    _walk(root, (), lines, problems)
    return data, lines, problems


def _walk(
    node: yaml.Node | None, at: KeyPath, lines: dict[KeyPath, int], problems: list[Problem]
) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen:
                problems.append(
                    Problem((*at, key), f"stands twice, first on line {seen[key]}; keep one")
                )
            seen.setdefault(key, line)
            lines[(*at, key)] = line
            _walk(value_node, (*at, key), lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*at, str(index))] = item.start_mark.line + 1
            _walk(item, (*at, str(index)), lines, problems)


def override_key(data: dict[str, Any], override: str, seen: dict[KeyPath, str]) -> Problem | None:
    """Set a key of a recipe that is not validated yet, as --set names it; note where it is from."""
    key, separator, text = override.partition("=")
    path = tuple(key.split("."))
    if not separator or not all(path):
        raise UsageError(
            f"--set {override}: expected KEY=VALUE with a dotted key",
            where="--set",
            next_step="for example: --set transfer.mode=pull",
        )
    try:
        value = yaml.safe_load(text)
        json.dumps(value, default=str)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"--set {override}: the value is not valid YAML",
            where="--set",
            next_step="quote it for the shell and for YAML",
        ) from error
    seen[path] = override
    target = data
    for depth, part in enumerate(path[:-1]):
        child = target.get(part)
        if child is None:
            child = target[part] = {}
        if not isinstance(child, dict):
            return Problem(path, f"{'.'.join(path[: depth + 1])} has no keys below it")
        target = child
    target[path[-1]] = value
    return None


def _locate_model(recipe: Recipe, folder: Path) -> tuple[Recipe, list[Problem]]:
    """Make a model's path, relative to a folder, absolute and see that the model is there.

    Not needed here by those who only plan and render; `up` and `doctor` look where engines run.
    """
    if is_path(recipe.model):
        location = (folder / recipe.model).resolve()
        recipe = recipe.model_copy(update={"model": str(location)})
        message = _no_folder(location, may_lack=_may_lack(recipe))
    else:
        message = _no_name(recipe.model, folder)
    return recipe, [] if message is None else [Problem(("model",), message)]


def _no_folder(location: Path, *, may_lack: bool) -> str | None:
    """Why a path is not that of a model."""
    if not location.exists() and may_lack:
        return None
    if not location.is_dir():
        return (
            f"no model folder at {location}: check the path; to plan or render where the model is "
            "not, tell its sizes in model_shape"
        )
    if not (location / "config.json").is_file():
        return f"{location} holds no config.json: not a model folder"
    return None


def _no_name(model: str, folder: Path) -> str | None:
    """Why a name is not that of a model of ours, or on the hub."""
    kind, separator, _ = model.partition(":")
    if separator and model not in model_shape.OWN_MODELS:
        near = difflib.get_close_matches(model, model_shape.OWN_MODELS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return (
            f"unknown {kind}: model {model}{hint} (a path starts with / or ./; what is in an "
            "object store is copied to a folder on each host first)"
        )
    # vLLM itself would take a folder here for the model.
    for path, base in ((f"./{model}", folder), (str(Path.cwd() / model), Path())):
        if not separator and (base / model / "config.json").is_file():
            return (
                f"{model} names a model on the hub, and a model's folder here: write {path} for "
                "the folder, or rename it"
            )
    return None


def _may_lack(recipe: Recipe) -> bool:
    """Whether a recipe holds on a machine without its model's folder."""
    if recipe.model_shape is not None:
        return True
    addresses = [recipe.role(role).address for role in recipe_checks.ROLES]
    return not any(each == LOCAL_HOST or recipe_checks.is_loopback(each) for each in addresses)


def _translate(errors: Iterable[ErrorDetails]) -> Iterator[Problem]:
    for error in errors:
        key_path = tuple(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            yield Problem(key_path, "unknown key" + _nearest(key_path))
        elif error["type"] == "missing":
            yield Problem(key_path, "is required")
        elif error["type"] == "value_error":
            yield Problem(key_path, error["msg"].removeprefix("Value error, "))
        else:
            found = json.dumps(error["input"], default=str)
            short = found if len(found) <= 60 else found[:57] + "..."
            yield Problem(key_path, f"should {_plain(error['msg'])}, found {short}")


def _plain(text: str) -> str:
    for theirs, ours in (
        ("Input should ", ""),
        ("String should ", ""),
        ("Tuple should ", ""),
        (" after validation, not 0", ""),
        ("be a valid integer", "be a whole number"),
        ("be a valid ", "be a "),
        ("be an object", "be a mapping of keys to values"),
        ("be a array", "be a list"),
        ("match pattern", "match the pattern"),
    ):
        text = text.replace(theirs, ours)
    return text


def _nearest(key_path: KeyPath) -> str:
    at = _section(Recipe, key_path[:-1])
    if at is not None:
        near = difflib.get_close_matches(key_path[-1], at.model_fields, n=1)
        if near:
            return f"; did you mean {near[0]}?"
    everywhere = {path[-1]: path for path in reversed(list(all_keys(Recipe)))}
    near = difflib.get_close_matches(key_path[-1], everywhere, n=1, cutoff=0.8)
    if near:
        return f"; did you mean {'.'.join(everywhere[near[0]])}?"
    return f"; known here: {', '.join(at.model_fields)}" if at is not None else ""


def _section(model: type[BaseModel], key_path: KeyPath) -> type[BaseModel] | None:
    for part in key_path:
        field = model.model_fields.get(part)
        below = None if field is None else _model_in(field.annotation)
        if below is None:
            return None
        model = below
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def all_keys(model: type[BaseModel], at: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key that a recipe may have, sections before what they hold."""
    for name, field in model.model_fields.items():
        yield (*at, name)
        below = _model_in(field.annotation)
        if below is not None:
            yield from all_keys(below, (*at, name))


def _refusal(problems: Sequence[Problem], source: _Source) -> UsageError:
    unique = list(dict.fromkeys(problems))
    rows = [
        f"  {source.locate(p.key_path)}: {'.'.join(p.key_path)}: {p.message}"
        for p in unique[:MAX_PROBLEMS_SHOWN]
    ]
    if len(unique) > MAX_PROBLEMS_SHOWN:
        rows.append(f"  and {len(unique) - MAX_PROBLEMS_SHOWN} more")
    count = "a problem" if len(unique) == 1 else f"{len(unique)} problems"
    return UsageError(
        f"the recipe has {count}:\n" + "\n".join(rows),
        next_step="mend them; recipes/reference.yaml explains every key, "
        "`pdlaunch recipe schema` lists them",
    )
