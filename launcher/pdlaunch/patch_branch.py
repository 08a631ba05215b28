"""The series as an ordinary git branch, and back: one base commit and one commit a patch.

Checking out twice gives the same commits; exporting what was checked out gives the same bytes.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlaunch import git, packages, register, sdist
from pdlaunch.console import Reporter
from pdlaunch.errors import PdError, UsageError
from pdlaunch.series import Patch, Series, file_name, names_in_order
from pdlaunch.upstream import Upstream

BRANCH = "patches"

# No person made the base commit, and a fixed date makes it the same commit everywhere.
_IDENTITY = {
    "GIT_AUTHOR_NAME": "pdlaunch",
    "GIT_AUTHOR_EMAIL": "pdlaunch@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "pdlaunch",
    "GIT_COMMITTER_EMAIL": "pdlaunch@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00+0000",
}
_AM = (
    "am",
    "--quiet",
    "--keep-non-patch",  # plain `git am` strips [NIXL] and the like from subjects
    "--keep-cr",
    "--no-scissors",
    "--committer-date-is-author-date",
)
_FORMAT = (
    "format-patch",
    "--stdout",
    "-1",
    "--zero-commit",
    "--full-index",
    "--no-signature",
    "--no-stat",
    "--keep-subject",
    "--unified=3",
    "--diff-algorithm=myers",
    "--no-renames",
    "--no-color",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)
# What the user's own git must not do to these files, whatever it is configured to do.
_LOCAL_CONFIG = {"core.autocrlf": "false", "core.safecrlf": "false", "commit.gpgSign": "false"}


@dataclass(frozen=True)
class Export:
    """What an export did to the folder of patches."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: tuple[str, ...]


def base_tag(version: str) -> str:
    return f"base-{version}"


def checkout(
    series: Series, folder: Path, reporter: Reporter, *, with_patches: bool = True
) -> None:
    """Makes a repository of the upstream source with the series on a branch."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} is not empty",
            next_step="export what is in it and remove it, or name another folder",
        )
    archive = packages.fetch(series.upstream.sdist, reporter)
    with reporter.work(f"unpacking vLLM {series.upstream.version}"):
        sdist.unpack(archive, folder)
    with reporter.work("committing the base"):
        commit_base(folder, series.upstream.version)
    if with_patches and series.patches:
        with reporter.work(f"applying {len(series.patches)} patches"):
            result = apply(folder, series.patches)
        if result.returncode:
            raise PdError(
                f"{_stopped_at(folder, series.patches)}: does not apply: {git.complaint(result)}",
                where=str(folder),
                next_step="resolve it there, run git am --continue, then pdlaunch patch export",
            )


def commit_base(folder: Path, version: str) -> None:
    """Turns an unpacked tree into a repository with one commit."""
    git.output(folder, ["init", "--quiet", "--template=", f"--initial-branch={BRANCH}"])
    for key, value in _LOCAL_CONFIG.items():
        git.output(folder, ["config", key, value])
    # Forced, for upstream ignores files that its own source distribution holds.
    git.output(folder, ["add", "--all", "--force", "."])
    git.output(
        folder,
        ["commit", "--quiet", "--allow-empty", "--no-verify", "-m", f"vLLM {version} as published"],
        extra_env=_IDENTITY,
    )
    git.output(folder, ["tag", base_tag(version)])


def apply(
    folder: Path, patches: Sequence[Patch], committer: tuple[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Commits patches onto the branch, without fuzz; stops at the first that does not apply.

    Args:
        committer: name and address, by default nobody's.
    """
    identity = dict(_IDENTITY)
    if committer:
        identity["GIT_COMMITTER_NAME"], identity["GIT_COMMITTER_EMAIL"] = committer
    with tempfile.TemporaryDirectory() as tmp:
        files = [Path(tmp) / patch.name for patch in patches]
        for file, patch in zip(files, patches, strict=True):
            file.write_bytes(patch.data)
        return git.run(folder, [*_AM, *map(str, files)], extra_env=identity)


def formatted(folder: Path, commits: Sequence[str]) -> list[bytes]:
    """The commits as patches in canonical form.

    They are formatted in a scratch repository that borrows the objects: the folder's own
    config, attributes, hooks and replaced objects cannot reach it.
    """
    # Names mean nothing in the scratch repository: hashes do.
    hashes = _line(folder, ["rev-parse", *commits]).splitlines()
    # Not always in the git directory: linked worktrees share those of the main one.
    objects = folder / _line(folder, ["rev-parse", "--git-path", "objects"])
    with tempfile.TemporaryDirectory() as tmp:
        scratch = Path(tmp)
        git.output(scratch, ["init", "--quiet", "--bare", "--template=", "."])
        (scratch / "objects" / "info").mkdir(exist_ok=True)
        (scratch / "objects" / "info" / "alternates").write_text(
            f"{objects.resolve()}\n", encoding="utf-8"
        )
        return [git.output(scratch, [*_FORMAT, commit]) for commit in hashes]


def export(upstream: Upstream, folder: Path, patches: Path) -> Export:
    """Writes the branch's commits back as patches, with the order and the register.

    What lies in the folder of patches before may be broken: only the base is read of it.
    """
    commits = _commits(folder, base_tag(upstream.version))
    made = [_named(data) for data in formatted(folder, commits)]
    names = [patch.name for patch in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PdError(f"two commits have the subject that makes {twice[0]}", where=str(folder))

    written: list[str] = []
    unchanged: list[str] = []
    for patch in made:
        same = _content(patches / patch.name) == patch.data
        (unchanged if same else written).append(patch.name)
        if not same:
            (patches / patch.name).write_bytes(patch.data)
    removed = sorted({path.name for path in patches.glob("*.patch")} - set(names))
    for name in removed:
        (patches / name).unlink()
    order = patches / "series"
    order.write_text(reordered(order.read_text(encoding="utf-8"), names), encoding="utf-8")
    register.write(patches / "README.md", tuple(made))
    return Export(tuple(written), tuple(removed), tuple(unchanged))


def reordered(text: str, names: Sequence[str]) -> str:
    """A `series` file with other names: comments stay above the patch that they stood above."""
    above: dict[str, list[str]] = {}
    pending: list[str] = []
    for line in text.splitlines():
        if (name := "".join(names_in_order(line))) in names:
            above[name], pending = pending, []
        elif not name:
            pending.append(line)
    lines = [line for name in names for line in (*above.get(name, ()), name)]
    # A file of comments only keeps them on top; else what stood at the end stays there.
    return "\n".join([*lines, *pending] if above else [*pending, *lines]) + "\n"


def _named(data: bytes) -> Patch:
    unnamed = Patch("a new patch", data)
    return Patch(file_name(unnamed.subject), data)


def _commits(folder: Path, base: str) -> list[str]:
    named = ["rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"]
    if not folder.is_dir() or git.run(folder, named).returncode:
        raise UsageError(
            f"{folder} is not a checkout of the series: it has no tag {base}",
            next_step=f"make one: pdlaunch patch checkout {folder}",
        )
    refuse_unfinished(folder)
    if git.run(folder, ["merge-base", "--is-ancestor", base, "HEAD"]).returncode:
        raise UsageError(f"HEAD does not stand on {base}", where=str(folder))
    merges = _line(folder, ["rev-list", "--merges", "--max-count=1", f"{base}..HEAD"])
    if merges:
        raise UsageError(
            f"{merges[:12]} is a merge; a series is a straight line", where=str(folder)
        )
    return git.output(folder, ["rev-list", "--reverse", f"{base}..HEAD"]).decode().split()


def refuse_unfinished(folder: Path) -> None:
    """Raises a UsageError where somebody is in the middle of something."""
    git_dir = Path(_line(folder, ["rev-parse", "--absolute-git-dir"]))
    if any((git_dir / name).exists() for name in ("rebase-apply", "rebase-merge", "MERGE_HEAD")):
        raise UsageError(
            "a rebase, merge or `git am` is not finished",
            where=str(folder),
            next_step="finish or abort it, then export",
        )
    if dirty := git.output(folder, ["status", "--porcelain"]).decode().splitlines():
        raise UsageError(
            f"there are uncommitted changes: {dirty[0].strip()}"
            + (f" and {len(dirty) - 1} more" if len(dirty) > 1 else ""),
            where=str(folder),
            next_step="commit them (git commit --amend, or --fixup and rebase --autosquash)",
        )


def _stopped_at(folder: Path, patches: Sequence[Patch]) -> str:
    next_file = folder / ".git" / "rebase-apply" / "next"
    try:
        return patches[int(next_file.read_text(encoding="utf-8")) - 1].name
    except (OSError, ValueError, IndexError):
        return "the series"


def _line(folder: Path, args: Sequence[str]) -> str:
    return git.output(folder, args).decode().strip()


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
