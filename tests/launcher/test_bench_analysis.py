"""What a benchmark makes of its figures: percentiles, ratios, handover, goodput; and of answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlaunch.bench import analysis
from pdlaunch.bench.analysis import Statistic
from pdlaunch.bench.answers import differences, gap_where_parted
from pdlaunch.bench.results import (
    TIE_LOGPROB,
    Difference,
    Legs,
    Measured,
    Measurement,
    Moved,
    Request,
    Results,
)
from pdlaunch.bench.workload import Load

seconds = st.floats(0.001, 100)
some = st.lists(seconds, min_size=1, max_size=30)
rounds_of = st.lists(some, min_size=1, max_size=4)
LOAD = "short x1"
STATISTICS: tuple[Statistic, ...] = ("median", "mean")


def request(
    ttft_s: float = 1.0, tpot_s: float = 0.1, tokens: int = 3, text: str = "abc"
) -> Request:
    gaps = (tpot_s,) * (tokens - 1)
    return Request(
        ttft_s=ttft_s,
        latency_s=ttft_s + sum(gaps),
        itl_s=gaps,
        answer_tokens=tokens,
        text=text,
        error="",
    )


FAILED = Request(
    ttft_s=0, latency_s=0, itl_s=(), answer_tokens=0, text="", error="Internal Server Error"
)


def measured(
    subject: Measured,
    requests: Sequence[Request],
    *,
    number: int = 0,
    took_s: float = 10.0,
    prefill_e2e_s: float | None = None,
    moved: Moved | None = None,
) -> Measurement:
    legs = None
    if prefill_e2e_s is not None:
        legs = Legs(
            count=len(requests), e2e_s=prefill_e2e_s, queue_s=0.0, prefill_s=0.1, ttft_s=0.2
        )
    return Measurement(
        subject=subject,
        load=LOAD,
        round=number,
        took_s=took_s,
        requests=tuple(requests),
        cpu_s={"prefill": 4.0, "decode": 2.0},
        prefill=legs,
        decode=legs,
        moved=moved,
    )


def results(*measurements: Measurement) -> Results:
    return Results(
        pdlaunch_version="1",
        engine_version="2",
        recipe="r",
        settings=(),
        model="m",
        machine="1 x any",
        cores={},
        started_unix_s=0,
        took_s=1,
        rounds=1,
        modes=("pull", "push"),
        loads={LOAD: Load("short", 200, 3, 2, at_once=1)},
        measurements=measurements,
        idle=(),
        is_complete=True,
        differences=(),
    )


@settings(deadline=None)
@given(some)
def test_percentiles_lie_among_the_values_and_in_order(values: list[float]) -> None:
    found = analysis.spread(values)
    assert found is not None and found.count == len(values)
    nearly = 1e-9 * max(values)
    assert min(values) - nearly <= found.p50 <= found.p90 <= found.p99 <= max(values) + nearly


def test_nothing_has_no_percentiles() -> None:
    assert analysis.spread(()) is None


@settings(deadline=None)
@given(rounds_of)
def test_the_ratio_of_values_to_themselves_is_one(rounds: list[list[float]]) -> None:
    for of in STATISTICS:
        found = analysis.ratio(rounds, rounds, of=of)
        assert found is not None
        value, low, high = found
        assert value == pytest.approx(1) and low <= 1 + 1e-9 and high >= 1 - 1e-9


@settings(deadline=None)
@given(rounds_of, st.floats(0.1, 10))
def test_a_ratio_scales_with_its_values_and_so_does_its_interval(
    rounds: list[list[float]], factor: float
) -> None:
    scaled = [[factor * value for value in each] for each in rounds]
    for of in STATISTICS:
        plain = analysis.ratio(rounds, rounds, of=of)
        found = analysis.ratio(scaled, rounds, of=of)
        assert plain is not None and found is not None
        assert found == pytest.approx([factor * each for each in plain])


@settings(deadline=None)
@given(st.lists(st.tuples(some, some), min_size=1, max_size=4))
def test_an_interval_is_the_same_every_time(rounds: list[tuple[list[float], list[float]]]) -> None:
    mine, theirs = [a for a, _ in rounds], [b for _, b in rounds]
    assert analysis.ratio(mine, theirs, of="mean") == analysis.ratio(mine, theirs, of="mean")


def test_drift_that_hits_both_sides_does_not_widen_an_interval() -> None:
    # Every round is slower than the one before it, for both.
    mine = [[level * 1.0] * 9 for level in (1, 2, 4)]
    theirs = [[level * 2.0] * 9 for level in (1, 2, 4)]
    assert analysis.ratio(mine, theirs, of="mean") == pytest.approx((0.5, 0.5, 0.5))


def test_a_clear_difference_has_an_interval_without_one() -> None:
    mine = [[1.0, 1.1, 0.9, 1.05], [1.0, 0.95, 1.1, 1.0]]
    theirs = [[2.0, 2.1, 1.9, 2.0], [2.1, 1.95, 2.2, 2.0]]
    found = analysis.ratio(mine, theirs, of="median")
    assert found is not None
    value, low, high = found
    assert 0.4 < low < value < high < 0.6


def test_rounds_without_answers_on_one_side_count_for_neither() -> None:
    for of in STATISTICS:
        found = analysis.ratio([[1.0], []], [[2.0], [9.0]], of=of)
        assert found == pytest.approx((0.5, 0.5, 0.5))
        assert analysis.ratio([[]], [[1.0]], of=of) is None


def test_there_is_no_ratio_to_a_handover_of_nothing() -> None:
    assert analysis.ratio([[1.0]], [[0.0]], of="mean") is None
    assert analysis.ratio([[1.0]], [[-0.1]], of="mean") is None


def test_the_handover_is_ttft_less_what_prefill_reports() -> None:
    found = analysis.rows(
        results(
            measured("pull", [request(1.0), request(2.0)], prefill_e2e_s=0.9),
            measured("push", [request(1.0), request(2.0)], prefill_e2e_s=1.4),
        )
    )
    assert [row.handover and round(row.handover.handover_s, 6) for row in found] == [0.6, 0.1]
    ratios = analysis.ratios(
        results(
            measured("pull", [request(1.0), request(2.0)], prefill_e2e_s=0.9),
            measured("push", [request(1.0), request(2.0)], prefill_e2e_s=1.4),
        )
    )
    (handover,) = (each for each in ratios if each.what == "handover")
    assert handover.other == "pull" and handover.value == pytest.approx(1 / 6)


def test_failed_requests_are_counted_and_measured_nowhere() -> None:
    (row,) = analysis.rows(results(measured("push", [request(1.0), FAILED])))
    assert (row.requests, row.failed) == (2, 1)
    assert row.ttft is not None and row.ttft.count == 1
    assert row.requests_per_s == pytest.approx(0.1)
    assert row.cpu_s_per_request == pytest.approx(6.0)


def test_good_requests_are_near_the_floor_and_the_one_engine() -> None:
    found = analysis.rows(
        results(
            measured("floor", [request(0.5, tokens=1)] * 2),
            measured("one-engine", [request(0.5, tpot_s=0.1)] * 2),
            measured("push", [request(2.4), request(2.6), request(2.4, tpot_s=0.3)]),
        )
    )
    by_subject = {row.subject: row for row in found}
    assert by_subject["push"].goodput_per_s == pytest.approx(0.1)
    assert by_subject["push"].ttft_over_floor == pytest.approx(4.8)
    assert by_subject["floor"].goodput_per_s is None


def test_ttft_is_held_against_the_floors_beside_it() -> None:
    before, after, other = (
        measured("floor", [request(ttft_s, tokens=1)] * 3).model_copy(update={"beside": mode})
        for ttft_s, mode in ((0.9, "push"), (1.1, "push"), (3.0, "pull"))
    )
    found = results(
        measured("floor", [request(0.5, tokens=1)] * 3),
        measured("pull", [request(6.0)] * 3),
        measured("push", [request(1.2)] * 3),
        *(before, after, other),
    )
    over = {row.subject: row.ttft_over_floor for row in analysis.rows(found)}
    assert over["push"] == pytest.approx(1.2) and over["pull"] == pytest.approx(2.0)
    # The floor that is told is the one engine's.
    (floor,) = (row for row in analysis.rows(found) if row.subject == "floor")
    assert floor.ttft is not None and floor.ttft.p50 == pytest.approx(0.5)
    ratio = analysis.ratio_of(found, LOAD, "TTFT", "floor")
    assert ratio is not None and ratio.value == pytest.approx(1.2)


def test_a_request_has_a_second_token_only_if_it_has_two() -> None:
    assert request(1.0, tpot_s=0.1).second_token_s == pytest.approx(1.1)
    assert request(1.0, tpot_s=0.1).tpot_s == pytest.approx(0.1)
    assert request(1.0, tokens=1).second_token_s is None
    assert request(1.0, tokens=1).tpot_s is None


def test_one_round_says_nothing_of_how_throughput_varies() -> None:
    both = [measured("pull", [request()]), measured("push", [request()])]
    (ratio,) = (each for each in analysis.ratios(results(*both)) if each.what == "requests/s")
    assert ratio.interval is None and ratio.value == 1
    both += [measured("pull", [request()], number=1), measured("push", [request()], number=1)]
    (ratio,) = (each for each in analysis.ratios(results(*both)) if each.what == "requests/s")
    assert ratio.interval == (1, 1)


def test_the_share_before_prefill_end_is_of_all_bytes_of_all_rounds() -> None:
    def moved(total: float, early: float) -> Moved:
        return Moved(
            bytes_moved=total,
            bytes_during_prefill=early,
            transfers=2,
            transfers_failed=0,
            descriptors=10,
            post_s=0.004,
            transfer_s=0.02,
            after_prefill_s=None,
        )

    (row,) = analysis.rows(
        results(
            measured("push", [request()], moved=moved(100, 90)),
            measured("push", [request()], number=1, moved=moved(300, 230)),
        )
    )
    assert row.share_before_prefill_end == pytest.approx(0.8)
    assert row.descriptors_per_transfer == 5
    assert row.post_ms_per_transfer == pytest.approx(2)


def test_what_others_took_is_a_mean_over_the_time_that_was_measured() -> None:
    quiet = measured("pull", [request()], took_s=30.0)
    noisy = measured("push", [request()]).model_copy(update={"others_cpu_s": 4.0})
    found = results(quiet, noisy)
    assert analysis.others_cores(found) == pytest.approx(0.1)
    assert [row.others_cores for row in analysis.rows(found)] == pytest.approx([0.0, 0.4])
    assert analysis.others_cores(results()) == 0


def test_answers_are_held_to_those_of_the_same_round_and_prompt() -> None:
    alone = measured("one-engine", [request(text="abc"), request(text="xyz"), FAILED])
    same = measured("push", [request(text="abc"), request(text="xyz"), request(text="?")])
    other = measured("pull", [request(text="abc"), request(text="xyw"), FAILED])
    shorter = measured("pull", [request(text="abc", tokens=2), FAILED, FAILED])
    no_reference = measured("push", [request(text="!")], number=1)
    found = differences([same, other, shorter, no_reference], [alone])
    assert [(each.subject, each.request, each.answer, each.expected) for each in found] == [
        ("pull", 1, "xyw", "xyz"),
        ("pull", 0, "abc", "abc"),
    ]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5)), min_size=1, max_size=20),
    st.data(),
)
def test_the_gap_is_that_of_the_token_where_answers_part(
    steps: list[tuple[str, float]], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(steps) - 1))
    kept = "".join(piece for piece, _ in steps[:at])
    assert gap_where_parted(steps, kept + "z" + "abc") == steps[at][1]


def test_bytes_of_an_unfinished_character_share_its_gap() -> None:
    steps = [("a", 9.0), ("", 0.5), ("", 3.0), ("ä", 2.0), ("b", 1.0)]
    assert gap_where_parted(steps, "aö") == 0.5
    assert gap_where_parted(steps, "aäc") == 1.0


def test_only_a_gap_that_rounding_can_close_excuses() -> None:
    def is_tie(gap_logprob: float | None) -> bool:
        return Difference(
            subject="push",
            load=LOAD,
            round=0,
            request=0,
            answer="a",
            expected="b",
            gap_logprob=gap_logprob,
        ).is_tie

    assert is_tie(TIE_LOGPROB)
    assert not is_tie(TIE_LOGPROB * 1.01)
    assert not is_tie(None)
