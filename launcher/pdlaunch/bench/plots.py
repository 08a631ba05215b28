"""Draws a benchmark's figures as SVG. Reads and writes no files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pdlaunch.bench.analysis import Handover, Row, Spread
from pdlaunch.bench.results import Measured, Results
from pdlaunch.trace import Span, Timeline

# Colours that people with colour blindness tell apart, and shapes for printers.
_STYLE: dict[Measured, tuple[str, str]] = {
    "floor": ("#888888", "_"),
    "one-engine": ("#222222", "s"),
    "pull": ("#e69f00", "v"),
    "push-upstream": ("#56b4e9", "^"),
    "push": ("#009e73", "o"),
}
_PARTS: tuple[tuple[str, str, str], ...] = (
    ("prefill_queue_s", "prefill queued", "#cccccc"),
    ("prefill_s", "prefill computed", "#999999"),
    ("prefill_rest_s", "prefill's rest", "#666666"),
    ("handover_s", "handover", "#d55e00"),
)
_SIDES = {"client": "#cc79a7", "prefill": "#009e73", "decode": "#0072b2"}
_PANEL_INCHES = (4.2, 3.2)
_ACROSS = 4
_BAR_INCHES = 0.24
_PANEL_MARGIN_INCHES = 0.55
_ASIDE = 1.04
_AROUND = 1.5


def over_concurrency(
    results: Results, rows: Sequence[Row], what: str, of_row: Callable[[Row], Spread | None]
) -> str | None:
    """Medians over the number at a time, up to p90, a panel a workload; None without any."""
    loads = [load for load in results.loads.values() if load.at_once]
    workloads = list(dict.fromkeys(load.workload for load in loads))
    if not workloads:
        return None
    across = min(_ACROSS, len(workloads))
    down = -(-len(workloads) // across)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel in panels[len(workloads) :]:
        panel.remove()
    panels = panels[: len(workloads)]
    for panel, workload in zip(panels, workloads, strict=True):
        at_once = {
            load.name: load.at_once for load in loads if load.workload == workload and load.at_once
        }
        _lines(panel, [row for row in rows if row.load in at_once], at_once, of_row)
        panel.set_title(workload)
        panel.set_xlabel("requests at a time")
        panel.set_xscale("log", base=2)
        ticks = sorted(at_once.values())
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlim(ticks[0] / _AROUND, ticks[-1] * _AROUND)
        panel.set_ylim(bottom=0)
    for panel in panels[::across]:
        panel.set_ylabel(f"{what}, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return _svg(figure, what)


def alone(svg: str) -> str:
    """A plot as a file of its own, readable on dark pages too."""
    at = svg.index(">") + 1
    return f'{svg[:at]}<rect width="100%" height="100%" fill="#ffffff"/>{svg[at:]}'


def handovers(rows: Sequence[Row]) -> str | None:
    """The mean time to the first token, part by part, a panel a load; None without a pair."""
    loads = list(dict.fromkeys(row.load for row in rows if row.handover))
    if not loads:
        return None
    bars = [[row for row in rows if row.load == load and row.handover] for load in loads]
    heights = [_PANEL_MARGIN_INCHES + _BAR_INCHES * len(each) for each in bars]
    figure = Figure(figsize=(9.0, sum(heights) + _PANEL_MARGIN_INCHES), layout="constrained")
    panels = figure.subplots(len(loads), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, load, each in zip(panels, loads, bars, strict=True):
        _stack(panel, each)
        panel.set_title(load, loc="left", fontsize="medium")
    panels[-1].set_xlabel("ms")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(_PARTS)
    )
    return _svg(figure, "handover")


def timeline(line: Timeline) -> str:
    """What each side did and when, a row each; below it what followed the prefill, enlarged."""
    parts = [part for part in (line.spans, line.handover) if part]
    heights = [_PANEL_MARGIN_INCHES + _BAR_INCHES * len(part) for part in parts]
    figure = Figure(figsize=(11.0, sum(heights) + _PANEL_MARGIN_INCHES), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, part in zip(panels, parts, strict=True):
        _rows(panel, part, line.begin_ns)
    if line.handover:
        panels[-1].set_title("after prefill", loc="left", fontsize="medium")
    panels[-1].set_xlabel("ms since the client sent it")
    sides = [Patch(color=colour, label=side) for side, colour in _SIDES.items()]
    figure.legend(handles=sides, loc="outside upper center", ncols=len(sides))
    return _svg(figure, "timeline")


def _rows(panel: Axes, spans: Sequence[Span], since_ns: int) -> None:
    places = range(len(spans))
    starts = [(span.begin_ns - since_ns) / 1e6 for span in spans]
    bars = panel.barh(
        places,
        [span.took_ms for span in spans],
        left=starts,
        color=[_SIDES[span.side] for span in spans],
    )
    panel.bar_label(bars, [f"{span.took_ms:.1f}" for span in spans], padding=2, fontsize="small")
    panel.set_yticks(places, [span.what for span in spans], fontsize="small")
    panel.margins(x=0.06)
    panel.invert_yaxis()


def _stack(panel: Axes, rows: Sequence[Row]) -> None:
    names = [row.subject for row in rows]
    left = [0.0] * len(rows)
    for attribute, label, colour in _PARTS:
        widths = [_part_ms(row.handover, attribute) for row in rows]
        panel.barh(names, widths, left=left, label=label, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    panel.invert_yaxis()


def _lines(
    panel: Axes,
    rows: Sequence[Row],
    at_once: dict[str, int],
    of_row: Callable[[Row], Spread | None],
) -> None:
    for place, (subject, (colour, marker)) in enumerate(_STYLE.items()):
        points = [
            (at_once[row.load], spread)
            for row in rows
            if row.subject == subject and (spread := of_row(row)) is not None
        ]
        if not points:
            continue
        p50 = [1e3 * spread.p50 for _, spread in points]
        up = [1e3 * spread.p90 - low for (_, spread), low in zip(points, p50, strict=True)]
        panel.errorbar(
            # Beside each other, or one would hide another.
            [x * _ASIDE ** (place - len(_STYLE) // 2) for x, _ in points],
            p50,
            yerr=[[0.0] * len(up), up],
            color=colour,
            marker=marker,
            capsize=2,
            linewidth=1.3,
            elinewidth=0.7,
            label=subject,
        )


def _part_ms(parts: Handover | None, attribute: str) -> float:
    # A part below nothing is noise of the means, and no bar.
    return max(0.0, 1e3 * float(getattr(parts, attribute, 0.0)))


def _svg(figure: Figure, name: str) -> str:
    """The figure as an element of a page: text stays text, ids differ from other figures'."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
