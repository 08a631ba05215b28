"""What must hold of push: each bar from its own figure, and what a run without it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdlaunch.bench import bars
from pdlaunch.bench.results import (
    Bar,
    Difference,
    Idle,
    LeftOut,
    Legs,
    Measured,
    Measurement,
    Moved,
    Request,
    Results,
)
from pdlaunch.bench.workload import select

RECORDED = Path(__file__).with_name("bench_results.json")
LOADS = {load.name: load for load in select((), quick=False)}
SUBJECTS: tuple[Measured, ...] = ("floor", "one-engine", "pull", "push-upstream", "push")

# By subject: time to the first token, between tokens, in prefill, all in seconds.
Times = dict[Measured, tuple[float, float, float]]
EQUAL: Times = dict.fromkeys(SUBJECTS, (1.0, 0.1, 0.5))


def measured(
    subject: Measured,
    load: str,
    times: Times,
    *,
    took_s: float = 10.0,
    running_tpot_s: float | None = 0.1,
    descriptors: float = 10.0,
    early: float = 0.5,
) -> Measurement:
    ttft_s, tpot_s, prefill_s = times[subject]
    request = Request(
        ttft_s=ttft_s,
        latency_s=ttft_s + 2 * tpot_s,
        itl_s=(tpot_s, tpot_s),
        answer_tokens=3,
        text="abc",
        error="",
    )
    legs = Legs(count=2, e2e_s=prefill_s, queue_s=0, prefill_s=prefill_s, ttft_s=prefill_s)
    moved = Moved(
        bytes_moved=100,
        bytes_during_prefill=100 * early,
        transfers=2,
        transfers_failed=0,
        descriptors=2 * descriptors,
        post_s=0,
        transfer_s=0,
        after_prefill_s=None,
    )
    is_pair = subject not in ("floor", "one-engine")
    return Measurement(
        subject=subject,
        load=load,
        round=0,
        took_s=took_s,
        requests=(request,) * 2,
        cpu_s={},
        prefill=legs if is_pair else None,
        decode=legs if is_pair else None,
        moved=moved if is_pair else None,
        running_tpot_s=running_tpot_s,
    )


def results(*measurements: Measurement, **changes: object) -> Results:
    loads = {one.load: LOADS[one.load] for one in measurements}
    made = Results(
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
        modes=("pull", "push-upstream", "push"),
        loads=loads,
        measurements=measurements,
        idle=(),
        differences=(),
    )
    return made.model_copy(update=changes)


def found(made: Results, what: str, load: str, other: str = "") -> Bar:
    (bar,) = (
        each
        for each in bars.of(made)
        if (each.what, each.load) == (what, load) and other in ("", each.other)
    )
    return bar


def under(load: str, times: Times) -> Results:
    return results(*(measured(subject, load, times) for subject in SUBJECTS))


# What the bar is of, the load, the other, and our times that are just good enough or just not.
@pytest.mark.parametrize(
    ("what", "load", "other", "ours_of", "good", "bad"),
    [
        ("TTFT", "short x1", "floor", lambda x: (x, 0.1, 0.5), 1.04, 1.06),
        ("TTFT", "long x1", "floor", lambda x: (x, 0.1, 0.5), 1.04, 1.06),
        ("TTFT", "next-turn x1", "pull", lambda x: (x, 0.1, 0.1), 0.39, 0.41),
        ("TTFT", "scattered x4", "pull", lambda x: (x, 0.1, 0.5), 0.69, 0.71),
        # A handover of the others of 0.5 s.
        ("handover", "short x8", "push-upstream", lambda x: (0.5 + x, 0.1, 0.5), 0.12, 0.13),
        ("handover", "busy x8", "pull", lambda x: (0.5 + x, 0.1, 0.5), 0.09, 0.11),
        # From prefill's end to the second token the others take 0.6 s.
        (
            "prefill's end to second token",
            "slow-link x1",
            "push-upstream",
            lambda x: (0.5 + x, 0.1, 0.5),
            0.13,
            0.15,
        ),
    ],
)
def test_times_over_anothers(
    what: str,
    load: str,
    other: Measured,
    ours_of: Callable[[float], tuple[float, float, float]],
    good: float,
    bad: float,
) -> None:
    for value, is_met in ((good, True), (bad, False)):
        bar = found(under(load, {**EQUAL, "push": ours_of(value)}), what, load, other)
        assert (bar.is_met, bar.note) == (is_met, ""), bar


@pytest.mark.parametrize("other", ["pull", "push-upstream", "one-engine"])
def test_requests_a_second_must_be_more(other: Measured) -> None:
    for took_s, is_met in ((7.6, True), (7.8, False)):
        made = results(
            *(
                measured(subject, "chat x8", EQUAL, took_s=took_s if subject == "push" else 10.0)
                for subject in SUBJECTS
            )
        )
        assert found(made, "requests/s", "chat x8", other).is_met is is_met


def test_running_decodes_and_descriptors_of_scattered_caches() -> None:
    for tpot_s, descriptors, is_met in ((0.069, 1.0, True), (0.071, 1.1, False)):
        ours = measured(
            "push", "scattered x1", EQUAL, running_tpot_s=tpot_s, descriptors=descriptors
        )
        others = [measured(each, "scattered x1", EQUAL) for each in ("pull", "push-upstream")]
        made = results(ours, *others)
        assert found(made, "TPOT of running decodes", "scattered x1").is_met is is_met
        assert found(made, "descriptors", "scattered x1").is_met is is_met


def test_the_share_written_before_prefill_ends() -> None:
    for early, is_met in ((0.88, True), (0.87, False)):
        made = results(measured("push", "longest x1", EQUAL, early=early))
        bar = found(made, "share of KV bytes written before prefill's end", "longest x1")
        assert (bar.figure, bar.is_met) == (pytest.approx(early), is_met)


def test_what_must_hold_everywhere_does_not_hold_if_it_fails_once() -> None:
    better: Times = {**EQUAL, "push": (0.9, 0.1, 0.5)}
    worse: Times = {**EQUAL, "push": (1.1, 0.1, 0.5)}
    good = [measured(subject, "short x1", better) for subject in SUBJECTS]
    bad = [measured(subject, "long x1", worse) for subject in SUBJECTS]
    for what in ("second token", "end to end"):
        bar = found(results(*good), what, "all", "pull")
        assert bar.is_met and bar.note == "holds under 1 of 1 loads; the worst is short x1"
        bar = found(results(*good, *bad), what, "all", "pull")
        assert not bar.is_met and bar.note == "holds under 1 of 2 loads; the worst is long x1"
    # As good is not better.
    same = [measured(subject, "short x1", EQUAL) for subject in SUBJECTS]
    assert found(results(*same), "second token", "all", "pull").is_met is False


def test_tpot_is_held_to_the_better_of_the_two() -> None:
    for tpot_s, is_met in ((0.103, True), (0.104, False)):
        times: Times = {
            **EQUAL,
            "pull": (1.0, 0.1, 0.5),
            "push-upstream": (1.0, 0.2, 0.5),
            "push": (1.0, tpot_s - 1e-9, 0.5),
        }
        assert found(under("short x1", times), "TPOT", "all").is_met is is_met


def test_cores_at_rest_are_those_of_both_engines_of_ours() -> None:
    def idle(decode_s: float, *, is_waiting: bool) -> Idle:
        cpu_s = {"prefill": 0.1, "decode": decode_s, "router": 9.0}
        return Idle.model_validate(
            {
                "subject": "push",
                "round": 0,
                "seconds": 10.0,
                "cpu_s": cpu_s,
                "is_waiting": is_waiting,
            }
        )

    for decode_s, waits_s, is_met in ((0.09, 0.8, True), (0.11, 0.95, False)):
        at_rest = (idle(decode_s, is_waiting=False), idle(waits_s, is_waiting=True))
        made = results(idle=at_rest)
        assert found(made, "cores of an idle pair", "none").is_met is is_met
        waiting = found(made, "cores of a pair that waits for KV", "one slow transfer")
        assert waiting.is_met is is_met


def test_answers_of_ours_count_and_ties_do_not() -> None:
    both = [measured(each, "short x1", EQUAL) for each in ("one-engine", "push")]
    what = "answers that are not one engine's"

    def wrong(subject: Measured, gap_logprob: float | None) -> Difference:
        return Difference(
            subject=subject,
            load="short x1",
            round=0,
            request=0,
            answer="a",
            expected="b",
            gap_logprob=gap_logprob,
        )

    for different, is_met in (
        ((), True),
        ((wrong("push", 1e-4), wrong("pull", None)), True),
        ((wrong("push", 0.5),), False),
        ((wrong("push", None),), False),
    ):
        bar = found(results(*both, differences=different), what, "all")
        assert (bar.is_met, bar.note) == (is_met, "2 compared")
    assert found(results(*both, is_complete=False), what, "all").is_met is None
    # Nothing compared is nothing shown.
    assert found(results(*both[1:]), what, "all").is_met is False


def test_what_was_not_measured_is_told_with_its_reason() -> None:
    left_out = LeftOut(loads=("slow-link x1",), reason="not allowed here")
    made = results(measured("push", "short x1", EQUAL), left_out=(left_out,))
    what = "prefill's end to second token"
    assert found(made, what, "slow-link x1").note == "not allowed here"
    waiting = found(made, "cores of a pair that waits for KV", "one slow transfer")
    assert (waiting.is_met, waiting.note) == (None, "not allowed here")
    assert found(made, "TTFT", "short x1").note == "no figure of both"
    assert found(made, "TTFT", "long x1").note == "not part of this run"


def test_a_run_without_push_has_no_bars() -> None:
    assert bars.of(results(modes=("pull",))) == ()


def test_bars_are_kept_with_the_figures() -> None:
    recorded = Results.model_validate_json(RECORDED.read_text("utf-8"))
    made = recorded.model_copy(update={"bars": bars.of(recorded)})
    assert len(made.bars) > 20
    assert Results.model_validate_json(made.model_dump_json()) == made


def test_every_load_that_a_bar_names_is_measured() -> None:
    named = {bar.load for bar in bars.of(results())}
    assert named - {"all", "none", "one slow transfer"} <= set(LOADS)
