"""Renders a benchmark as one page of HTML that needs nothing else, network included."""

from __future__ import annotations

import time
from collections import Counter
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
# Numbers of requests at a time that make a line.
_SEVERAL = 3


def svg(results: Results) -> str:
    """The one plot for a page of somebody's own: the time to the first token over concurrency, of
    the workloads that say most about that."""
    counts = Counter(load.workload for load in results.loads.values() if load.at_once)
    enough = min(_SEVERAL, max(counts.values(), default=0))
    loads = {name: load for name, load in results.loads.items() if counts[load.workload] >= enough}
    told, of_row = _OVER_CONCURRENCY[0]
    chosen = results.model_copy(update={"loads": loads})
    drawn = plots.over_concurrency(chosen, analysis.rows(chosen), told, of_row)
    if drawn is None:
        raise PdError(
            "nothing was measured with so many requests at a time, and there is nothing to draw",
            next_step="measure a workload such as short",
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
        timeline=plots.timeline(results.timeline) if results.timeline is not None else None,
        sheets=tables.of_results(results),
    )
