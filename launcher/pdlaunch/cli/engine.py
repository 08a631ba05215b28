"""`pdlaunch engine`: the engine environments in the cache."""

from __future__ import annotations

import click

from pdlaunch import engine as engines
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.errors import UsageError
from pdlaunch.upstream import VARIANTS, Variant

_VARIANT = click.argument("variant", type=click.Choice(VARIANTS))


@click.group(
    epilog=parameters.examples(
        "pdlaunch engine build cpu", "pdlaunch engine list", "pdlaunch engine remove --old"
    )
)
def engine() -> None:
    """Build, list, repair and remove engine environments."""


@engine.command("build", epilog=parameters.examples("pdlaunch engine build cpu"))
@_VARIANT
def build_engine(variant: Variant) -> None:
    """Build the engine of a variant, or find it built; prints its folder."""
    terminal = Terminal()
    terminal.data(str(engines.ensure(variant, terminal).root))


@engine.command("list", epilog=parameters.examples("pdlaunch engine list"))
def list_engines() -> None:
    """List the environments: name, state, folder."""
    terminal = Terminal()
    for each in engines.installed():
        state = ("current" if each.current else "old") if each.complete else "incomplete"
        terminal.data(f"{each.name}  {state}  {each.root}")


@engine.command(epilog=parameters.examples("pdlaunch engine repair cuda"))
@_VARIANT
def repair(variant: Variant) -> None:
    """Check the engine of a variant by running it, and build it again if it is broken."""
    terminal = Terminal()
    fixed = engines.repair(variant, terminal)
    terminal.success(f"{fixed.name} works")


@engine.command(epilog=parameters.examples("pdlaunch engine path cpu"))
@_VARIANT
def path(variant: Variant) -> None:
    """Print the folder in which the engine of a variant is, or would be."""
    Terminal().data(str(engines.planned(variant).root))


@engine.command(epilog=parameters.examples("pdlaunch engine remove --old"))
@click.argument("names", metavar="NAME...", nargs=-1)
@click.option("--old", is_flag=True, help="All that the current series does not use.")
def remove(names: tuple[str, ...], old: bool) -> None:
    """Remove environments that nothing runs from."""
    if old == bool(names):
        raise UsageError(
            "name the engines to remove, or give --old",
            next_step="see what there is: pdlaunch engine list",
        )
    terminal = Terminal()
    for name in names or [each.name for each in engines.installed() if not each.current]:
        engines.remove(name, terminal)
        terminal.success(f"removed {name}")
