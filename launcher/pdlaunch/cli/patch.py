"""`pdlaunch patch`: the series as a git branch and back, its checks, its list."""

from __future__ import annotations

from pathlib import Path

import click

from pdlaunch import engine, patch_branch, patch_check, patch_forecast, patch_tests, upstream_branch
from pdlaunch.cli import parameters
from pdlaunch.console import Terminal
from pdlaunch.errors import PdError, UsageError
from pdlaunch.paths import patches_dir
from pdlaunch.series import Series
from pdlaunch.series import load as load_series
from pdlaunch.upstream import load as load_upstream

_DEFAULT_FOLDER = Path("build/vllm")
_FOLDER = click.argument(
    "folder",
    metavar="[DIR]",
    default=_DEFAULT_FOLDER,
    type=click.Path(file_okay=False, path_type=Path),
)


@click.group(
    epilog=parameters.examples(
        "pdlaunch patch checkout", "pdlaunch patch export", "pdlaunch patch check"
    )
)
def patch() -> None:
    """Work on the patch series: checkout, edit, export, check."""


@patch.command(
    epilog=parameters.examples(
        "pdlaunch patch checkout", "pdlaunch patch checkout --base-only /tmp/vllm"
    )
)
@_FOLDER
@click.option("--base-only", is_flag=True, help="Only the base, to rebase the series onto.")
def checkout(folder: Path, base_only: bool) -> None:
    """Make a git branch of the series in DIR (default: build/vllm)."""
    terminal = Terminal()
    series = load_series()
    patch_branch.checkout(series, folder, terminal, with_patches=not base_only)
    count = 0 if base_only else len(series.patches)
    terminal.success(f"vLLM {series.upstream.version} and {_counted(count)} in {folder}")


@patch.command(
    epilog=parameters.examples(
        "pdlaunch patch export",
        "pdlaunch patch export /tmp/vllm",
        "pdlaunch patch export --upstream nixl-harden-handshake-listener",
    )
)
@_FOLDER
@click.option(
    "--upstream",
    metavar="PATCH",
    help="Write a branch of this patch for a pull request to vLLM instead.",
)
def export(folder: Path, upstream: str | None) -> None:
    """Write the commits in DIR (default: build/vllm) back as patches.

    With --upstream, DIR gets the branch upstream/PATCH instead: this patch on vLLM as published,
    above the patches of the series that it needs, without the trailers of the series. DIR may be a
    clone of vLLM, too. The commits are printed in the order in which they are to go upstream.
    """
    if upstream is not None:
        _export_upstream(upstream, folder)
        return
    terminal = Terminal()
    target = patches_dir()
    if target.parent.name == "_data":
        raise PdError(
            "this pdlaunch is an installed copy, its patches are not yours to change",
            where=str(target),
            next_step="run it from a checkout: pip install -e .",
        )
    done = patch_branch.export(load_upstream(target / "UPSTREAM"), folder, target)
    for name in done.written:
        terminal.data(f"written   {name}")
    for name in done.removed:
        terminal.data(f"removed   {name}")
    terminal.success(f"{_counted(len(done.unchanged))} unchanged, in {target}")


def _export_upstream(name: str, folder: Path) -> None:
    terminal = Terminal()
    made = upstream_branch.write(load_series(), name, folder, terminal)
    for need in made.needs:
        terminal.data(f"{need.patch.name.removesuffix('.patch')}  (needed: {need.why})")
    terminal.data(made.patch.name.removesuffix(".patch"))
    alone = "alone" if not made.needs else f"on {_counted(len(made.needs))} that it needs"
    terminal.success(f"branch {made.name} in {folder}: {made.base}, and the patch {alone}")


@patch.command(
    epilog=parameters.examples(
        "pdlaunch patch check",
        "pdlaunch patch check --tests core-ignore-late-transfer-results",
        "pdlaunch patch check --against newest",
    )
)
@click.argument("names", metavar="[PATCH]...", nargs=-1)
@click.option("--tests", is_flag=True, help="Also run each patch's tests without and with it.")
@click.option(
    "--against",
    metavar="VERSION",
    help="Instead: which patches fail on another vLLM, and where; `newest` for the last release.",
)
def check(names: tuple[str, ...], tests: bool, against: str | None) -> None:
    """Check the series: applies, canonical, complete headers, named tests exist.

    With --tests, PATCH names those whose tests to run (default: all; minutes a patch).

    With --against, the source of that vLLM is taken from where pip is configured to look, and the
    series is tried on it patch by patch. Whether what applies also works, only tests can tell.
    """
    terminal = Terminal()
    series = load_series()
    if against is not None:
        if names or tests:
            raise UsageError("--against goes with neither --tests nor a PATCH")
        _check_against(series, against, terminal)
        return
    only = {f"{name.removesuffix('.patch')}.patch" for name in names}
    if unknown := only - {patch.name for patch in series.patches}:
        raise UsageError(f"there is no {min(unknown)}", next_step="see: pdlaunch patch list")
    if only and not tests:
        raise UsageError("a PATCH can be named with --tests only")
    problems = patch_check.check(series, patches_dir(), terminal)
    for problem in problems:
        terminal.data(str(problem))
    if tests and not problems:
        for problem in patch_tests.check(series, engine.ensure("cpu", terminal), terminal, only):
            terminal.data(str(problem))
            problems.append(problem)
    if problems:
        raise PdError(
            f"the series has {len(problems)} problem{'s' if len(problems) > 1 else ''}",
            where=str(patches_dir()),
            next_step="pdlaunch patch checkout, mend, pdlaunch patch export",
        )
    terminal.success(f"{_counted(len(series.patches))}, clean")


def _check_against(series: Series, version: str, terminal: Terminal) -> None:
    source = patch_forecast.source_of(series, version)
    outcomes = patch_forecast.forecast(series, source, terminal)
    failed = [each for each in outcomes if each.problems]
    for each in failed:
        for problem in each.problems:
            terminal.data(str(problem))
        ends = "; ".join(each.patch.trailers.get("Retire-When", ("its message does not say",)))
        terminal.data(f"{each.patch.name}: retires when: {ends}")
    if failed:
        raise PdError(
            f"{len(failed)} of {_counted(len(outcomes))} would have to change",
            where=source.filename,
            next_step="move the series: CONTRIBUTING.md, Move to a new vLLM",
        )
    terminal.success(f"{_counted(len(outcomes))} apply to {source.filename}")


@patch.command("list", epilog=parameters.examples("pdlaunch patch list"))
def list_patches() -> None:
    """List the patches in the order in which they apply."""
    terminal = Terminal()
    series = load_series()
    for number, each in enumerate(series.patches, start=1):
        terminal.data(f"{number:3}  {each.name.removesuffix('.patch')}  {each.subject}")
    terminal.status(f"{_counted(len(series.patches))} on vLLM {series.upstream.version}")


def _counted(number: int) -> str:
    return f"{number} patch{'' if number == 1 else 'es'}"
