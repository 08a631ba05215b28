"""A patch of the series as a branch for a pull request to vLLM, with what it needs below it.

Adds a branch to a repository; never touches its working tree, its other branches or the series.
"""

from __future__ import annotations

import difflib
import email
import email.policy
import re
import tempfile
from dataclasses import dataclass
from email.utils import parseaddr
from pathlib import Path

from pdlaunch import git, patch_branch, patch_needs
from pdlaunch.console import Reporter
from pdlaunch.errors import PdError, UsageError
from pdlaunch.patch_needs import Need
from pdlaunch.series import REQUIRED_TRAILERS, Patch, Series

# They are about our keeping of the patch. Who signed off, upstream wants to know.
OUR_TRAILERS = frozenset(REQUIRED_TRAILERS) - {"Signed-off-by"}

_PREFIX = "upstream/"


@dataclass(frozen=True)
class UpstreamBranch:
    """What was written: one commit for each need, in this order, and one for the patch on top."""

    name: str
    base: str
    needs: tuple[Need, ...]
    patch: Patch


def write(series: Series, name: str, folder: Path, reporter: Reporter) -> UpstreamBranch:
    """Writes the branch `upstream/NAME` into a checkout of the series or a clone of vLLM.

    The same series and base give the same commits: dates and people are those of the patches.

    Args:
        series: where the patch comes from.
        name: of the patch, with or without `.patch`.
        folder: the repository; it has the base as `base-VERSION`, or as vLLM's tag `vVERSION`.
        reporter: hears of what takes its time.

    Raises:
        UsageError: there is no such patch, or the folder is no such repository, has
            uncommitted changes, or has the branch already.
        PdError: the patch does not apply.
    """
    patch = _find(series, name)
    branch = _PREFIX + patch.name.removesuffix(".patch")
    base = _base(folder, series)
    patch_branch.refuse_unfinished(folder)
    _refuse_unexported(folder, base, series)
    if _exists(folder, f"refs/heads/{branch}"):
        raise UsageError(
            f"the branch {branch} is there already",
            where=str(folder),
            next_step=f"rename it, or delete it: git -C {folder} branch -D {branch}",
        )
    with reporter.work(f"looking for what {patch.name} needs"):
        needs = patch_needs.needed(folder, base, series.patches, patch)
    with reporter.work(f"writing {branch}"):
        tip = _commit(folder, base, [*(need.patch for need in needs), patch])
        git.output(folder, ["branch", "--no-track", branch, tip])
    return UpstreamBranch(branch, base, needs, patch)


def message_for_upstream(patch: Patch) -> str:
    """The patch's message without our trailers."""
    *paragraphs, trailers = re.split(r"\n\s*\n", patch.body)
    kept: list[str] = []
    ours = False
    for line in trailers.splitlines():
        if not line[:1].isspace():
            ours = line.partition(":")[0] in OUR_TRAILERS
        if not ours:
            kept.append(line)
    return "\n\n".join([patch.subject, *paragraphs, "\n".join(kept)]).rstrip() + "\n"


def _find(series: Series, name: str) -> Patch:
    known = {patch.name.removesuffix(".patch"): patch for patch in series.patches}
    wanted = Path(name).name.removesuffix(".patch")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    raise UsageError(
        f"there is no patch {wanted}",
        next_step=f"did you mean {' or '.join(near)}?" if near else "see: pdlaunch patch list",
    )


def _base(folder: Path, series: Series) -> str:
    version = series.upstream.version
    tags = (patch_branch.base_tag(version), f"v{version}")
    for tag in tags:
        if folder.is_dir() and _exists(folder, f"refs/tags/{tag}"):
            return tag
    raise UsageError(
        f"{folder} has neither the tag {tags[0]} nor vLLM's {tags[1]}",
        next_step=f"make a checkout: pdlaunch patch checkout {folder}; or name a clone of vLLM",
    )


def _exists(folder: Path, ref: str) -> bool:
    return git.run(folder, ["rev-parse", "--verify", "--quiet", ref]).returncode == 0


def _refuse_unexported(folder: Path, base: str, series: Series) -> None:
    """What lies on the branch of the series and not in its folder would not be in the branch."""
    head = f"refs/heads/{patch_branch.BRANCH}"
    if not _exists(folder, head) or base != patch_branch.base_tag(series.upstream.version):
        return
    commits = git.output(folder, ["rev-list", "--reverse", f"{base}..{head}"]).decode().split()
    if commits and patch_branch.formatted(folder, commits) != [p.data for p in series.patches]:
        raise UsageError(
            f"the commits of {patch_branch.BRANCH} are not those of the series",
            where=str(folder),
            next_step=f"write them back first: pdlaunch patch export {folder}",
        )


def _commit(folder: Path, base: str, patches: list[Patch]) -> str:
    """The patches as commits on the base, made in a working tree of their own; the last one."""
    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp) / "tree"
        git.output(folder, ["worktree", "add", "--quiet", "--detach", str(tree), base])
        try:
            for patch in patches:
                result = patch_branch.apply(tree, [_for_upstream(patch)], committer=_author(patch))
                if result.returncode:
                    raise PdError(
                        f"{patch.name}: does not apply: {git.complaint(result)}", where=str(folder)
                    )
            return git.output(tree, ["rev-parse", "HEAD"]).decode().strip()
        finally:
            git.run(folder, ["worktree", "remove", "--force", str(tree)])


def _for_upstream(patch: Patch) -> Patch:
    """The same patch with the message for upstream: what `git am` reads."""
    head, _, rest = patch.text.partition("\n\n")
    diff = rest[rest.index("\ndiff --git ") + 1 :]
    _, _, body = message_for_upstream(patch).partition("\n\n")
    text = f"{head}\n\n{body}---\n{diff}"
    return Patch(patch.name, text.encode("utf-8", errors="surrogateescape"))


def _author(patch: Patch) -> tuple[str, str]:
    message = email.message_from_bytes(patch.data, policy=email.policy.default)
    return parseaddr(str(message["From"]))
