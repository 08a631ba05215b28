"""`--help`: each command ends with examples, and each example is one."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from command_lines import parse, pdlaunch_words
from pdlaunch import recipe_loader
from pdlaunch.cli import cli


def commands(
    command: click.Command = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group, by the words that lead to it."""
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))


COMMANDS = dict(commands())


def example_lines(path: tuple[str, ...]) -> list[str]:
    """The examples that --help prints, as it prints them."""
    result = CliRunner().invoke(cli, [*path, "--help"])
    assert result.exit_code == 0
    shown = result.output.partition("Examples:\n")[2].splitlines()
    return [line.strip() for line in shown if line.strip()]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_ends_with_examples_of_the_command(path: tuple[str, ...]) -> None:
    lines = " ".join(example_lines(path)).replace("\\ ", "").split("pdlaunch ")[1:]
    assert lines
    for line in lines:
        words = pdlaunch_words(f"pdlaunch {line}")
        assert tuple(words[: len(path)]) == path
        parse(words, incomplete=False)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_recipes_in_examples_are_shipped(path: tuple[str, ...]) -> None:
    arguments = [each.name for each in COMMANDS[path].params if isinstance(each, click.Argument)]
    if arguments != ["recipe"]:
        return
    for line in example_lines(path):
        named = pdlaunch_words(line)[len(path) :][:1]
        if named and not named[0].startswith(("-", ".")):
            recipe_loader.find(named[0])


def test_help_names_each_command_on_one_line() -> None:
    result = CliRunner().invoke(cli, ["--help"])
    for name, command in cli.commands.items():
        assert f"  {name} " in result.output
        assert command.get_short_help_str(limit=200)
