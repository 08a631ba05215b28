"""The report of a real run, recorded: complete, one file, and what it says when answers differ."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdlaunch.bench import bars, report, tables
from pdlaunch.bench.results import Difference, Results
from pdlaunch.errors import PdError
from pdlaunch.trace import Span, Timeline

RECORDED = Path(__file__).with_name("bench_results.json")


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())


@pytest.fixture(scope="module")
def recorded() -> Results:
    found = Results.model_validate_json(RECORDED.read_text("utf-8"))
    return found.model_copy(update={"bars": bars.of(found)})


@pytest.fixture(scope="module")
def text(recorded: Results) -> str:
    return report.html(recorded)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_figures_survive_json(recorded: Results) -> None:
    assert Results.model_validate_json(recorded.model_dump_json()) == recorded
    assert recorded.failed_requests == 0 and recorded.is_identical


def test_the_page_needs_nothing_from_anywhere(page: Page, text: str) -> None:
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(page.tags)
    loaded = [
        value
        for name, value in page.attributes
        if name in ("src", "href", "xlink:href", "srcset", "data") and not value.startswith("#")
    ]
    assert loaded == []
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_the_page_shows_every_plot(page: Page) -> None:
    assert page.tags.count("svg") == 3
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert labels == [
        "Time to first token over the number of requests at a time",
        "End to end over the number of requests at a time",
        "Parts of the mean time to the first token",
    ]
    for subject in ("floor", "one-engine", "pull", "push-upstream", "push"):
        assert subject in page.words


def test_plots_do_not_take_each_others_parts(text: str, page: Page) -> None:
    ids = Counter(value for name, value in page.attributes if name == "id")
    wanted = set(re.findall(r"url\(#([^)]+)\)", text))
    wanted |= {value[1:] for name, value in page.attributes if name == "xlink:href"}
    assert wanted and all(ids[each] == 1 for each in wanted)


def test_every_figure_of_the_terminal_is_on_the_page(recorded: Results, page: Page) -> None:
    sheets = tables.of_results(recorded)
    assert len(sheets) == 7
    words = set(page.words)
    for sheet in sheets:
        assert sheet.title in words
        assert {*sheet.columns, *(cell for row in sheet.rows for cell in row)} <= words
        assert all(len(row) == len(sheet.columns) for row in sheet.rows)


def test_the_plot_for_other_pages_is_a_file_of_its_own(recorded: Results) -> None:
    svg = report.svg(recorded)
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Time to first token, ms", "short", "long", "push", "pull", "push-upstream"} <= texts
    # A page may be dark.
    assert next(iter(root)).attrib["fill"] == "#ffffff"
    assert report.svg(recorded) == svg
    with pytest.raises(PdError, match="nothing to draw"):
        report.svg(recorded.model_copy(update={"loads": {}}))


def test_tables_for_other_pages_have_every_cell(recorded: Results) -> None:
    text = report.markdown(recorded)
    lines = text.splitlines()
    for sheet in tables.of_results(recorded):
        if sheet.title not in lines:
            continue
        at = lines.index(sheet.title) + 2
        assert lines[at] == "| " + " | ".join(sheet.columns) + " |"
        for number, row in enumerate(sheet.rows):
            assert lines[at + 2 + number] == "| " + " | ".join(row) + " |"


def test_the_report_is_the_same_every_time(recorded: Results, text: str) -> None:
    assert report.html(recorded) == text


def test_wrong_answers_come_first_and_cannot_break_the_page(recorded: Results) -> None:
    wrong = Difference(
        subject="push",
        load="short x1",
        round=0,
        request=3,
        answer="</pre><script>alert(1)</script>",
        expected="fine",
        gap_logprob=2.0,
    )
    page = Page(report.html(recorded.model_copy(update={"differences": (wrong,)})))
    assert "script" not in page.tags
    said = " ".join(page.words)
    assert "1 answers of P/D are not those of one engine" in said
    assert said.index("request 3") < said.index("Time to first token")


def test_modes_that_were_not_measured_leave_no_holes(recorded: Results) -> None:
    only_pull = recorded.model_copy(
        update={
            "modes": ("pull",),
            "measurements": tuple(
                one for one in recorded.measurements if not one.subject.startswith("push")
            ),
        }
    )
    page = Page(report.html(only_pull))
    assert page.tags.count("svg") == 3
    assert not [word for word in page.words if "push over the others" in word]


def test_the_timeline_of_a_request_is_drawn_where_one_was_traced(
    recorded: Results, text: str
) -> None:
    title = "One request of push, on both engines"
    assert title not in text
    spans = (
        Span(side="prefill", what="computes tokens 0 to 64", begin_ns=0, end_ns=40_000_000),
        Span(side="decode", what="waits for KV", begin_ns=1_000_000, end_ns=45_500_000),
    )
    line = Timeline(spans=spans, handover=(spans[1],))
    traced = Results.model_validate_json(
        recorded.model_copy(update={"timeline": line}).model_dump_json()
    )
    assert traced.timeline == line
    words = Page(report.html(traced)).words
    assert title in words and "computes tokens 0 to 64" in words and "after prefill" in words
    assert words.count("waits for KV") == 2 and "44.5" in words
