"""Fixtures: a cache of the test's own, and a small vLLM as if published."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fake_upstream import FakeReporter, FakeUpstream, publish


@pytest.fixture
def reporter() -> FakeReporter:
    return FakeReporter()


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeUpstream:
    """A published vLLM that is found through pip's settings, and an empty cache."""
    made = publish(tmp_path / "upstream")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.published))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made
