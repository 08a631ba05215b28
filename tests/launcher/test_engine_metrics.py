"""What the engines' counters say about how KV moved."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from pdlaunch.engine_metrics import (
    Failures,
    KvMovement,
    Metrics,
    failures,
    kv_movement,
    scrape,
)
from test_planner import planned, recipe

PREFILL = """\
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 3
vllm:nixl_bytes_transferred_count{engine="0"} 3
vllm:nixl_bytes_transferred_sum{engine="0"} 300
# TYPE vllm:nixl_push_bytes counter
vllm:nixl_push_bytes_total{engine="0",phase="during_prefill"} 80
vllm:nixl_push_bytes_total{engine="1",phase="during_prefill"} 5
vllm:nixl_push_bytes_total{engine="0",phase="after_prefill"} 20
# TYPE vllm:nixl_push_registrations counter
vllm:nixl_push_registrations_total{side="before_prefill_end"} 2
vllm:nixl_push_registrations_total{side="after_prefill_end"} 1
"""
DECODE = """\
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{le="+Inf"} 1
vllm:nixl_bytes_transferred_count 1
vllm:nixl_bytes_transferred_sum 7
# TYPE vllm:nixl_push_transfers counter
vllm:nixl_push_transfers_total{role="receiver",outcome="completed",reason="none"} 3
vllm:nixl_push_transfers_total{role="receiver",outcome="failed",reason="aborted"} 1
vllm:nixl_push_transfers_total{role="receiver",outcome="failed",reason="peer_gone"} 0
# TYPE vllm:nixl_push_hangs counter
vllm:nixl_push_hangs_total 0
# TYPE vllm:nixl_push_dropped_messages counter
vllm:nixl_push_dropped_messages_total{engine="0",reason="stray"} 2
vllm:nixl_push_dropped_messages_total{engine="1",reason="stray"} 5
# TYPE vllm:nixl_num_failed_transfers counter
vllm:nixl_num_failed_transfers_total 9
"""


def movement(mode: str) -> KvMovement:
    return kv_movement(mode, [Metrics.parse(PREFILL)], [Metrics.parse(DECODE)])  # type: ignore[arg-type]


def test_push_counts_bytes_by_phase_and_completions_on_decode() -> None:
    moved = movement("push")
    assert (moved.bytes_moved, moved.bytes_during_prefill, moved.bytes_after_prefill) == (
        105,
        85,
        20,
    )
    assert (moved.transfers_completed, moved.transfers_failed) == (3, 1)
    assert moved.registrations_before_prefill_end == 2


def test_upstream_push_counts_what_prefill_wrote() -> None:
    assert (
        movement("push-upstream").bytes_moved,
        movement("push-upstream").transfers_completed,
    ) == (
        300,
        3,
    )


def test_pull_counts_what_decode_read() -> None:
    assert (movement("pull").bytes_moved, movement("pull").transfers_completed) == (7, 1)


def test_failures_are_counted_by_reason_over_all_of_an_engine() -> None:
    found = failures("push", Metrics.parse(DECODE))
    assert found == Failures({"aborted": 1}, 0, 0, {"stray": 7})
    assert found
    assert failures("pull", Metrics.parse(DECODE)) == Failures({"unknown": 9}, 0, 0, {"stray": 7})


def test_no_failures_are_not_the_same_as_no_answer() -> None:
    assert failures("push", Metrics()) is None
    nothing = failures("push", Metrics.parse(PREFILL))
    assert nothing == Failures({}, 0, 0, {})
    assert not nothing


def test_restarted_engine_does_not_count_backwards() -> None:
    nothing = kv_movement("push", [Metrics()], [Metrics()])
    assert nothing.since(movement("push")) == nothing


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(500), httpx.Response(200, text="{not metrics"), httpx.ConnectError("gone")],
)
def test_engine_that_does_not_answer_has_no_metrics(answer: httpx.Response | Exception) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask() -> Metrics:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await scrape(client, planned(recipe()).processes[0])

    assert asyncio.run(ask()).samples == ()
