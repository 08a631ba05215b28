"""Arguments and options that several commands share, what shells complete, and examples of help.

Completion must be quick and must not fail: it lists names and reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from pdlaunch import deployments, recipe_loader

_RECIPE_FILES = (".yaml", ".yml")


def examples(*lines: str) -> str:
    """The end of a command's help; a test parses each line."""
    # \b keeps click from filling the lines as if they were prose.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def _starting_with(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(set(names)) if name.startswith(incomplete)]


def _recipes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped recipes, and recipe files here; the shell itself goes through other folders."""
    here = (path.name for path in Path().iterdir() if path.suffix in _RECIPE_FILES)
    found = _starting_with(incomplete, (*recipe_loader.shipped(), *here))
    return found or [CompletionItem(incomplete, type="file")]


def _recipes_and_running(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    running = _starting_with(incomplete, deployments.names())
    return running + _recipes(context, parameter, incomplete)


def _running(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _starting_with(incomplete, deployments.names())


def _logged(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _starting_with(incomplete, deployments.logged_names())


def _logs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    name = context.params.get("name")
    folder = deployments.log_dir(Path(name or "").name)
    return _starting_with(incomplete, (path.stem for path in folder.glob("*.log")))


recipe = click.argument("recipe", shell_complete=_recipes)
optional_recipe = click.argument("recipe", required=False, shell_complete=_recipes)
recipe_or_running = click.argument("recipe", shell_complete=_recipes_and_running)
running = click.argument("name", shell_complete=_running)
optional_running = click.argument("name", required=False, shell_complete=_running)
optional_logged = click.argument("name", required=False, shell_complete=_logged)
optional_log = click.argument("process", required=False, shell_complete=_logs)
overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, as in engine.args.seed=7 or 'transfer.backends=[UCX]'. VALUE is YAML. "
    "Once for each key. A model's path is relative to the working directory.",
)
