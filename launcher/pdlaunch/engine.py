"""Engine environments: a virtual environment per variant and series, in the user's cache.

Each holds the patched vLLM alone and stands on an environment of the packages that vLLM needs,
which all series on one base share. Both are built in place, for their scripts hold their path;
a marker written last tells a finished one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
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
from pdlaunch.recipe import NEURON_VLLM_VERSION, EngineVariant
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


def planned(variant: EngineVariant) -> Engine:
    """Where the engine of a variant is or would be. Touches nothing.

    Raises:
        UsageError: the series does not apply to the vLLM that the variant has.
    """
    series = load_series()
    return _engine(_patched(variant, series), series)


def is_ready(engine: Engine) -> bool:
    """Whether the environment is complete, by its marker and programs alone: milliseconds."""
    return _is_ready(engine, _packages(engine.variant, load_series()))


def ensure(variant: EngineVariant, reporter: Reporter) -> Engine:
    """The engine of a variant, built when it is missing or broken."""
    series = load_series()
    engine = _engine(_patched(variant, series), series)
    packages = _packages(engine.variant, series)
    if not _is_ready(engine, packages):
        with _locked(engine.root, reporter):
            if not _is_ready(engine, packages):
                _build(engine, packages, series, reporter)
    return engine


def planned_router() -> Path:
    """Where the router is, or would be, on a machine that runs no engine. Touches nothing."""
    return _router_root() / "bin" / "vllm-router"


def ensure_router(reporter: Reporter) -> None:
    """The router by itself, installed when it is missing: megabytes, where an engine has many."""
    root, program = _router_root(), planned_router()
    with _locked(root, reporter):
        if _marker_of(root) is None or not _executable(program):
            _delete(root)
            engine_install.install_router(root, reporter)
            _mark(root, {"tools": [engine_install.ROUTER]})


def repair(variant: Variant, reporter: Reporter) -> Engine:
    """Checks an engine by importing what it needs, and builds it again when that fails."""
    series = load_series()
    engine, packages = _engine(variant, series), _packages(variant, series)
    with _locked(engine.root, reporter):
        if _is_ready(engine, packages):
            with reporter.work(f"checking {engine.name}"):
                complaint = engine_install.complaint(engine.python, engine.version)
            if complaint is None:
                return engine
            reporter.warning(f"{engine.name} is broken: {complaint}")
            # Whichever layer is at fault: neither may be taken for a good one.
            (packages / _MARKER).unlink(missing_ok=True)
        _build(engine, packages, series, reporter)
    return engine


def packages_of(engine: Engine) -> Path:
    """The environment of packages that a ready engine stands on."""
    marker = _marker_of(engine.root)
    return _packages_dir() / str(marker["packages"] if isinstance(marker, dict) else "")


def installed() -> list[Installed]:
    """The environments in the cache, by name."""
    current = {_router_root(), *(planned(variant).root for variant in VARIANTS)}
    return [
        Installed(root.name, root, _marker_of(root) is not None, root in current)
        for root in _environments(_engines_dir())
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
        _delete(root)
    _delete_unused_packages(reporter)


def _engines_dir() -> Path:
    return cache_dir() / "engines"


def _packages_dir() -> Path:
    return cache_dir() / "engine-packages"


def _environments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*-py*") if path.is_dir())


def _python_tag() -> str:
    return f"py{sys.version_info.major}{sys.version_info.minor}"


def _patched(variant: EngineVariant, series: Series) -> Variant:
    if variant == "neuron":
        raise UsageError(
            f"engine.variant neuron needs the vllm-neuron plugin, whose images carry vLLM "
            f"{NEURON_VLLM_VERSION}; the patch series is for vLLM {series.upstream.version} and "
            "does not apply there, so nothing was started",
            where="engine.variant",
            next_step="run it on cuda or cpu, or wait for a plugin for vLLM "
            f"{series.upstream.version}; `pdlaunch recipe validate` checks the recipe meanwhile",
        )
    return variant


def _engine(variant: Variant, series: Series) -> Engine:
    root = _engines_dir() / f"{variant}-{series.hash[:12]}-{_python_tag()}"
    return Engine(
        variant=variant,
        root=root,
        python=root / "bin" / "python",
        vllm=root / "bin" / "vllm",
        router=root / "bin" / "vllm-router",
        version=version_of(series, variant),
        series_hash=series.hash,
    )


def _router_root() -> Path:
    key = hashlib.sha256(engine_install.ROUTER.encode()).hexdigest()[:12]
    return _engines_dir() / f"router-{key}-{_python_tag()}"


def _packages(variant: Variant, series: Series) -> Path:
    """They depend on the published wheel's metadata and on what pdlaunch itself adds."""
    needs = [series.upstream.wheel(variant).sha256, *engine_install.TOOLS]
    key = hashlib.sha256("\n".join(needs).encode()).hexdigest()[:12]
    return _packages_dir() / f"{variant}-{key}-{_python_tag()}"


def _packages_are_ready(packages: Path) -> bool:
    programs = (packages / "bin" / "python", packages / "bin" / "vllm-router")
    return _marker_of(packages) is not None and _executable(*programs)


def _executable(*programs: Path) -> bool:
    return all(os.access(program, os.X_OK) for program in programs)


def _is_ready(engine: Engine, packages: Path) -> bool:
    programs = (engine.python, engine.vllm, engine.router)
    return _marker_of(engine.root) == _marker(engine, packages) and _executable(*programs)


def _build(engine: Engine, packages: Path, series: Series, reporter: Reporter) -> None:
    reporter.status(f"building the {engine.variant} engine in {engine.root}")
    packages.parent.mkdir(parents=True, exist_ok=True)
    # Locked to the end: packages that no marker names yet must not be taken for unused ones.
    with (
        _locked(packages, reporter),
        tempfile.TemporaryDirectory(dir=packages.parent) as scratch,
    ):
        wheel = build_wheel(engine.variant, Path(scratch), reporter, series=series)
        if not _packages_are_ready(packages):
            _delete(packages)
            engine_install.install_packages(packages, engine.variant, wheel, reporter)
            _mark(packages, {"tools": list(engine_install.TOOLS)})
        _delete(engine.root)
        engine_install.install_vllm(engine.root, packages, wheel, reporter)
        with reporter.work("checking the engine"):
            complaint = engine_install.complaint(engine.python, engine.version)
        if complaint is not None:
            (packages / _MARKER).unlink()
            raise PdError(
                f"the engine was installed but does not work: {complaint}",
                where=str(engine_install.log_file(packages)),
                next_step=f"build it again: pdlaunch engine repair {engine.variant}",
            )
        _mark(engine.root, _marker(engine, packages))


def _delete(root: Path) -> None:
    # The marker goes first: a removal cut short must not leave a complete-looking rest.
    (root / _MARKER).unlink(missing_ok=True)
    if root.exists():
        shutil.rmtree(root)


def _delete_unused_packages(reporter: Reporter) -> None:
    """Removes the packages that no engine stands on any more."""
    markers = [_marker_of(each.root) for each in installed()]
    used = {marker.get("packages") for marker in markers if isinstance(marker, dict)}
    for root in _environments(_packages_dir()):
        # One that is being built is locked, and no engine names it yet.
        with _locked(root, reporter):
            if root.name not in used:
                _delete(root)


def _mark(root: Path, content: object) -> None:
    part = root / f"{_MARKER}.part"
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    part.replace(root / _MARKER)


def _marker(engine: Engine, packages: Path) -> dict[str, object]:
    return {"version": engine.version, "packages": packages.name}


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
