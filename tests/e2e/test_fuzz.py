"""Ten thousand broken frames and notifications, from peers with and without the secret."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from faults import Case, Pairs

pytestmark = pytest.mark.slow
COUNT = 10_000
SECRET = "VLLM_NIXL_SIDE_CHANNEL_SECRET"


@pytest.fixture(params=["no secret", "secret"])
def pairs(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Pairs]:
    if request.param == "secret":
        monkeypatch.setenv(SECRET, secrets.token_hex(16))
    else:
        monkeypatch.delenv(SECRET, raising=False)
    found = Pairs(request.config, "e2e-fuzz", tmp_path_factory.mktemp("fuzz"))
    yield found
    found.take_down()


def test_engines_survive_and_nothing_is_written(pairs: Pairs) -> None:
    async def work(case: Case) -> None:
        await case.works()
        await case.freed()
        before = case.pair.of_prefill.memory(), case.pair.of_decode.memory()
        prefill, decode = map(case.pair.side_channel, (case.pair.prefill, case.pair.decode))
        await case.hostile("fuzz", prefill=prefill, decode=decode, count=COUNT)
        assert (case.pair.of_prefill.memory(), case.pair.of_decode.memory()) == before
        for engine in (case.pair.prefill, case.pair.decode):
            assert await case.counted(engine, "dropped_messages_total") > COUNT / 4

    pairs.run(work)
