"""What two looks at an engine's counters say of the time between them."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlaunch.engine_metrics import Metrics
from pdlaunch.rates import Counters, History, counters, has_restarted, quantile, rates

NOTHING = Counters(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {0.1: 0.0, 0.25: 0.0, math.inf: 0.0})
BUSY = Counters(
    at_s=2.0,
    prompt_tokens=400.0,
    generated_tokens=30.0,
    kv_bytes=2.0 * 2**20,
    transfers=4.0,
    first_tokens=4.0,
    ttft_sum_s=0.6,
    ttft_buckets={0.1: 2.0, 0.25: 4.0, math.inf: 4.0},
)

amounts = st.floats(0, 1e15, allow_nan=False)


@st.composite
def looks(draw: st.DrawFn, at_s: st.SearchStrategy[float] = amounts) -> Counters:
    counts = sorted(draw(st.lists(amounts, min_size=3, max_size=3)))
    return Counters(
        at_s=draw(at_s),
        prompt_tokens=draw(amounts),
        generated_tokens=draw(amounts),
        kv_bytes=draw(amounts),
        transfers=draw(amounts),
        first_tokens=counts[-1],
        ttft_sum_s=draw(amounts),
        ttft_buckets=dict(zip((0.1, 0.25, math.inf), counts, strict=True)),
    )


def test_rates_are_what_was_counted_over_the_time_it_took() -> None:
    found = rates(NOTHING, BUSY)
    assert found is not None
    assert found.prompt_tokens_per_s == 200
    assert found.generated_tokens_per_s == 15
    assert found.kv_bytes_per_s == 2**20
    assert found.transfers_per_s == 2
    assert found.ttft_mean_s == pytest.approx(0.15)
    # 90 % of 4 are 3.6, of which 1.6 are in a bucket of 2 from 0.1 to 0.25 s.
    assert found.ttft_p90_s == pytest.approx(0.1 + 0.15 * 0.8)


def test_without_a_first_token_there_is_no_time_to_it() -> None:
    found = rates(BUSY, replace(BUSY, at_s=3.0, generated_tokens=40.0))
    assert found is not None
    assert (found.generated_tokens_per_s, found.ttft_mean_s, found.ttft_p90_s) == (10, None, None)


def test_of_an_engine_that_restarted_only_its_new_life_counts() -> None:
    # More generated than before, less of the rest.
    later = Counters(4.0, 100.0, 50.0, 0.0, 1.0, 1.0, 0.2, {0.1: 0.0, 0.25: 1.0, math.inf: 1.0})
    assert has_restarted(BUSY, later)
    found = rates(BUSY, later)
    assert found is not None
    assert (found.prompt_tokens_per_s, found.generated_tokens_per_s) == (50, 25)
    assert found.ttft_mean_s == pytest.approx(0.2)


def test_no_time_between_two_looks_tells_nothing() -> None:
    assert rates(BUSY, BUSY) is None
    assert rates(replace(BUSY, at_s=3.0), BUSY) is None


@settings(deadline=None)
@given(earlier=looks(), later=looks())
def test_no_rate_is_ever_below_zero(earlier: Counters, later: Counters) -> None:
    found = rates(earlier, later)
    if later.at_s <= earlier.at_s:
        assert found is None
        return
    assert found is not None
    assert all(value is None or value >= 0 for value in vars(found).values())


@settings(deadline=None)
@given(begin=looks(), more=looks(st.floats(0.1, 1e3)), again=looks(st.floats(0.1, 1e3)))
def test_what_two_intervals_saw_is_what_both_together_see(
    begin: Counters, more: Counters, again: Counters
) -> None:
    middle = _plus(begin, more)
    end = _plus(middle, again)
    first, second, both = rates(begin, middle), rates(middle, end), rates(begin, end)
    if first is None or second is None or both is None:
        return
    first_s, second_s = middle.at_s - begin.at_s, end.at_s - middle.at_s
    counted = first.kv_bytes_per_s * first_s + second.kv_bytes_per_s * second_s
    assert both.kv_bytes_per_s * (first_s + second_s) == pytest.approx(counted, rel=1e-6, abs=10)


def _plus(earlier: Counters, more: Counters) -> Counters:
    sums = {
        each.name: getattr(earlier, each.name) + getattr(more, each.name)
        for each in fields(Counters)
        if each.name != "ttft_buckets"
    }
    buckets = {
        bound: count + more.ttft_buckets[bound] for bound, count in earlier.ttft_buckets.items()
    }
    return Counters(**sums, ttft_buckets=buckets)


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    share=st.floats(0.01, 1),
    other=st.floats(0.01, 1),
)
def test_a_quantile_lies_where_its_bucket_does_and_grows_with_the_share(
    counts: list[int], share: float, other: float
) -> None:
    bounds = [0.1 * (i + 1) for i in range(len(counts))]
    cumulative = [float(sum(counts[: i + 1])) for i in range(len(counts))]
    buckets = {**dict(zip(bounds, cumulative, strict=True)), math.inf: cumulative[-1]}
    found, more = quantile(buckets, min(share, other)), quantile(buckets, max(share, other))
    if not cumulative[-1]:
        assert found is None and more is None
        return
    assert found is not None and more is not None
    assert found <= more + 1e-9
    target = min(share, other) * cumulative[-1]
    at = next(i for i, count in enumerate(cumulative) if count >= target)
    assert ([0.0, *bounds][at]) - 1e-9 <= found <= bounds[at] + 1e-9


def test_beyond_the_highest_bound_only_the_bound_is_told() -> None:
    assert quantile({0.1: 0.0, 1.0: 0.0, math.inf: 5.0}, 0.9) == 1.0
    assert quantile({math.inf: 5.0}, 0.9) is None
    assert quantile({}, 0.9) is None


def test_history_rates_over_its_window() -> None:
    history = History(window_s=2.0)
    seen = [
        history.add("e", replace(NOTHING, at_s=float(second), prompt_tokens=float(second**2)))
        for second in range(6)
    ]
    assert [each and each.prompt_tokens_per_s for each in seen] == [None, 1, 2, 4, 6, 8]


def test_history_forgets_an_engine_that_is_gone_or_restarted() -> None:
    history = History(window_s=60.0)
    assert history.add("e", BUSY) is None
    # It counts anew: what it did before says nothing of it.
    restarted = history.add("e", replace(NOTHING, at_s=4.0, prompt_tokens=10.0))
    assert restarted is not None and restarted.prompt_tokens_per_s == 5
    after = history.add("e", replace(NOTHING, at_s=5.0, prompt_tokens=40.0))
    assert after is not None and after.prompt_tokens_per_s == pytest.approx(40 / 3)
    assert history.add("e", None) is None
    assert history.add("e", replace(BUSY, at_s=6.0)) is None
    assert history.add("other", BUSY) is None


@settings(deadline=None)
@given(st.lists(st.none() | looks(), max_size=8))
def test_no_history_has_a_rate_below_zero(seen: list[Counters | None]) -> None:
    history = History(window_s=5.0)
    for at_s, each in enumerate(seen):
        found = history.add("e", each and replace(each, at_s=float(at_s)))
        assert found is None or all(value is None or value >= 0 for value in vars(found).values())


RECORDED = Path(__file__).parent / "recorded_metrics"


@pytest.mark.parametrize(("role", "transfers"), [("prefill", 6), ("decode", 6)])
def test_real_engines_are_counted(role: str, transfers: int) -> None:
    metrics = Metrics.parse((RECORDED / f"{role}.txt").read_text())
    found = counters("push", metrics, 1.0)
    assert found is not None
    assert (found.prompt_tokens, found.first_tokens, found.transfers) == (2294, 6, transfers)
    assert (found.kv_bytes > 0) == (role == "prefill")
    assert found.ttft_sum_s == pytest.approx(1.15, abs=0.05)
    pulled = counters("pull", metrics, 1.0)
    assert pulled is not None and pulled.transfers == (8 if role == "prefill" else 0)


def test_an_engine_that_does_not_answer_has_no_counters() -> None:
    assert counters("push", Metrics(), 1.0) is None


def test_figures_that_are_none_are_left_out() -> None:
    page = "# TYPE a gauge\na NaN\n# TYPE b gauge\nb +Inf\n# TYPE c gauge\nc 3\n"
    metrics = Metrics.parse(page)
    assert [metrics.value(name) for name in "abc"] == [0, 0, 3]
