"""Pairs that no recipe can say, started engine by engine: they work, or refuse with a reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from answers import Failed, at_once, or_failure
from checks import LIVENESS_TIMEOUT_S, wait_until_freed
from pdlaunch.plan import ProcessPlan
from questions import Question, salted, some, words
from serving import AT_ONCE, Connection, by_hand

pytestmark = pytest.mark.slow
TRANSFER_CONFIG = "--kv-transfer-config"


def _with_flag(engine: ProcessPlan, flag: str, value: str) -> ProcessPlan:
    at = engine.argv.index(flag) + 1
    return engine.model_copy(update={"argv": (*engine.argv[:at], value, *engine.argv[at + 1 :])})


@pytest.mark.parametrize(
    ("larger_on", "policy", "said_by_decode"),
    [
        ("prefill", "fail", "block size 32 on decode, 64 on prefill: push needs the same"),
        ("prefill", "recompute", "block size 32 on decode, 64 on prefill: push needs the same"),
        ("decode", "fail", "block size 64 on decode, 32 on prefill: push needs the same"),
    ],
)
def test_pair_of_two_block_sizes_is_refused_request_by_request(
    larger_on: str, policy: str, said_by_decode: str, tmp_path: Path
) -> None:
    def changed(engine: ProcessPlan) -> ProcessPlan:
        return _with_flag(engine, "--block-size", "64") if engine.role == larger_on else engine

    question = Question("blocks", prompt=words(300, "blocks"), answer_tokens=6)
    with by_hand(changed, "e2e-blocks", tmp_path, f"transfer.load_failure_policy={policy}") as pair:

        async def work(connection: Connection) -> None:
            alone = await connection.ask_engine(pair.decode, question.salted("alone"))
            for leg in (connection.legs.in_sequence, connection.legs.decode_first):
                # Nobody waits for the other side to fall silent.
                async with asyncio.timeout(LIVENESS_TIMEOUT_S / 2):
                    answer = await or_failure(leg(question.salted("pushed")))
                if policy == "recompute":
                    assert answer == alone
                else:
                    assert isinstance(answer, Failed)
                    assert answer.status == httpx.codes.INTERNAL_SERVER_ERROR

        pair.run(work)
        assert said_by_decode in pair.log(pair.decode.name).read_text()


def test_push_beside_another_connector(tmp_path: Path) -> None:
    def changed(engine: ProcessPlan) -> ProcessPlan:
        at = engine.argv.index(TRANSFER_CONFIG) + 1
        push = json.loads(engine.argv[at])
        # Keeps the KV of whole prompts in files, and loads what it finds there within a step.
        files = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / engine.role)},
        }
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": push["kv_role"],
            "kv_load_failure_policy": push["kv_load_failure_policy"],
            "kv_connector_extra_config": {"connectors": [push, files]},
        }
        return _with_flag(engine, TRANSFER_CONFIG, json.dumps(both))

    # In one chunk each, all of them at once: the other connector keeps the first chunk only.
    asked = some(6, longest_tokens=2000)
    settings = ("prefill.args.max-num-batched-tokens=16384", "decode.env.TORCHDYNAMO_DISABLE=1")
    with by_hand(changed, "e2e-multi", tmp_path, *settings) as pair:

        async def work(connection: Connection) -> None:
            alone = await connection.reference(salted(asked, "alone"))
            # The second time, P has the prompts in files, but not in its prefix cache.
            for salt in ("first", "second"):
                answers = await at_once(connection.legs.decode_first, salted(asked, salt), AT_ONCE)
                assert alone.differences(asked, answers) == []
            await wait_until_freed(connection)

        pair.run(work)
        assert "Inject KV cache of" in pair.log(pair.prefill.name).read_text()
