"""KV caches too small for all requests at once: they wait or are preempted, no answer changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from answers import Answer, at_once, new_id
from checks import wait_until_freed, wait_until_used
from questions import Question, salted, words
from serving import TINY, Connection, Deployment, deployed

PREEMPTIONS = "vllm:num_preemptions_total"
# 76 blocks.
CACHE_GIB = 0.15
MAX_MODEL_LEN_TOKENS = 2048

# What one prompt at a time would not need. P takes a little of each in every step, and runs out
# of blocks when all are half done.
LONG_PROMPTS = tuple(
    Question(f"prompt {number}", prompt=words(900 + 37 * number, f"long {number}"), answer_tokens=4)
    for number in range(8)
)
# D has room for all prompts at once, but not for all answers.
LONG_ANSWERS = tuple(
    Question(f"answer {number}", prompt=words(200 + 11 * number, number), answer_tokens=400)
    for number in range(8)
)
# More than fit into either cache. Of one length: P ends them in the order in which D takes them.
MANY = tuple(
    Question(f"many {number}", prompt=words(600, f"many {number}"), answer_tokens=8)
    for number in range(12)
)
# Two of them fill a cache.
HALF_A_CACHE_TOKENS = 1100
SETTINGS = (
    "decode.env.TORCHDYNAMO_DISABLE=1",
    f"max_model_len_tokens={MAX_MODEL_LEN_TOKENS}",
    f"prefill.kv_cache_gib={CACHE_GIB}",
    f"decode.kv_cache_gib={CACHE_GIB}",
    # vLLM would start no prompt that does not fit as a whole beside those that run.
    "prefill.args.scheduler-reserve-full-isl=false",
    "prefill.args.long-prefill-token-threshold=64",
)
# By far less than what ends a wait in any case: push_max_lease_s.
ROOM_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("small")
    with deployed(TINY, "e2e-small", folder, *SETTINGS) as deployment:
        yield deployment


@pytest.mark.parametrize(
    ("asked", "preempted"),
    [
        pytest.param(LONG_PROMPTS, "prefill", id="prefill preempts", marks=pytest.mark.slow),
        pytest.param(LONG_ANSWERS, "decode", id="decode preempts", marks=pytest.mark.slow),
        pytest.param(MANY, "", id="requests queue on both sides"),
    ],
)
def test_answers_are_those_of_one_engine(
    pair: Deployment, asked: tuple[Question, ...], preempted: str
) -> None:
    engine = pair.prefill if preempted == "prefill" else pair.decode

    async def work(connection: Connection) -> None:
        async def preemptions() -> float:
            return (await connection.metrics())[engine.name].value(PREEMPTIONS)

        # Two at a time fit.
        alone = await connection.reference(salted(asked, "alone"), 2)
        assert sum(alone.is_clear(each) for each in asked) >= len(asked) / 2
        before, moved_before = await preemptions(), await connection.moved()
        answers = await at_once(connection.ask, salted(asked, "pushed"), len(asked))
        assert alone.differences(asked, answers) == []
        assert not preempted or await preemptions() > before
        moved = await connection.moved_since(
            moved_before, lambda moved: moved.transfers_completed >= len(asked)
        )
        assert (moved.transfers_completed, moved.transfers_failed) == (len(asked), 0)
        await wait_until_freed(connection)

    pair.run(work)


def test_sides_that_are_full_of_each_others_prompts_make_room(pair: Deployment) -> None:
    """P is full of prompts that D has no room for, D of prompts that P has no room for."""
    computed, registered = (
        tuple(
            Question(name, prompt=words(HALF_A_CACHE_TOKENS, name), answer_tokens=4)
            for name in names
        )
        for names in (("a", "b"), ("c", "d"))
    )
    questions = (*registered, *computed)

    async def work(connection: Connection) -> None:
        alone = await connection.reference(salted(questions, "alone"), 1)
        legs = connection.legs
        ids = {question.name: new_id() for question in questions}
        named: dict[str, Mapping[str, Any]] = {}
        for each in computed:
            named[each.name] = await legs.prefill_leg(each, ids[each.name])
        before = await connection.moved()

        async def decode_leg(question: Question) -> Answer:
            name = question.name
            return await legs.decode_leg(question, ids[name], named.get(name))

        async with asyncio.timeout(ROOM_WITHIN_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(decode_leg(each)) for each in registered]
            await wait_until_used(connection, pair.decode.name)
            for each in registered:
                group.create_task(legs.prefill_leg(each, ids[each.name]))
            tasks += [group.create_task(decode_leg(each)) for each in computed]
        assert alone.differences(questions, [task.result() for task in tasks]) == []
        moved = await connection.moved_since(
            before, lambda moved: moved.transfers_completed >= len(questions)
        )
        assert (moved.transfers_completed, moved.transfers_failed) == (len(questions), 0)
        await wait_until_freed(connection)

    pair.run(work)
