"""What an engine did between two looks at what it counts. Pure: reads no clock, asks nobody."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields

from pdlaunch.engine_metrics import Metrics
from pdlaunch.plan import TransferMode

# Engines publish their counters step by step: over less, rates jump.
WINDOW_S = 10.0
_TTFT = "vllm:time_to_first_token_seconds"
_BYTES = "vllm:nixl_bytes_transferred"


@dataclass(frozen=True)
class Counters:
    """What one engine has counted since it started, at one moment of a clock that never jumps."""

    at_s: float
    prompt_tokens: float
    generated_tokens: float
    # Of the transfers that it issued itself.
    kv_bytes: float
    transfers: float
    first_tokens: float
    ttft_sum_s: float
    # Requests by the upper bound of their time to the first token, in seconds; cumulative.
    ttft_buckets: Mapping[float, float]


_SUMS = tuple(each.name for each in fields(Counters) if each.name not in ("at_s", "ttft_buckets"))


@dataclass(frozen=True)
class Rates:
    """What one engine did, a second."""

    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    kv_bytes_per_s: float
    transfers_per_s: float
    # Of the requests whose first token came meanwhile; None where none did.
    ttft_mean_s: float | None
    ttft_p90_s: float | None


def counters(mode: TransferMode, metrics: Metrics, at_s: float) -> Counters | None:
    """What an engine that answers counts; None of one that does not."""
    if not metrics.samples:
        return None
    if mode == "push":
        transfers = metrics.value("vllm:nixl_push_transfers_total", outcome="completed")
    else:
        transfers = metrics.value(f"{_BYTES}_count")
    return Counters(
        at_s=at_s,
        prompt_tokens=metrics.value("vllm:prompt_tokens_total"),
        generated_tokens=metrics.value("vllm:generation_tokens_total"),
        kv_bytes=metrics.value(f"{_BYTES}_sum"),
        transfers=transfers,
        first_tokens=metrics.value(f"{_TTFT}_count"),
        ttft_sum_s=metrics.value(f"{_TTFT}_sum"),
        ttft_buckets=metrics.buckets(_TTFT),
    )


def has_restarted(earlier: Counters, later: Counters) -> bool:
    """Whether an engine counts anew: counters do not fall."""
    return any(getattr(later, name) < getattr(earlier, name) for name in _SUMS) or any(
        later.ttft_buckets.get(bound, 0.0) < count for bound, count in earlier.ttft_buckets.items()
    )


def rates(earlier: Counters, later: Counters) -> Rates | None:
    """What an engine did between two moments; None where no time went by.

    Of an engine that restarted in between, what it has counted since.
    """
    took_s = later.at_s - earlier.at_s
    if took_s <= 0:
        return None
    if has_restarted(earlier, later):
        earlier = _nothing(earlier.at_s)
    count = later.first_tokens - earlier.first_tokens
    buckets = {
        bound: value - earlier.ttft_buckets.get(bound, 0.0)
        for bound, value in later.ttft_buckets.items()
    }
    return Rates(
        prompt_tokens_per_s=(later.prompt_tokens - earlier.prompt_tokens) / took_s,
        generated_tokens_per_s=(later.generated_tokens - earlier.generated_tokens) / took_s,
        kv_bytes_per_s=(later.kv_bytes - earlier.kv_bytes) / took_s,
        transfers_per_s=(later.transfers - earlier.transfers) / took_s,
        ttft_mean_s=(later.ttft_sum_s - earlier.ttft_sum_s) / count if count else None,
        ttft_p90_s=quantile(buckets, 0.9),
    )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The value that a share of a histogram's observations do not exceed, or None.

    buckets: cumulative counts by upper bound. Inside a bucket, observations are taken to be spread
    evenly; of those above the highest bound, only that they exceed it is known, and that is told.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0 or not math.isfinite(bounds[0]):
        return None
    target = share * total
    low, below = 0.0, 0.0
    for bound in bounds:
        if not math.isfinite(bound):
            break
        if (count := buckets[bound]) >= target:
            within = (target - below) / (count - below) if count > below else 1.0
            return low + (bound - low) * min(1.0, max(0.0, within))
        low, below = bound, count
    return low


class History:
    """The looks of the last seconds at each engine, and what it did between the first and last."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks: dict[str, deque[Counters]] = {}

    def add(self, engine: str, look: Counters | None) -> Rates | None:
        """Note one more look; the rates up to it, where there is an earlier one."""
        if look is None:
            # What comes next may be another process.
            self._looks.pop(engine, None)
            return None
        looks = self._looks.setdefault(engine, deque())
        if looks and has_restarted(looks[-1], look):
            begun_s = looks[-1].at_s
            looks.clear()
            looks.append(_nothing(begun_s))
        looks.append(look)
        while len(looks) > 2 and looks[1].at_s <= look.at_s - self._window_s:
            looks.popleft()
        return rates(looks[0], look)


def _nothing(at_s: float) -> Counters:
    return Counters(at_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {})
