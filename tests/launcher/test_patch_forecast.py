"""The series on another vLLM: which patch fails, at which hunk, and what upstream has already."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_upstream import SOURCES, SPDX, FakeReporter, FakeUpstream, published_in, sdist
from pdlaunch import packages, patch_forecast
from pdlaunch.errors import PdError, UsageError
from pdlaunch.pip_config import Sources

CORE = SOURCES["vllm/core.py"]
TWO_HUNKS = CORE.replace("return 3\n", "return 33\n").replace("return 15\n", "return 155\n")
PATCHES = (
    ("[Core] Two hunks", {"vllm/core.py": TWO_HUNKS}),
    ("[Core] After it", {"vllm/core.py": TWO_HUNKS.replace("return 33\n", "return 34\n")}),
    ("[NIXL] New file", {"vllm/push.py": SPDX + "SIZE = 1\n"}),
    ("[Core] Gone", {"vllm/old.py": SPDX + "unused = False\n"}),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    with published_in(root) as upstream:
        folder = upstream.checkout(root / "work")
        for subject, changes in PATCHES:
            upstream.add_patch(folder, subject, dict(changes))
    return upstream.patches


@pytest.fixture
def series_of_four(upstream: FakeUpstream, made: Path) -> FakeUpstream:
    upstream.take(made)
    return upstream


def publish(upstream: FakeUpstream, version: str, changes: dict[str, str | None]) -> None:
    sources = {**SOURCES, **changes}
    kept = {name: text for name, text in sources.items() if text is not None}
    (upstream.published / f"vllm-{version}.tar.gz").write_bytes(sdist(version, kept))


def found(upstream: FakeUpstream, changes: dict[str, str | None]) -> list[str]:
    publish(upstream, "0.33.0", changes)
    series = upstream.series()
    source = patch_forecast.source_of(series, "0.33.0")
    outcomes = patch_forecast.forecast(series, source, FakeReporter())
    assert [each.patch for each in outcomes] == list(series.patches)
    return [str(problem) for each in outcomes for problem in each.problems]


def test_a_vllm_that_changed_elsewhere_takes_the_series(series_of_four: FakeUpstream) -> None:
    assert found(series_of_four, {"vllm/core.py": f"{CORE}\n\nmore = 1\n"}) == []


def test_lines_that_moved_are_no_failure(series_of_four: FakeUpstream) -> None:
    moved = CORE.replace(SPDX, f"{SPDX}import os\n\n\n")
    assert found(series_of_four, {"vllm/core.py": moved}) == []


def test_the_hunk_that_fails_is_named_and_the_rest_is_kept(series_of_four: FakeUpstream) -> None:
    changed = CORE.replace("return 15\n", "return 1 + 14\n")
    line = TWO_HUNKS.splitlines().index("    return 155") + 1 - 3
    assert found(series_of_four, {"vllm/core.py": changed}) == [
        f"core-two-hunks.patch: vllm/core.py:{line}: hunk 2 of 2 does not apply"
    ]


def test_a_failure_that_another_may_have_caused_says_so(series_of_four: FakeUpstream) -> None:
    changed = CORE.replace("return 3\n", "return 1 + 2\n")
    first, second = found(series_of_four, {"vllm/core.py": changed})
    assert first.startswith("core-two-hunks.patch: vllm/core.py:")
    assert first.endswith("hunk 1 of 2 does not apply")
    assert second.startswith("core-after-it.patch: vllm/core.py:")
    assert second.endswith("does not apply, as may follow from core-two-hunks.patch")


def test_a_patch_that_upstream_has_is_to_be_dropped(series_of_four: FakeUpstream) -> None:
    assert found(series_of_four, {"vllm/core.py": TWO_HUNKS}) == [
        "core-two-hunks.patch: upstream has it: drop it"
    ]


def test_a_hunk_that_upstream_has_is_told_from_one_that_fails(
    series_of_four: FakeUpstream,
) -> None:
    changed = TWO_HUNKS.replace("return 155\n", "return 1 + 14\n")
    first, second = found(series_of_four, {"vllm/core.py": changed})
    assert first.endswith("hunk 1 of 2 is in upstream already")
    assert second.endswith("hunk 2 of 2 does not apply")


def test_files_that_went_or_came_are_named(series_of_four: FakeUpstream) -> None:
    assert found(series_of_four, {"vllm/old.py": None, "vllm/push.py": SPDX + "other = 1\n"}) == [
        "nixl-new-file.patch: vllm/push.py: upstream has a file of that name",
        "core-gone.patch: vllm/old.py: is not there any more",
    ]


def test_a_test_that_went_is_named_though_the_patch_applies(series_of_four: FakeUpstream) -> None:
    problems = found(series_of_four, {"tests/test_core.py": SPDX})
    assert problems[0] == "core-two-hunks.patch: Test: tests/test_core.py has no test_zero"
    assert len(problems) == len(PATCHES)


def test_the_newest_is_the_highest_release(series_of_four: FakeUpstream) -> None:
    for version in ("0.9.1", "0.33.1", "0.34.0rc1"):
        publish(series_of_four, version, {})
    (series_of_four.published / "vllm-notes.tar.gz").touch()
    series = series_of_four.series()
    assert patch_forecast.source_of(series, "newest").filename == "vllm-0.33.1.tar.gz"
    assert patch_forecast.source_of(series, "0.34.0rc1").filename == "vllm-0.34.0rc1.tar.gz"


@pytest.mark.parametrize("version", ["0.99.0", "latest"])
def test_a_version_that_is_nowhere_is_answered_with_the_last_ones(
    series_of_four: FakeUpstream, version: str
) -> None:
    with pytest.raises(UsageError, match=f"no source distribution of vLLM {version}") as caught:
        patch_forecast.source_of(series_of_four.series(), version)
    assert caught.value.next_step == "the last ones: 0.32.0"


def test_versions_of_an_index_are_those_with_a_hash_and_not_withdrawn(tmp_path: Path) -> None:
    listing = tmp_path / "vllm" / "index.html"
    listing.parent.mkdir()
    digest = "#sha256=" + "0" * 64
    listing.write_text(
        f'<a href="vllm-0.1.0.tar.gz{digest}">vllm-0.1.0.tar.gz</a>'
        f'<a href="vllm-0.2.0.tar.gz{digest}" data-yanked="broken">vllm-0.2.0.tar.gz</a>'
        '<a href="vllm-0.3.0.tar.gz">vllm-0.3.0.tar.gz</a>'
        f'<a href="vllm-0.4.0-py3-none-any.whl{digest}">vllm-0.4.0-py3-none-any.whl</a>'
    )
    for sources in (
        Sources((), (str(tmp_path),)),
        Sources((str(listing),), ()),
    ):
        found = packages.published_sdists("vllm", sources)
        assert [str(version) for version in found] == ["0.1.0"]
        (file,) = found.values()
        assert (file.filename, file.sha256) == ("vllm-0.1.0.tar.gz", "0" * 64)


def test_no_source_at_all_is_explained() -> None:
    with pytest.raises(PdError, match="no source distribution") as caught:
        packages.published_sdists("vllm", Sources((), ("http://127.0.0.1:9/simple/",)))
    assert "127.0.0.1:9" in str(caught.value.where)
