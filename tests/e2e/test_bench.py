"""The smallest benchmarks there are, on real engines. Nobody here judges what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlaunch.bench import link
from pdlaunch.bench.results import Results
from serving import TINY, pdlaunch


@pytest.mark.slow
def test_one_round_of_short_requests(tmp_path: Path) -> None:
    data, page = tmp_path / "bench.json", tmp_path / "bench.html"
    pdlaunch(
        tmp_path / "state",
        *("bench", TINY, "--quick", "--workload", "short", "--rounds", "1"),
        *("--json", str(data), "--html", str(page)),
    )
    found = Results.model_validate_json(data.read_text("utf-8"))
    assert [one.subject for one in found.measurements] == [
        *("floor", "one-engine", "pull", "push-upstream", "push")
    ]
    assert found.failed_requests == 0
    assert found.compared_answers == 3 * len(found.measurements[0].requests)
    for one in found.measurements:
        tokens = 1 if one.subject == "floor" else 16
        assert {request.answer_tokens for request in one.requests} == {tokens}
        if one.subject in found.modes:
            assert one.prefill is not None and one.decode is not None and one.moved is not None
            assert one.prefill.count == one.decode.count == len(one.requests)
            assert one.moved.transfers >= len(one.requests) and one.moved.bytes_moved > 0
    assert page.read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_a_pair_over_a_slow_link(tmp_path: Path) -> None:
    if (reason := link.refusal()) is not None:
        pytest.skip(reason)
    data = tmp_path / "bench.json"
    pdlaunch(
        tmp_path / "state",
        *("bench", TINY, "--workload", "slow-link", "--modes", "push", "--rounds", "1"),
        *("--json", str(data)),
    )
    found = Results.model_validate_json(data.read_text("utf-8"))
    assert found.failed_requests == 0 and found.is_identical and found.left_out == ()
    assert [one.subject for one in found.measurements] == ["floor", "one-engine", "push"]
    assert [each.is_waiting for each in found.idle if each.subject == "push"] == [False, True]
