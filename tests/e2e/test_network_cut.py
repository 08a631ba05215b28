"""Prefill on another host, which is a network namespace, and a cable that is pulled."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from answers import Failed, new_id
from checks import LIVENESS_TIMEOUT_S, check_answers, usage, wait_until_freed, wait_until_used
from pdlaunch.deployments import Record
from questions import Question, some, words
from serving import START_WITHIN_S, TINY, Connection, Deployment, Reference, pdlaunch

pytestmark = pytest.mark.slow
NAME = "e2e-cut"
CABLE = "pdl0"
PREFILL, DECODE = "10.213.73.1", "10.213.73.2"
CUT_S = 30.0
SETTINGS = (
    f"prefill.host={PREFILL}",
    f"decode.host={DECODE}",
    f"router.host={DECODE}",
    # Engines of one machine would find shared memory.
    "engine.env.UCX_TLS=tcp",
    f"engine.env.UCX_NET_DEVICES={CABLE}",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def cable(namespace: str) -> Iterator[None]:
    """Another host, and a cable to it."""
    try:
        ip("netns", "add", namespace)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not allowed here: {error}")
    try:
        here = ("link", "add", "name", CABLE, "type", "veth")
        ip(*here, "peer", "name", CABLE, "netns", namespace)
        ip("addr", "add", f"{DECODE}/24", "dev", CABLE)
        ip("link", "set", CABLE, "up")
        ip("-n", namespace, "addr", "add", f"{PREFILL}/24", "dev", CABLE)
        ip("-n", namespace, "link", "set", CABLE, "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        yield
    finally:
        subprocess.run(["ip", "link", "del", CABLE], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


@contextmanager
def pulled() -> Iterator[None]:
    ip("link", "set", CABLE, "down")
    try:
        yield
    finally:
        ip("link", "set", CABLE, "up")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Deployment]:
    namespace = f"pdl-cut-{os.getpid()}"
    settings = [word for each in SETTINGS for word in ("--set", each)]
    up = ("up", TINY, "--name", NAME, *settings, "--detach", "--only")
    with cable(namespace):
        try:
            pdlaunch(tmp_path, *up, "decode")
            subprocess.run(
                [
                    "ip",
                    "netns",
                    "exec",
                    namespace,
                    sys.executable,
                    "-m",
                    "pdlaunch",
                    *up,
                    "prefill",
                ],
                env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
                check=True,
                timeout=START_WITHIN_S,
                capture_output=True,
            )
            pdlaunch(tmp_path, *up, "router")
            path = tmp_path / "pdlaunch/deployments" / f"{NAME}-router" / "deployment.json"
            plan = Record.model_validate_json(path.read_text("utf-8")).plan
            yield Deployment(plan, tmp_path)
        finally:
            pdlaunch(tmp_path, "down", "--all")


def test_requests_end_while_prefill_is_cut_off_and_succeed_afterwards(
    pair: Deployment, reference: Reference
) -> None:
    async def work(connection: Connection) -> None:
        await check_answers(connection, reference, "before the cut")
        # One that waits for prefill, and one that prefill is about to write.
        legs = connection.legs
        ids = new_id(), new_id()
        asked = [Question(f"cut {n}", prompt=words(3000, f"cut {n}")) for n in range(2)]
        waiting = [
            asyncio.create_task(legs.decode_leg(each, request_id))
            for each, request_id in zip(asked, ids, strict=True)
        ]
        await wait_until_used(connection, pair.decode.name)
        computing = asyncio.create_task(legs.prefill_leg(asked[0], ids[0]))
        await asyncio.sleep(0.3)
        with pulled():
            began_s = time.monotonic()
            for each in waiting:
                with pytest.raises(Failed):
                    await asyncio.wait_for(each, LIVENESS_TIMEOUT_S + 10)
            assert time.monotonic() - began_s < LIVENESS_TIMEOUT_S + 5
            local = some(9)[0]
            answer = await connection.ask_engine(pair.decode, local.salted("beside"))
            assert reference.differences((local,), [answer]) == []
            # Prefill may still write to them.
            assert (await usage(connection, pair.decode))[pair.decode.name] > 0
            await asyncio.sleep(max(0.0, CUT_S - (time.monotonic() - began_s)))
        with suppress(Failed, httpx.HTTPError, TimeoutError):
            await asyncio.wait_for(computing, 5)
        deadline_s = time.monotonic() + LIVENESS_TIMEOUT_S + 5
        while True:
            try:
                answer = await asyncio.wait_for(legs.in_sequence(local.salted(new_id())), 30)
                break
            except (Failed, httpx.HTTPError):
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.5)
        assert reference.differences((local,), [answer]) == []
        await check_answers(connection, reference, "after the cut")
        await wait_until_freed(connection)

    pair.run(work)
