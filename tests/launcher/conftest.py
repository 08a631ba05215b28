"""Fixtures that several tests share, made of what stands in fake_upstream and launching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_upstream import FakeReporter, FakeUpstream, published_in
from launching import fake_engine, launcher, state

__all__ = ["fake_engine", "launcher", "reporter", "state", "upstream"]


@pytest.fixture
def reporter() -> FakeReporter:
    return FakeReporter()


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[FakeUpstream]:
    """A published vLLM that is found through pip's settings, and an empty cache."""
    with published_in(tmp_path) as made:
        yield made
