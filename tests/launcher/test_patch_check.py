"""What `patch check` finds: each fault named with its patch, nothing in a clean series."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_upstream import SOURCES, SPDX, TRAILERS, FakeReporter, FakeUpstream, commit, published_in
from pdlaunch import patch_check
from pdlaunch.series import file_name

CORE = SOURCES["vllm/core.py"]
GOOD = {"vllm/core.py": CORE.replace("return 3", "return 33"), "vllm/new.py": SPDX + "x = 1\n"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good patch."""
    root = tmp_path_factory.mktemp("made")
    with published_in(root) as upstream:
        upstream.add_patch(upstream.checkout(root / "work"), "[Core] Good", GOOD)
    return upstream.patches


@pytest.fixture
def checked(upstream: FakeUpstream, made: Path) -> FakeUpstream:
    upstream.take(made)
    return upstream


def problems(upstream: FakeUpstream) -> list[str]:
    found = patch_check.check(upstream.series(), upstream.patches, FakeReporter())
    return [str(problem) for problem in found]


def problems_of(
    upstream: FakeUpstream,
    work: Path,
    changes: dict[str, str | None],
    *,
    body: str = "It was wrong.",
    trailers: str = TRAILERS,
) -> list[str]:
    """What is found in one more patch."""
    folder = upstream.checkout(work)
    commit(folder, f"[Core] Bad\n\n{body}\n\n{trailers}", changes)
    upstream.export(folder)
    found = problems(upstream)
    assert all(each.startswith("core-bad.patch: ") for each in found)
    return [each.removeprefix("core-bad.patch: ") for each in found]


def edit(upstream: FakeUpstream, old: bytes, new: bytes) -> None:
    path = upstream.patches / "core-good.patch"
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def test_clean_series_has_no_problems(checked: FakeUpstream) -> None:
    assert problems(checked) == []


def test_empty_series_has_no_problems(upstream: FakeUpstream) -> None:
    assert problems(upstream) == []


def test_patch_outside_the_series(checked: FakeUpstream) -> None:
    (checked.patches / "stray.patch").write_text("")
    assert problems(checked) == ["stray.patch: lies in the folder but is not in the series"]


def test_register_out_of_date(checked: FakeUpstream) -> None:
    readme = checked.patches / "README.md"
    readme.write_text(readme.read_text().replace("| never |", "| soon |"))
    assert problems(checked) == ["README.md: its register is out of date: pdlaunch patch export"]


def test_name_that_does_not_follow_from_the_subject(checked: FakeUpstream) -> None:
    (checked.patches / "core-good.patch").rename(checked.patches / "other.patch")
    (checked.patches / "series").write_text("other.patch\n")
    assert f"other.patch: its subject asks for the name {file_name('core good')}" in problems(
        checked
    )


def test_fuzz_is_not_taken(checked: FakeUpstream) -> None:
    edit(checked, b" def f3():", b" def f_three():")
    (found,) = problems(checked)
    assert found.startswith("core-good.patch: does not apply: error: patch failed: vllm/core.py")


def test_form_that_export_would_change(checked: FakeUpstream) -> None:
    diff = b"\ndiff --git a/vllm/core.py"
    edit(checked, diff, b"\n---\n vllm/core.py | 2 +-\n" + diff)
    assert problems(checked) == [
        "core-good.patch: is not in canonical form: pdlaunch patch export rewrites it"
    ]


def test_missing_trailers(checked: FakeUpstream, tmp_path: Path) -> None:
    trailers = "".join(line for line in TRAILERS.splitlines(True) if "Wire" not in line)
    found = problems_of(checked, tmp_path / "w", {"docs/a.md": "a\n"}, trailers=trailers)
    assert found == ["has no Wire: trailer"]


def test_message_of_trailers_only(checked: FakeUpstream, tmp_path: Path) -> None:
    (found,) = problems_of(checked, tmp_path / "w", {"docs/a.md": "a\n"}, body="")
    assert found.startswith("has no message above its trailers")


@pytest.mark.parametrize(
    ("test", "fault"),
    [
        ("tests/test_core.py", None),
        ("tests/test_core.py::test_zero[x-1]", None),
        ("tests/test_new.py::TestNew::test_method, tests/test_core.py", None),
        ("tests/test_gone.py", "Test: there is no tests/test_gone.py"),
        ("tests/test_core.py::test_gone", "Test: tests/test_core.py has no test_gone"),
        ("tests/test_new.py::TestNew::test_x", "Test: tests/test_new.py has no TestNew::test_x"),
        ("vllm/core.py", "Test: vllm/core.py is not a file under tests/, or a test in one"),
    ],
)
def test_named_tests_must_exist(
    checked: FakeUpstream, tmp_path: Path, test: str, fault: str | None
) -> None:
    trailers = TRAILERS.replace("tests/test_core.py::test_zero", test)
    new = {"tests/test_new.py": SPDX + "class TestNew:\n    def test_method(self): ...\n"}
    found = problems_of(checked, tmp_path / "w", new, trailers=trailers)
    assert found == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"vllm/bad.py": SPDX + "def f(:\n"}, "vllm/bad.py:2 does not compile: invalid syntax"),
        ({"vllm/bad.py": "x = 1\n"}, "vllm/bad.py does not start with the SPDX header"),
        (
            {"vllm/bad.py": f"{SPDX}x = '{'x' * 83}'\n"},
            "vllm/bad.py:2 is longer than 88 columns",
        ),
        (
            {"vllm/core.py": GOOD["vllm/core.py"].replace("    return 9\n", "        return 9\n")},
            "vllm/core.py:36 changes white space only",
        ),
    ],
)
def test_style_of_what_is_added(
    checked: FakeUpstream, tmp_path: Path, changes: dict[str, str | None], fault: str
) -> None:
    assert problems_of(checked, tmp_path / "w", changes) == [fault]


def test_patch_after_one_that_does_not_apply_is_not_blamed(
    checked: FakeUpstream, tmp_path: Path
) -> None:
    folder = checked.checkout(tmp_path / "w")
    checked.add_patch(folder, "[Core] Next", {"vllm/new.py": SPDX + "x = 2\n"})
    edit(checked, b"+x = 1", b"+x = 0")
    edit(checked, b"-    return 3\n", b"-    return 4\n")
    (found,) = problems(checked)
    assert found.startswith("core-good.patch: does not apply")
