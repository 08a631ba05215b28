"""A benchmark's figures as tables of text, for a terminal and for the report. Prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from pdlaunch.bench import analysis
from pdlaunch.bench.analysis import OURS, IdleCost, Ratio, Row, Spread
from pdlaunch.bench.results import Bar, Results
from pdlaunch.bench.schedule import Schedule, expected_s

NOTHING = "-"


@dataclass(frozen=True)
class Sheet:
    """A table: rows whose first cell is the same belong together."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    # The columns that name a row; all others are figures.
    names: int = 2


def for_terminal(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, column in enumerate(sheet.columns):
        table.add_column(column, no_wrap=True, justify="left" if place < sheet.names else "right")
    before = None
    for row in sheet.rows:
        if before not in (None, row[0]):
            table.add_section()
        before = row[0]
        table.add_row(*row)
    return table


def for_markdown(sheet: Sheet) -> str:
    """The same for a page such as a README."""
    lines = [
        sheet.columns,
        tuple("---" if place < sheet.names else "---:" for place, _ in enumerate(sheet.columns)),
        *sheet.rows,
    ]
    cells = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n".join(cells) + "\n"


def of_results(results: Results) -> list[Sheet]:
    """All tables of a run that have something to say."""
    rows = analysis.rows(results)
    ratios = analysis.ratios(results) if OURS in results.modes else []
    sheets = (
        of_bars(results.bars),
        of_ratios(ratios),
        of_first_tokens(rows),
        of_answers(rows),
        of_handovers(rows),
        of_transfers(rows),
        of_idle(analysis.idle_costs(results)),
    )
    return [sheet for sheet in sheets if sheet.rows]


def of_schedule(schedule: Schedule) -> Sheet:
    """Which deployments in which order, and which loads each gets."""
    title = f"{len(schedule.visits)} deployments, about {schedule.expected_s / 60:.0f} minutes"
    if schedule.within_s is not None:
        title += f"; after the first, no round that would end after {schedule.within_s / 60:.0f}"
    return Sheet(
        title,
        ("round", "brought up", "setup", "load", "requests", "seconds"),
        tuple(
            (
                str(visit.round + 1),
                visit.subject,
                str(visit.setup),
                load.name,
                str(load.requests),
                f"{expected_s(load):.0f}",
            )
            for visit in schedule.visits
            for load in visit.loads
        ),
        names=4,
    )


def of_bars(bars: Iterable[Bar]) -> Sheet:
    """What must hold of push, and whether it did."""
    return Sheet(
        "Bars: what must hold of push, as ratios of medians where it is over another",
        ("figure", "load", "over", "bar", "measured", "holds", "note"),
        tuple(
            (
                bar.what,
                bar.load,
                bar.other or NOTHING,
                bar.bound,
                _interval(bar.figure, bar.low, bar.high, digits=3),
                NOTHING if bar.is_met is None else "yes" if bar.is_met else "NO",
                bar.note or NOTHING,
            )
            for bar in bars
        ),
        names=4,
    )


def of_first_tokens(rows: Iterable[Row]) -> Sheet:
    """What a user waits for first."""
    return Sheet(
        "First tokens in milliseconds, p50 / p90 / p99; the handover is a mean",
        ("load", "subject", "TTFT", "over floor", "handover", "second token", "failed"),
        tuple(
            (
                row.load,
                row.subject,
                _spread(row.ttft),
                _number(row.ttft_over_floor, 2),
                NOTHING if row.handover is None else _ms(row.handover.handover_s),
                _spread(row.second_token),
                f"{row.failed} of {row.requests}",
            )
            for row in rows
        ),
    )


def of_answers(rows: Iterable[Row]) -> Sheet:
    """What a user waits for then, and how many of them there may be."""
    return Sheet(
        "Whole answers in milliseconds, p50 / p90 / p99; requests a second, and good ones",
        (
            *("load", "subject", "TPOT", "ITL", "TPOT of running decodes", "end to end"),
            *("req/s", "good/s", "others' cores"),
        ),
        tuple(
            (
                row.load,
                row.subject,
                _spread(row.tpot, digits=1),
                _spread(row.itl, digits=1),
                NOTHING if row.running_tpot_s is None else f"{1e3 * row.running_tpot_s:.1f}",
                _spread(row.e2e),
                _number(row.requests_per_s, 2),
                _number(row.goodput_per_s, 2),
                _number(row.others_cores, 2),
            )
            for row in rows
            if row.tpot is not None
        ),
    )


def of_handovers(rows: Iterable[Row]) -> Sheet:
    """Where the time to the first token goes in a pair."""
    return Sheet(
        "The time to the first token and its parts, means in milliseconds",
        (
            *("load", "subject", "TTFT", "prefill queued", "prefill computed", "prefill's rest"),
            *("handover", "decode's first step", "transfer after prefill"),
        ),
        tuple(
            (
                row.load,
                row.subject,
                _ms(parts.ttft_s),
                _ms(parts.prefill_queue_s),
                _ms(parts.prefill_s),
                _ms(parts.prefill_rest_s),
                _ms(parts.handover_s),
                _ms(parts.decode_first_step_s),
                _ms(parts.transfer_s),
            )
            for row in rows
            if (parts := row.handover) is not None
        ),
    )


def of_transfers(rows: Iterable[Row]) -> Sheet:
    """How KV moved in pairs, and what a request cost."""
    return Sheet(
        "Transfers",
        (
            *("load", "subject", "MiB", "before prefill's end", "transfers", "failed"),
            *("descriptors each", "post ms each", "transfer ms each", "CPU s a request"),
        ),
        tuple(
            (
                row.load,
                row.subject,
                _number(row.mib_moved, 1),
                NOTHING
                if row.share_before_prefill_end is None
                else f"{row.share_before_prefill_end:.0%}",
                _number(row.transfers, 0),
                _number(row.transfers_failed, 0),
                _number(row.descriptors_per_transfer, 1),
                _number(row.post_ms_per_transfer, 2),
                _number(row.transfer_ms, 1),
                _number(row.cpu_s_per_request, 2),
            )
            for row in rows
            if row.transfers is not None
        ),
    )


def of_ratios(ratios: Sequence[Ratio]) -> Sheet:
    """Ours over the others, a row a load and other."""
    whats = tuple(dict.fromkeys(ratio.what for ratio in ratios))
    places: dict[tuple[str, str], dict[str, Ratio]] = {}
    for ratio in ratios:
        places.setdefault((ratio.load, ratio.other), {})[ratio.what] = ratio
    return Sheet(
        "push over the others with 95 % intervals: below 1 is less",
        ("load", "push over", *whats),
        tuple(
            (load, other, *(_ratio(found.get(what)) for what in whats))
            for (load, other), found in places.items()
        ),
    )


def of_idle(costs: Iterable[IdleCost]) -> Sheet:
    """What idle deployments take."""
    return Sheet(
        "Cores that processes take while nobody asks anything, or all wait for one slow transfer",
        ("subject", "role", "while", "cores"),
        tuple(
            (
                cost.subject,
                cost.role,
                "waiting for KV" if cost.is_waiting else "idle",
                f"{cost.cores:.3f}",
            )
            for cost in costs
        ),
        names=3,
    )


def _spread(spread: Spread | None, digits: int = 0) -> str:
    if spread is None:
        return NOTHING
    return " / ".join(f"{1e3 * value:.{digits}f}" for value in (spread.p50, spread.p90, spread.p99))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return NOTHING
    low, high = ratio.interval or (None, None)
    return _interval(ratio.value, low, high, digits=2)


def _interval(value: float | None, low: float | None, high: float | None, digits: int) -> str:
    if value is None:
        return NOTHING
    text = f"{value:.{digits}f}"
    if low is None or high is None:
        return text
    return f"{text} ({low:.{digits}f} to {high:.{digits}f})"
