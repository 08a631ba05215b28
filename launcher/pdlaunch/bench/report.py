"""Renders a benchmark as one page of HTML that needs nothing else, network included."""

from __future__ import annotations

import time
from collections.abc import Callable

from jinja2 import Environment, PackageLoader, StrictUndefined

from pdlaunch.bench import analysis, plots, tables
from pdlaunch.bench.analysis import Row, Spread
from pdlaunch.bench.results import Results
from pdlaunch.errors import PdError

_OVER_CONCURRENCY: tuple[tuple[str, Callable[[Row], Spread | None]], ...] = (
    ("Time to first token", lambda row: row.ttft),
    ("End to end", lambda row: row.e2e),
)


def svg(results: Results) -> str:
    """The one plot for a page of somebody's own: the time to the first token, part by part."""
    rows = [row for row in analysis.rows(results) if row.handover is not None]
    drawn = plots.handovers(rows)
    if drawn is None:
        raise PdError(
            "no pair was measured, and there is nothing to draw",
            next_step="measure a transfer mode: --modes push,pull",
        )
    return plots.alone(drawn)


def markdown(results: Results) -> str:
    """The tables for such a page: what must hold, and what users wait for."""
    rows = analysis.rows(results)
    sheets = (tables.of_bars(results.bars), tables.of_first_tokens(rows), tables.of_answers(rows))
    return "\n".join(
        f"{sheet.title}\n\n{tables.for_markdown(sheet)}" for sheet in sheets if sheet.rows
    )


def html(results: Results) -> str:
    """The whole page."""
    rows = analysis.rows(results)
    pairs = [row for row in rows if row.handover is not None]
    drawn = [
        (what, plots.over_concurrency(results, rows, what, of_row))
        for what, of_row in _OVER_CONCURRENCY
    ]
    environment = Environment(
        loader=PackageLoader("pdlaunch.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        results=results,
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(results.started_unix_s)),
        others_cores=analysis.others_cores(results),
        compared=results.compared_answers,
        wrong=[each for each in results.differences if not each.is_tie],
        ties=[each for each in results.differences if each.is_tie],
        drawn=[(what, svg) for what, svg in drawn if svg is not None],
        handovers=plots.handovers(pairs),
        sheets=tables.of_results(results),
    )
