"""What `pdlaunch status` says of engines that do not say much themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlaunch.cli.showing import failure_lines, transport_lines
from pdlaunch.engine_metrics import Failures
from pdlaunch.status import ProcessStatus
from pdlaunch.transport import Transport

NOTHING = Failures({}, 0, 0, {})


def process(name: str, failures: Failures | None) -> ProcessStatus:
    role = "router" if name == "router" else "engine"
    return ProcessStatus(name, role, "http://host", 1, 0, True, 0.0, 0, 0, failures)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Failures({"aborted": 1}, 0, 0, {}), "1 failed transfer (aborted 1)"),
        (Failures({"a": 1, "c": 2, "b": 2}, 0, 0, {}), "5 failed transfers (b 2, c 2, a 1)"),
        (Failures({}, 3, 0, {}), "3 lost to a silent or dead peer"),
        (Failures({}, 0, 1, {}), "1 given up while prefill was silent"),
        (Failures({}, 0, 0, {"stray": 2}), "2 dropped messages (stray 2)"),
        (None, "not known, it does not answer"),
    ],
)
def test_each_engine_has_a_line_of_its_own(found: Failures | None, told: str) -> None:
    processes = [process("p", NOTHING), process("d", found), process("router", None)]
    assert failure_lines(processes) == ["failures since start:", f"  d: {told}"]


def test_nothing_that_failed_is_said_in_short() -> None:
    processes = [process("p", NOTHING), process("d", NOTHING), process("router", None)]
    assert failure_lines(processes) == ["no failed transfers"]


def test_each_engine_tells_its_backend_and_what_it_moved() -> None:
    told = Transport(("LIBFABRIC",), ("efa",))
    prefill = replace(process("p", NOTHING), transport=told, nixl_bytes=3 * 2**20)
    decode = replace(process("d", NOTHING), transport=told)
    assert transport_lines([prefill, decode, process("router", None)])[1:] == [
        "  p: LIBFABRIC (efa), 3.00 MiB moved",
        "  d: LIBFABRIC (efa)",
    ]


def test_a_backend_that_nobody_here_has_heard_of_is_not_known() -> None:
    elsewhere, silent = process("p", NOTHING), replace(process("d", NOTHING), transport=Transport())
    assert transport_lines([elsewhere, silent])[1:] == ["  p: not known", "  d: not known"]
