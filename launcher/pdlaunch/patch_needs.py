"""Which earlier patches of the series a patch needs. Reads a repository; never changes it.

A patch needs what its diff stands on, and what its Python imports or names of theirs. Both are
told from the patches alone, so that nobody has to keep a list.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlaunch import git
from pdlaunch.errors import PdError
from pdlaunch.series import Patch

_PACKAGE = "vllm/"


@dataclass(frozen=True)
class Need:
    """An earlier patch, and what needs it."""

    patch: Patch
    why: str


def needed(folder: Path, base: str, patches: Sequence[Patch], patch: Patch) -> tuple[Need, ...]:
    """The earlier patches that a patch needs, in their order: none of them could be left out.

    Args:
        folder: a repository that has the base.
        base: the commit that the series applies to.
        patches: the whole series.
        patch: one of them.

    Raises:
        PdError: it, or one before it, does not apply.
    """
    earlier = patches[: patches.index(patch)]
    uses = _uses(folder, base, (*earlier, patch))
    with tempfile.TemporaryDirectory() as tmp:
        trial = _Trial(folder, base, Path(tmp))
        kept = [*earlier, patch]
        needs: list[Need] = []
        # From the last: whoever needs a patch has then been kept or left out already.
        for each in reversed(earlier):
            without = [other for other in kept if other is not each]
            above = [*(need.patch for need in reversed(needs)), patch]
            users = {other.name: uses[other.name].get(each.name) for other in above}
            if user := next((name for name, used in users.items() if used), None):
                needs.append(Need(each, f"{_short(user)} uses {users[user]}"))
            elif not _same_file(each, above) or trial.applies(without):
                kept = without
            else:
                needs.append(Need(each, "what stands on it does not apply without it"))
    return tuple(reversed(needs))


def _same_file(patch: Patch, others: Iterable[Patch]) -> bool:
    paths = {each.path for each in patch.touched}
    return any(each.path in paths for other in others for each in other.touched)


def _short(name: str) -> str:
    return name.removesuffix(".patch")


@dataclass(frozen=True)
class _Trial:
    """Applies patches to an index of its own, without fuzz."""

    folder: Path
    base: str
    scratch: Path

    def applies(self, patches: Sequence[Patch]) -> bool:
        index = {"GIT_INDEX_FILE": str(self.scratch / "index")}
        git.output(self.folder, ["read-tree", self.base], extra_env=index)
        files = [self.scratch / patch.name for patch in patches]
        for file, patch in zip(files, patches, strict=True):
            if not file.exists():
                file.write_bytes(patch.data)
        call = ["apply", "--cached", *map(str, files)]
        return git.run(self.folder, call, extra_env=index).returncode == 0


def _uses(folder: Path, base: str, patches: Sequence[Patch]) -> Mapping[str, Mapping[str, str]]:
    """By patch: the earlier ones that its Python needs, and a module or name of theirs in it.

    A name counts that an earlier patch gives to something in the package, and that the base has
    nowhere there: a hook, a field, a class. Names of tests are their own.
    """
    known = _words_of(folder, base)
    uses: dict[str, dict[str, str]] = {}
    origins: dict[str, str] = {}  # a module or a new name to the patch that brought it
    for patch, change in zip(patches, _changes(folder, base, patches), strict=True):
        words = sorted(change.words & origins.keys())
        uses[patch.name] = {origins[word]: word for word in words}
        for word in (change.defined - known) | change.modules:
            origins.setdefault(word, patch.name)
    return uses


@dataclass(frozen=True)
class _Change:
    """What a patch adds to the Python that it touches."""

    modules: frozenset[str]  # dotted, of the files that it creates
    defined: frozenset[str]  # names that the package has in more places than before
    words: frozenset[str]  # all names that it writes, and modules that it imports or tests


def _changes(folder: Path, base: str, patches: Sequence[Patch]) -> Iterator[_Change]:
    with tempfile.TemporaryDirectory() as tmp:
        tree = Path(tmp)
        paths = {each.path for patch in patches for each in patch.touched}
        known = git.output(folder, ["ls-tree", "-r", "-z", "--name-only", base]).decode()
        for path in sorted(paths & set(known.split("\0"))):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(git.output(folder, ["show", f"{base}:{path}"]))
        for patch in patches:
            sources = [each.path for each in patch.touched if each.path.endswith(".py")]
            before = {path: _names(tree / path) for path in sources}
            result = git.run(tree, ["apply", "-"], input_bytes=patch.data)
            if result.returncode:
                raise PdError(
                    f"{patch.name}: does not apply: {git.complaint(result)}",
                    where=f"{base} in {folder}",
                    next_step="see: pdlaunch patch check",
                )
            after = {path: _names(tree / path) for path in sources}
            defined: set[str] = set()
            words: set[str] = set()
            for path in sources:
                words |= (after[path].words - before[path].words).keys()
                if path.startswith(_PACKAGE):
                    defined |= (after[path].defined - before[path].defined).keys()
            yield _Change(
                modules=frozenset(_module(e.path) for e in patch.touched if e.added),
                defined=frozenset(defined),
                words=frozenset(words) | {_module(t.partition("::")[0]) for t in patch.tests},
            )


def _module(path: str) -> str:
    """`a/b.py` as `a.b`; a package is named like its folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class _Names:
    """How often a file defines and writes each name."""

    defined: Counter[str]
    words: Counter[str]


def _names(path: Path) -> _Names:
    tree = ast.parse(path.read_bytes()) if path.is_file() else ast.Module([], [])
    nodes = list(ast.walk(tree))
    return _Names(
        Counter(name for node in nodes for name in _defined(node)),
        Counter(name for node in nodes for name in _written(node)),
    )


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name


def _written(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.keyword(arg=str(name)):
            yield name
        case ast.Constant(value=str(text)) if text.isidentifier():
            yield text  # getattr, mocks and the like
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases)
        case ast.ImportFrom(module=str(module), names=aliases):
            yield module
            for alias in aliases:
                yield alias.name
                yield f"{module}.{alias.name}"
        case _:
            yield from _defined(node)


def _words_of(folder: Path, base: str) -> frozenset[str]:
    """Every word in the Python of the base's package."""
    # One archive: a process a file would take minutes.
    content = git.output(folder, ["archive", base, "--", f"{_PACKAGE}*.py"])
    return frozenset(word.decode() for word in re.findall(rb"[A-Za-z_]\w*", content))
