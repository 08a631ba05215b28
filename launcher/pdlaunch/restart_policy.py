"""Decides whether, and after how long, a process that died is started again. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from pdlaunch.plan import RestartPolicy

HOUR_S = 3600.0


def wait_s(
    policy: RestartPolicy, exit_code: int, earlier_s: Sequence[float], now_s: float
) -> float | None:
    """Seconds until a process is started again that has just died; None: it stays down.

    Args:
        exit_code: below 0, the signal that killed it.
        earlier_s: when it died before, by the same clock as now_s.
    """
    if policy.policy == "never" or (policy.policy == "on-failure" and exit_code == 0):
        return None
    recent = len(within_an_hour(earlier_s, now_s))
    if recent >= policy.max_per_hour:
        return None
    if recent == 0:
        return 0.0
    try:
        grown_s = policy.backoff_s * 2.0 ** (recent - 1)
    except OverflowError:
        return policy.max_backoff_s
    return min(policy.max_backoff_s, grown_s)


def within_an_hour(times_s: Sequence[float], now_s: float) -> list[float]:
    """Those of the times that still count."""
    return [at_s for at_s in times_s if now_s - at_s < HOUR_S]
