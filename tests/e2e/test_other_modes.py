"""Pull and stock push: one key of the recipe changes, the answers do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from answers import at_once
from questions import salted, some
from serving import AT_ONCE, TINY, Connection, Deployment, Reference, deployed

# Of two stock engines that spin, with NIXL's progress threads, on two cores: some kernels let
# nobody else run for minutes.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["pull", "push-upstream"])
def pair(
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Deployment]:
    mode = request.param
    folder = tmp_path_factory.mktemp(mode)
    with deployed(TINY, f"e2e-{mode}", folder, f"transfer.mode={mode}") as deployment:
        yield deployment


def test_answers_are_those_of_one_engine(pair: Deployment, reference: Reference) -> None:
    # Stock NIXL polls all the time: on two cores, prefill is slow.
    asked = some(3, longest_tokens=300)

    async def work(connection: Connection) -> None:
        before = await connection.moved()
        # One by one, then all together.
        answers = [await connection.ask(each) for each in salted(asked, "alone")]
        assert reference.differences(asked, answers) == []
        answers = await at_once(connection.ask, salted(asked, "together"), AT_ONCE)
        assert reference.differences(asked, answers) == []
        moved = await connection.moved_since(before, lambda moved: moved.bytes_moved > 0)
        assert moved.bytes_moved > 0

    pair.run(work)
