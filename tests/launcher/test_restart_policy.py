"""When a process that died is started again: the decision alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdlaunch.plan import RestartPolicy
from pdlaunch.restart_policy import HOUR_S, wait_s, within_an_hour

EVERY = st.builds(
    RestartPolicy,
    policy=st.sampled_from(["always", "on-failure", "never"]),
    backoff_s=st.floats(0.01, 1e6),
    max_backoff_s=st.floats(0.01, 1e6),
    max_per_hour=st.integers(0, 3000),
)
TIMES = st.lists(st.floats(0, 1e6), max_size=2000).map(sorted)


def test_the_first_death_is_answered_at_once_and_the_next_ones_ever_later() -> None:
    policy = RestartPolicy(backoff_s=2, max_backoff_s=10, max_per_hour=6)
    waits = [wait_s(policy, 1, [0.0] * deaths, 1.0) for deaths in range(7)]
    assert waits == [0, 2, 4, 8, 10, 10, None]


def test_deaths_of_an_hour_ago_are_forgotten() -> None:
    policy = RestartPolicy(max_per_hour=1)
    assert wait_s(policy, 1, [0.0], HOUR_S - 1) is None
    assert wait_s(policy, 1, [0.0], HOUR_S) == 0


def test_what_ended_in_order_is_started_again_only_always() -> None:
    waits = {
        policy: wait_s(RestartPolicy(policy=policy), 0, [], 0.0)  # type: ignore[arg-type]
        for policy in ("always", "on-failure", "never")
    }
    assert waits == {"always": 0, "on-failure": None, "never": None}


@given(EVERY, st.integers(-64, 255), TIMES, st.floats(0, 2e6))
def test_a_wait_is_bounded_and_restarts_are_counted(
    policy: RestartPolicy, code: int, earlier_s: list[float], now_s: float
) -> None:
    found = wait_s(policy, code, earlier_s, now_s)
    recent = within_an_hour(earlier_s, now_s)
    if found is not None:
        assert 0 <= found <= policy.max_backoff_s
        assert policy.policy != "never"
        assert len(recent) < policy.max_per_hour
    elif policy.policy == "always":
        assert len(recent) >= policy.max_per_hour


@given(EVERY, TIMES, st.floats(0, 2e6))
def test_one_death_more_never_shortens_the_wait(
    policy: RestartPolicy, earlier_s: list[float], now_s: float
) -> None:
    before = wait_s(policy, 1, earlier_s, now_s)
    after = wait_s(policy, 1, [*earlier_s, now_s], now_s)
    assert after is None or (before is not None and after >= before)


@given(EVERY, TIMES, st.integers(1, 100))
def test_a_process_that_dies_at_once_is_not_started_more_often_than_said(
    policy: RestartPolicy, earlier_s: list[float], deaths: int
) -> None:
    began_s = now_s = 2e6
    died_s = list(earlier_s)
    for starts in range(1, deaths + 1):
        found = wait_s(policy, 1, died_s, now_s)
        if found is None:
            break
        died_s.append(now_s)
        now_s += found
        assert now_s - began_s >= HOUR_S or starts <= policy.max_per_hour
