"""Reads what engines export at /metrics. Interprets names and labels, judges nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdlaunch.plan import ProcessPlan, TransferMode

_SCRAPE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class _Sample:
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """One engine's metrics at one moment, or none at all where it did not answer."""

    samples: tuple[_Sample, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Metrics:
        return cls(
            tuple(
                _Sample(sample.name, dict(sample.labels), sample.value)
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                # Nothing that an engine counts is infinite, and no sum survives what is no number.
                if math.isfinite(sample.value)
            )
        )

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of a name that carry these labels; 0 where there are none."""
        return sum(sample.value for sample in self._matching(name, labels))

    def counts(self, name: str, by: str, **labels: str) -> dict[str, int]:
        """The same for each value of one more label, without those that are 0."""
        counts: dict[str, int] = {}
        for sample in self._matching(name, labels):
            if sample.value:
                key = sample.labels.get(by, "")
                counts[key] = counts.get(key, 0) + int(sample.value)
        return counts

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's counts by upper bound, cumulative, summed over all labels."""
        counts: dict[float, float] = {}
        for sample in self._matching(f"{name}_bucket", {}):
            bound = float(sample.labels.get("le", "nan"))
            if not math.isnan(bound):
                counts[bound] = counts.get(bound, 0.0) + sample.value
        return counts

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterator[_Sample]:
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample


async def scrape(
    client: httpx.AsyncClient, process: ProcessPlan, within_s: float = _SCRAPE_TIMEOUT_S
) -> Metrics:
    """The metrics of one engine; none where it does not answer properly."""
    try:
        response = await client.get(f"{process.url}/metrics", timeout=within_s)
        response.raise_for_status()
        return Metrics.parse(response.text)
    except (httpx.HTTPError, ValueError):
        return Metrics()


async def scrape_all(
    client: httpx.AsyncClient, processes: Iterable[ProcessPlan]
) -> dict[str, Metrics]:
    """The metrics of several engines, asked at once, by process name."""
    processes = tuple(processes)
    found = await asyncio.gather(*(scrape(client, process) for process in processes))
    return {process.name: metrics for process, metrics in zip(processes, found, strict=True)}


@dataclass(frozen=True)
class KvMovement:
    """How much KV moved, as the engines count it, since they started."""

    bytes_moved: float
    bytes_during_prefill: float
    bytes_after_prefill: float
    registrations_sent: float
    registrations_before_prefill_end: float
    registrations_after_prefill_end: float
    transfers_completed: float
    transfers_failed: float
    transfers_cancelled: float
    transfer_s: float

    def since(self, earlier: KvMovement) -> KvMovement:
        """What moved between two moments; engines that restarted count as having begun anew."""
        return KvMovement(
            **{name: max(0.0, now - getattr(earlier, name)) for name, now in vars(self).items()}
        )


@dataclass(frozen=True)
class Failures:
    """What one engine says has gone wrong since it started; only push knows reasons."""

    transfers: dict[str, int]
    liveness: int
    hangs: int
    dropped_messages: dict[str, int]

    def __bool__(self) -> bool:
        return bool(self.transfers or self.liveness or self.hangs or self.dropped_messages)


def failures(mode: TransferMode, metrics: Metrics) -> Failures | None:
    """What has failed on an engine; None where it has not answered."""
    if not metrics.samples:
        return None
    if mode == "push":
        transfers = metrics.counts("vllm:nixl_push_transfers_total", by="reason", outcome="failed")
    else:
        failed = int(metrics.value("vllm:nixl_num_failed_transfers_total"))
        transfers = {"unknown": failed} if failed else {}
    return Failures(
        transfers=transfers,
        liveness=int(metrics.value("vllm:nixl_push_liveness_failures_total")),
        hangs=int(metrics.value("vllm:nixl_push_hangs_total")),
        dropped_messages=metrics.counts("vllm:nixl_push_dropped_messages_total", by="reason"),
    )


def kv_movement(
    mode: TransferMode, prefill: Iterable[Metrics], decode: Iterable[Metrics]
) -> KvMovement:
    """Sum up both sides' counters. The side that issues the transfer counts its bytes."""
    prefill, decode = tuple(prefill), tuple(decode)
    movers = decode if mode == "pull" else prefill

    def total(of: Iterable[Metrics], name: str, **labels: str) -> float:
        return sum(metrics.value(name, **labels) for metrics in of)

    bytes_by_nixl = total(movers, "vllm:nixl_bytes_transferred_sum")
    during = total(prefill, "vllm:nixl_push_bytes_total", phase="during_prefill")
    after = total(prefill, "vllm:nixl_push_bytes_total", phase="after_prefill")
    registrations = "vllm:nixl_push_registrations_total"
    transfers = "vllm:nixl_push_transfers_total"
    if mode == "push":
        completed = total(decode, transfers, role="receiver", outcome="completed")
        failed = total(decode, transfers, role="receiver", outcome="failed")
        cancelled = total(decode, transfers, role="receiver", outcome="cancelled")
    else:
        completed = total(movers, "vllm:nixl_bytes_transferred_count")
        failed = total(prefill + decode, "vllm:nixl_num_failed_transfers_total")
        cancelled = 0.0
    return KvMovement(
        bytes_moved=during + after if mode == "push" else bytes_by_nixl,
        bytes_during_prefill=during,
        bytes_after_prefill=after,
        registrations_sent=total(decode, registrations, side="sent"),
        registrations_before_prefill_end=total(prefill, registrations, side="before_prefill_end"),
        registrations_after_prefill_end=total(prefill, registrations, side="after_prefill_end"),
        transfers_completed=completed,
        transfers_failed=failed,
        transfers_cancelled=cancelled,
        transfer_s=total(movers, "vllm:nixl_xfer_time_seconds_sum"),
    )
