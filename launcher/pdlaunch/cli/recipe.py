"""`pdlaunch recipe`: look at recipes without starting anything."""

from __future__ import annotations

import json
from pathlib import Path

import click
import yaml

from pdlaunch import recipe_loader, recipe_schema
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.files import write


@click.group(
    epilog=parameters.examples(
        "pdlaunch recipe validate ./mine.yaml",
        "pdlaunch recipe show tiny-qwen3-cpu",
        "pdlaunch recipe schema --output recipe.schema.json",
    )
)
def recipe() -> None:
    """Validate and show recipes, and print their schema."""


@recipe.command(
    epilog=parameters.examples(
        "pdlaunch recipe validate ./mine.yaml",
        "pdlaunch recipe validate qwen3-32b-p5en --set prefill.tensor_parallel=8",
    )
)
@parameters.recipe
@parameters.overrides
def validate(recipe: str, overrides: tuple[str, ...]) -> None:
    """Check a recipe; name all that is wrong with it."""
    terminal = Terminal()
    loaded = recipe_loader.load(recipe_loader.find(recipe), overrides)
    for note in loaded.notes:
        terminal.warning(note)
    terminal.success(f"{loaded.path} holds")


@recipe.command(
    epilog=parameters.examples(
        "pdlaunch recipe show tiny-qwen3-cpu > mine.yaml",
        "pdlaunch recipe show ./mine.yaml --json",
    )
)
@parameters.recipe
@parameters.overrides
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print a recipe with every key, defaults filled in: a copy of a shipped one to edit."""
    loaded = recipe_loader.load(recipe_loader.find(recipe), overrides)
    data = loaded.recipe.model_dump(mode="json")
    Terminal().data(
        json.dumps(data, indent=2) if as_json else yaml.safe_dump(data, sort_keys=False)
    )


@recipe.command(epilog=parameters.examples("pdlaunch recipe schema --output recipe.schema.json"))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write it there instead.",
)
def schema(output: Path | None) -> None:
    """Print the JSON Schema of recipes, from which editors complete and check.

    It knows each key. What one key says of another, `pdlaunch recipe validate` checks.
    """
    terminal = Terminal()
    if output is None:
        terminal.data(recipe_schema.text())
        return
    write(output, recipe_schema.text())
    terminal.success(f"the schema is in {output}")
    terminal.status(
        f"a recipe beside it that begins with this line is completed by editors: "
        f"# yaml-language-server: $schema={output.name}"
    )
