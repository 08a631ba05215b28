"""Other kinds of models: over push they give what one engine answers."""

from __future__ import annotations

import pytest

from checks import wait_until_freed
from questions import salted, some
from serving import TINY, Connection, deployed

LATENT = (
    "model=random:tiny-deepseek-v2",
    # Where there is AMX, vLLM would take a backend that computes in bfloat16 only.
    "engine.args.attention-backend=CPU_MLA",
    # vLLM's kernel for CPUs takes slices of larger tensors for tensors of their own and overwrites
    # what is beside them: one engine does not even answer itself alike.
    'engine.args.compilation-config={"custom_ops": ["-rotary_embedding"]}',
)
# Prompts of one token up to several windows and chunks; some begin like others.
ASKED = some(4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("model=random:tiny-gemma3",), id="some layers with a sliding window"),
        pytest.param(("model=random:tiny-mistral",), id="all layers with a sliding window"),
        # vLLM's CPU engine ends when it keeps states of such a model in its prefix cache.
        pytest.param(
            ("model=random:tiny-granite-hybrid", "engine.args.enable-prefix-caching=false"),
            id="some layers with a state",
        ),
        pytest.param(LATENT, id="latent attention"),
        pytest.param((*LATENT, "decode.tensor_parallel=2"), id="latent attention, TP 1 to 2"),
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
