"""Engine environments: a virtual environment per variant and series, in the user's cache.

Built in place, for its scripts hold its path; a marker written last tells a finished one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from pdlaunch import engine_install
from pdlaunch.console import Reporter
from pdlaunch.errors import PdError, UsageError
from pdlaunch.paths import cache_dir
from pdlaunch.series import Series
from pdlaunch.series import load as load_series
from pdlaunch.upstream import VARIANTS, Variant
from pdlaunch.wheel import build_wheel, version_of

_MARKER = "engine.json"


@dataclass(frozen=True)
class Engine:
    """An engine environment, built or planned."""

    variant: Variant
    root: Path
    python: Path
    vllm: Path
    router: Path
    version: str
    series_hash: str

    @property
    def name(self) -> str:
        return self.root.name


@dataclass(frozen=True)
class Installed:
    """An environment found in the cache, whatever series it was built from."""

    name: str
    root: Path
    complete: bool
    current: bool


def planned(variant: Variant) -> Engine:
    """Where the engine of a variant is or would be. Touches nothing."""
    return _engine(variant, load_series())


def is_ready(engine: Engine) -> bool:
    """Whether the environment is complete, by its marker and programs alone: milliseconds."""
    return _marker_of(engine.root) == _marker(engine) and all(
        os.access(program, os.X_OK) for program in (engine.python, engine.vllm, engine.router)
    )


def ensure(variant: Variant, reporter: Reporter) -> Engine:
    """The engine of a variant, built when it is missing or broken."""
    series = load_series()
    engine = _engine(variant, series)
    if not is_ready(engine):
        with _locked(engine.root, reporter):
            if not is_ready(engine):
                _build(engine, series, reporter)
    return engine


def repair(variant: Variant, reporter: Reporter) -> Engine:
    """Checks an engine by importing what it needs, and builds it again when that fails."""
    series = load_series()
    engine = _engine(variant, series)
    with _locked(engine.root, reporter):
        if is_ready(engine):
            with reporter.work(f"checking {engine.name}"):
                complaint = engine_install.complaint(engine.python, engine.version)
            if complaint is None:
                return engine
            reporter.warning(f"{engine.name} is broken: {complaint}")
        _build(engine, series, reporter)
    return engine


def installed() -> list[Installed]:
    """The environments in the cache, by name."""
    current = {planned(variant).root for variant in VARIANTS}
    found = [root for root in _engines_dir().glob("*-py*") if root.is_dir()]
    return [
        Installed(root.name, root, _marker_of(root) is not None, root in current)
        for root in sorted(found)
    ]


def remove(name: str, reporter: Reporter) -> None:
    """Removes an environment, unless a process runs from it."""
    root = _engines_dir() / name
    if root not in {each.root for each in installed()}:
        raise UsageError(
            f"there is no engine {name!r}", next_step="see what there is: pdlaunch engine list"
        )
    with _locked(root, reporter):
        users = [str(pid) for pid in _processes_from(root)]
        if users:
            raise PdError(
                f"{name} is in use",
                where=f"process {', '.join(users)}",
                next_step="take the deployment down first: pdlaunch down",
            )
        # The marker goes first: a removal cut short must not leave a complete-looking rest.
        (root / _MARKER).unlink(missing_ok=True)
        shutil.rmtree(root)


def _engines_dir() -> Path:
    return cache_dir() / "engines"


def _engine(variant: Variant, series: Series) -> Engine:
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    root = _engines_dir() / f"{variant}-{series.hash[:12]}-{python}"
    return Engine(
        variant=variant,
        root=root,
        python=root / "bin" / "python",
        vllm=root / "bin" / "vllm",
        router=root / "bin" / "vllm-router",
        version=version_of(series, variant),
        series_hash=series.hash,
    )


def _build(engine: Engine, series: Series, reporter: Reporter) -> None:
    shutil.rmtree(engine.root, ignore_errors=True)
    wheel = build_wheel(engine.variant, cache_dir() / "wheels", reporter, series=series)
    reporter.status(f"building the {engine.variant} engine in {engine.root}")
    engine_install.install(engine.root, engine.variant, wheel, reporter)
    with reporter.work("checking the engine"):
        complaint = engine_install.complaint(engine.python, engine.version)
    if complaint is not None:
        raise PdError(
            f"the engine was installed but does not work: {complaint}",
            where=str(engine_install.log_file(engine.root)),
            next_step=f"build it again: pdlaunch engine repair {engine.variant}",
        )
    part = engine.root / f"{_MARKER}.part"
    part.write_text(json.dumps(_marker(engine), indent=2) + "\n", encoding="utf-8")
    part.replace(engine.root / _MARKER)


def _marker(engine: Engine) -> dict[str, object]:
    # What pdlaunch itself asks for is part of the identity: a later pdlaunch that wants
    # another NIXL must not take this environment for its own.
    return {"version": engine.version, "tools": list(engine_install.TOOLS)}


def _marker_of(root: Path) -> object:
    try:
        return json.loads((root / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@contextmanager
def _locked(root: Path, reporter: Reporter) -> Iterator[None]:
    root.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root.with_name(f".{root.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        reporter.status(f"waiting for another pdlaunch that works on {root.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _processes_from(root: Path) -> list[int]:
    prefix = f"{root}{os.sep}"
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(word.startswith(prefix) for word in (process.info["cmdline"] or [])[:2])
    ]
