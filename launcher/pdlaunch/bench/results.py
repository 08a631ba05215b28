"""What a benchmark has found, request by request: the data behind tables, JSON and report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from pdlaunch.bench.schedule import Subject
from pdlaunch.bench.workload import Load
from pdlaunch.plan import ProcessRole, TransferMode
from pdlaunch.trace import Timeline

FLOOR: Final = "floor"
# Sums are rounded in another order when a prompt is cut elsewhere or runs in other company: tokens
# whose log probabilities are closer than this in float32 may change places.
TIE_LOGPROB: Final = 1e-3
# What a measurement is of: a deployment, or the same prompts for one token on one engine.
Measured = Literal["push", "pull", "push-upstream", "one-engine", "floor"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Data):
    """One request, as its client saw it."""

    ttft_s: float
    latency_s: float
    # Between pieces of the answer; a piece is a token unless the client was slow.
    itl_s: tuple[float, ...]
    answer_tokens: int
    text: str
    # Empty where it was answered.
    error: str

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def second_token_s(self) -> float | None:
        return self.ttft_s + self.itl_s[0] if self.itl_s else None

    @property
    def tpot_s(self) -> float | None:
        if self.answer_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.answer_tokens - 1)


class Legs(_Data):
    """Means over the legs of one role in an interval, from the engine's own histograms."""

    count: int
    e2e_s: float
    queue_s: float
    prefill_s: float
    ttft_s: float


class Moved(_Data):
    """What a pair counted of its transfers in an interval."""

    bytes_moved: float
    # Push only: the others write, or read, when prefill has ended.
    bytes_during_prefill: float
    transfers: int
    transfers_failed: int
    descriptors: float
    # Sums over the transfers; in push over their WRITEs.
    post_s: float
    transfer_s: float
    # Push only: from the end of prefill to the last WRITE, the mean.
    after_prefill_s: float | None


class Measurement(_Data):
    """One load on one subject in one round."""

    subject: Measured
    load: str
    round: int
    took_s: float
    requests: tuple[Request, ...]
    # CPU seconds that each role's processes took meanwhile.
    cpu_s: dict[ProcessRole, float]
    # And what all others took on the same cores, which should be nothing.
    others_cpu_s: float = 0.0
    # Of pairs.
    prefill: Legs | None = None
    decode: Legs | None = None
    moved: Moved | None = None
    # Of the long answers that decode gave to others meanwhile: seconds a token, the mean.
    running_tpot_s: float | None = None
    # A floor: the pair whose prefill engine gave it, just before or after that pair's own load.
    beside: TransferMode | None = None

    @property
    def answered(self) -> list[Request]:
        return [request for request in self.requests if request.ok]


class Idle(_Data):
    """What a deployment takes while nobody asks anything, or while all wait for one transfer."""

    subject: Subject
    round: int
    seconds: float
    cpu_s: dict[ProcessRole, float]
    is_waiting: bool = False


class Difference(_Data):
    """An answer that is not the one engine's."""

    subject: Measured
    load: str
    round: int
    request: int
    answer: str
    expected: str
    # By how much the engine preferred its own token where the two part; None where not asked.
    gap_logprob: float | None = None

    @property
    def is_tie(self) -> bool:
        """So close that the order of a sum decides: no error."""
        return self.gap_logprob is not None and self.gap_logprob <= TIE_LOGPROB


class LeftOut(_Data):
    """Loads that were asked for and could not be measured here."""

    loads: tuple[str, ...]
    reason: str


class Bar(_Data):
    """One thing that must hold, under one load against one other, and whether it does."""

    what: str
    load: str
    # Empty where the figure is ours alone.
    other: str
    bound: str
    # None where it was not measured.
    figure: float | None = None
    low: float | None = None
    high: float | None = None
    is_met: bool | None = None
    # Why there is no figure, or what else to know of it.
    note: str = ""


class Results(_Data):
    """A whole run."""

    format: Literal[1] = 1
    pdlaunch_version: str
    engine_version: str
    recipe: str
    settings: tuple[str, ...]
    model: str
    machine: str
    cores: dict[str, tuple[int, ...]]
    started_unix_s: float
    took_s: float
    rounds: int
    modes: tuple[TransferMode, ...]
    # By name, in the order in which they were put.
    loads: dict[str, Load]
    measurements: tuple[Measurement, ...]
    idle: tuple[Idle, ...]
    # Whether all was measured and compared; else it is what there was when the run ended.
    is_complete: bool = True
    differences: tuple[Difference, ...]
    left_out: tuple[LeftOut, ...] = ()
    # How long each deployment took to come up, in the order of the visits.
    bring_up_s: tuple[float, ...] = ()
    # What must hold of push; made of all that is above.
    bars: tuple[Bar, ...] = ()
    # Of one request by push, in a deployment of its own that nothing else was measured on.
    timeline: Timeline | None = None

    @property
    def is_identical(self) -> bool:
        """Whether every answer is known to be the one engine's, ties apart."""
        return self.is_complete and all(difference.is_tie for difference in self.differences)

    @property
    def compared_answers(self) -> int:
        """Answers of pairs that one engine has answered as well."""
        return self.compared_answers_of(self.modes)

    def compared_answers_of(self, subjects: Sequence[Measured]) -> int:
        """The same of some pairs."""
        return sum(
            got.ok and expected.ok
            for one in self.measurements
            if one.subject in subjects
            for reference in self.of("one-engine", one.load)
            if reference.round == one.round
            for got, expected in zip(one.requests, reference.requests, strict=True)
        )

    @property
    def failed_requests(self) -> int:
        return sum(not each.ok for one in self.measurements for each in one.requests)

    def of(self, subject: Measured, load: str) -> list[Measurement]:
        """The measurements of a subject under a load, a round each."""
        return self._of(subject, load, None)

    def floors_of(self, subject: Measured, load: str) -> list[Measurement]:
        """What a subject's TTFT is held against: the floors beside it, where it has such."""
        beside = [
            one for mode in self.modes if mode == subject for one in self._of(FLOOR, load, mode)
        ]
        return beside or self.of(FLOOR, load)

    def _of(self, subject: Measured, load: str, beside: TransferMode | None) -> list[Measurement]:
        wanted = subject, load, beside
        return [one for one in self.measurements if (one.subject, one.load, one.beside) == wanted]
