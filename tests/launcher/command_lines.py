"""Lines of pages and of help that run pdlaunch, and whether the command line would take them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator

import click
import pytest

from pdlaunch.cli import cli

_OPERATORS = frozenset({"", "|", "||", "&", "&&", "{", "}"})
_REDIRECTION = re.compile(r"\d?[<>]+")
_SETTING = re.compile(r"[A-Z_]+=")


def pdlaunch_words(line: str) -> list[str]:
    """The arguments of a line that runs pdlaunch; none where it runs something else."""
    if not line.startswith("pdlaunch "):
        return []
    words = shlex.split(line, comments=True)[1:]
    return list(itertools.takewhile(lambda word: word not in (">", "|", "&&"), words))


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a line of shell, each as its words: no settings in front, no redirections."""
    command: list[str] = []
    words = iter((*shlex.split(line, comments=True), ";"))
    for word in words:
        plain = word.rstrip(";")
        if redirection := _REDIRECTION.match(plain):
            if redirection[0] == plain:
                next(words)  # the file
        elif plain not in _OPERATORS:
            command.append(plain)
        if plain != word or plain in _OPERATORS:
            run = list(itertools.dropwhile(_SETTING.match, command))
            if run:
                yield run
            command = []


def parse(words: list[str], *, incomplete: bool) -> None:
    """Fails as the command line would, without running anything."""
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"pdlaunch {shlex.join(words)}"
        command = command.commands[name]
    try:
        command.make_context(command.name, rest, help_option_names=["-h", "--help"])
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        assert incomplete, f"pdlaunch {shlex.join(words)}"
    except click.ClickException as error:
        pytest.fail(f"pdlaunch {shlex.join(words)}: {error.format_message()}")
