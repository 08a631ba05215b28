"""What recipes of production come out as, to the letter."""

from __future__ import annotations

import pytest

from golden_files import FILES, FOLDER


@pytest.mark.parametrize("name", FILES)
def test_output_is_what_it_was(name: str) -> None:
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert FILES[name]() == kept, "if that is meant: `make golden`, and read the difference"


def test_nothing_else_is_kept() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
