"""Sums a benchmark up: percentiles, handover, goodput, ratios with confidence intervals. Pure.

An interval is a bootstrap in two levels, rounds and the requests of a round, with the same rounds
for both sides of a ratio: what drifts hits both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from pdlaunch.bench.results import FLOOR, Measured, Measurement, Request, Results
from pdlaunch.bench.schedule import ONE_ENGINE

Floats = NDArray[np.float64]
OURS: Final = "push"
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 20260
# Of goodput, when nobody says what is good enough.
_GOOD_TTFT_OF_FLOOR = 5.0
_GOOD_TPOT_OF_ONE_ENGINE = 2.0

# Statistics that a ratio may be of, as tables call them.
TTFT, SECOND, TPOT, E2E = "TTFT", "second token", "TPOT", "end to end"
HANDOVER, THROUGHPUT = "handover", "requests/s"
AFTER_PREFILL = "prefill's end to second token"
RUNNING_TPOT, DESCRIPTORS = "TPOT of running decodes", "descriptors"
Statistic = Literal["median", "mean"]
_OF_REQUEST: dict[str, Callable[[Request], float | None]] = {
    TTFT: lambda request: request.ttft_s,
    SECOND: lambda request: request.second_token_s,
    TPOT: lambda request: request.tpot_s,
    E2E: lambda request: request.latency_s,
}


@dataclass(frozen=True)
class Spread:
    """Percentiles of one figure over the requests of all rounds, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Handover:
    """Means, in seconds, of where the time to the first token goes in a pair.

    Decode's first step and what is written after prefill may overlap each other: they are no sum.
    """

    ttft_s: float
    prefill_queue_s: float
    prefill_s: float
    # What prefill's leg takes beyond the two: its server, its last step's output.
    prefill_rest_s: float
    handover_s: float
    decode_first_step_s: float
    # Push: from the end of prefill until the last WRITE. Others: of each transfer.
    transfer_s: float


@dataclass(frozen=True)
class Row:
    """One subject under one load, over all rounds."""

    load: str
    subject: Measured
    requests: int
    failed: int
    ttft: Spread | None
    second_token: Spread | None
    tpot: Spread | None
    itl: Spread | None
    # Of the long answers that decode gave to others meanwhile, a mean.
    running_tpot_s: float | None
    e2e: Spread | None
    requests_per_s: float
    # Requests a second that are good enough; None where there is nothing to measure it by.
    goodput_per_s: float | None
    # Median over the floor's median.
    ttft_over_floor: float | None
    handover: Handover | None
    # Share of the KV bytes that had been written before their prompt's prefill ended.
    share_before_prefill_end: float | None
    mib_moved: float | None
    transfers: int | None
    transfers_failed: int | None
    descriptors_per_transfer: float | None
    post_ms_per_transfer: float | None
    transfer_ms: float | None
    cpu_s_per_request: float
    # What everybody else took of the same cores, in the mean.
    others_cores: float


@dataclass(frozen=True)
class Ratio:
    """Ours over another, with its 95 % interval; below 1 is less."""

    load: str
    what: str
    other: Measured
    value: float
    # None where a round has one value and there is one round: nothing tells how much it varies.
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class IdleCost:
    """Share of a core that a deployment's roles take while nobody asks anything."""

    subject: Measured
    role: str
    cores: float
    # All wait for one slow transfer, rather than for nothing.
    is_waiting: bool = False


def rows(results: Results) -> list[Row]:
    """All loads and subjects, in the order in which they were planned."""
    subjects: tuple[Measured, ...] = (FLOOR, ONE_ENGINE, *results.modes)
    return [
        _row(results, load.name, subject, found)
        for load in results.loads.values()
        for subject in subjects
        if (found := results.of(subject, load.name))
    ]


def ratios(results: Results) -> list[Ratio]:
    """Ours against every other, figure by figure. Medians; means for the handover."""
    others: tuple[Measured, ...] = (
        *(mode for mode in results.modes if mode != OURS),
        ONE_ENGINE,
        FLOOR,
    )
    return [
        ratio
        for load, other in itertools.product(results.loads, others)
        for what in ([TTFT] if other == FLOOR else [TTFT, HANDOVER, SECOND, TPOT, E2E, THROUGHPUT])
        if (ratio := ratio_of(results, load, what, other)) is not None
    ]


def ratio_of(results: Results, load: str, what: str, other: Measured) -> Ratio | None:
    """Ours against one other in one figure; None where either lacks it."""
    mine = results.of(OURS, load)
    theirs = results.floors_of(OURS, load) if other == FLOOR else results.of(other, load)
    rounds = sorted({one.round for one in mine} & {one.round for one in theirs})
    of_round = _OF_ROUND.get(what)
    values = of_round or (lambda one: _values(one, what))
    ours, others = (
        [
            [value for one in side if one.round == number for value in values(one)]
            for number in rounds
        ]
        for side in (mine, theirs)
    )
    found = ratio(ours, others, of="mean" if of_round else "median")
    if found is None:
        return None
    value, low, high = found
    is_known = of_round is None or len(rounds) > 1
    return Ratio(load, what, other, value, (low, high) if is_known else None)


def others_cores(results: Results) -> float:
    """What everybody else took of the machine's cores over all measurements, in the mean."""
    took_s = sum(one.took_s for one in results.measurements)
    return sum(one.others_cpu_s for one in results.measurements) / took_s if took_s else 0.0


def idle_costs(results: Results) -> list[IdleCost]:
    """Means over the rounds."""
    taken: dict[tuple[bool, Measured, str], list[float]] = {}
    for one in results.idle:
        for role, cpu_s in one.cpu_s.items():
            key = one.is_waiting, one.subject, role
            taken.setdefault(key, []).append(cpu_s / one.seconds)
    return [
        IdleCost(subject, role, float(np.mean(each)), is_waiting)
        for (is_waiting, subject, role), each in sorted(taken.items(), key=lambda item: item[0][0])
    ]


def pair_cores(results: Results, *, is_waiting: bool) -> list[float]:
    """Cores that prefill and decode of ours take together while they do nothing, each time."""
    return [
        sum(cpu_s for role, cpu_s in one.cpu_s.items() if role != "router") / one.seconds
        for one in results.idle
        if one.subject == OURS and one.is_waiting == is_waiting
    ]


def spread(values: Iterable[float]) -> Spread | None:
    """Percentiles by linear interpolation; None of nothing."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    p50, p90, p99 = (float(each) for each in np.percentile(array, (50, 90, 99)))
    return Spread(array.size, float(array.mean()), p50, p90, p99)


def ratio(
    mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, of: Statistic
) -> tuple[float, float, float] | None:
    """Ratio over rounds of values, and its interval; None where there is no ratio."""
    both = _paired(mine, theirs)
    if both is None:
        return None
    statistic = np.median if of == "median" else np.mean
    rng = np.random.default_rng(_SEED)
    ours, others = both
    chosen = rng.integers(len(ours), size=(_RESAMPLES, len(ours)))
    above, below = (statistic(_resampled(rng, each, chosen), axis=1) for each in both)
    if statistic(np.concatenate(others)) <= 0 or np.any(below <= 0):
        return None
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(above / below, (tail, 100 - tail))
    value = statistic(np.concatenate(ours)) / statistic(np.concatenate(others))
    return float(value), float(low), float(high)


def _paired(
    mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> tuple[list[Floats], list[Floats]] | None:
    """The rounds that both sides have values of."""
    pairs = [
        (np.asarray(ours, dtype=np.float64), np.asarray(others, dtype=np.float64))
        for ours, others in zip(mine, theirs, strict=True)
        if ours and others
    ]
    return ([ours for ours, _ in pairs], [others for _, others in pairs]) if pairs else None


def _resampled(
    rng: np.random.Generator, rounds: Sequence[Floats], chosen: NDArray[np.int64]
) -> Floats:
    """A row of values for each row of chosen rounds, drawn anew within each round."""
    counts = np.array([each.size for each in rounds])
    longest = int(counts.max())
    table = np.zeros((len(rounds), longest))
    for place, each in enumerate(rounds):
        table[place, : each.size] = each
    drawn = rng.random((*chosen.shape, longest)) * counts[chosen][:, :, None]
    values: Floats = table[chosen[:, :, None], drawn.astype(np.int64)]
    return values.reshape(len(chosen), -1)


def _values(one: Measurement, what: str) -> list[float]:
    of_request = _OF_REQUEST[what]
    return [value for each in one.answered if (value := of_request(each)) is not None]


def _mean_handover_s(one: Measurement) -> list[float]:
    """One value: what prefill took is known as a mean only, and of no single request."""
    if one.prefill is None or not one.prefill.count or not one.answered:
        return []
    return [float(np.mean([each.ttft_s for each in one.answered])) - one.prefill.e2e_s]


def _after_prefill_s(one: Measurement) -> list[float]:
    """One value, of means: from the end of prefill to the second token."""
    seconds = _values(one, SECOND)
    if one.prefill is None or not one.prefill.count or not seconds:
        return []
    return [float(np.mean(seconds)) - one.prefill.e2e_s]


def _running_tpot_s(one: Measurement) -> list[float]:
    return [] if one.running_tpot_s is None else [one.running_tpot_s]


def _descriptors(one: Measurement) -> list[float]:
    moved = one.moved
    return [moved.descriptors / moved.transfers] if moved is not None and moved.transfers else []


# Figures that a round has one of, at most.
_OF_ROUND: dict[str, Callable[[Measurement], list[float]]] = {
    HANDOVER: _mean_handover_s,
    THROUGHPUT: lambda one: [len(one.answered) / one.took_s],
    AFTER_PREFILL: _after_prefill_s,
    RUNNING_TPOT: _running_tpot_s,
    DESCRIPTORS: _descriptors,
}


def _mean(values: Iterable[float]) -> float | None:
    array = np.fromiter(values, dtype=np.float64)
    return float(array.mean()) if array.size else None


def _row(results: Results, load: str, subject: Measured, found: Sequence[Measurement]) -> Row:
    answered = [request for one in found for request in one.answered]
    took_s = sum(one.took_s for one in found)
    ttft = spread(request.ttft_s for request in answered)
    floors = results.floors_of(subject, load)
    floor = spread(request.ttft_s for one in floors for request in one.answered)
    over_floor = ttft.p50 / floor.p50 if ttft and floor and subject != FLOOR else None
    requests = sum(len(one.requests) for one in found)
    moved = [one.moved for one in found if one.moved is not None]
    transfers = sum(each.transfers for each in moved)
    mib = sum(each.bytes_moved for each in moved) / 2**20
    early_mib = sum(each.bytes_during_prefill for each in moved) / 2**20

    def a_transfer(total: float) -> float | None:
        return total / transfers if transfers else None

    return Row(
        load=load,
        subject=subject,
        requests=requests,
        failed=requests - len(answered),
        ttft=ttft,
        second_token=spread(v for v in (r.second_token_s for r in answered) if v is not None),
        tpot=spread(v for v in (r.tpot_s for r in answered) if v is not None),
        itl=spread(gap_s for request in answered for gap_s in request.itl_s),
        running_tpot_s=_mean(value for one in found for value in _running_tpot_s(one)),
        e2e=spread(request.latency_s for request in answered),
        requests_per_s=len(answered) / took_s,
        goodput_per_s=_goodput(results, load, answered, took_s) if subject != FLOOR else None,
        ttft_over_floor=over_floor,
        handover=_handover(found),
        share_before_prefill_end=early_mib / mib if mib and subject == OURS else None,
        mib_moved=mib if moved else None,
        transfers=transfers if moved else None,
        transfers_failed=sum(each.transfers_failed for each in moved) if moved else None,
        descriptors_per_transfer=a_transfer(sum(each.descriptors for each in moved)),
        post_ms_per_transfer=a_transfer(1e3 * sum(each.post_s for each in moved)),
        transfer_ms=a_transfer(1e3 * sum(each.transfer_s for each in moved)),
        others_cores=sum(one.others_cpu_s for one in found) / took_s,
        cpu_s_per_request=sum(sum(one.cpu_s.values()) for one in found) / max(1, len(answered)),
    )


def _goodput(
    results: Results, load: str, answered: Sequence[Request], took_s: float
) -> float | None:
    """Requests a second whose first token came within five times the floor's median, and whose
    TPOT is within twice that of one engine."""
    floor = spread(r.ttft_s for one in results.of(FLOOR, load) for r in one.answered)
    alone = spread(
        tpot_s
        for one in results.of(ONE_ENGINE, load)
        for request in one.answered
        if (tpot_s := request.tpot_s) is not None
    )
    if floor is None or alone is None:
        return None
    good = [
        request
        for request in answered
        if request.ttft_s <= _GOOD_TTFT_OF_FLOOR * floor.p50
        and (request.tpot_s or 0.0) <= _GOOD_TPOT_OF_ONE_ENGINE * alone.p50
    ]
    return len(good) / took_s


def _handover(found: Sequence[Measurement]) -> Handover | None:
    parts = [
        Handover(
            ttft_s=ttft_s,
            prefill_queue_s=prefill.queue_s,
            prefill_s=prefill.prefill_s,
            prefill_rest_s=prefill.e2e_s - prefill.queue_s - prefill.prefill_s,
            handover_s=ttft_s - prefill.e2e_s,
            decode_first_step_s=one.decode.prefill_s,
            transfer_s=_transfer_s(one),
        )
        for one in found
        if (prefill := one.prefill) is not None
        and prefill.count
        and one.decode is not None
        and one.answered
        and (ttft_s := float(np.mean([request.ttft_s for request in one.answered])))
    ]
    if not parts:
        return None
    return Handover(
        **{name: float(np.mean([getattr(each, name) for each in parts])) for name in vars(parts[0])}
    )


def _transfer_s(one: Measurement) -> float:
    moved = one.moved
    if moved is None:
        return 0.0
    if moved.after_prefill_s is not None:
        return moved.after_prefill_s
    return moved.transfer_s / moved.transfers if moved.transfers else 0.0
