"""A benchmark's figures as tables for a terminal. Computes and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from pdlaunch.bench.analysis import IdleCost, Ratio, Row, Spread
from pdlaunch.bench.schedule import Schedule, expected_s

NOTHING = "-"


def of_schedule(schedule: Schedule) -> Table:
    """Which deployments in which order, and which loads each gets."""
    table = Table(title=f"about {schedule.expected_s / 60:.0f} minutes", title_justify="left")
    for column in ("round", "brought up", "load", "requests", "about"):
        table.add_column(column, no_wrap=True)
    for visit in schedule.visits:
        for place, load in enumerate(schedule.loads):
            first = (str(visit.round + 1), visit.subject) if place == 0 else ("", "")
            table.add_row(*first, load.name, str(load.requests), f"{expected_s(load):.0f} s")
    return table


def of_rows(rows: Iterable[Row]) -> Table:
    """Latencies in milliseconds: p50 / p90 / p99."""
    return _table(
        "Milliseconds: p50 / p90 / p99",
        ("load", "", "TTFT", "over floor", "handover", "second token", "TPOT", "ITL", "end to end",
         "req/s", "good/s", "failed"),
        [
            (
                row.load,
                row.subject,
                _spread(row.ttft),
                _number(row.ttft_over_floor, 2),
                _ms(row.handover.handover_s if row.handover else None),
                _spread(row.second_token),
                _spread(row.tpot),
                _spread(row.itl),
                _spread(row.e2e),
                _number(row.requests_per_s, 2),
                _number(row.goodput_per_s, 2),
                f"{row.failed} of {row.requests}",
            )
            for row in rows
        ],
    )  # fmt: skip


def of_transfers(rows: Iterable[Row]) -> Table:
    """How KV moved, of pairs; and what each request cost."""
    return _table(
        "Transfers",
        ("load", "", "MiB", "before prefill's end", "transfers", "failed", "descriptors each",
         "post ms each", "transfer ms each", "CPU s a request"),
        [
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
        ],
    )  # fmt: skip


def of_ratios(ratios: Iterable[Ratio]) -> Table:
    """Ours over the others, a row a load and other."""
    ratios = list(ratios)
    whats = list(dict.fromkeys(ratio.what for ratio in ratios))
    places: dict[tuple[str, str], dict[str, Ratio]] = {}
    for ratio in ratios:
        places.setdefault((ratio.load, ratio.other), {})[ratio.what] = ratio
    return _table(
        "push over the others, with 95 % intervals; below 1 is less",
        ("load", "push over", *whats),
        [
            (load, other, *(_ratio(found.get(what)) for what in whats))
            for (load, other), found in places.items()
        ],
    )


def of_idle(costs: Iterable[IdleCost]) -> Table:
    """What idle deployments take."""
    return _table(
        "Cores taken by idle processes",
        ("", "role", "cores"),
        [(cost.subject, cost.role, f"{cost.cores:.3f}") for cost in costs],
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if place < 2 else "right")
    before = None
    for row in rows:
        if before not in (None, row[0]):
            table.add_section()
        before = row[0]
        table.add_row(*row)
    return table


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return NOTHING
    return " / ".join(f"{1e3 * value:.0f}" for value in (spread.p50, spread.p90, spread.p99))


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.0f}"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _ratio(ratio: Ratio | None) -> str:
    return NOTHING if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
