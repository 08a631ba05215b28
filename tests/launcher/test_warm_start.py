"""Every prefill engine meets every decode engine before a deployment is ready."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fake_upstream import FakeReporter
from pdlaunch import deployments, warm_start
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from test_planner import planned, recipe


class Engines:
    """Engines that answer as vLLM does, and count what moves between them."""

    def __init__(self, plan: DeploymentPlan) -> None:
        self.by_port = {engine.port: engine for engine in plan.engines}
        self.mode = plan.mode
        self.requests: list[tuple[str, dict[str, Any], httpx.Headers]] = []
        self.met: Counter[tuple[str, str]] = Counter()
        self.moved: Counter[str] = Counter()
        self.at_once: Counter[str] = Counter()
        self.answers: dict[str, Callable[[], httpx.Response]] = {}
        # By engine, why transfers failed: one before the first request, one with each.
        self.reasons: dict[str, str] = {}
        self.fails_now = True
        self.moves = True

    async def handle(self, request: httpx.Request) -> httpx.Response:
        engine = self.by_port[request.url.port or 0]
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics(engine))
        self.at_once[engine.name] += 1
        assert self.at_once[engine.name] == 1
        await asyncio.sleep(0)
        self.at_once[engine.name] -= 1
        body = json.loads(request.content)
        self.requests.append((engine.name, body, request.headers))
        if answer := self.answers.get(engine.name):
            return answer()
        params = body["kv_transfer_params"]
        if engine.role == "prefill":
            named = {"do_remote_prefill": True, "remote_port": engine.side_channel_port}
            return httpx.Response(200, json={"choices": [], "kv_transfer_params": named})
        (prefill,) = (
            other
            for other in self.by_port.values()
            if other.side_channel_port == params["remote_port"]
        )
        self.met[prefill.name, engine.name] += 1
        if self.moves:
            self.moved[prefill.name] += 1
            self.moved[engine.name] += 1
        return httpx.Response(200, json={"choices": [], "kv_transfer_params": None})

    def metrics(self, engine: ProcessPlan) -> str:
        count = self.moved[engine.name]
        mover = engine.role == ("decode" if self.mode == "pull" else "prefill")
        lines = [
            "# TYPE vllm:nixl_push_transfers counter",
            'vllm:nixl_push_transfers_total{role="receiver",outcome="completed",reason="none"} '
            f"{count if engine.role == 'decode' else 0}",
            *(
                f'vllm:nixl_push_transfers_total{{role="any",outcome="failed",reason="{reason}"}} '
                f"{1 + self.fails_now * len(self.requests)}"
                for reason in (self.reasons.get(engine.name),)
                if reason
            ),
            "# TYPE vllm:nixl_push_bytes counter",
            f'vllm:nixl_push_bytes_total{{phase="during_prefill"}} {count if mover else 0}',
            "# TYPE vllm:nixl_bytes_transferred histogram",
            f'vllm:nixl_bytes_transferred_bucket{{le="+Inf"}} {count if mover else 0}',
            f"vllm:nixl_bytes_transferred_count {count if mover else 0}",
            f"vllm:nixl_bytes_transferred_sum {count if mover else 0}",
        ]
        return "\n".join(lines) + "\n"


def deployment(prefill: int = 1, decode: int = 1, mode: str = "push") -> DeploymentPlan:
    source = recipe(
        prefill={"replicas": prefill}, decode={"replicas": decode}, transfer={"mode": mode}
    )
    return planned(source)


def introduce(plan: DeploymentPlan, engines: Engines) -> list[str]:
    told = FakeReporter()

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(engines.handle)) as client:
            await warm_start.introduce(plan, client, told)

    asyncio.run(run())
    return told.said


@pytest.mark.parametrize("mode", ["push", "pull", "push-upstream"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (3, 2), (1, 4), (2, 2)])
def test_every_pair_meets_once_and_no_engine_is_in_two_at_a_time(
    mode: str, prefill: int, decode: int
) -> None:
    plan = deployment(prefill, decode, mode)
    engines = Engines(plan)
    (line,) = introduce(plan, engines)
    assert engines.met == {
        (p.name, d.name): 1 for p in plan.of_role("prefill") for d in plan.of_role("decode")
    }
    assert line.startswith(f"{prefill * decode} pair")


def test_the_legs_of_a_pair_are_those_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "k")
    plan = deployment()
    engines = Engines(plan)
    introduce(plan, engines)
    (first, prefill_leg, one), (second, decode_leg, other) = engines.requests
    assert (first, second) == ("prefill-0", "decode-0")
    assert one["x-request-id"] == other["x-request-id"]
    assert one["authorization"] == other["authorization"] == "Bearer k"
    assert prefill_leg["prompt"] == decode_leg["prompt"]
    # So that no block is left out.
    assert prefill_leg["prompt"].count(" and") >= plan.largest_block_tokens
    assert decode_leg["kv_transfer_params"]["do_remote_prefill"] is True


def answer_nothing() -> httpx.Response:
    raise httpx.ReadTimeout("timed out")


@pytest.mark.parametrize(
    ("engine", "answer", "why"),
    [
        (
            "prefill-1",
            lambda: httpx.Response(500, text="boom"),
            "prefill-1 answered HTTP 500: boom",
        ),
        ("prefill-1", lambda: httpx.Response(200, json={}), "prefill-1 did not say where its KV"),
        ("decode-0", lambda: httpx.Response(200, text="<html>"), "decode-0 answered <html>"),
        ("decode-0", answer_nothing, "decode-0 gave no answer: ReadTimeout timed out"),
    ],
)
def test_a_pair_that_cannot_is_named_with_both_logs(
    engine: str,
    answer: Callable[[], httpx.Response],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_start, "_COUNTER_DELAY_S", 0.1)
    plan = deployment(prefill=2)
    engines = Engines(plan)
    engines.answers[engine] = answer
    with pytest.raises(PdError) as caught:
        introduce(plan, engines)
    prefill = "prefill-1" if engine == "prefill-1" else "prefill-0"
    error = caught.value
    assert str(error).startswith(f"{prefill} could not hand a prompt over to decode-0: {why}")
    logs = deployments.log_dir(plan.name)
    assert error.where == f"{logs / prefill}.log, {logs / 'decode-0.log'}"
    assert error.next_step is not None
    assert f"pdlaunch logs {plan.name} {prefill}" in error.next_step
    assert f"pdlaunch logs {plan.name} decode-0" in error.next_step


def test_an_answer_without_kv_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "_COUNTER_DELAY_S", 0.1)
    plan = deployment()
    engines = Engines(plan)
    engines.moves = False
    with pytest.raises(PdError, match="both answer, but no KV moved by push"):
        introduce(plan, engines)


def test_an_error_of_decode_is_a_failure_though_kv_moved() -> None:
    plan = deployment()
    engines = Engines(plan)

    def fail() -> httpx.Response:
        engines.moved.update(("prefill-0", "decode-0"))
        return httpx.Response(500, text="boom")

    engines.answers["decode-0"] = fail
    engines.reasons["decode-0"] = "other"
    with pytest.raises(PdError, match=r"the transfer failed \(other\); decode-0 answered HTTP 500"):
        introduce(plan, engines)


@pytest.mark.parametrize(
    ("reasons", "why"),
    [
        (
            {"decode-0": "no_handshake"},
            "decode-0 could not shake hands with prefill-0 at {prefill}; decode-0 answered",
        ),
        (
            {"decode-0": "peer_silent", "prefill-0": "no_handshake"},
            "prefill-0 could not shake hands with decode-0 at {decode}; decode-0 answered",
        ),
        (
            {"decode-0": "peer_silent"},
            "decode-0 reached prefill-0 and heard nothing back, as it is where prefill-0 cannot "
            "reach decode-0 at {decode}; decode-0 answered",
        ),
        ({"prefill-0": "write_error"}, "the transfer failed (write_error); decode-0 answered"),
    ],
)
def test_who_could_not_reach_whom_is_said_where_counters_tell(
    reasons: dict[str, str], why: str
) -> None:
    plan = deployment()
    engines = Engines(plan)
    engines.reasons = reasons
    engines.answers["decode-0"] = lambda: httpx.Response(500, text="boom")
    with pytest.raises(PdError) as caught:
        introduce(plan, engines)
    address = {engine.role: f"{engine.host}:{engine.side_channel_port}" for engine in plan.engines}
    assert f"prefill-0 could not hand a prompt over to decode-0: {why.format(**address)}" in str(
        caught.value
    )


def test_a_load_that_failed_and_was_recomputed_is_a_failure_with_its_reason() -> None:
    plan = deployment()
    engines = Engines(plan)
    engines.moves = False
    engines.reasons["decode-0"] = "no_handshake"
    with pytest.raises(PdError, match=r"could not shake hands .*; both answer, but no KV moved"):
        introduce(plan, engines)


def test_failures_from_before_the_start_explain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_start, "_COUNTER_DELAY_S", 0.1)
    plan = deployment()
    engines = Engines(plan)
    # Engines of another host may be older than this `up`.
    engines.reasons["prefill-0"] = "no_handshake"
    engines.fails_now = False
    engines.moves = False
    with pytest.raises(PdError, match="decode-0: both answer, but no KV moved"):
        introduce(plan, engines)


def test_every_pair_of_a_round_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "_COUNTER_DELAY_S", 0.1)
    plan = deployment(prefill=2, decode=2)
    engines = Engines(plan)
    engines.moves = False
    with pytest.raises(PdError) as caught:
        introduce(plan, engines)
    for number in (0, 1):
        assert f"prefill-{number} could not hand a prompt over to decode-{number}" in str(
            caught.value
        )
        assert f"decode-{number}.log" in (caught.value.where or "")
