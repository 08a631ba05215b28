"""The deep check: a patch whose tests show nothing, or do not pass, is found out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fake_upstream import SPDX, TRAILERS, FakeReporter, FakeUpstream, commit
from pdlaunch import overlay, packages, patch_tests, sdist
from pdlaunch.engine import Engine

TEST = SPDX + "def test_new():\n    from vllm.new import NEW\n\n    assert NEW == 1\n"
GOOD = {"vllm/new.py": SPDX + "NEW = 1\n", "tests/test_new.py": TEST}


@pytest.fixture
def engine(upstream: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """This Python in place of an engine's, on the fake source tree."""

    def lay_out(tree: Path, *_: object) -> None:
        sdist.unpack(packages.fetch(upstream.series().upstream.sdist, FakeReporter()), tree)

    # Plugins of the developer have no part in it, and take a second each to load.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(overlay, "ensure_test_tools", lambda *_: tmp_path)
    monkeypatch.setattr(overlay, "lay_out", lay_out)
    here = Path(sys.executable)
    return Engine("cpu", tmp_path, here, here, here, "0.32.0", "abc")


def add(upstream: FakeUpstream, work: Path, changes: dict[str, str | None]) -> None:
    folder = upstream.checkout(work)
    trailers = TRAILERS.replace("tests/test_core.py::test_zero", "tests/test_new.py")
    commit(folder, f"[Core] New\n\nIt lacked.\n\n{trailers}", changes)
    upstream.export(folder)


def problems(upstream: FakeUpstream, engine: Engine, *only: str) -> list[str]:
    found = patch_tests.check(upstream.series(), engine, FakeReporter(), only)
    return [problem.what for problem in found]


def test_tests_that_fail_without_and_pass_with_it(
    upstream: FakeUpstream, engine: Engine, tmp_path: Path
) -> None:
    add(upstream, tmp_path / "work", dict(GOOD))
    assert problems(upstream, engine) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tests/test_new.py": "def test_new(): pass\n"}, "its tests pass without it: 1 passed"),
        ({"vllm/new.py": "NEW = 2\n"}, "its tests do not pass with it: 1 failed"),
        ({"tests/test_new.py": "import nothing\n"}, "its tests do not pass with it: 1 error"),
        (
            # A patch whose test is skipped: what the check under test has to reject.
            {"tests/test_new.py": "import pytest\n@pytest.mark.skip\ndef test_new(): pass\n"},
            "its tests do not pass with it: 1 skipped",
        ),
    ],
    ids=["show nothing", "fail", "do not import", "are skipped"],
)
def test_tests_that_show_nothing(
    upstream: FakeUpstream,
    engine: Engine,
    tmp_path: Path,
    changes: dict[str, str | None],
    fault: str,
) -> None:
    add(upstream, tmp_path / "work", GOOD | changes)
    (found,) = problems(upstream, engine)
    assert found.startswith(fault)


def test_patches_that_are_not_named_are_applied_only(
    upstream: FakeUpstream, engine: Engine, tmp_path: Path
) -> None:
    add(upstream, tmp_path / "work", GOOD | {"vllm/new.py": "NEW = 2\n"})
    assert problems(upstream, engine, "other.patch") == []
