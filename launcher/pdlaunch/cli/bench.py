"""`pdlaunch bench`: transfer modes of a recipe against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pdlaunch import deployments, preparation, recipe_loader
from pdlaunch.bench import analysis, bars, link, schedule, tables, workload
from pdlaunch.bench.results import LeftOut, Results
from pdlaunch.bench.run import run
from pdlaunch.bench.workload import Load
from pdlaunch.cli import parameters
from pdlaunch.cli.up import interruptible
from pdlaunch.console import Terminal
from pdlaunch.errors import PdError, UsageError
from pdlaunch.recipe_loader import Loaded
from pdlaunch.supervisor import Signals

_ROUNDS = 2
_QUICK_WITHIN_S = 600.0
_SHOWN = 5
# Of the machine's cores; below it is what any system does for itself.
_OTHERS_CORES = 0.2


@dataclass(frozen=True)
class _Files:
    """Where results go; None where nobody asked."""

    json: Path | None
    html: Path | None
    svg: Path | None
    markdown: Path | None

    def check(self) -> None:
        for file in (self.json, self.html, self.svg, self.markdown):
            if file is not None:
                _check_writable(file)

    def keep(self, results: Results) -> None:
        if self.json is not None:
            self.json.write_text(results.model_dump_json() + "\n", "utf-8")

    def write(self, results: Results, terminal: Terminal) -> None:
        # Takes matplotlib, for which all other commands would wait.
        from pdlaunch.bench import report  # noqa: PLC0415

        self.keep(results)
        if self.json is not None:
            terminal.success(f"all figures are in {self.json}")
        made: tuple[tuple[Path | None, Callable[[Results], str], str], ...] = (
            (self.html, report.html, "the report"),
            (self.svg, report.svg, "the plot"),
            (self.markdown, report.markdown, "tables"),
        )
        for file, rendered, what in made:
            if file is not None:
                file.write_text(rendered(results), "utf-8")
                terminal.success(f"{what} in {file}")


def _file(*names: str, told: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*names, type=click.Path(dir_okay=False, path_type=Path), help=told)


@click.command(
    epilog=parameters.examples(
        "pdlaunch bench tiny-qwen3-cpu --quick --html report.html",
        "pdlaunch bench tiny-qwen3-cpu --workload chat --modes push,pull --json chat.json",
        "pdlaunch bench --read chat.json --svg plot.svg --markdown table.md",
    ),
    short_help="Measure transfer modes of a recipe against each other.",
)
@parameters.optional_recipe
@click.option("--quick", is_flag=True, help="Few loads and requests: minutes, wide intervals.")
@parameters.overrides
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
    help=f"How often each is brought up. [default: {_ROUNDS}; with --quick 1 if it takes long]",
)
@click.option("--dry-run", is_flag=True, help="Say what would be measured; start nothing.")
@_file("--read", "read_file", told="Report on the --json file of an earlier run; measure nothing.")
@_file("--json", "json_file", told="Write all figures, request by request, to this file.")
@_file("--html", "html_file", told="Write a report with plots; it needs no network.")
@_file("--svg", "svg_file", told="Write one plot: the time to the first token over concurrency.")
@_file("--markdown", "markdown_file", told="Write the tables of what users wait for.")
def bench(
    *,
    recipe: str | None,
    quick: bool,
    overrides: tuple[str, ...],
    modes: str,
    workloads: tuple[str, ...],
    rounds: int | None,
    dry_run: bool,
    read_file: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    svg_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Measure the transfer modes of RECIPE against each other, on this machine.

    Each round brings up one pair a mode, behind the router, and one engine without P/D, one after
    the other and each round in another order, and puts the same prompts to all. One engine also
    gives the floor: the same prompts for one token. Every answer is compared with that engine's: a
    difference is an error.
    """
    terminal = Terminal()
    files = _Files(json_file, html_file, svg_file, markdown_file)
    if read_file is not None:
        if recipe is not None:
            raise UsageError(
                "a recipe and an earlier run: only one of them can be reported on",
                where="RECIPE and --read",
                next_step="leave one of them out",
            )
        results = _read(read_file)
        files.check()
        _report(terminal, results, files)
        return
    with interruptible():
        loaded = recipe_loader.load(recipe_loader.find(_named(recipe)), overrides)
        loads, left_out = _possible(loaded, overrides, workload.select(workloads, quick=quick))
        chosen = schedule.modes_of(modes)
        plan = preparation.planned(loaded, None)
        schedule.check_measurable(loaded.recipe, plan)
        workload.check_fits(loads, loaded.recipe.max_model_len_tokens)
        # Whoever asks for rounds gets them.
        within_s = _QUICK_WITHIN_S if quick and rounds is None else None
        made = schedule.schedule(chosen, loads, rounds or _ROUNDS, within_s)
        for each in left_out:
            terminal.warning(f"left out: {', '.join(each.loads)}; {each.reason}")
        if dry_run:
            terminal.show(tables.for_terminal(tables.of_schedule(made)))
            return
        files.check()
        for note in plan.notes:
            terminal.warning(note)
        for name in deployments.names():
            terminal.warning(f"{name} is up on this machine and takes part of it")
        terminal.status(
            f"{len(made.visits)} deployments one after the other: "
            f"about {made.expected_s / 60:.0f} min on two cores"
        )
        preparation.provide(loaded.recipe, plan, terminal)
    signals = Signals()
    with signals.caught():
        results = run(
            loaded,
            made,
            overrides,
            left_out=left_out,
            reporter=terminal,
            interrupts=signals,
            keep=files.keep,
            with_timeline=html_file is not None,
        )
    _report(terminal, results, files)


def _named(recipe: str | None) -> str:
    if recipe is None:
        raise UsageError(
            "nothing to measure, and nothing that was measured",
            where="RECIPE",
            next_step="name a recipe, or --read a file that --json has written",
        )
    return recipe


def _possible(
    loaded: Loaded, overrides: Sequence[str], loads: Sequence[Load]
) -> tuple[tuple[Load, ...], tuple[LeftOut, ...]]:
    """The loads that this machine can have, and the others."""

    def is_change(settings: tuple[str, ...]) -> bool:
        changed = recipe_loader.load(loaded.path, (*overrides, *settings))
        return changed.recipe != loaded.recipe

    loads = schedule.without_idle_settings(loads, is_change)
    linked = tuple(load.name for load in loads if load.setup.link_mbit_per_s is not None)
    reason = link.refusal() if linked else None
    if reason is None:
        return tuple(loads), ()
    kept = tuple(load for load in loads if load.name not in linked)
    if not kept:
        raise PdError(
            reason,
            where=f"--workload: {', '.join(linked)}",
            next_step="run as root on Linux with iproute2 and util-linux, or choose others",
        )
    return kept, (LeftOut(loads=linked, reason=reason),)


def _read(file: Path) -> Results:
    try:
        found = Results.model_validate_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no figures of a benchmark: {str(error).splitlines()[0]}",
            where=str(file),
            next_step="name a file that this version's --json has written",
        ) from error
    return found.model_copy(update={"bars": bars.of(found)})


def _report(terminal: Terminal, results: Results, files: _Files) -> None:
    files.write(results, terminal)
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
    if not results.is_complete:
        terminal.warning("the run was cut short; answers were not compared")
        return
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
