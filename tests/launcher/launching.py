"""A launcher with a fake engine: everything but the engine and its downloads is real."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from fake_upstream import FakeReporter
from pdlaunch import cli, deployments, engine, leftovers, models
from pdlaunch.engine import Engine
from shared_file import mark_of

FAKE = Path(__file__).with_name("fake_engine.py")
RECIPE = """
name: {name}
model: random:tiny-qwen3
engine: {{variant: cpu}}
timeouts: {{ready_s: 60, stop_s: 3}}
"""


@dataclass
class Command:
    """A `pdlaunch` command in a process of its own, forked from the tests' process."""

    pid: int
    output: Path
    errors: Path
    code: int | None = None

    def wait(self, within_s: float = 120) -> int:
        """The exit code as a shell would show it."""
        deadline = time.monotonic() + within_s
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"pdlaunch does not end:\n{self.errors.read_text()}")
            else:
                time.sleep(0.02)
        return self.code

    def _ended(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        self.code = 128 - code if code < 0 else code

    def kill(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG) if self.code is None else (self.pid, 0)
        if not pid:
            os.kill(self.pid, number)
        elif self.code is None:
            self._ended(status)

    def until(self, text: str, within_s: float = 120) -> None:
        """Wait for something in the status output."""
        deadline = time.monotonic() + within_s
        while text not in self.errors.read_text():
            assert self.code is None and time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.02)


@dataclass
class Launcher:
    """Runs `pdlaunch` commands against a fake engine, state and cache of their own."""

    folder: Path
    started: list[Command]

    def recipe(self, name: str, extra: str = "") -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(RECIPE.format(name=name) + extra)
        return str(path)

    def begin(
        self, *args: str, namespace: str | None = None, terminal: int | None = None
    ) -> Command:
        """Start a command; `terminal` is a descriptor to be its output instead of a file."""
        number = len(self.started)
        output, errors = (self.folder / f"{number}.{kind}" for kind in ("out", "err"))
        output.touch()
        errors.touch()
        heard, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.write(say, b"!")
                if namespace is not None:
                    enter(namespace)
                for descriptor, path in ((1, output), (2, errors)):
                    os.dup2(os.open(path, os.O_WRONLY), descriptor)
                if terminal is not None:
                    os.dup2(terminal, 1)
                sys.stdout = os.fdopen(1, "w")
                sys.stderr = os.fdopen(2, "w")
                sys.argv = ["pdlaunch", *args]
                cli.main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except KeyboardInterrupt:
                # Where an interpreter that only just starts would end so too.
                code = 130
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        # Python forgets a signal that comes before it has noticed that it was forked.
        os.read(heard, 1)
        os.close(heard)
        os.close(say)
        command = Command(pid, output, errors)
        self.started.append(command)
        return command

    def run(self, *args: str, namespace: str | None = None) -> tuple[int, str, str]:
        command = self.begin(*args, namespace=namespace)
        code = command.wait()
        return code, command.output.read_text(), command.errors.read_text()


@contextmanager
def load(deployment: str) -> Iterator[Counter[int]]:
    """Requests through the router all the time; how they were answered."""
    url = deployments.need(deployment).plan.router_url
    answers: Counter[int] = Counter()
    ended = threading.Event()

    def ask() -> None:
        body = {"model": "m", "prompt": "x", "max_tokens": 1}
        with httpx.Client(timeout=20) as client:
            while not ended.is_set():
                answers[client.post(f"{url}/v1/completions", json=body).status_code] += 1

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert until(lambda: bool(answers))
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def crash(name: str) -> None:
    """As when the machine's memory ran out: nobody is left to clean up."""
    supervisor = deployments.need(name).supervisor()
    assert supervisor is not None
    # Its guardian comes first, or it would act.
    guardians = [each for each in supervisor.children() if "pdlaunch.guardian" in each.cmdline()]
    for process in (*guardians, supervisor):
        process.kill()
    assert guardians and until(lambda: not any(map(psutil.Process.is_running, guardians)))


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    clone_newnet = 0x40000000
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), clone_newnet):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def fake_processes() -> list[psutil.Process]:
    """Living processes of this test's deployments: other tests may run beside it."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("XDG_STATE_HOME") == os.environ["XDG_STATE_HOME"]
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if ours and any(word in line for word in (str(FAKE), "pdlaunch.guardian", "shared_file")):
            found.append(process)
    return found


def leftover_files() -> list[Path]:
    """What this test's deployments have in shared memory and in their temporary folders."""
    mark = mark_of(os.environ["XDG_STATE_HOME"])
    scratch = leftovers.scratch_dir("any").parent
    return [*Path("/dev/shm").glob(f"{mark}*"), *scratch.glob("pdlaunch-*")]


def until(condition: Callable[[], bool], within_s: float = 60) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "state"


@pytest.fixture
def fake_engine(tmp_path: Path) -> Engine:
    for name in ("vllm", "vllm-router"):
        script = tmp_path / "engine" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} {name} "$@"\n')
        script.chmod(0o755)
    return Engine(
        variant="cpu",
        root=tmp_path / "engine",
        python=Path(sys.executable),
        vllm=tmp_path / "engine" / "vllm",
        router=tmp_path / "engine" / "vllm-router",
        version="0.32.0+cpu.pd.test",
        series_hash="abc",
    )


@pytest.fixture
def launcher(
    tmp_path: Path, state: Path, fake_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launcher]:
    monkeypatch.setattr(engine, "planned", lambda variant: fake_engine)
    monkeypatch.setattr(engine, "ensure", lambda variant, reporter: fake_engine)
    monkeypatch.setattr(engine, "planned_router", lambda: fake_engine.router)
    monkeypatch.setattr(engine, "ensure_router", lambda reporter: None)
    monkeypatch.setattr(models, "planned_random", lambda name: tmp_path / "model")
    monkeypatch.setattr(models, "ensure_random", lambda *_: tmp_path / "model")
    running = Launcher(tmp_path, [])
    yield running
    for command in running.started:
        if command.code is None:
            os.kill(command.pid, signal.SIGKILL)
            os.waitpid(command.pid, 0)
    for name in deployments.names():
        deployments.take_down(name, FakeReporter())
