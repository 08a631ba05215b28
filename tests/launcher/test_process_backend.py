"""What is told of processes: their logs, their deaths, their secrets."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from launching import until
from pdlaunch import leftovers
from pdlaunch.death import Death
from pdlaunch.logs import doing, tail, telling_lines
from pdlaunch.plan import ProcessPlan
from pdlaunch.process_backend import ProcessBackend
from pdlaunch.redaction import redact

FAILED_START = """\
(APIServer pid=1) INFO 11-29 10:00:00 [api.py:1] starting
(EngineCore pid=2) ERROR 11-29 10:00:01 [core.py:9] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 10:00:01 [core.py:9] ValueError: Free memory is less than desired
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "a.py", line 1, in a
(APIServer pid=1)   File "a.py", line 2, in b
(APIServer pid=1)   File "a.py", line 3, in c
(APIServer pid=1)   File "a.py", line 4, in d
(APIServer pid=1)   File "a.py", line 5, in e
(APIServer pid=1)   File "a.py", line 6, in f

(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "prefill-0.log"


def process(*argv: str, name: str = "prefill-0", **env: str) -> ProcessPlan:
    return ProcessPlan(
        name=name,
        role="prefill",
        host="127.0.0.1",
        is_here=True,
        argv=argv,
        env=env,
        env_prepend={},
        env_unset=(),
        url="http://127.0.0.1:1",
        port=1,
    )


def python(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


def stop(backend: ProcessBackend, stop_s: float = 5) -> list[str]:
    return asyncio.run(backend.stop(stop_s, lambda: False))


def test_cause_is_told_before_the_last_lines(log: Path) -> None:
    log.write_text(FAILED_START)
    lines = telling_lines(log)
    assert "ValueError: Free memory is less than desired" in lines[0]
    assert "See root cause above" in lines[-1]
    assert len(lines) < 12


def test_nixl_tells_what_a_backend_lacks(log: Path) -> None:
    lacks = "libfabric.so.1: cannot open shared object file: No such file or directory"
    log.write_text(
        f"I1130 17:02:36.4 17 nixl_plugin_manager.cpp:352] Failed to load plugin from /p: {lacks}\n"
        "E1130 17:02:36.4 17 nixl_agent.cpp:334] createBackend: unsupported backend 'LIBFABRIC'\n"
        + "  File\n" * 100
        + "nixl_cu12._bindings.nixlNotFoundError: NIXL_ERR_NOT_FOUND\n"
        + "  shutting down\n" * 20
    )
    told = telling_lines(log)
    assert lacks in told[0] and "unsupported backend 'LIBFABRIC'" in told[1]


def test_death_names_how_where_and_what_next(log: Path) -> None:
    log.write_text("last words\n")
    error = Death("prefill-0", 3, log, 12.3).error("a", "mine.yaml")
    assert error.exit_code == 3
    assert str(error).startswith("prefill-0 exited with code 3 after 12 s\n  | last words\n")
    assert f"where: {log}" in str(error)
    assert error.next_step == "pdlaunch logs a prefill-0; pdlaunch doctor mine.yaml"
    killed = Death("prefill-0", -signal.SIGKILL, log, 1).error("a", "mine.yaml")
    assert (killed.exit_code, "killed by SIGKILL" in killed.what) == (137, True)
    assert Death("prefill-0", 0, log, 1).error("a", "mine.yaml").exit_code == 1


def test_doing_is_the_last_line_of_the_logger(log: Path) -> None:
    assert doing(log) == "starting"
    log.write_text("(Worker pid=3) INFO 11-29 10:00:00 [load.py:7] Loading weights\n  detail\n")
    assert doing(log) == "Loading weights"


def test_long_and_odd_logs_are_shortened(log: Path) -> None:
    log.write_bytes(b"x" * 200_000 + b"\n\xff\xfe binary \r progress \r\n\n" + b"y" * 500)
    assert [len(line) for line in tail(log, 3)] == [9, 9, 300]


def test_secrets_are_redacted_but_not_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HF_TOKEN": "hf_abcdef", "OTHER_API_KEY": "hf_abcdefgh", "A_TOKEN": "1", "X": "red"}
    text = "hf_abcdef hf_abcdefgh 1 red"
    assert redact(text, environ) == "<HF_TOKEN> <OTHER_API_KEY> 1 red"


def test_environment_is_inherited_set_prepended_and_unset(tmp_path: Path) -> None:
    backend = ProcessBackend(
        "env00001", tmp_path, {"KEEP": "1", "DROP": "1", "LD_LIBRARY_PATH": "/mine"}
    )
    code = "import os; print(dict(os.environ))"
    plan = process(*python(code), SET="2").model_copy(
        update={"env_prepend": {"LD_LIBRARY_PATH": "/efa", "NEW": "/n"}, "env_unset": ("DROP",)}
    )
    backend.start(plan)
    assert until(lambda: bool(backend.deaths()))
    told = (tmp_path / "prefill-0.log").read_text()
    for expected in ("'KEEP': '1'", "'SET': '2'", "'LD_LIBRARY_PATH': '/efa:/mine'", "'/n'"):
        assert expected in told
    assert "DROP" not in told
    stop(backend)


def test_logs_are_for_their_owner_only(tmp_path: Path) -> None:
    backend = ProcessBackend("logs0001", tmp_path)
    backend.start(process(*python("pass")))
    assert backend.log("prefill-0").stat().st_mode & 0o777 == 0o600
    stop(backend)


def test_descendants_without_the_tag_or_the_session_are_stopped(tmp_path: Path) -> None:
    backend = ProcessBackend("orph0001", tmp_path)
    child = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys, time\n"
        f"argv = [sys.executable, '-c', {child!r}]\n"
        "print(subprocess.Popen(argv, env={}, start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    backend.start(process(*python(code)))
    assert until(lambda: bool(tail(backend.log("prefill-0"), 1)))
    pid = int(tail(backend.log("prefill-0"), 1)[0])
    assert stop(backend) == []
    assert until(lambda: not psutil.pid_exists(pid))


def test_scratch_folder_of_a_launch_goes_with_it(tmp_path: Path) -> None:
    backend = ProcessBackend("temp0001", tmp_path)
    backend.start(
        process(*python("import tempfile, time; tempfile.mkstemp(); print('made'); time.sleep(60)"))
    )
    scratch = leftovers.scratch_dir("temp0001")
    assert until(lambda: any(scratch.iterdir()))
    stop(backend)
    assert not scratch.exists()


def holding_shared_memory(launch_id: str, folder: Path, *, lives_s: int) -> ProcessBackend:
    """A backend whose one process has a file in shared memory."""
    backend = ProcessBackend(launch_id, folder)
    # Ending takes long where much memory has to be given back, and files are closed last.
    code = (
        "import os, time\n"
        f"held = open('/dev/shm/pdlaunch_test_{launch_id}', 'w')\n"
        "memory = bytearray(os.urandom(4096)) * 100_000\n"
        "print('made', flush=True)\n"
        f"time.sleep({lives_s})\n"
    )
    backend.start(process(*python(code)))
    assert until(lambda: tail(backend.log("prefill-0"), 1) == ["made"])
    return backend


def test_shared_memory_of_a_large_process_that_is_killed_goes(tmp_path: Path) -> None:
    backend = holding_shared_memory("shme0001", tmp_path, lives_s=600)
    assert leftovers.sweep("shme0001") == []
    assert not Path("/dev/shm/pdlaunch_test_shme0001").exists()
    stop(backend)


def test_shared_memory_of_a_process_that_ended_by_itself_goes(tmp_path: Path) -> None:
    backend = holding_shared_memory("shme0002", tmp_path, lives_s=1)
    assert until(lambda: bool(backend.deaths()))
    held = Path("/dev/shm/pdlaunch_test_shme0002")
    assert held.exists()
    stop(backend)
    assert not held.exists()


def test_semaphores_of_a_killed_process_go(tmp_path: Path) -> None:
    backend = ProcessBackend("sema0001", tmp_path)
    code = (
        "import multiprocessing, os, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(600)\n"
    )
    backend.start(process(*python(code)))
    assert until(lambda: bool(tail(backend.log("prefill-0"), 1)))
    name = tail(backend.log("prefill-0"), 1)[0].removeprefix("/")
    assert Path(f"/dev/shm/sem.{name}").exists()
    assert leftovers.sweep("sema0001") == []
    assert not Path(f"/dev/shm/sem.{name}").exists()
    stop(backend)


def test_shared_memory_that_somebody_still_uses_stays(tmp_path: Path) -> None:
    path = Path(f"/dev/shm/pdlaunch_test_used_{os.getpid()}")
    with path.open("w+b"):
        leftovers.remove_shared_memory([path])
        # This process holds it open.
        assert path.exists()
    leftovers.remove_shared_memory([path])
    assert not path.exists()
