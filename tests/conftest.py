"""Options of all tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stock", action="store_true", help="fault tests: on upstream's push connector, not ours"
    )
