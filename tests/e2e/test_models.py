"""Other kinds of models: over push they give what one engine answers."""

from __future__ import annotations

import pytest

from answers import Answer
from checks import wait_until_freed
from questions import salted, some
from serving import TINY, Connection, deployed

# Prompts of one token up to several windows and chunks; some begin like others.
ASKED = some(4)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("model=random:tiny-gemma3",), id="some layers with a sliding window"),
        pytest.param(
            ("model=random:tiny-mistral",),
            id="all layers with a sliding window",
            marks=pytest.mark.slow,
        ),
        # vLLM's CPU engine ends when it keeps states of such a model in its prefix cache.
        pytest.param(
            ("model=random:tiny-granite-hybrid", "engine.args.enable-prefix-caching=false"),
            id="some layers with a state",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_answers_are_those_of_one_engine(
    settings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("models")
    with deployed(
        TINY, "e2e-models", folder, "decode.env.TORCHDYNAMO_DISABLE=1", *settings
    ) as pair:

        async def work(connection: Connection) -> None:
            alone = await connection.reference(salted(ASKED, "alone"))
            assert sum(alone.is_clear(each) for each in ASKED) >= 0.8 * len(ASKED)
            before = await connection.moved()
            # Twice: the second time, both engines find the prompts in their prefix caches.
            for _ in range(2):
                answers = await connection.ask_all(salted(ASKED, "pushed"))
                assert alone.differences(ASKED, answers) == []
            moved = await connection.moved_since(before, lambda moved: moved.bytes_moved > 0)
            assert moved.bytes_moved > 0
            assert not moved.transfers_failed
            await wait_until_freed(connection)

        pair.run(work)


@pytest.mark.slow
def test_latent_attention_gives_what_pull_gives(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not what one engine gives: vLLM's CPU kernels for prefill and for decode do not agree there,
    and D decodes the last token of a prompt that one engine prefills. Nor do those for one request
    and for several."""
    model = ("model=random:tiny-deepseek-v2", "engine.args.attention-backend=CPU_MLA")
    asked = some(8, longest_tokens=2000)
    answers: dict[tuple[str, ...], list[Answer]] = {}
    for settings in (("transfer.mode=pull",), (), ("decode.tensor_parallel=2",)):
        folder = tmp_path_factory.mktemp("latent")
        with deployed(TINY, "e2e-latent", folder, *model, *settings) as pair:

            async def work(connection: Connection) -> list[Answer]:
                found = [await connection.ask(each) for each in asked]
                await wait_until_freed(connection)
                return found

            answers[settings] = pair.run(work)
    pulled, *pushed = answers.values()
    assert pushed == [pulled, pulled]
