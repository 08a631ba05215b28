"""`pdlaunch doctor`: will it work here, and what to do where it will not."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

import click
from rich.text import Text

from pdlaunch import recipe_loader
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.doctor import examination
from pdlaunch.doctor.findings import Finding, State
from pdlaunch.plan import ProcessRole

_STYLES: dict[State, str] = {
    "ok": "green",
    "warning": "yellow",
    "error": "red",
    "not checked": "dim",
}


@click.command(
    epilog=parameters.examples(
        "pdlaunch doctor",
        "pdlaunch doctor smollm2-135m-cpu",
        "pdlaunch doctor qwen3-32b-p5en --set decode.host=10.0.0.12 --only decode --json",
    )
)
@parameters.optional_recipe
@parameters.overrides
@click.option(
    "--only", type=click.Choice(get_args(ProcessRole)), help="Examine for this role alone."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def doctor(
    recipe: str | None, overrides: tuple[str, ...], only: ProcessRole | None, as_json: bool
) -> None:
    """Find what would keep a recipe from working on this machine, and say what to do.

    RECIPE is a file or the name of a shipped recipe; without one, only the machine is examined.
    Starts no engine, mends nothing, and takes a few seconds: a child process tries NIXL, hosts of
    the recipe are connected to, and the hub is asked for a model that is not here. Run it on every
    host. Exits with 1 where something cannot work.
    """
    terminal = Terminal()
    path = recipe_loader.find(recipe) if recipe is not None else None
    with terminal.work("examining"):
        found = examination.examine(path, overrides, only)
    counts = Counter(finding.state for finding in found)
    if as_json:
        report = {
            "recipe": recipe,
            "counts": {state: counts[state] for state in get_args(State)},
            "findings": [asdict(finding) for finding in found],
        }
        terminal.data(json.dumps(report, indent=2))
    else:
        _show(terminal, found)
        terminal.status(", ".join(f"{counts[state]} {state}" for state in get_args(State)))
    if counts["error"]:
        sys.exit(1)


def _show(terminal: Terminal, found: Sequence[Finding]) -> None:
    state_width, check_width = (
        max(map(len, column)) for column in zip(*((f.state, f.check) for f in found), strict=True)
    )
    for finding in found:
        evidence = f"{finding.where}: {finding.evidence}" if finding.where else finding.evidence
        line = Text(finding.state.ljust(state_width), _STYLES[finding.state])
        line.append(f"  {finding.check.ljust(check_width)}  {evidence}", "default")
        terminal.show(line)
        if finding.remedy is not None:
            indent = " " * (state_width + check_width + 4)
            terminal.show(Text(f"{indent}→ {finding.remedy}", "bold"))
