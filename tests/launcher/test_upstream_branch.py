"""A patch as a branch for upstream: its needs below it, our trailers gone, nothing touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fake_upstream import SOURCES, SPDX, FakeReporter, FakeUpstream, commit, git, published_in
from pdlaunch import upstream_branch
from pdlaunch.errors import PdError, UsageError
from pdlaunch.series import Patch
from pdlaunch.upstream_branch import UpstreamBranch

CORE = SOURCES["vllm/core.py"]
CORE_WITH_HOOK = CORE + "def wake_engine():\n    return 1\n"
BODY = "Symptom, on prefill: it went wrong.\n\nForwarded: is a word of this paragraph, too."
TRAILERS = """\
Forwarded: no, it is a fake
Origin: us
Wire: no change, which takes
 more than one line to say
Test: {test}
Retire-When: never
Reviewed-by: Another <another@example.org>
Signed-off-by: A Person <person@example.org>
"""


def add(
    upstream: FakeUpstream,
    folder: Path,
    subject: str,
    changes: dict[str, str | None],
    test: str = "tests/test_core.py",
) -> None:
    commit(folder, f"{subject}\n\n{BODY}\n\n{TRAILERS.format(test=test)}", changes)
    upstream.export(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of a series whose patches need each other in each way there is."""
    root = tmp_path_factory.mktemp("made")
    with published_in(root) as upstream:
        folder = upstream.checkout(root / "work")
        hook = {"vllm/core.py": CORE_WITH_HOOK}
        add(upstream, folder, "[Core] Hook", {**hook, "tests/test_hook.py": SPDX + "a = 1\n"})
        add(upstream, folder, "[Core] Module", {"vllm/push/wire.py": SPDX + "SIZE = 2\n"})
        add(upstream, folder, "[Docs] Guide", {"docs/guide.md": "# Guide\n\nmore\n"})
        imports = SPDX + "from vllm.push import wire\n"
        add(upstream, folder, "[NIXL] Importer", {"vllm/push/writer.py": imports})
        calls = SPDX + "def f(engine):\n    engine.wake_engine()\n"
        add(upstream, folder, "[NIXL] Caller", {"vllm/other/caller.py": calls})
        doc = {"docs/guide.md": "# Guide\n\nmore\n\nstill more\n"}
        add(upstream, folder, "[Docs] Guide again", doc)
        tested = {"vllm/old.py": SPDX + "unused = False\n"}
        add(upstream, folder, "[Core] Tested", tested, test="tests/test_hook.py::test_a")
        add(upstream, folder, "[NIXL] Alone", {"vllm/alone.py": SPDX + "alone = True\n"})
        top = {"vllm/push/top.py": SPDX + "import vllm.push.writer\n"}
        add(upstream, folder, "[NIXL] Top", top)
    return root


@pytest.fixture
def branch(upstream: FakeUpstream, made: Path, tmp_path: Path) -> Path:
    upstream.take(made / "upstream" / "patches")
    return shutil.copytree(made / "work", tmp_path / "work")


def write(upstream: FakeUpstream, name: str, folder: Path) -> UpstreamBranch:
    return upstream_branch.write(upstream.series(), name, folder, FakeReporter())


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("core-hook", []),
        ("nixl-alone", []),
        ("nixl-importer", ["core-module"]),
        ("nixl-caller", ["core-hook"]),
        ("docs-guide-again", ["docs-guide"]),
        ("core-tested", ["core-hook"]),
        ("nixl-top", ["core-module", "nixl-importer"]),
    ],
)
def test_a_patch_stands_on_what_it_needs_and_on_nothing_else(
    upstream: FakeUpstream, branch: Path, name: str, needs: list[str]
) -> None:
    done = write(upstream, name, branch)
    assert [need.patch.name for need in done.needs] == [f"{each}.patch" for each in needs]
    subjects = git(branch, "log", "--reverse", "--format=%s", f"base-0.32.0..{done.name}")
    written = [*(need.patch.subject for need in done.needs), done.patch.subject]
    assert subjects.splitlines() == written


def test_needs_say_why(upstream: FakeUpstream, branch: Path) -> None:
    why = {
        name: write(upstream, name, branch).needs[0].why
        for name in ("nixl-importer", "nixl-caller", "core-tested", "docs-guide-again")
    }
    assert why == {
        "nixl-importer": "nixl-importer uses vllm.push.wire",
        "nixl-caller": "nixl-caller uses wake_engine",
        "core-tested": "core-tested uses tests.test_hook",
        "docs-guide-again": "what stands on it does not apply without it",
    }


def test_a_commit_changes_what_its_patch_does(upstream: FakeUpstream, branch: Path) -> None:
    done = write(upstream, "core-hook", branch)
    assert git(branch, "diff", "--name-only", "base-0.32.0", done.name).split() == [
        "tests/test_hook.py",
        "vllm/core.py",
    ]
    assert git(branch, "show", f"{done.name}:vllm/core.py") == CORE_WITH_HOOK


def test_messages_keep_people_and_lose_our_trailers(upstream: FakeUpstream, branch: Path) -> None:
    done = write(upstream, "core-hook", branch)
    assert git(branch, "log", "-1", "--format=%B", done.name).strip() == (
        f"[Core] Hook\n\n{BODY}\n\n"
        "Reviewed-by: Another <another@example.org>\n"
        "Signed-off-by: A Person <person@example.org>"
    )
    people = git(branch, "log", "-1", "--format=%an %ae %cn %ce", done.name)
    assert people.split("\n")[0] == " ".join(["A Person person@example.org"] * 2)


def test_the_same_series_makes_the_same_commits(
    upstream: FakeUpstream, branch: Path, tmp_path: Path
) -> None:
    again = upstream.checkout(tmp_path / "again")
    hashes = {
        git(folder, "rev-parse", write(upstream, "nixl-top", folder).name)
        for folder in (branch, again)
    }
    assert len(hashes) == 1


def test_the_checkout_is_left_as_it_was(upstream: FakeUpstream, branch: Path) -> None:
    def state() -> list[str]:
        return [
            git(branch, *what)
            for what in (("rev-parse", "HEAD"), ("status", "--porcelain"), ("worktree", "list"))
        ]

    before = state()
    write(upstream, "nixl-top", branch)
    assert state() == before


def test_a_clone_of_vllm_will_do(upstream: FakeUpstream, branch: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-tags", str(branch), str(clone))
    git(clone, "tag", "v0.32.0", git(branch, "rev-parse", "base-0.32.0").strip())
    done = write(upstream, "nixl-caller", clone)
    assert done.base == "v0.32.0"
    assert [need.patch.subject for need in done.needs] == ["[Core] Hook"]


def test_an_unknown_patch_is_answered_with_near_ones(upstream: FakeUpstream, branch: Path) -> None:
    with pytest.raises(UsageError, match="no patch nixl-calling") as caught:
        write(upstream, "nixl-calling", branch)
    assert "nixl-caller" in str(caught.value.next_step)
    with pytest.raises(UsageError, match="no patch zzz") as caught:
        write(upstream, "zzz", branch)
    assert caught.value.next_step == "see: pdlaunch patch list"


def test_names_of_files_are_understood(upstream: FakeUpstream, branch: Path) -> None:
    assert write(upstream, "patches/nixl-alone.patch", branch).name == "upstream/nixl-alone"


def test_a_branch_that_is_there_is_kept(upstream: FakeUpstream, branch: Path) -> None:
    write(upstream, "nixl-alone", branch)
    with pytest.raises(UsageError, match="upstream/nixl-alone is there already") as caught:
        write(upstream, "nixl-alone", branch)
    assert "branch -D upstream/nixl-alone" in str(caught.value.next_step)


def test_uncommitted_changes_are_refused(upstream: FakeUpstream, branch: Path) -> None:
    (branch / "vllm/core.py").write_text("changed\n")
    with pytest.raises(UsageError, match=r"uncommitted changes: M vllm/core.py"):
        write(upstream, "nixl-alone", branch)


def test_commits_that_were_not_exported_are_refused(upstream: FakeUpstream, branch: Path) -> None:
    commit(branch, "[Core] Newer\n\ntext\n", {"vllm/newer.py": "x = 1\n"})
    with pytest.raises(UsageError, match="not those of the series") as caught:
        write(upstream, "nixl-alone", branch)
    assert "pdlaunch patch export" in str(caught.value.next_step)


@pytest.mark.parametrize("what", ["nothing", "other"])
def test_a_folder_without_the_base_is_refused(
    upstream: FakeUpstream, branch: Path, tmp_path: Path, what: str
) -> None:
    git(tmp_path, "init", "--quiet", "other")
    with pytest.raises(UsageError, match=r"neither the tag base-0.32.0 nor vLLM's v0.32.0"):
        write(upstream, "nixl-alone", tmp_path / what)


def test_a_series_that_does_not_apply_is_named(
    upstream: FakeUpstream, branch: Path, tmp_path: Path
) -> None:
    git(branch, "branch", "--quiet", "-m", "patches", "elsewhere")
    path = upstream.patches / "docs-guide.patch"
    path.write_bytes(path.read_bytes().replace(b" # Guide", b" # Other"))
    with pytest.raises(PdError, match=r"^docs-guide.patch: does not apply"):
        write(upstream, "docs-guide-again", branch)


def test_a_message_of_trailers_of_ours_alone_keeps_its_body() -> None:
    message = "[Core] One\n\nbody\n\nForwarded: no\nTest: tests/a.py\n tests/b.py\n"
    patch = Patch("core-one.patch", f"From x\nSubject: {message}\ndiff --git a/a b/a\n".encode())
    assert upstream_branch.message_for_upstream(patch) == "[Core] One\n\nbody\n"
