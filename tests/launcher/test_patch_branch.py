"""The series as a branch and back: the same bytes whatever git is configured to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fake_upstream import SOURCES, TRAILERS, FakeReporter, FakeUpstream, commit, git, published_in
from pdlaunch import patch_branch
from pdlaunch.errors import PdError, UsageError

HOSTILE_CONFIG = """
[am]
    threeWay = true
    keepcr = false
[apply]
    whitespace = fix
    ignoreWhitespace = change
[color]
    ui = always
    diff = always
[commit]
    gpgSign = true
    template = /nonexistent
[core]
    autocrlf = true
    abbrev = 5
    attributesFile = {attributes}
    hooksPath = {hooks}
    quotePath = false
    safecrlf = true
[diff]
    noprefix = true
    context = 0
    interHunkContext = 9
    mnemonicPrefix = true
    renames = copies
    algorithm = patience
    indentHeuristic = false
    suppressBlankEmpty = true
    orderFile = /nonexistent
    external = false
    srcPrefix = x/
[format]
    attach = true
    coverLetter = true
    signOff = true
    subjectPrefix = HOSTILE
    numbered = true
    suffix = .eml
    thread = deep
    headers = "X-Hostile: yes\\n"
    to = somebody@example.org
    from = somebody@example.org
    pretty = oneline
    useAutoBase = true
    encodeEmailHeaders = false
    signature = hostile
    mboxrd = true
    notes = true
    filenameMaxLength = 10
[gpg]
    program = /nonexistent
[i18n]
    commitEncoding = ISO-8859-1
    logOutputEncoding = ISO-8859-1
[mailinfo]
    scissors = true
[rebase]
    autoStash = true
[user]
    useConfigOnly = true
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with three patches exported from it."""
    root = tmp_path_factory.mktemp("made")
    core = SOURCES["vllm/core.py"]
    long_subject = "Ümläuts in a subject that is long enough to be folded over more than one line"
    with published_in(root) as upstream:
        folder = upstream.checkout(root / "work")
        upstream.add_patch(
            folder,
            "[NIXL] Harden handshake listener",
            {"vllm/core.py": core.replace("return 3", "return 33"), "vllm/new.py": "x = 1\n"},
        )
        upstream.add_patch(
            folder,
            f"[Core] {long_subject}",
            {"vllm/old.py": None, "vllm/crlf.py": SOURCES["vllm/crlf.py"].replace("two", "deux")},
        )
        upstream.add_patch(
            folder, "[Docs] Explain push mode", {"docs/guide.md": "# Guide\n\ntext \n"}
        )
    return root


@pytest.fixture
def branch(upstream: FakeUpstream, made: Path, tmp_path: Path) -> Path:
    """A copy of that checkout, and its patches in the test's own upstream."""
    upstream.take(made / "upstream" / "patches")
    return shutil.copytree(made / "work", tmp_path / "work")


def make_hostile(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = home / "hooks"
    hooks.mkdir(parents=True)
    for name in ("applypatch-msg", "commit-msg", "pre-applypatch", "pre-commit"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    attributes = home / ".config" / "git" / "attributes"
    attributes.parent.mkdir(parents=True)
    attributes.write_text("*.py diff=python text eol=crlf\n*.md binary\n")
    config = HOSTILE_CONFIG.format(attributes=attributes, hooks=hooks)
    (home / ".gitconfig").write_text(config)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(home / ".gitconfig"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=0")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.context")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "1")
    monkeypatch.setenv("LANGUAGE", "de")


def test_names_and_order_follow_from_the_commits(upstream: FakeUpstream, branch: Path) -> None:
    assert [patch.name for patch in upstream.series().patches] == [
        "nixl-harden-handshake-listener.patch",
        "core-umlauts-in-a-subject-that-is-long-enough-to-be-folded-over-more-than-one-line.patch",
        "docs-explain-push-mode.patch",
    ]


def test_export_after_checkout_is_byte_identical(
    upstream: FakeUpstream, branch: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in upstream.patches.iterdir()}
    done = upstream.export(upstream.checkout(tmp_path / "again"))
    assert {path.name: path.read_bytes() for path in upstream.patches.iterdir()} == before
    assert not done.written
    assert not done.removed


def test_linked_worktree_exports_the_same(
    upstream: FakeUpstream, branch: Path, tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    git(branch, "worktree", "add", "--quiet", "--detach", str(linked))
    assert patch_branch.formatted(linked, ["HEAD"]) == patch_branch.formatted(branch, ["HEAD"])


def test_hostile_git_settings_change_neither_branch_nor_patches(
    upstream: FakeUpstream, branch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = git(upstream.checkout(tmp_path / "calm"), "rev-list", "HEAD")
    make_hostile(tmp_path / "home", monkeypatch)
    hostile = upstream.checkout(tmp_path / "hostile")
    assert git(hostile, "rev-list", "HEAD") == commits
    # The repository's own config and attributes are hostile too.
    with (hostile / ".git" / "config").open("a") as config:
        config.write((tmp_path / "home" / ".gitconfig").read_text())
    (hostile / ".git" / "info").mkdir(exist_ok=True)
    (hostile / ".git" / "info" / "attributes").write_text("*.py diff=python\n")
    before = {path.name: path.read_bytes() for path in upstream.patches.iterdir()}
    upstream.export(hostile)
    assert {path.name: path.read_bytes() for path in upstream.patches.iterdir()} == before


def test_checkout_inside_another_repository_holds_the_whole_tree(
    upstream: FakeUpstream, branch: Path, tmp_path: Path
) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    folder = upstream.checkout(outer / "build" / "vllm")
    assert "return 33" in (folder / "vllm/core.py").read_text()
    assert git(folder, "ls-files").split() == sorted(
        ({*SOURCES} | {"vllm/new.py"}) - {"vllm/old.py"}
    )


def test_checkout_leaves_line_ends_alone(upstream: FakeUpstream, branch: Path) -> None:
    assert b"deux = 2\r\n" in (branch / "vllm/crlf.py").read_bytes()


def test_dropped_and_reordered_commits_are_exported(upstream: FakeUpstream, branch: Path) -> None:
    order = upstream.patches / "series"
    order.write_text("# engine\n" + order.read_text().replace("docs-", "# docs\ndocs-"))
    third = git(branch, "rev-parse", "HEAD").strip()
    git(branch, "reset", "--quiet", "--hard", "HEAD~2")
    first = git(branch, "rev-parse", "HEAD").strip()
    git(branch, "reset", "--quiet", "--hard", "HEAD~1")
    git(branch, "cherry-pick", third)
    git(branch, "cherry-pick", first)
    done = upstream.export(branch)
    assert [patch.name for patch in upstream.series().patches] == [
        "docs-explain-push-mode.patch",
        "nixl-harden-handshake-listener.patch",
    ]
    assert [name[:8] for name in done.removed] == ["core-uml"]


def test_series_comments_stay_above_their_patch() -> None:
    text = "# first\n\n# a\na.patch\nb.patch\n# c\nc.patch\n# end\n"
    assert patch_branch.reordered(text, ["a.patch", "n.patch", "c.patch"]) == (
        "# first\n\n# a\na.patch\nn.patch\n# c\nc.patch\n# end\n"
    )


def test_export_refuses_uncommitted_changes(upstream: FakeUpstream, branch: Path) -> None:
    (branch / "vllm/core.py").write_text("changed\n")
    with pytest.raises(UsageError, match=r"uncommitted changes: M vllm/core.py"):
        upstream.export(branch)


def test_export_refuses_merges(upstream: FakeUpstream, branch: Path) -> None:
    git(branch, "checkout", "--quiet", "-b", "side", "HEAD~1")
    commit(branch, f"[Core] Side\n\ntext\n\n{TRAILERS}", {"vllm/side.py": "s = 1\n"})
    git(branch, "merge", "--quiet", "--no-edit", "patches")
    with pytest.raises(UsageError, match="straight line"):
        upstream.export(branch)


def test_export_refuses_two_commits_with_one_name(upstream: FakeUpstream, branch: Path) -> None:
    commit(branch, f"[Docs] Explain push mode!\n\ntext\n\n{TRAILERS}", {"docs/more.md": "x\n"})
    with pytest.raises(PdError, match="docs-explain-push-mode"):
        upstream.export(branch)


def test_export_refuses_a_folder_that_is_no_checkout(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    git(tmp_path, "init", "--quiet", "other")
    (tmp_path / "other" / "sub").mkdir()
    for folder in ("other", "other/sub", "nothing"):
        with pytest.raises(UsageError, match="pdlaunch patch checkout"):
            upstream.export(tmp_path / folder)


def test_checkout_refuses_a_folder_with_content(upstream: FakeUpstream, branch: Path) -> None:
    with pytest.raises(UsageError, match="not empty"):
        upstream.checkout(branch)


def test_checkout_names_the_patch_that_does_not_apply(
    upstream: FakeUpstream, branch: Path, tmp_path: Path
) -> None:
    patch = next(upstream.patches.glob("core-uml*"))
    patch.write_bytes(patch.read_bytes().replace(b"-two", b"-six"))
    with pytest.raises(PdError, match=r"(?s)core-uml.*does not apply.*git am --continue") as caught:
        patch_branch.checkout(upstream.series(), tmp_path / "broken", FakeReporter())
    assert caught.value.where == str(tmp_path / "broken")
