"""Engine environments: built once, reused, rebuilt when broken, removed when unused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import pytest

from fake_upstream import FakeReporter, FakeUpstream
from pdlaunch import engine, engine_install
from pdlaunch.engine import Engine
from pdlaunch.errors import PdError, UsageError
from pdlaunch.upstream import Variant


class FakeInstall:
    """Stands in for pip: makes the programs, counts, and fails when told to."""

    def __init__(self) -> None:
        self.packages = 0
        self.engines = 0
        self.routers = 0
        self.fails = False
        self.complaints: Iterator[str | None] = repeat(None)

    def install_packages(
        self, root: Path, variant: Variant, wheel: Path, reporter: FakeReporter
    ) -> None:
        self.packages += 1
        assert wheel.is_file()
        time.sleep(0.1)  # long enough for a second builder to come and wait
        make_programs(root, "python")
        if self.fails:
            raise PdError("installing torch failed")
        make_programs(root, "vllm-router")

    def install_vllm(self, root: Path, packages: Path, wheel: Path, reporter: FakeReporter) -> None:
        self.engines += 1
        make_programs(root, "python", "vllm")
        (root / "bin" / "vllm-router").symlink_to(packages / "bin" / "vllm-router")

    def install_router(self, root: Path, reporter: FakeReporter) -> None:
        self.routers += 1
        if self.fails:
            raise PdError("installing the router failed")
        make_programs(root, "vllm-router")

    def complaint(self, python: Path, version: str) -> str | None:
        return next(self.complaints)


def make_programs(root: Path, *names: str) -> None:
    for name in names:
        program = root / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\nsleep 60\n")
        program.chmod(0o755)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, upstream: FakeUpstream) -> FakeInstall:
    fake = FakeInstall()
    for name in ("install_packages", "install_vllm", "install_router", "complaint"):
        monkeypatch.setattr(engine_install, name, getattr(fake, name))
    monkeypatch.setattr(engine, "load_series", upstream.series)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return fake


def change_series(upstream: FakeUpstream) -> None:
    base = upstream.patches / "UPSTREAM"
    base.write_text(base.read_text() + "# changed\n")


def ensure(reporter: FakeReporter | None = None) -> Engine:
    return engine.ensure("cpu", reporter or FakeReporter())


def test_planning_touches_nothing(pip: FakeInstall, tmp_path: Path) -> None:
    planned = engine.planned("cpu")
    assert not (tmp_path / "cache").exists()
    assert planned.name == f"cpu-{planned.series_hash[:12]}-py{_python()}"
    assert planned.version.startswith("0.32.0+cpu.pd.0.h")


def test_built_once_and_reused(pip: FakeInstall) -> None:
    assert ensure() == ensure() == engine.planned("cpu")
    assert pip.engines == 1


def test_reuse_says_nothing(pip: FakeInstall) -> None:
    reporter = FakeReporter()
    ensure()
    ensure(reporter)
    assert reporter.said == []


def test_two_builds_at_once_make_one(pip: FakeInstall) -> None:
    reporters = [FakeReporter(), FakeReporter()]
    threads = [threading.Thread(target=ensure, args=[each]) for each in reporters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pip.engines == 1
    assert any("waiting for another pdlaunch" in said for each in reporters for said in each.said)


def test_another_series_gets_another_engine(pip: FakeInstall, upstream: FakeUpstream) -> None:
    first = ensure()
    change_series(upstream)
    assert ensure().root != first.root
    assert pip.engines == 2


def test_another_series_stands_on_the_same_packages(
    pip: FakeInstall, upstream: FakeUpstream
) -> None:
    first = ensure()
    change_series(upstream)
    assert engine.packages_of(ensure()) == engine.packages_of(first)
    assert pip.packages == 1


def test_failed_build_is_not_taken_for_an_engine(pip: FakeInstall) -> None:
    pip.fails = True
    with pytest.raises(PdError, match="installing torch"):
        ensure()
    assert not engine.is_ready(engine.planned("cpu"))
    pip.fails = False
    assert engine.is_ready(ensure())


def test_engine_that_does_not_import_is_not_taken(pip: FakeInstall) -> None:
    pip.complaints = iter(["No module named 'nixl'", None])
    with pytest.raises(PdError, match="No module named 'nixl'"):
        ensure()
    assert not engine.is_ready(engine.planned("cpu"))
    assert engine.is_ready(ensure())
    assert pip.packages == 2


@pytest.mark.parametrize(
    "breaks",
    [
        lambda made: (made.root / "engine.json").unlink(),
        lambda made: (made.root / "engine.json").write_text("{"),
        lambda made: made.python.unlink(),
        lambda made: made.router.chmod(0o644),
        lambda made: shutil.rmtree(engine.packages_of(made)),
    ],
    ids=["no marker", "cut marker", "python gone", "router not executable", "packages gone"],
)
def test_broken_engine_is_built_again(pip: FakeInstall, breaks: Callable[[Engine], object]) -> None:
    made = ensure()
    breaks(made)
    assert engine.is_ready(ensure())
    assert pip.engines == 2


def test_tools_that_pdlaunch_now_wants_are_installed(
    pip: FakeInstall, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure()
    monkeypatch.setattr(engine_install, "TOOLS", ("nixl==9",))
    ensure()
    assert pip.engines == 2


def test_repair_leaves_a_working_engine_alone(pip: FakeInstall) -> None:
    ensure()
    engine.repair("cpu", FakeReporter())
    assert pip.engines == 1


def test_repair_builds_again_what_does_not_import(pip: FakeInstall) -> None:
    reporter = FakeReporter()
    ensure()
    pip.complaints = iter(["libtorch.so is gone", None])
    engine.repair("cpu", reporter)
    assert (pip.packages, pip.engines) == (2, 2)
    assert any("libtorch.so is gone" in said for said in reporter.said)


def test_router_by_itself_is_installed_once_and_removed(pip: FakeInstall) -> None:
    pip.fails = True
    with pytest.raises(PdError, match="installing the router"):
        engine.ensure_router(FakeReporter())
    pip.fails = False
    for _ in range(2):
        engine.ensure_router(FakeReporter())
    assert (pip.packages, pip.engines, pip.routers) == (0, 0, 2)
    (found,) = engine.installed()
    assert found.complete and found.current
    assert engine.planned_router() == found.root / "bin" / "vllm-router"
    engine.remove(found.name, FakeReporter())
    assert engine.installed() == []


def test_list_tells_current_old_and_incomplete(pip: FakeInstall, upstream: FakeUpstream) -> None:
    old = ensure()
    change_series(upstream)
    new = ensure()
    (new.root / "engine.json").unlink()
    found = {each.name: (each.complete, each.current) for each in engine.installed()}
    assert found == {old.name: (True, False), new.name: (False, True)}


def test_remove(pip: FakeInstall) -> None:
    made = ensure()
    packages = engine.packages_of(made)
    engine.remove(made.name, FakeReporter())
    assert not made.root.exists()
    assert not packages.exists()
    assert engine.installed() == []


def test_remove_keeps_packages_that_another_engine_stands_on(
    pip: FakeInstall, upstream: FakeUpstream
) -> None:
    old = ensure()
    change_series(upstream)
    new = ensure()
    engine.remove(old.name, FakeReporter())
    assert engine.is_ready(new)


def test_remove_refuses_an_engine_in_use(pip: FakeInstall) -> None:
    made = ensure()
    with subprocess.Popen([made.vllm]) as process:
        try:
            with pytest.raises(PdError, match=rf"in use(?s:.)*{process.pid}"):
                engine.remove(made.name, FakeReporter())
        finally:
            process.kill()
    assert engine.is_ready(made)


@pytest.mark.parametrize("name", ["nothing", "..", "../models", ""])
def test_remove_takes_names_of_engines_only(pip: FakeInstall, name: str) -> None:
    with pytest.raises(UsageError, match="there is no engine"):
        engine.remove(name, FakeReporter())


def _python() -> str:
    return f"{sys.version_info.major}{sys.version_info.minor}"
