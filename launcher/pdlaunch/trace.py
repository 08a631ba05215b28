"""Makes one timeline of what the engines of a deployment stamped for one transfer.

Reads trace files and removes old ones; starts nothing and prints nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table
from rich.text import Text

from pdlaunch.errors import PdError

SETTING: Final = "push_trace"
Side = Literal["client", "prefill", "decode"]

_ABOUT = b'{"trace":'
# A transfer whose engines have stamped these has nothing more to tell.
_ENDS = {
    ("prefill", "finished"),
    ("prefill", "transfer_done"),
    ("decode", "kv_collected"),
    ("decode", "token"),
}
_POLL_S = 0.1
_BAR_CELLS = 44
_COLOURS: dict[Side, str] = {"client": "magenta", "prefill": "green", "decode": "blue"}
# More rows than this of chunks, or of WRITEs, and those in the middle become one.
_ROWS_OF_A_KIND = 8


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True)


class About(_Data):
    """The first line of a file: which process stamped it."""

    trace: Literal[1]
    side: Literal["prefill", "decode", "both"]
    process: str
    engine: str
    pid: int


class Stamp(_Data):
    """One line: what happened, and when in nanoseconds of the system's clock."""

    ns: int
    event: str
    side: str = ""
    transfer: str = ""
    request: str = ""
    registration: str = ""
    process: str = ""
    tokens: int = 0
    # Of a WRITE.
    write: int = -1
    first_token: int = 0
    bytes: int = 0

    @property
    def names(self) -> set[str]:
        """Ids of the transfer, of either engine."""
        return {self.transfer, self.request, self.registration} - {""}


class Span(_Data):
    """Something that took time, on one side."""

    side: Side
    what: str
    begin_ns: int
    end_ns: int

    @property
    def took_ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


class Timeline(_Data):
    """One request on both engines, and at its client."""

    spans: tuple[Span, ...]
    # From the moment when prefill had computed the prompt to the client's first token, no gaps.
    handover: tuple[Span, ...]

    @property
    def begin_ns(self) -> int:
        return min(span.begin_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        return max(span.end_ns for span in self.spans)


@dataclass(frozen=True)
class ClientTimes:
    """What the client's clock said, in nanoseconds of the system's clock."""

    sent_ns: int
    first_token_ns: int | None = None
    second_token_ns: int | None = None


def clear(folder: Path) -> None:
    """Remove the files of processes that are gone."""
    for path in folder.glob("*.jsonl"):
        pid = path.stem.rpartition("-")[2]
        if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def read(folder: Path, transfer: str) -> list[Stamp]:
    """All stamps of a transfer in the order of their times; none where it is unknown.

    Raises:
        PdError: a file is no trace, or cannot be read.
    """
    files = [_parts(path) for path in sorted(folder.glob("*.jsonl"))]
    names = {transfer}
    for _, lines in files:
        for line in _with(lines, {transfer}):
            stamp = Stamp.model_validate_json(line)
            if stamp.transfer == transfer:
                names |= stamp.names
    found = []
    for about, lines in files:
        for line in _with(lines, names):
            stamp = Stamp.model_validate_json(line)
            if stamp.names & names:
                whose = {"side": stamp.side or about.side, "process": about.process}
                found.append(stamp.model_copy(update=whose))
    return sorted(found, key=lambda stamp: stamp.ns)


def wait_for(folder: Path, transfer: str, within_s: float) -> list[Stamp]:
    """The stamps of a transfer once both engines have written its end, or what there is by then."""
    deadline_s = time.monotonic() + within_s
    while True:
        stamps = read(folder, transfer)
        ends = {(stamp.side, stamp.event) for stamp in stamps}
        if ends >= _ENDS or time.monotonic() > deadline_s:
            return stamps
        time.sleep(_POLL_S)


def timeline(stamps: Sequence[Stamp], client: ClientTimes | None) -> Timeline | None:
    """What took time, side by side; None where nothing was stamped."""
    if not stamps:
        return None
    found = _Found(stamps)
    spans = [*_of_client(client), *_of_prefill(found, client), *_of_decode(found, client)]
    return Timeline(spans=tuple(spans), handover=tuple(_handover(found, client))) if spans else None


def for_terminal(line: Timeline) -> Table:
    """Bars over one axis of time, then the handover step by step."""
    table = Table.grid(padding=(0, 1))
    for justify in ("left", "left", "left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_row("", "", "", "at ms", "ms", style="dim")
    for span in line.spans:
        _add(table, span, line.begin_ns, line.end_ns)
    if line.handover:
        first, last = line.handover[0], line.handover[-1]
        total = Span(side="client", what="", begin_ns=first.begin_ns, end_ns=last.end_ns)
        table.add_row("after prefill", f"{total.took_ms:.1f} ms to the first token", style="bold")
        for span in line.handover:
            _add(table, span, total.begin_ns, total.end_ns, since_ns=line.begin_ns)
    return table


def _add(
    table: Table, span: Span, begin_ns: int, end_ns: int, *, since_ns: int | None = None
) -> None:
    scale = _BAR_CELLS / max(1, end_ns - begin_ns)
    start, end = (
        min(_BAR_CELLS, max(0, round((at_ns - begin_ns) * scale)))
        for at_ns in (span.begin_ns, span.end_ns)
    )
    # What takes next to no time can still be seen.
    start = min(start, _BAR_CELLS - 1)
    length = max(1, end - start)
    table.add_row(
        span.side,
        span.what,
        Text(" " * start + "█" * length, style=_COLOURS[span.side]),
        f"{(span.begin_ns - (begin_ns if since_ns is None else since_ns)) / 1e6:.1f}",
        f"{span.took_ms:.1f}",
    )


def _parts(path: Path) -> tuple[About, list[bytes]]:
    try:
        whole, _, _torn = path.read_bytes().rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        if not lines:
            # Its process has only just begun.
            return About(trace=1, side="both", process="", engine="", pid=0), []
        about = About.model_validate_json(lines[0])
    except (OSError, ValidationError) as error:
        raise PdError(
            "this is no trace that pdlaunch can read",
            where=str(path),
            next_step="remove the file, or move it out of the folder",
        ) from error
    return about, [line for line in lines[1:] if not line.startswith(_ABOUT)]


def _with(lines: Iterable[bytes], names: Iterable[str]) -> Iterator[bytes]:
    """The lines that have one of these as a value; files have many that do not."""
    needles = [json.dumps(name, ensure_ascii=False).encode() for name in names]
    return (line for line in lines if any(needle in line for needle in needles))


class _Found:
    """Stamps by side and event, ranks of one engine together."""

    def __init__(self, stamps: Sequence[Stamp]) -> None:
        self._stamps = stamps

    def all(self, side: Side, event: str) -> list[Stamp]:
        return [each for each in self._stamps if (each.side, each.event) == (side, event)]

    def first(self, side: Side, event: str) -> int | None:
        return next((each.ns for each in self.all(side, event)), None)

    def last(self, side: Side, event: str) -> int | None:
        return next((each.ns for each in reversed(self.all(side, event))), None)


def _spans(side: Side, *steps: tuple[str, int | None, int | None]) -> Iterator[Span]:
    """Of what has both ends; clocks of two hosts may put the second before the first."""
    for what, begin_ns, end_ns in steps:
        if begin_ns is not None and end_ns is not None:
            yield Span(side=side, what=what, begin_ns=begin_ns, end_ns=max(begin_ns, end_ns))


def _of_client(client: ClientTimes | None) -> Iterator[Span]:
    if client is not None:
        first_ns = client.first_token_ns
        yield from _spans(
            "client",
            ("waits for the first token", client.sent_ns, first_ns),
            ("waits for the second", first_ns, client.second_token_ns),
        )


def _of_prefill(found: _Found, client: ClientTimes | None) -> Iterator[Span]:
    sent_ns = client.sent_ns if client else found.first("prefill", "received")
    arrived_ns = found.first("prefill", "arrived")
    scheduled_ns = found.first("prefill", "scheduled")
    yield from _spans(
        "prefill",
        ("on its way to the engine", sent_ns, arrived_ns),
        ("queued", arrived_ns, scheduled_ns),
    )
    left = {each.tokens: each.ns for each in found.all("prefill", "forward_left")}
    chunks: list[Span] = []
    begin = 0
    for each in found.all("prefill", "scheduled"):
        what = f"computes tokens {begin} to {each.tokens}"
        chunks += _spans("prefill", (what, each.ns, left.get(each.tokens)))
        begin = each.tokens
    yield from _fewer(chunks, "chunks")
    yield from _fewer(list(_writes(found)), "WRITEs")
    computed_ns = found.last("prefill", "forward_left")
    yield from _spans(
        "prefill", ("samples, ends its leg", computed_ns, found.last("prefill", "finished"))
    )


def _writes(found: _Found) -> Iterator[Span]:
    """By position: each rank of prefill writes its part of the same tokens."""
    begun: dict[tuple[int, int], list[Stamp]] = {}
    for each in found.all("prefill", "write_begun"):
        begun.setdefault((each.first_token, each.tokens), []).append(each)
    done = found.all("prefill", "write_done")
    for (first, tokens), parts in sorted(begun.items()):
        ids = {(part.process, part.write) for part in parts}
        landed = [each for each in done if (each.process, each.write) in ids]
        size = f"{sum(each.bytes for each in landed) / 2**20:.1f} MiB"
        what = f"WRITEs tokens {first} to {first + tokens}, {size}"
        end_ns = max((each.ns for each in landed), default=None)
        yield from _spans("prefill", (what, parts[0].ns, end_ns))


def _fewer(spans: list[Span], kind: str) -> Iterator[Span]:
    """Spans, those in the middle as one where they are many."""
    half = _ROWS_OF_A_KIND // 2
    if len(spans) <= _ROWS_OF_A_KIND:
        yield from spans
        return
    middle = spans[half:-half]
    yield from spans[:half]
    yield Span(
        side=middle[0].side,
        what=f"{len(middle)} more {kind}",
        begin_ns=min(span.begin_ns for span in middle),
        end_ns=max(span.end_ns for span in middle),
    )
    yield from spans[-half:]


def _of_decode(found: _Found, client: ClientTimes | None) -> Iterator[Span]:
    sent_ns = client.sent_ns if client else found.first("decode", "received")
    arrived_ns = found.first("decode", "arrived")
    allocated_ns = found.first("decode", "allocated")
    registered_ns = found.last("prefill", "registration_received")
    complete_ns = found.last("decode", "kv_complete")
    yield from _spans(
        "decode",
        ("on its way to the engine", sent_ns, arrived_ns),
        ("queued for blocks", arrived_ns, allocated_ns),
        ("registers them with prefill", allocated_ns, registered_ns),
        ("waits for KV", registered_ns, complete_ns),
    )
    yield from _until_token(found, client)


def _until_token(found: _Found, client: ClientTimes | None) -> Iterator[Span]:
    """From the moment when all KV is there."""
    # Prefill's token may have been there before, so that this is another one.
    is_second = found.first("decode", "token_given") is not None
    at_client_ns = None
    if client is not None:
        at_client_ns = client.second_token_ns if is_second else client.first_token_ns
    yield from _chain(
        ("decode", "", found.last("decode", "kv_complete")),
        ("decode", "the worker's step takes note", found.last("decode", "kv_collected")),
        ("decode", "the scheduler takes note", found.last("decode", "kv_noticed")),
        ("decode", "waits for a step", found.first("decode", "scheduled")),
        ("decode", "computes a token", found.first("decode", "token")),
        ("decode", "the token gets to the client", at_client_ns),
    )


def _handover(found: _Found, client: ClientTimes | None) -> Iterator[Span]:
    computed_ns = found.last("prefill", "forward_left")
    complete_ns = found.last("decode", "kv_complete")
    given_ns = found.first("decode", "token_given")
    if computed_ns is None:
        return
    if given_ns is not None:
        yield from _chain(
            ("prefill", "", computed_ns),
            ("prefill", "samples, ends its leg", found.last("prefill", "finished")),
            ("prefill", "sends the token", found.first("prefill", "token_sent")),
            ("decode", "the worker hears it", found.first("decode", "token_received")),
            ("decode", "the scheduler takes it", given_ns),
            ("decode", "the token gets to the client", client.first_token_ns if client else None),
        )
    elif complete_ns is not None:
        yield from _chain(
            ("prefill", "", computed_ns),
            # Of a registration that came late, the prefill has long ended.
            ("prefill", "until the last WRITE begins", found.last("prefill", "write_begun")),
            ("prefill", "the last WRITE, until decode knows", complete_ns),
            *((step.side, step.what, step.end_ns) for step in _until_token(found, client)),
        )


def _chain(*moments: tuple[Side, str, int | None]) -> Iterator[Span]:
    """One step after the other; what was not stamped is part of the step after it."""
    begin_ns: int | None = None
    for side, what, at_ns in moments:
        if at_ns is None:
            continue
        # The clocks of two hosts may put an effect before its cause.
        end_ns = at_ns if begin_ns is None else max(begin_ns, at_ns)
        if begin_ns is not None:
            yield Span(side=side, what=what, begin_ns=begin_ns, end_ns=end_ns)
        begin_ns = end_ns
