"""Fixtures of the end-to-end tests. Deployments have modules to themselves: two pairs at once would
share two cores, so each is taken down before the next is brought up."""

from __future__ import annotations

from pathlib import Path

import pytest

import questions
import serving
from serving import Reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What one engine without P/D answers to every question."""
    found = serving.reference(questions.EVERYTHING, tmp_path_factory.mktemp("reference"))
    assert sum(found.is_clear(each) for each in questions.EVERYTHING) >= 60
    return found
