"""What the doctor reads: from real sockets, children and limits, and from files in their place."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from pdlaunch.doctor import check_devices, machine, model, network, nixl
from pdlaunch.doctor.facts import Gpu
from pdlaunch.recipe import Recipe

HUB_MODEL = Recipe(name="a", model="Org/Model")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A stand-in for the engine's Python; tests write what it does."""
    path = tmp_path / "python"
    path.touch(mode=0o755)
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    """A hub with one model; notes what it is asked, and with which token."""
    asked: list[tuple[str, str | None]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            body = b'{"num_attention_heads": 16, "num_key_value_heads": 8}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path), "HF_ENDPOINT": os.environ.get("HF_ENDPOINT", ""), **more}


def test_this_machine_can_be_read() -> None:
    found = machine.read()
    assert found.memory_total_bytes <= psutil.virtual_memory().total
    assert 0 <= found.memory_available_bytes <= found.memory_total_bytes
    assert found.cores and found.wheel_tags
    assert found.clock_is_synchronised in (True, False, None)
    assert {folder.variable for folder in found.folders} >= {"XDG_CACHE_HOME", "TMPDIR"}


def test_reading_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "there"))
    (cache, *_) = machine.folders()
    assert cache.problem is None and cache.free_bytes
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_place_of_a_folder_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pdlaunch").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.folders()[0].problem == f"{tmp_path / 'pdlaunch'} is no folder"


def test_older_control_groups_are_read_as_well(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    for name, text in {
        "memory/memory.limit_in_bytes": "1000000",
        "memory/memory.usage_in_bytes": "900000",
        "memory/memory.stat": "total_inactive_file 400000\n",
        "cpu/cpu.cfs_quota_us": "150000",
        "cpu/cpu.cfs_period_us": "100000",
    }.items():
        (group / name).parent.mkdir(parents=True, exist_ok=True)
        (group / name).write_text(text)
    found = machine.read(tmp_path)
    assert found.memory_total_bytes == 1_000_000
    # The page cache is given back at once.
    assert found.memory_available_bytes == 500_000
    assert found.cpu_quota_cores == 1.5


def test_unlimited_control_groups_are_no_limit(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("max 100000\n")
    found = machine.read(tmp_path)
    assert found.memory_total_bytes == psutil.virtual_memory().total
    assert found.cpu_quota_cores is None


def test_devices_are_found_by_index_and_by_the_start_of_a_uuid() -> None:
    gpus = tuple(Gpu(str(i), f"GPU-{c}-1", "H200", "580.1", 1, 1) for i, c in enumerate("ab"))
    assert check_devices.named(gpus, "1") is gpus[1]
    assert check_devices.named(gpus, "GPU-b") is gpus[1]
    assert check_devices.named(gpus, "2") is None


def test_ports_are_tried_for_real() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert network.tried("127.0.0.1", port, 3) == "refused"
        server.listen()
        assert network.tried("127.0.0.1", port, 3) is None
    assert "does not resolve" in str(network.tried("host.invalid", 1, 3))


def test_silent_port_is_given_up_in_time() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        fillers = []
        # The kernel drops what a full queue cannot take, as a firewall would.
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        started_s = time.monotonic()
        assert network.tried("127.0.0.1", port, 0.5) == "no answer within 0.5 s"
        assert time.monotonic() - started_s < 10
        for filler in fillers:
            filler.close()


def test_hub_is_asked_with_the_users_token(
    hub: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    found = model.read(HUB_MODEL, "Org/Model", environ(tmp_path, HF_TOKEN="t"), ask_hub=True)
    assert hub == [("/Org/Model/resolve/main/config.json", "Bearer t")]
    assert found.shape is not None and found.shape.kv_heads == 8
    assert found.hub is not None and found.hub.status == 200
    assert found.hub.clock_skew_s is not None and abs(found.hub.clock_skew_s) < 30


def test_hub_is_left_alone_unless_told_to_ask_it(
    hub: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    model.read(HUB_MODEL, "Org/Model", environ(tmp_path), ask_hub=False)
    model.read(HUB_MODEL, "Org/Model", environ(tmp_path, HF_HUB_OFFLINE="1"), ask_hub=True)
    snapshot = tmp_path / "hub/models--Org--Model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/models--Org--Model/refs").mkdir()
    (tmp_path / "hub/models--Org--Model/refs/main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    model.read(HUB_MODEL, "Org/Model", environ(tmp_path), ask_hub=True)
    assert hub == []


def test_probe_has_the_environment_it_is_given(script: Path) -> None:
    script.write_text('#!/bin/sh\necho "{\\"torch\\": \\"$PROBED\\"}"\n')
    assert nixl.probe("a", script, ["UCX"], {"PROBED": "1.2"}).torch == "1.2"


def test_probe_keeps_what_was_said_before_a_crash(script: Path) -> None:
    script.write_text(
        '#!/bin/sh\necho \'{"builds": ["nixl-cu12"]}\'\necho "noise of a library"\n'
        'echo \'{"trying": "UCX"}\'\nkill -ABRT $$\n'
    )
    found = nixl.probe("a", script, ["UCX", "LIBFABRIC"], {})
    assert found.builds == ("nixl-cu12",)
    assert found.backends == {"UCX": "it crashed: SIGABRT"}


def test_probe_that_hangs_leaves_no_process(script: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script.write_text(f"#!/bin/sh\n/bin/sleep 600 &\necho $! > {pids}\nwait\n")
    found = nixl.probe("a", script, ["UCX"], {}, timeout_s=2)
    assert found.problem == "it hung: no end within 2 s"
    pid = int(pids.read_text())
    deadline_s = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_probe_of_a_python_without_torch_says_so(script: Path) -> None:
    # Without site-packages, whatever is in them.
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    found = nixl.probe("a", script, ["UCX"], {})
    assert found.problem is not None and "ModuleNotFoundError" in found.problem
    assert found.backends == {}
