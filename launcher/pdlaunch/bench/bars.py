"""What must hold of push in a benchmark, and whether it does in one that was run. Pure.

The figures are those of the tables: nothing is measured another way to be held to a bar.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from pdlaunch.bench import analysis
from pdlaunch.bench.analysis import (
    AFTER_PREFILL,
    DESCRIPTORS,
    E2E,
    HANDOVER,
    OURS,
    RUNNING_TPOT,
    SECOND,
    THROUGHPUT,
    TPOT,
    TTFT,
    Ratio,
)
from pdlaunch.bench.results import FLOOR, Bar, Measured, Results
from pdlaunch.bench.schedule import ONE_ENGINE

Sense = Literal["at most", "at least", "under"]
_HOLDS: dict[Sense, Callable[[float, float], bool]] = {
    "at most": operator.le,
    "at least": operator.ge,
    "under": operator.lt,
}
_STOCK: Final = "push-upstream"


@dataclass(frozen=True)
class _Bound:
    sense: Sense
    value: float

    def __str__(self) -> str:
        return f"{self.sense} {self.value:g}"

    def holds(self, figure: float) -> bool:
        return _HOLDS[self.sense](figure, self.value)


@dataclass(frozen=True)
class _Against:
    """A bound of ours over another, in one figure, under some loads."""

    what: str
    other: Measured
    bound: _Bound
    loads: tuple[str, ...]


_TO_8 = (1, 4, 8)
_HANDOVERS = tuple(f"{name} x{count}" for name in ("short", "long", "busy") for count in _TO_8)
_SCATTERED = ("scattered x1", "scattered x4")
_AGAINST: tuple[_Against, ...] = (
    _Against(TTFT, FLOOR, _Bound("at most", 1.05), ("short x1", "long x1")),
    _Against(HANDOVER, _STOCK, _Bound("at most", 0.25), _HANDOVERS),
    _Against(HANDOVER, "pull", _Bound("at most", 0.2), _HANDOVERS),
    _Against(TTFT, "pull", _Bound("at most", 0.4), ("next-turn x1",)),
    _Against(THROUGHPUT, _STOCK, _Bound("at least", 1.3), ("chat x8",)),
    _Against(THROUGHPUT, "pull", _Bound("at least", 1.3), ("chat x8",)),
    _Against(THROUGHPUT, ONE_ENGINE, _Bound("at least", 1.3), ("chat x8",)),
    _Against(RUNNING_TPOT, "pull", _Bound("at most", 0.7), _SCATTERED),
    _Against(TTFT, "pull", _Bound("at most", 0.7), _SCATTERED),
    _Against(DESCRIPTORS, _STOCK, _Bound("at most", 0.1), _SCATTERED),
    _Against(AFTER_PREFILL, _STOCK, _Bound("at most", 0.4), ("slow-link x1",)),
)
_BETTER = _Bound("under", 1.0)
_TPOT = _Bound("at most", 1.03)
_EARLY, _EARLY_LOAD = _Bound("at least", 0.88), "longest x1"
_IDLE, _WAITING = _Bound("under", 0.02), _Bound("under", 0.1)


def of(results: Results) -> tuple[Bar, ...]:
    """Every bar; what a run has not measured is told as such."""
    return tuple(_of(results)) if OURS in results.modes else ()


def _of(results: Results) -> Iterator[Bar]:
    for each in _AGAINST:
        for load in each.loads:
            bar = Bar(what=each.what, load=load, other=each.other, bound=str(each.bound))
            ratio = analysis.ratio_of(results, load, each.what, each.other)
            yield (
                _not_measured(results, bar) if ratio is None else _measured(bar, each.bound, ratio)
            )
    for what in (SECOND, E2E):
        for other in (_STOCK, "pull"):
            ratios = [
                ratio
                for load in results.loads
                if (ratio := analysis.ratio_of(results, load, what, other)) is not None
            ]
            yield _everywhere(what, other, _BETTER, ratios)
    yield _everywhere(TPOT, "the better of the two", _TPOT, list(_over_the_better(results)))
    yield _early(results)
    yield _at_rest(results, "cores of an idle pair", _IDLE, is_waiting=False)
    yield _at_rest(results, "cores of a pair that waits for KV", _WAITING, is_waiting=True)
    yield _answers(results)


def _measured(bar: Bar, bound: _Bound, ratio: Ratio) -> Bar:
    low, high = ratio.interval or (None, None)
    return bar.model_copy(
        update={
            "figure": ratio.value,
            "low": low,
            "high": high,
            "is_met": bound.holds(ratio.value),
        }
    )


def _not_measured(results: Results, bar: Bar) -> Bar:
    """The bar and why it has no figure."""
    for each in results.left_out:
        if bar.load in each.loads:
            return bar.model_copy(update={"note": each.reason})
    note = "no figure of both" if bar.load in results.loads else "not part of this run"
    return bar.model_copy(update={"note": note})


def _everywhere(what: str, other: str, bound: _Bound, ratios: Sequence[Ratio]) -> Bar:
    """Of all loads that were measured, the worst."""
    bar = Bar(what=what, load="all", other=other, bound=str(bound), note="not measured")
    if not ratios:
        return bar
    worst = max(ratios, key=lambda ratio: ratio.value)
    holding = sum(bound.holds(ratio.value) for ratio in ratios)
    note = f"holds under {holding} of {len(ratios)} loads; the worst is {worst.load}"
    return _measured(bar, bound, worst).model_copy(update={"note": note})


def _over_the_better(results: Results) -> Iterator[Ratio]:
    """TPOT of each load over the better of pull and stock push: the larger of two ratios."""
    for load in results.loads:
        found = [
            ratio
            for other in (_STOCK, "pull")
            if (ratio := analysis.ratio_of(results, load, TPOT, other)) is not None
        ]
        if found:
            yield max(found, key=lambda ratio: ratio.value)


def _early(results: Results) -> Bar:
    bar = Bar(
        what="share of KV bytes written before prefill's end",
        load=_EARLY_LOAD,
        other="",
        bound=str(_EARLY),
    )
    moved = [one.moved for one in results.of(OURS, _EARLY_LOAD) if one.moved is not None]
    total = sum(each.bytes_moved for each in moved)
    if not total:
        return _not_measured(results, bar)
    share = sum(each.bytes_during_prefill for each in moved) / total
    return bar.model_copy(update={"figure": share, "is_met": _EARLY.holds(share)})


def _at_rest(results: Results, what: str, bound: _Bound, *, is_waiting: bool) -> Bar:
    cores = analysis.pair_cores(results, is_waiting=is_waiting)
    load = "one slow transfer" if is_waiting else "none"
    if not cores:
        reason = results.left_out[0].reason if is_waiting and results.left_out else "not measured"
        return Bar(what=what, load=load, other="", bound=str(bound), note=reason)
    mean = float(np.mean(cores))
    return Bar(
        what=what, load=load, other="", bound=str(bound), figure=mean, is_met=bound.holds(mean)
    )


def _answers(results: Results) -> Bar:
    what = "answers that are not one engine's"
    if not results.is_complete:
        return Bar(what=what, load="all", other="", bound="none", note="not compared")
    wrong = sum(each.subject == OURS and not each.is_tie for each in results.differences)
    compared = results.compared_answers_of((OURS,))
    return Bar(
        what=what,
        load="all",
        other="",
        bound="none",
        figure=wrong,
        is_met=not wrong and compared > 0,
        note=f"{compared} compared",
    )
