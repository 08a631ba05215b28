"""`pdlaunch bench`: transfer modes of a recipe against each other."""

from __future__ import annotations

from pathlib import Path

import click

from pdlaunch import deployments, preparation, recipe_loader
from pdlaunch.bench import analysis, report, schedule, tables, workload
from pdlaunch.bench.results import Results
from pdlaunch.bench.run import run
from pdlaunch.cli.up import interruptible
from pdlaunch.console import Terminal
from pdlaunch.errors import PdError
from pdlaunch.supervisor import Signals

_ROUNDS, _QUICK_ROUNDS = 3, 2
_SHOWN = 5
# Of the machine's cores; below it is what any system does for itself.
_OTHERS_CORES = 0.2


@click.command(
    epilog="Example: pdlaunch bench tiny-qwen3-cpu --quick --html report.html",
    short_help="Measure transfer modes of a recipe against each other.",
)
@click.argument("recipe")
@click.option("--quick", is_flag=True, help="Few loads and requests: minutes, wide intervals.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option(
    "--modes",
    default=",".join(schedule.MODES),
    show_default=True,
    metavar="MODE,...",
    help="Which modes to measure.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help=f"Only these: {', '.join(each.name for each in workload.WORKLOADS)}.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help=f"How often each is brought up. [default: {_ROUNDS}; with --quick {_QUICK_ROUNDS}]",
)
@click.option("--dry-run", is_flag=True, help="Say what would be measured; start nothing.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures, request by request, to this file.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a report with plots to this file; it needs no network.",
)
def bench(
    *,
    recipe: str,
    quick: bool,
    overrides: tuple[str, ...],
    modes: str,
    workloads: tuple[str, ...],
    rounds: int | None,
    dry_run: bool,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Measure the transfer modes of RECIPE against each other, on this machine.

    Each round brings up one pair a mode, behind the router, and one engine without P/D, one after
    the other and each round in another order, and puts the same prompts to all. One engine also
    gives the floor: the same prompts for one token. Every answer is compared with that engine's: a
    difference is an error.
    """
    terminal = Terminal()
    with interruptible():
        loaded = recipe_loader.load(recipe_loader.find(recipe), overrides)
        loads = workload.select(workloads, quick=quick)
        chosen = schedule.modes_of(modes)
        plan = preparation.planned(loaded, None)
        schedule.check_measurable(loaded.recipe, plan)
        workload.check_fits(loads, loaded.recipe.max_model_len_tokens)
        made = schedule.schedule(chosen, loads, rounds or (_QUICK_ROUNDS if quick else _ROUNDS))
        if dry_run:
            terminal.show(tables.for_terminal(tables.of_schedule(made)))
            return
        for file in (json_file, html_file):
            if file is not None:
                _check_writable(file)
        for note in plan.notes:
            terminal.warning(note)
        for record in deployments.all_records():
            terminal.warning(f"{record.name} is up on this machine and takes part of it")
        preparation.provide(loaded.recipe, terminal)
    signals = Signals()
    with signals.caught():
        results = run(
            loaded,
            made,
            overrides,
            reporter=terminal,
            interrupts=signals,
            keep=lambda found: _keep(found, json_file),
        )
    _keep(results, json_file)
    if json_file is not None:
        terminal.success(f"all figures are in {json_file}")
    if html_file is not None:
        html_file.write_text(report.html(results), "utf-8")
        terminal.success(f"the report is in {html_file}")
    for sheet in tables.of_results(results):
        terminal.show(tables.for_terminal(sheet))
    _end(terminal, results)


def _check_writable(file: Path) -> None:
    """Better now than after half an hour."""
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise PdError(
            f"cannot write {file}: {error.strerror or error}",
            where=str(file.parent),
            next_step="name a file in a folder that one can write to",
        ) from error


def _keep(results: Results, file: Path | None) -> None:
    if file is not None:
        file.write_text(results.model_dump_json() + "\n", "utf-8")


def _end(terminal: Terminal, results: Results) -> None:
    """Say what a reader of the tables must know; raise where the answers were not the same."""
    if results.failed_requests:
        terminal.warning(f"{results.failed_requests} requests failed; no figure counts them")
    others = analysis.others_cores(results)
    if others > _OTHERS_CORES:
        terminal.warning(
            f"other processes took {others:.1f} cores while this measured; take the figures, and "
            "most of all the small ones, with care"
        )
    ties = [each for each in results.differences if each.is_tie]
    if ties:
        terminal.warning(
            f"{len(ties)} answers part from one engine's where its two best tokens were closer "
            "than rounding: no error"
        )
    if results.is_identical:
        terminal.success(
            f"{results.compared_answers} answers of P/D compared with one engine's: the same"
        )
        return
    wrong = [each for each in results.differences if not each.is_tie]
    lines = [
        f"  {each.subject}, {each.load}, round {each.round + 1}, request {each.request}: "
        f"{each.answer!r} instead of {each.expected!r}"
        for each in wrong[:_SHOWN]
    ]
    raise PdError(
        "\n".join([f"{len(wrong)} answers of P/D are not those of one engine", *lines]),
        where="the answers to the same prompts, in the same run",
        next_step="do not trust this mode with this recipe; --json keeps all answers. Recipes in "
        "16 bits may differ by rounding: compare with --set engine.args.dtype=float32",
    )
