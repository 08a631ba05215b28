"""What a benchmark asks: workloads as data, and which of their loads a run has. Sends nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from pdlaunch.errors import UsageError

Cached = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Setup:
    """How deployments are brought up for a load, where that is not as the recipe says."""

    # What people call it; no part of what it is.
    name: str = field(default="", compare=False)
    # KEY=VALUE, as for --set.
    settings: tuple[str, ...] = ()
    # Prefill and decode as on two hosts, joined by a link of this rate. None: on one host.
    link_mbit_per_s: int | None = None

    @property
    def on_one_host(self) -> Setup:
        """The same without a link: one engine has nobody at its other end."""
        return replace(self, link_mbit_per_s=None)

    def __str__(self) -> str:
        return self.name if self.settings or self.link_mbit_per_s else "the recipe's"


AS_IS: Final = Setup()


@dataclass(frozen=True)
class Load:
    """One measurement: so many requests of one shape, so many at a time or a second."""

    workload: str
    prompt_tokens: int
    answer_tokens: int
    requests: int
    # Exactly one of the two: closed loop, or open loop.
    at_once: int | None = None
    requests_per_s: float | None = None
    # Whose prefix cache has the prompt's first tokens when it comes.
    cached_by: Cached | None = None
    cached_tokens: int = 0
    # Long answers that the decode engine gives meanwhile.
    busy_decodes: int = 0
    # Whether the blocks that are free lie scattered in both caches, as they do after hours.
    scattered: bool = False
    # Above 0, answers are drawn, each from the same seed.
    temperature: float = 0.0
    setup: Setup = AS_IS

    @property
    def name(self) -> str:
        """Unique in a run: `short x8`, or `open 1/s`."""
        if self.requests_per_s is not None:
            return f"{self.workload} {self.requests_per_s:g}/s"
        return f"{self.workload} x{self.at_once}"

    @property
    def is_one_at_a_time(self) -> bool:
        return self.at_once == 1

    @property
    def longest_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class Workload:
    """A shape of requests, and the loads at which it is measured."""

    name: str
    what: str
    loads: tuple[Load, ...]
    # The same for --quick; none where it has no part in that.
    quick: tuple[Load, ...] = ()


def _loads(
    workload: str, prompt_tokens: int, answer_tokens: int, requests: dict[int, int]
) -> tuple[Load, ...]:
    """Closed loops: how many requests for each number at a time."""
    return tuple(
        Load(workload, prompt_tokens, answer_tokens, count, at_once=at_once)
        for at_once, count in requests.items()
    )


BLOCKS_OF_128: Final = Setup(
    "blocks of 128 tokens",
    ("prefill.block_size_tokens=128", "decode.block_size_tokens=128"),
)
CHUNKS_OF_512: Final = Setup("chunks of 512 tokens", ("prefill.args.max-num-batched-tokens=512",))
CONTIGUOUS: Final = Setup(
    "contiguous blocks in push", ("transfer.extra.push_contiguous_window=1.0",)
)
SLOW_LINK: Final = Setup(
    "two namespaces, 2 Gb/s between them",
    ("prefill.args.max-num-batched-tokens=256",),
    link_mbit_per_s=2000,
)

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "short",
        "200 tokens in, 16 out, 1 to 16 at a time",
        _loads("short", 200, 16, {1: 16, 4: 32, 8: 48, 16: 64}),
        _loads("short", 200, 16, {1: 8}),
    ),
    Workload(
        "long",
        "1,000 tokens in, 16 out, 1 to 8 at a time",
        _loads("long", 1000, 16, {1: 8, 4: 16, 8: 24}),
        _loads("long", 1000, 16, {1: 4}),
    ),
    Workload(
        "chat",
        "200 tokens in, 64 out, 1 to 16 at a time",
        _loads("chat", 200, 64, {1: 8, 4: 16, 8: 32, 16: 48}),
        _loads("chat", 200, 64, {8: 16}),
    ),
    Workload(
        "open",
        "200 tokens in, 16 out, arriving at random, 0.5 and 1 a second",
        (
            Load("open", 200, 16, 20, requests_per_s=0.5),
            Load("open", 200, 16, 40, requests_per_s=1.0),
        ),
    ),
    Workload(
        "drawn",
        "200 tokens in, 16 out, at temperature 1 with a seed",
        tuple(replace(load, temperature=1.0) for load in _loads("drawn", 200, 16, {1: 8})),
    ),
    Workload(
        "busy",
        "200 tokens in, 16 out, 1 to 8 at a time, while decode gives 4 long answers to others",
        tuple(
            replace(load, busy_decodes=4) for load in _loads("busy", 200, 16, {1: 12, 4: 24, 8: 32})
        ),
    ),
    Workload(
        "next-turn",
        "2,064 tokens in, 16 out; prefill has the first 2,000 in its prefix cache",
        (Load("next-turn", 2064, 16, 8, at_once=1, cached_by="prefill", cached_tokens=2000),),
    ),
    Workload(
        "decode-hit",
        "2,064 tokens in, 16 out; decode has the first 2,000 in its prefix cache",
        (Load("decode-hit", 2064, 16, 8, at_once=1, cached_by="decode", cached_tokens=2000),),
    ),
    Workload(
        "blocks-128",
        "1,000 tokens in, 16 out, 1 and 4 at a time; blocks of 128 tokens on both sides",
        tuple(
            replace(load, setup=BLOCKS_OF_128)
            for load in _loads("blocks-128", 1000, 16, {1: 8, 4: 16})
        ),
    ),
    Workload(
        "longest",
        "4,000 tokens in, 16 out; prefill in chunks of 512",
        (Load("longest", 4000, 16, 4, at_once=1, setup=CHUNKS_OF_512),),
    ),
    Workload(
        "scattered",
        "2,000 tokens in, 16 out, 1 and 4 at a time; free blocks lie scattered in both caches, "
        "push allocates contiguous ones, decode gives 4 long answers to others",
        tuple(
            replace(load, scattered=True, busy_decodes=4, setup=CONTIGUOUS)
            for load in _loads("scattered", 2000, 16, {1: 8, 4: 12})
        ),
    ),
    Workload(
        "slow-link",
        "2,000 tokens in, 16 out, in chunks of 256; prefill and decode in two network namespaces, "
        "2 Gb/s between them",
        (Load("slow-link", 2000, 16, 8, at_once=1, setup=SLOW_LINK),),
    ),
)


def select(names: Iterable[str], *, quick: bool) -> tuple[Load, ...]:
    """The loads of these workloads, or of all; raise for a name that there is not."""
    known = {workload.name: workload for workload in WORKLOADS}
    wanted = tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"no workload {name}",
                where="--workload",
                next_step=(f"did you mean {near[0]}? " if near else "")
                + f"there are: {', '.join(known)}",
            )
    chosen = [known[name] for name in wanted] or list(WORKLOADS)
    loads = tuple(load for each in chosen for load in (each.quick if quick else each.loads))
    if not loads:
        raise UsageError(
            f"{', '.join(wanted)} has no quick form",
            where="--quick",
            next_step="leave --quick out, or name one of: "
            + ", ".join(each.name for each in WORKLOADS if each.quick),
        )
    return loads


def check_fits(loads: Iterable[Load], longest_tokens: int | None) -> None:
    """Raise for the first load that is longer than the model may be."""
    for load in loads:
        if longest_tokens is not None and load.longest_tokens > longest_tokens:
            raise UsageError(
                f"{load.name} needs {load.longest_tokens} tokens, and the recipe's longest prompt "
                f"plus answer has {longest_tokens}",
                where="max_model_len_tokens",
                next_step="choose others with --workload, or raise max_model_len_tokens",
            )
