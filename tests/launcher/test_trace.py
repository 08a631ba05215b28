"""Traces: both engines' stamps of a transfer become one timeline, whatever is missing or torn."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdlaunch import series, trace
from pdlaunch.errors import PdError
from pdlaunch.trace import ClientTimes, Span, Stamp, Timeline

STREAMING = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/streaming"
MS = 1_000_000
CLIENT = ClientTimes(0, 100 * MS, 120 * MS)
# (ms, side, event, more): a prompt of 96 tokens in two chunks and two WRITEs.
LIFE: tuple[tuple[int, str, str, dict[str, Any]], ...] = (
    (5, "prefill", "arrived", {"transfer": "t", "request": "p"}),
    (6, "decode", "arrived", {"transfer": "t", "request": "d"}),
    (7, "prefill", "scheduled", {"request": "p", "tokens": 64}),
    (8, "decode", "allocated", {"transfer": "t", "request": "d", "registration": "d~1"}),
    (10, "decode", "registered", {"transfer": "t", "registration": "d~1"}),
    (12, "prefill", "registration_received", {"transfer": "t", "registration": "d~1"}),
    (30, "prefill", "forward_left", {"request": "p", "tokens": 64}),
    (31, "prefill", "write_begun", {"request": "p", "tokens": 64, "write": 0}),
    (33, "prefill", "scheduled", {"request": "p", "tokens": 96}),
    (34, "prefill", "write_done", {"request": "p", "write": 0, "bytes": 2**20}),
    (50, "prefill", "forward_left", {"request": "p", "tokens": 96}),
    (52, "prefill", "write_begun", {"request": "p", "first_token": 64, "tokens": 32, "write": 1}),
    (55, "decode", "kv_complete", {"registration": "d~1"}),
    (56, "prefill", "write_done", {"request": "p", "write": 1, "bytes": 2**19}),
    (57, "prefill", "transfer_done", {"registration": "d~1"}),
    (58, "prefill", "finished", {"request": "p"}),
    (59, "decode", "kv_collected", {"request": "d"}),
    (61, "decode", "kv_noticed", {"request": "d"}),
    (62, "decode", "scheduled", {"request": "d"}),
    (90, "decode", "token", {"request": "d"}),
)


def about(side: str, pid: int = 1) -> str:
    whose = {"trace": 1, "side": side, "process": "worker", "engine": side, "pid": pid}
    return json.dumps(whose, separators=(",", ":")) + "\n"


def written(folder: Path, life: tuple[tuple[int, str, str, dict[str, Any]], ...] = LIFE) -> Path:
    """Files as engines write them, with another request's stamps among them."""
    for side in ("prefill", "decode"):
        lines = [about(side)]
        for ms, whose, event, more in life:
            if whose == side:
                lines.append(json.dumps({"ns": ms * MS, "event": event, **more}) + "\n")
                other = {key: "x" for key in more if key in ("transfer", "request", "registration")}
                lines.append(json.dumps({"ns": ms * MS, "event": event, **more, **other}) + "\n")
        (folder / f"{side}-1.jsonl").write_text("".join(lines))
    return folder


def stamps(life: tuple[tuple[int, str, str, dict[str, Any]], ...] = LIFE) -> list[Stamp]:
    return [
        Stamp(ns=ms * MS, event=event, side=side, process="worker", **more)
        for ms, side, event, more in life
    ]


def whole() -> Timeline:
    made = trace.timeline(stamps(), CLIENT)
    assert made is not None
    return made


def in_ms(spans: tuple[Span, ...]) -> list[tuple[str, str, float, float]]:
    return [(each.side, each.what, each.begin_ns / MS, each.end_ns / MS) for each in spans]


def test_stamps_of_one_transfer_are_found_under_all_its_names(tmp_path: Path) -> None:
    assert trace.read(written(tmp_path), "t") == stamps()
    assert trace.read(tmp_path, "nobody") == []
    assert trace.read(tmp_path / "missing", "t") == []


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = written(tmp_path) / "decode-1.jsonl"
    path.write_text(path.read_text()[:-60])
    (tmp_path / "just-begun-1.jsonl").touch()
    (tmp_path / "torn-1.jsonl").write_text(about("decode")[:20])
    assert trace.read(tmp_path, "t") == stamps()[:-1] or trace.read(tmp_path, "t") == stamps()


def test_a_process_with_the_number_of_an_older_one_goes_on_in_its_file(tmp_path: Path) -> None:
    path = written(tmp_path) / "decode-1.jsonl"
    path.write_text(about("decode") + path.read_text())
    assert trace.read(tmp_path, "t") == stamps()


@pytest.mark.parametrize("content", ["no trace\n", '{"trace": 2}\n'])
def test_what_is_no_trace_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(PdError, match="no trace that pdlaunch can read") as error:
        trace.read(tmp_path, "t")
    assert error.value.where == str(path)


def test_waiting_ends_when_both_engines_have_written_the_end(tmp_path: Path) -> None:
    assert trace.wait_for(written(tmp_path), "t", within_s=60) == stamps()
    (tmp_path / "decode-1.jsonl").unlink()
    assert len(trace.wait_for(tmp_path, "t", within_s=0)) == 12


def test_each_side_shows_what_it_did_and_when() -> None:
    assert in_ms(whole().spans) == [
        ("client", "waits for the first token", 0, 100),
        ("client", "waits for the second", 100, 120),
        ("prefill", "on its way to the engine", 0, 5),
        ("prefill", "queued", 5, 7),
        ("prefill", "computes tokens 0 to 64", 7, 30),
        ("prefill", "computes tokens 64 to 96", 33, 50),
        ("prefill", "WRITEs tokens 0 to 64, 1.0 MiB", 31, 34),
        ("prefill", "WRITEs tokens 64 to 96, 0.5 MiB", 52, 56),
        ("prefill", "samples, ends its leg", 50, 58),
        ("decode", "on its way to the engine", 0, 6),
        ("decode", "queued for blocks", 6, 8),
        ("decode", "registers them with prefill", 8, 12),
        ("decode", "waits for KV", 12, 55),
        *in_ms(whole().handover)[2:],
    ]


def test_the_handover_has_no_gap_from_prefills_end_to_the_clients_token() -> None:
    assert in_ms(whole().handover) == [
        ("prefill", "until the last WRITE begins", 50, 52),
        ("prefill", "the last WRITE, until decode knows", 52, 55),
        ("decode", "the worker's step takes note", 55, 59),
        ("decode", "the scheduler takes note", 59, 61),
        ("decode", "waits for a step", 61, 62),
        ("decode", "computes a token", 62, 90),
        ("decode", "the token gets to the client", 90, 100),
    ]


def test_a_token_of_prefill_is_what_the_client_waits_for() -> None:
    """Clients get it before the KV is there; decode's own is the second."""
    forwarded = (
        (59, "prefill", "token_sent", {"registration": "d~1"}),
        (60, "decode", "token_received", {"registration": "d~1"}),
        (60, "decode", "token_given", {"request": "d"}),
    )
    made = trace.timeline(stamps((*LIFE, *forwarded)), ClientTimes(0, 65 * MS, 95 * MS))
    assert made is not None
    assert in_ms(made.handover) == [
        ("prefill", "samples, ends its leg", 50, 58),
        ("prefill", "sends the token", 58, 59),
        ("decode", "the worker hears it", 59, 60),
        ("decode", "the scheduler takes it", 60, 60),
        ("decode", "the token gets to the client", 60, 65),
    ]
    assert in_ms(made.spans)[-2:] == [
        ("decode", "computes a token", 62, 90),
        ("decode", "the token gets to the client", 90, 95),
    ]


@given(st.sets(st.integers(0, len(LIFE) - 1)), st.booleans())
def test_what_is_missing_leaves_no_gap_and_no_error(kept: set[int], has_client: bool) -> None:
    some = stamps(tuple(each for at, each in enumerate(LIFE) if at in kept))
    made = trace.timeline(some, CLIENT if has_client else None)
    if made is None:
        return
    assert all(span.end_ns >= span.begin_ns for span in (*made.spans, *made.handover))
    pairs = zip(made.handover, made.handover[1:], strict=False)
    assert all(before.end_ns == after.begin_ns for before, after in pairs)
    draw(made)


@given(st.lists(st.integers(0, 200), min_size=len(LIFE), max_size=len(LIFE)))
def test_clocks_that_disagree_make_no_span_that_ends_before_it_begins(times: list[int]) -> None:
    shifted = tuple((ms, *each[1:]) for ms, each in zip(times, LIFE, strict=True))
    made = trace.timeline(sorted(stamps(shifted), key=lambda each: each.ns), CLIENT)
    assert made is not None
    assert all(span.end_ns >= span.begin_ns for span in (*made.spans, *made.handover))
    draw(made)


def test_the_ranks_of_an_engine_count_together() -> None:
    second = [
        each.model_copy(update={"process": "worker 2", "ns": each.ns + MS})
        for each in stamps()
        if each.event in ("write_begun", "write_done", "forward_left", "kv_complete")
    ]
    both = sorted([*stamps(), *second], key=lambda each: each.ns)
    made = trace.timeline(both, CLIENT)
    assert made is not None
    by_what = {what: (begin, end) for _, what, begin, end in in_ms(made.spans)}
    assert by_what["WRITEs tokens 0 to 64, 2.0 MiB"] == (31, 35)
    assert by_what["waits for KV"] == (12, 56)
    assert by_what["computes tokens 64 to 96"] == (33, 51)


def test_many_chunks_are_drawn_as_few_rows() -> None:
    many = [
        Stamp(ns=(at + 1) * MS, event=event, side="prefill", tokens=at // 2 + 1)
        for at, event in enumerate(["scheduled", "forward_left"] * 50)
    ]
    made = trace.timeline(many, None)
    assert made is not None
    whats = [span.what for span in made.spans]
    assert len(whats) == 9 and whats[4] == "42 more chunks"
    assert whats[-1] == "computes tokens 49 to 50"


def draw(line: Timeline, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=200, **options)
    console.print(trace.for_terminal(line))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_pipe_gets_plain_lines_and_a_terminal_colour() -> None:
    plain, coloured = draw(whole()), draw(whole(), force_terminal=True)
    assert "\x1b" not in plain and "\x1b[34m" in coloured
    lines = [line for line in plain.splitlines() if "computes a token" in line]
    assert [line.split()[-2:] for line in lines] == [["62.0", "28.0"]] * 2
    # A bar begins and ends where its time does.
    (waits,) = (line for line in plain.splitlines() if "waits for KV" in line)
    (asks,) = (line for line in plain.splitlines() if "waits for the first" in line)
    assert asks.index("█") < waits.index("█") and waits.rindex("█") < asks.rindex("█")


def test_only_files_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    mine, others = tmp_path / f"decode-{os.getpid()}.jsonl", tmp_path / f"decode-{gone.pid}.jsonl"
    kept = tmp_path / "notes.txt"
    for path in (mine, others, kept):
        path.touch()
    trace.clear(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, kept])
    trace.clear(tmp_path / "missing")


def test_engines_stamp_every_event_that_is_read() -> None:
    """An event that one of the two spells otherwise would silently be missing."""
    read = set(re.findall(r'"(?:prefill|decode)", "(\w+)"', Path(trace.__file__).read_text()))
    assert len(read) > 12
    shipped = "".join(
        line.value
        for patch in series.load().patches
        for file in patch.diff
        if file.path.startswith(STREAMING)
        for hunk in file
        for line in hunk
        if line.is_added
    )
    for event in read:
        assert f'"{event}"' in shipped, event
    assert f'"{trace.SETTING}", ""' in shipped
