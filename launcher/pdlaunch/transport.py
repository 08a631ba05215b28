"""Tells by which NIXL backend engines move KV, and over what, from what they say in their logs.

Reads; starts and asks nothing. A log is no protocol: what is not said there is not known, and of
what is said only names of the right form are taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pdlaunch.plan import ProcessPlan

# What NIXL takes where it is not told.
DEFAULT_BACKENDS = ("UCX",)
LIBFABRIC = "LIBFABRIC"
# Engines say it before they are ready; what users' requests make of a log comes later.
_READ_BYTES = 8 * 2**20
_MOST_NAMES = 16
# The worker that speaks, where vLLM says so.
_SPEAKER = r"^(?:\(\S+ pid=\d+\) ?)?"
_BACKEND = re.compile(
    _SPEAKER + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d NIXL INFO +\S+:\d+ "
    r"Backend ([A-Z][A-Z0-9_]{0,31}) was instantiated\s*$",
    re.MULTILINE | re.ASCII,
)
# NIXL's backend for libfabric takes TCP where there is no better provider, and says so as an INFO.
_PROVIDER = re.compile(
    _SPEAKER + r"I\d{4} [\d:.]+ +\d+ \S+\] "
    r"(?:Discovered \d+ |Created \d+ rails using provider=)([A-Za-z][\w;-]{0,31})(?: devices.*)?$",
    re.MULTILINE | re.ASCII,
)
# UCX names the transports of an endpoint with UCX_LOG_LEVEL=info.
_ENDPOINT = re.compile(
    _SPEAKER + r"\[[\d.]+\] \[[^\]\n]*\] +\S+:\d+ +UCX +INFO +\S+ "
    r"(?:intra|inter)-node cfg#\d+ (.*)$",
    re.MULTILINE | re.ASCII,
)
_LANE = re.compile(r"(\w+)\(([^()]*)\)", re.ASCII)
_UCX_TRANSPORT = re.compile(r"[a-z]\w{0,31}/[\w.:-]{1,32}", re.ASCII)
# Lanes that carry no KV: atomics, signs of life, set-up.
_IDLE_LANES = ("amo", "ka", "cm")
_TCP_PROVIDERS = ("tcp", "sockets", "udp")


@dataclass(frozen=True)
class Transport:
    """What an engine has said of NIXL since it started, sorted; nothing where it said nothing."""

    backends: tuple[str, ...] = ()
    # Providers that the backend for libfabric chose.
    providers: tuple[str, ...] = ()
    # What UCX may use to the other engines, as transport/device.
    ucx: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(self._named(each) for each in self.backends) or "not known"

    def _named(self, backend: str) -> str:
        if backend == LIBFABRIC:
            return f"{backend} ({', '.join(self.providers) or 'provider not known'})"
        if backend == "UCX":
            return f"{backend} ({', '.join(self.ucx) or 'transports not known'})"
        return backend


def read(log: Path, start_byte: int = 0) -> Transport:
    """What an engine says in its log from a byte on, where its present life begins."""
    try:
        with log.open("rb") as file:
            file.seek(start_byte)
            text = file.read(_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return Transport()
    return said(text)


def said(text: str) -> Transport:
    """What a piece of a log says."""
    lanes = (lane for line in _ENDPOINT.findall(text) for lane in _LANE.findall(line))
    ucx = (
        each for kind, used in lanes if not kind.startswith(_IDLE_LANES) for each in used.split()
    )
    return Transport(
        backends=_few(_BACKEND.findall(text)),
        providers=_few(each.lower() for each in _PROVIDER.findall(text)),
        ucx=_few(each for each in ucx if _UCX_TRANSPORT.fullmatch(each)),
    )


def doubts(engine: ProcessPlan, seen: Transport) -> list[str]:
    """What speaks against an engine moving KV as its recipe asks, a sentence each."""
    name, wanted = engine.name, engine.nixl_backends
    others = [each for each in seen.backends if each != LIBFABRIC]
    if LIBFABRIC not in wanted:
        strange = [each for each in seen.backends if each not in wanted]
        return [
            f"{name} moves KV over {each}, and the recipe asks for {', '.join(wanted)}"
            for each in strange
        ]
    if not seen.backends:
        return [
            f"the recipe asks for {LIBFABRIC}, and {name} does not say what it uses: it may be "
            "TCP. NIXL says it with NIXL_LOG_LEVEL=INFO"
        ]
    if LIBFABRIC not in seen.backends:
        return [
            f"the recipe asks for {LIBFABRIC}, and {name} moves KV over {seen}: not over EFA, and "
            "over TCP where UCX finds nothing better"
        ]
    found = []
    if others:
        found.append(
            f"{name} has {', '.join(others)} beside {LIBFABRIC}, and NIXL chooses between them: KV "
            f"may move over TCP. Set transfer.backends to [{LIBFABRIC}]"
        )
    asked = engine.env.get("FI_PROVIDER")
    if not seen.providers and asked is None:
        found.append(
            f"{name} does not say which provider of libfabric it uses: it may be TCP. Set "
            "efa_interfaces, or FI_PROVIDER, which rules it out"
        )
    for provider in seen.providers:
        if provider.partition(";")[0] in _TCP_PROVIDERS:
            found.append(f"{name} moves KV over TCP: libfabric found no EFA, and took {provider}")
        elif asked is not None and not provider.startswith(asked.lower()):
            found.append(f"{name} moves KV over {provider}, and FI_PROVIDER asks for {asked}")
    return found


def _few(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names))[:_MOST_NAMES])
